//! One server process: starts, kills, pauses and queries it.

use std::io;
use std::process::Command;

use nix::sys::signal::Signal;

use super::options::MariaDbOptions;
use crate::data_cache;
use crate::managed_server::{ManagedServer, ServerProgram, impl_managed_server};
use crate::ports::Port;
use crate::run_command;

const PROGRAM: ServerProgram = ServerProgram {
    name: "MariaDB",
    package: "mariadb-server",
    account: Some("mysql"),
    stop: Signal::SIGTERM,
    reap: None,
};

/// The log size for both the installation and the server, which must match. Writing the default of
/// 96 MB takes five times as long.
const LOG_SIZE: &str = "--innodb-log-file-size=8M";

/// The Galera library of Debian's package.
const GALERA: &str = "/usr/lib/galera/libgalera_smm.so";

/// A server. Dropping this handle kills it. Committed data is on disk, so the server keeps its data
/// when it is killed and started again. Its user is `root` and its database `app`.
#[derive(Debug)]
pub struct MariaDbServer {
    /// The first field, because the process must end before the ports are dropped.
    server: ManagedServer,
    options: MariaDbOptions,
    /// The port for other nodes of a Galera cluster.
    nodes_port: Port,
}

impl MariaDbServer {
    /// Starts a server that requires no password.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(MariaDbOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: MariaDbOptions) -> io::Result<Self> {
        let (server, nodes_port) = (ManagedServer::new(&PROGRAM)?, Port::reserve()?);
        let mut server = Self { server, options, nodes_port };
        if let Some(tls) = server.options.tls.clone() {
            server.install_file(&tls.server_cert_file(), "server.pem")?;
            server.install_file(&tls.server_key_file(), "server.key")?;
            server.install_file(&tls.ca_file(), "ca.pem")?;
        }
        server.create_data().await?;
        server.start_again().await?;
        server.sql_in("mysql", "CREATE DATABASE app").await?;
        if let Some(password) = server.options.store.password.clone() {
            server.sql(&format!("ALTER USER root@'127.0.0.1' IDENTIFIED BY '{password}'")).await?;
        }
        Ok(server)
    }

    async fn create_data(&self) -> io::Result<()> {
        let data = self.file("data");
        data_cache::fill(&data, self.options.program.as_os_str(), self.initialise()).await
    }

    async fn initialise(&self) -> io::Result<()> {
        let mut install = self.command("mariadb-install-db");
        // Skips fsync, because no file needs to be on disk before the server starts.
        install.args(["--no-defaults", "--skip-test-db", "--innodb-flush-method=nosync", LOG_SIZE]);
        install.args(["--auth-root-authentication-method=normal", "--skip-name-resolve"]);
        install.arg(format!("--datadir={}", self.file("data").display()));
        install.arg(format!("--tmpdir={}", self.folder().display()));
        run_command::run(install, "")
            .await
            .map(drop)
            .map_err(|error| self.not_started(&error.to_string()))
    }

    /// Kills the server if it runs, and starts it on the same port with its previous data.
    pub async fn start_again(&mut self) -> io::Result<()> {
        let mut command = self.command(&self.options.program);
        self.options.set_environment(&mut command);
        command.arg("--no-defaults");
        let folder = self.folder().display();
        command
            .arg(format!("--datadir={folder}/data"))
            .arg(format!("--socket={}", self.socket_path()));
        // A starting server removes all temporary tables from this folder, including those of other
        // servers.
        command.arg(format!("--tmpdir={folder}"));
        command.arg(format!("--pid-file={folder}/pid")).arg("--bind-address=127.0.0.1");
        command.arg(format!("--port={}", self.port().number())).arg(LOG_SIZE);
        command.args(["--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]);
        command.arg("--skip-name-resolve");
        if self.options.tls.is_some() {
            command.arg(format!("--ssl-cert={folder}/server.pem"));
            command.arg(format!("--ssl-key={folder}/server.key"));
            command.arg(format!("--ssl-ca={folder}/ca.pem")).arg("--require-secure-transport=ON");
        }
        let mut ready = "ready for connections";
        if self.options.store.is_galera_node {
            // The server itself is ready before its cluster accepts statements.
            ready = "Synchronized with group, ready for connections";
            command.args(["--wsrep-on=ON", "--wsrep-new-cluster", "--wsrep-sst-method=skip"]);
            command.args(["--wsrep-cluster-address=gcomm://", "--wsrep-node-address=127.0.0.1"]);
            command.args(["--binlog-format=ROW", "--innodb-autoinc-lock-mode=2"]);
            command.arg(format!("--wsrep-provider={GALERA}"));
            let listen = format!("gmcast.listen_addr=tcp://{}", self.nodes_port.addr());
            command.arg(format!("--wsrep-provider-options={listen};gcache.size=8M"));
        }
        command.args(&self.options.args);
        self.launch(&command)?;
        self.wait_until_printed(ready).await
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

impl_managed_server!(MariaDbServer);
