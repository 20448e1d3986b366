//! PgBouncer in front of a PostgreSQL server: many clients on few connections, which change hands after each transaction.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use tempfile::TempDir;

use crate::account::Account;
use crate::asked;
use crate::kept::{Kept, down};
use crate::ports::Port;
use crate::postgres::{self, PostgresServer};
use crate::programs;

/// Names another program than `pgbouncer`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_PGBOUNCER_SERVER";

/// A PgBouncer in transaction mode that is killed with this handle. It asks for the same password as its server.
#[derive(Debug)]
pub struct PgBouncer {
    port: Port,
    folder: TempDir,
    password: Option<String>,
    account: Account,
    running: Option<Kept>,
}

impl PgBouncer {
    /// Starts a PgBouncer in front of `server`.
    ///
    /// # Errors
    /// When there is no `pgbouncer`, or it does not start.
    ///
    /// # Cancel safety
    /// Dropping the future kills it.
    pub async fn start(server: &PostgresServer) -> io::Result<Self> {
        Self::start_with(server, &[]).await
    }

    /// As [`start`](Self::start), with lines of its configuration, such as `["default_pool_size = 2"]`. Of two that say different things,
    /// the later one counts.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// As for [`start`](Self::start).
    pub async fn start_with(server: &PostgresServer, lines: &[&str]) -> io::Result<Self> {
        let password = server.password().map(ToOwned::to_owned);
        let account = Account::for_root("postgres")?;
        let (port, folder) = (Port::reserve()?, tempfile::tempdir()?);
        account.own(folder.path())?;
        let (users, settings) = (folder.path().join("users"), folder.path().join("settings"));
        fs::write(&users, format!("\"postgres\" \"{}\"\n", password.as_deref().unwrap_or("")))?;
        let (server_port, here) = (server.addr().port(), port.number());
        let proof = if password.is_some() { "scram-sha-256" } else { "trust" };
        let encryption = if server.is_encrypted() { "require" } else { "disable" };
        fs::write(
            &settings,
            format!(
                "[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {here}\nunix_socket_dir =\n\
                 auth_type = {proof}\nauth_file = {}\nadmin_users = postgres\n\
                 pool_mode = transaction\nserver_tls_sslmode = {encryption}\n\
                 # Clients ask for it when they connect, and it changes nothing for them.\n\
                 ignore_startup_parameters = extra_float_digits\n{}\n",
                users.display(),
                lines.join("\n")
            ),
        )?;
        account.own(&users)?;
        account.own(&settings)?;
        let mut bouncer = Self { port, folder, password, account, running: None };
        bouncer.start_again().await?;
        Ok(bouncer)
    }

    /// Starts it after it was killed, on the same port.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// It may be up or down afterwards; it can be killed or started again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.kill();
        let program = programs::server(SERVER_VARIABLE, "pgbouncer");
        let mut command = self.account.command(program);
        command.arg(self.folder.path().join("settings"));
        let running = self.running.insert(Kept::launch(&command)?);
        running.begun().await?;
        if running.expect(|line| line.contains("process up")).await.is_err() {
            return Err(io::Error::other(format!(
                "pgbouncer does not start; is it installed (apt-get install pgbouncer)? It said:\n{}",
                running.said()
            )));
        }
        Ok(())
    }

    /// Kills it. Its connections, to both sides, break.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Stops it in its tracks, until [`resume`](Self::resume).
    ///
    /// # Errors
    /// The operating system's; it is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down)?.pause()
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down)?.resume()
    }

    /// Runs statements in the database `database`, where `pgbouncer` stands for its own console, and returns the rows: one a line, with `|`
    /// between columns.
    ///
    /// # Errors
    /// The first refusal; or that it cannot be reached.
    ///
    /// # Cancel safety
    /// It may have obeyed or not.
    pub async fn sql(&self, database: &str, statements: &str) -> io::Result<String> {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1"]);
        psql.args(["-U", "postgres", "-d", database, "-p"]).arg(self.port.number().to_string());
        if let Some(password) = &self.password {
            psql.env("PGPASSWORD", password);
        }
        asked::run(psql, statements).await
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Its URL, with the password if it wants one.
    #[must_use]
    pub fn url(&self) -> String {
        postgres::url(self.password.as_deref(), self.addr())
    }

    /// Where it keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // Before the folder and the port go.
        self.kill();
    }
}
