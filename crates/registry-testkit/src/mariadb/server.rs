//! One server process: starts, kills, pauses and queries it.

use std::io;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use super::options::{MariaDb, MariaDbOptions, SERVER_VARIABLE};
use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::ports::Port;
use crate::{data_cache, programs, run_command};

/// The log size for both the installation and the server, which must match. Writing the default of
/// 96 MB takes five times as long.
const LOG_SIZE: &str = "--innodb-log-file-size=8M";

/// The Galera library of Debian's package `galera-4`.
const GALERA: &str = "/usr/lib/galera/libgalera_smm.so";

/// A server. Dropping this handle kills it. Committed data is on disk, so the server keeps its data
/// when it is killed and started again. Its user is `root` and its database `app`.
pub type MariaDbServer = ManagedServer<MariaDb>;

impl ServerDescription for MariaDb {
    /// The port for other nodes of a Galera cluster.
    type State = Port;

    const PROGRAM: ServerProgram = ServerProgram {
        name: "MariaDB",
        package: "mariadb-server",
        account: Some("mysql"),
        stop: Signal::SIGTERM,
        reap_signal: None,
    };

    fn program() -> PathBuf {
        programs::find(SERVER_VARIABLE, "mariadbd")
    }

    fn command(server: &MariaDbServer) -> io::Result<Command> {
        let mut command = server.program_command();
        command.arg("--no-defaults");
        let folder = server.folder().display();
        command
            .arg(format!("--datadir={folder}/data"))
            .arg(format!("--socket={}", server.socket_path()));
        // A starting server removes all temporary tables from its `tmpdir`, including those of
        // other servers.
        command.arg(format!("--tmpdir={folder}"));
        command.arg(format!("--pid-file={folder}/pid")).arg("--bind-address=127.0.0.1");
        command.arg(format!("--port={}", server.port().number())).arg(LOG_SIZE);
        command.args(["--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]);
        command.arg("--skip-name-resolve");
        if server.options.tls.is_some() {
            command.arg(format!("--ssl-cert={folder}/server.pem"));
            command.arg(format!("--ssl-key={folder}/server.key"));
            command.arg(format!("--ssl-ca={folder}/ca.pem")).arg("--require-secure-transport=ON");
        }
        if server.options.store.is_galera_node {
            command.args(["--wsrep-on=ON", "--wsrep-new-cluster", "--wsrep-sst-method=skip"]);
            command.args(["--wsrep-cluster-address=gcomm://", "--wsrep-node-address=127.0.0.1"]);
            command.args(["--binlog-format=ROW", "--innodb-autoinc-lock-mode=2"]);
            command.arg(format!("--wsrep-provider={GALERA}"));
            let listen = format!("gmcast.listen_addr=tcp://{}", server.state.addr());
            command.arg(format!("--wsrep-provider-options={listen};gcache.size=8M"));
        }
        command.args(&server.options.args);
        Ok(command)
    }

    async fn is_serving(server: &MariaDbServer) -> bool {
        // A Galera node prints `ready for connections` before its cluster accepts statements.
        let ready = if server.options.store.is_galera_node {
            "Synchronized with group, ready for connections"
        } else {
            "ready for connections"
        };
        server.output_text().contains(ready)
    }
}

impl MariaDbServer {
    /// Starts a server that requires no password.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(MariaDbOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: MariaDbOptions) -> io::Result<Self> {
        let mut server = Self::new(options, Port::reserve()?)?;
        server.install_certificates()?;
        data_cache::copy_or_initialize(&server, server.init_command()).await?;
        server.restart().await?;
        server.sql_in("mysql", "CREATE DATABASE app").await?;
        if let Some(password) = &server.options.store.password {
            server.sql(&format!("ALTER USER root@'127.0.0.1' IDENTIFIED BY '{password}'")).await?;
        }
        Ok(server)
    }

    fn init_command(&self) -> Command {
        let mut install = self.account_command("mariadb-install-db");
        // Skips fsync, because no file needs to be on disk before the server starts.
        install.args(["--no-defaults", "--skip-test-db", "--innodb-flush-method=nosync", LOG_SIZE]);
        install.args(["--auth-root-authentication-method=normal", "--skip-name-resolve"]);
        install.arg(format!("--datadir={}", self.data().display()));
        install.arg(format!("--tmpdir={}", self.folder().display()));
        install
    }

    /// Runs statements as `root` and returns the rows, one for each line, with tabs between
    /// columns. Each statement runs in its own transaction, unless the statements contain explicit
    /// transactions.
    pub async fn sql(&self, statements: &str) -> io::Result<String> {
        self.sql_in("app", statements).await
    }

    async fn sql_in(&self, database: &str, statements: &str) -> io::Result<String> {
        let mut client = Command::new("mariadb");
        client.args(["--no-defaults", "--batch", "--raw", "--skip-column-names", "--user=root"]);
        client.arg(format!("--socket={}", self.socket_path()));
        client.arg(format!("--database={database}"));
        run_command::run(client, statements).await
    }

    /// Returns the server's URL, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        let password = self.options.store.password.as_ref();
        let password = password.map(|password| format!(":{password}")).unwrap_or_default();
        format!("mysql://root{password}@{}/app", self.addr())
    }

    /// Returns the Unix socket, which requires neither a password nor encryption.
    fn socket_path(&self) -> String {
        self.file("socket").display().to_string()
    }
}
