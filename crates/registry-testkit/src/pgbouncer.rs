//! PgBouncer in front of a PostgreSQL server: many clients share few server connections, which are
//! reassigned after each transaction.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use tempfile::TempDir;

use crate::managed_process::{ManagedProcess, down_error};
use crate::ports::Port;
use crate::postgres::{self, PostgresServer};
use crate::programs;
use crate::run_command;
use crate::server_user::ServerUser;

/// The environment variable that names a program to use instead of `pgbouncer`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_PGBOUNCER_SERVER";

/// A PgBouncer in transaction mode. Dropping this handle kills it. It requires the same password as
/// its server.
#[derive(Debug)]
pub struct PgBouncer {
    port: Port,
    folder: TempDir,
    password: Option<String>,
    server_user: ServerUser,
    running: Option<ManagedProcess>,
}

impl PgBouncer {
    /// Starts a PgBouncer in front of `server`.
    ///
    /// # Errors
    /// Returns an error if `pgbouncer` is not installed or does not start.
    ///
    /// # Cancel safety
    /// Dropping the future kills PgBouncer.
    pub async fn start(server: &PostgresServer) -> io::Result<Self> {
        Self::start_with(server, &[]).await
    }

    /// Like [`start`](Self::start), with additional configuration lines, such as
    /// `["default_pool_size = 2"]`. A later line overrides an earlier one.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// As [`start`](Self::start).
    pub async fn start_with(server: &PostgresServer, lines: &[&str]) -> io::Result<Self> {
        let password = server.password().map(ToOwned::to_owned);
        let server_user = ServerUser::for_root("postgres")?;
        let (port, folder) = (Port::reserve()?, tempfile::tempdir()?);
        server_user.chown(folder.path())?;
        let (users, settings) = (folder.path().join("users"), folder.path().join("settings"));
        fs::write(&users, format!("\"postgres\" \"{}\"\n", password.as_deref().unwrap_or("")))?;
        let (server_port, here) = (server.addr().port(), port.number());
        let auth_method = if password.is_some() { "scram-sha-256" } else { "trust" };
        let encryption = if server.is_encrypted() { "require" } else { "disable" };
        fs::write(
            &settings,
            format!(
                "[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {here}\nunix_socket_dir =\n\
                 auth_type = {auth_method}\nauth_file = {}\nadmin_users = postgres\n\
                 pool_mode = transaction\nserver_tls_sslmode = {encryption}\n\
                 # Clients ask for it when they connect, and it changes nothing for them.\n\
                 ignore_startup_parameters = extra_float_digits\n{}\n",
                users.display(),
                lines.join("\n")
            ),
        )?;
        server_user.chown(&users)?;
        server_user.chown(&settings)?;
        let mut bouncer = Self { port, folder, password, server_user, running: None };
        bouncer.start_again().await?;
        Ok(bouncer)
    }

    /// Kills PgBouncer if it runs, and starts it on the same port.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// PgBouncer may be up or down. You can kill it or start it again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.kill();
        let program = programs::server(SERVER_VARIABLE, "pgbouncer");
        let mut command = self.server_user.command(program);
        command.arg(self.folder.path().join("settings"));
        let running = self.running.insert(ManagedProcess::launch(&command)?);
        running.wait_until_started().await?;
        if running.expect(|line| line.contains("process up")).await.is_err() {
            return Err(io::Error::other(format!(
                "pgbouncer does not start; is it installed (apt-get install pgbouncer)? Its output:\n{}",
                running.output_text()
            )));
        }
        Ok(())
    }

    /// Kills PgBouncer. Its connections to clients and to the server break.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Stops PgBouncer (SIGSTOP) until [`resume`](Self::resume).
    ///
    /// # Errors
    /// Returns the error of the operating system, or an error if PgBouncer is down.
    pub fn pause(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down_error)?.pause()
    }

    /// Resumes PgBouncer.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down_error)?.resume()
    }

    /// Runs statements in `database` and returns the rows, one for each line, with `|` between
    /// columns. The database `pgbouncer` is PgBouncer's console.
    ///
    /// # Errors
    /// Returns the first error, or an error if PgBouncer cannot be reached.
    ///
    /// # Cancel safety
    /// PgBouncer may have executed the statements.
    pub async fn sql(&self, database: &str, statements: &str) -> io::Result<String> {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1"]);
        psql.args(["-U", "postgres", "-d", database, "-p"]).arg(self.port.number().to_string());
        if let Some(password) = &self.password {
            psql.env("PGPASSWORD", password);
        }
        run_command::run(psql, statements).await
    }

    /// Returns the address of PgBouncer.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns PgBouncer's URL, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        postgres::url(self.password.as_deref(), self.addr())
    }

    /// Returns the folder of PgBouncer's files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // The process must end before the folder and the port are dropped.
        self.kill();
    }
}
