//! PgBouncer in front of a PostgreSQL server: many clients share few server connections, which are
//! reassigned after each transaction.

use std::io;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::postgres::{self, PostgresServer};
use crate::server_options::ServerOptions;
use crate::{programs, run_command};

/// The environment variable that names a program to use instead of `pgbouncer`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_PGBOUNCER_SERVER";

/// A PgBouncer in transaction mode. Dropping this handle kills it. It requires the same password as
/// its server.
pub type PgBouncer = ManagedServer<Pooler>;

/// The options that only PgBouncer has.
#[derive(Debug, Clone, Default)]
pub struct Pooler {
    password: Option<String>,
}

impl ServerDescription for Pooler {
    type State = ();

    const PROGRAM: ServerProgram = ServerProgram {
        name: "pgbouncer",
        package: "pgbouncer",
        account: Some("postgres"),
        stop: Signal::SIGTERM,
        reap_signal: None,
    };

    fn program() -> PathBuf {
        programs::find(SERVER_VARIABLE, "pgbouncer")
    }

    fn command(server: &PgBouncer) -> io::Result<Command> {
        let mut command = server.program_command();
        command.arg(server.file("settings"));
        Ok(command)
    }

    async fn is_serving(server: &PgBouncer) -> bool {
        server.output_text().contains("process up")
    }
}

impl PgBouncer {
    /// Starts a PgBouncer in front of `server`.
    pub async fn start(server: &PostgresServer) -> io::Result<Self> {
        Self::start_with(server, &[]).await
    }

    /// Like [`start`](Self::start), with additional configuration lines, such as
    /// `["default_pool_size = 2"]`. A later line overrides an earlier one.
    pub async fn start_with(server: &PostgresServer, lines: &[&str]) -> io::Result<Self> {
        let mut options = ServerOptions::<Pooler>::new().args(lines);
        options.store.password = server.password().map(ToOwned::to_owned);
        let mut bouncer = Self::new(options, ())?;
        let login = format!("\"postgres\" \"{}\"\n", server.password().unwrap_or(""));
        bouncer.write_file("users", login)?;
        let (server_port, bouncer_port) = (server.addr().port(), bouncer.port().number());
        let auth_method = if server.password().is_some() { "scram-sha-256" } else { "trust" };
        let encryption = if server.is_encrypted() { "require" } else { "disable" };
        bouncer.write_file(
            "settings",
            format!(
                "[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {bouncer_port}\nunix_socket_dir =\n\
                 auth_type = {auth_method}\nauth_file = {}\nadmin_users = postgres\n\
                 pool_mode = transaction\nserver_tls_sslmode = {encryption}\n\
                 # Clients send this parameter when they connect. It has no effect on them.\n\
                 ignore_startup_parameters = extra_float_digits\n{}\n",
                bouncer.file("users").display(),
                lines.join("\n")
            ),
        )?;
        bouncer.restart().await?;
        Ok(bouncer)
    }

    /// Runs statements in `database` and returns the rows, one for each line, with `|` between
    /// columns. The database `pgbouncer` is PgBouncer's console.
    pub async fn sql(&self, database: &str, statements: &str) -> io::Result<String> {
        let mut psql = postgres::psql(database);
        psql.args(["-h", "127.0.0.1", "-U", "postgres", "-p"]);
        psql.arg(self.port().number().to_string());
        if let Some(password) = &self.options.store.password {
            psql.env("PGPASSWORD", password);
        }
        run_command::run(psql, statements).await
    }

    /// Returns PgBouncer's URL, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        postgres::url(self.options.store.password.as_deref(), self.addr())
    }
}
