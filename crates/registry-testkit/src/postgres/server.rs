//! One server process: starts, kills, pauses, queries and replicates it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::{fs, io};

use nix::sys::signal::Signal;

use super::options::{Postgres, PostgresOptions, SERVER_VARIABLE};
use crate::data_cache;
use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::{programs, run_command};

/// A server with all its processes. Dropping this handle kills it. Committed data is on disk, so
/// the server keeps its data when it is killed and started again. It has one user and one database,
/// both named `postgres`.
pub type PostgresServer = ManagedServer<Postgres>;

impl ServerDescription for Postgres {
    type State = ();

    const PROGRAM: ServerProgram = ServerProgram {
        name: "PostgreSQL",
        package: "postgresql",
        account: Some("postgres"),
        stop: Signal::SIGINT,
        reap_signal: Some(Signal::SIGQUIT),
    };

    fn program() -> PathBuf {
        programs::find_postgres(SERVER_VARIABLE)
    }

    fn command(server: &PostgresServer) -> io::Result<Command> {
        let mut command = server.program_command();
        command.env("LC_ALL", "C");
        command.arg("-D").arg(server.data()).arg("-p").arg(server.port().number().to_string());
        let folder = server.folder().display();
        let mut settings = vec![
            "listen_addresses=127.0.0.1".to_owned(),
            format!("unix_socket_directories={folder}"),
            "shared_buffers=32MB".to_owned(),
        ];
        if server.is_encrypted() {
            settings.push("ssl=on".to_owned());
            settings.push(format!("ssl_cert_file={folder}/server.pem"));
            settings.push(format!("ssl_key_file={folder}/server.key"));
        }
        for setting in settings.iter().chain(&server.options.args) {
            command.args(["-c", setting]);
        }
        Ok(command)
    }

    async fn is_serving(server: &PostgresServer) -> bool {
        // Omits the end of the message: a standby is ready to accept read-only connections.
        server.output_text().contains("database system is ready to accept")
    }
}

impl PostgresServer {
    /// Starts a server that requires no password.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(PostgresOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: PostgresOptions) -> io::Result<Self> {
        let mut server = Self::new(options, ())?;
        server.install_certificates()?;
        server.create_data().await?;
        server.restart().await?;
        Ok(server)
    }

    async fn create_data(&self) -> io::Result<()> {
        let mut initdb = self.client_command("initdb");
        initdb.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]);
        initdb.arg("-D").arg(self.data());
        if let Some(password) = self.password() {
            self.write_file("password", password)?;
            initdb.arg("--pwfile").arg(self.file("password"));
            data_cache::initialize(self, initdb).await?;
        } else {
            data_cache::copy_or_initialize(self, initdb).await?;
        }
        fs::write(self.data().join("pg_hba.conf"), self.options.pg_hba_lines())
    }

    /// Stops one process of the server (SIGSTOP), such as the backend of a connection
    /// (`pg_backend_pid()`) or the WAL sender of a standby (`pg_stat_replication`).
    pub fn pause_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.pause_child(pid)
    }

    /// Resumes one process of the server.
    pub fn resume_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.resume_child(pid)
    }

    /// Kills one process of the server. The server then terminates all other backends and recovers.
    pub fn kill_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.kill_child(pid)
    }

    /// Starts an asynchronous standby of this server: a commit does not wait for it. The standby
    /// has the same options, and its own port and folder.
    pub async fn standby(&self) -> io::Result<Self> {
        let mut standby = Self::new(self.options.clone(), ())?;
        standby.install_certificates()?;
        let mut copy = standby.client_command("pg_basebackup");
        copy.args(["-R", "-X", "stream", "-c", "fast", "--no-sync"]).arg("-D").arg(standby.data());
        self.add_connection_args(&mut copy);
        run_command::run(copy, "").await?;
        standby.restart().await?;
        Ok(standby)
    }

    /// Promotes a standby. It accepts writes when this returns.
    pub async fn promote(&self) -> io::Result<()> {
        match self.sql("select pg_promote()").await?.as_str() {
            "t" => Ok(()),
            _ => Err(io::Error::other("the standby was not promoted in time")),
        }
    }

    /// Runs statements and returns the rows, one for each line, with `|` between columns. Each
    /// statement runs in its own transaction, unless the statements contain explicit transactions.
    pub async fn sql(&self, statements: &str) -> io::Result<String> {
        let mut psql = psql("postgres");
        self.add_connection_args(&mut psql);
        run_command::run(psql, statements).await
    }

    /// Returns the server's URL, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        url(self.password(), self.addr())
    }

    pub(crate) fn password(&self) -> Option<&str> {
        self.options.store.password.as_deref()
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.options.tls.is_some()
    }

    /// Adds the arguments that connect a client program to the server's Unix socket.
    fn add_connection_args(&self, client: &mut Command) {
        client.arg("-h").arg(self.folder()).arg("-p").arg(self.port().number().to_string());
        client.args(["-U", "postgres"]).env("LC_ALL", "C");
    }

    /// Creates a command for a program of the same installation, under the server's account.
    fn client_command(&self, name: &str) -> Command {
        let mut command = self.account_command(self.options.program.with_file_name(name));
        command.env("LC_ALL", "C");
        command
    }
}

/// Creates a `psql` command that prints rows without decoration and ends at the first error.
pub(crate) fn psql(database: &str) -> Command {
    let mut psql = Command::new("psql");
    psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", database]);
    psql
}

/// Returns the URL of a server with the user and the database `postgres`.
pub(crate) fn url(password: Option<&str>, addr: SocketAddr) -> String {
    let password = password.map(|password| format!(":{password}")).unwrap_or_default();
    format!("postgres://postgres{password}@{addr}/postgres")
}
