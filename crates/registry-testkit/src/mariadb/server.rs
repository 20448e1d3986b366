//! One server: started, killed, paused, asked.

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::options::MariaDbOptions;
use crate::account::Account;
use crate::asked;
use crate::kept::{Kept, down};
use crate::ports::Port;

/// The size that a server is born with, which it must also be started with. The usual 96 MB take five times as long to write.
const LOG_SIZE: &str = "--innodb-log-file-size=8M";

/// Where Debian's package has what makes a server a node of a cluster.
const GALERA: &str = "/usr/lib/galera/libgalera_smm.so";

/// A server that is killed with this handle. What is committed is on the disk, so it can be killed and started again with its data.
/// Its user is `root`, its database `app`.
#[derive(Debug)]
pub struct MariaDbServer {
    port: Port,
    folder: TempDir,
    options: MariaDbOptions,
    account: Account,
    running: Option<Kept>,
    /// Where other nodes of a Galera cluster would come in.
    nodes_port: Port,
}

impl MariaDbServer {
    /// Starts a server that wants no password.
    ///
    /// # Errors
    /// When MariaDB is not installed, or does not start.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(MariaDbOptions::new()).await
    }

    /// As [`start`](Self::start), with other arguments, clocks, passwords or certificates.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: MariaDbOptions) -> io::Result<Self> {
        let account = Account::for_root("mysql")?;
        let (port, folder) = (Port::reserve()?, tempfile::tempdir()?);
        account.own(folder.path())?;
        let nodes_port = Port::reserve()?;
        let mut server = Self { port, folder, options, account, running: None, nodes_port };
        if let Some(tls) = server.options.tls.clone() {
            server.keep(&tls.server_cert_file(), "server.pem")?;
            server.keep(&tls.server_key_file(), "server.key")?;
            server.keep(&tls.ca_file(), "ca.pem")?;
        }
        server.make_data().await?;
        server.start_again().await?;
        server.ask("mysql", "CREATE DATABASE app").await?;
        if let Some(password) = server.options.password.clone() {
            server.sql(&format!("ALTER USER root@'127.0.0.1' IDENTIFIED BY '{password}'")).await?;
        }
        Ok(server)
    }

    /// Copies what only the server's account may read.
    fn keep(&self, file: &Path, name: &str) -> io::Result<()> {
        let kept = self.file(name);
        fs::copy(file, &kept)?;
        fs::set_permissions(&kept, Permissions::from_mode(0o600))?;
        self.account.own(&kept)
    }

    async fn make_data(&self) -> io::Result<()> {
        let mut install = self.account.command("mariadb-install-db");
        // Nothing of it needs to be on the disk before the server is started.
        install.args(["--no-defaults", "--skip-test-db", "--innodb-flush-method=nosync", LOG_SIZE]);
        install.args(["--auth-root-authentication-method=normal", "--skip-name-resolve"]);
        install.arg(format!("--datadir={}", self.file("data").display()));
        install.arg(format!("--tmpdir={}", self.folder.path().display()));
        // The account may have no right to be where the test is.
        install.current_dir(self.folder.path());
        asked::run(install, "").await.map(drop).map_err(not_installed)
    }

    /// Starts the server after it was stopped or killed, on the same port with the data that it had.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// The server may be up or down afterwards; it can be killed or started again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.kill();
        let mut command = self.account.command(&self.options.program);
        command.envs(self.options.environment.iter().map(|(name, value)| (name, value)));
        command.arg("--no-defaults");
        let folder = self.folder.path().display();
        command.arg(format!("--datadir={folder}/data")).arg(format!("--socket={}", self.door()));
        // A server that starts removes the temporary tables that it finds, those of others too.
        command.arg(format!("--tmpdir={folder}"));
        command.arg(format!("--pid-file={folder}/pid")).arg("--bind-address=127.0.0.1");
        command.arg(format!("--port={}", self.port.number())).arg(LOG_SIZE);
        command.args(["--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]);
        command.arg("--skip-name-resolve");
        if self.options.tls.is_some() {
            command.arg(format!("--ssl-cert={folder}/server.pem"));
            command.arg(format!("--ssl-key={folder}/server.key"));
            command.arg(format!("--ssl-ca={folder}/ca.pem")).arg("--require-secure-transport=ON");
        }
        let mut ready = "ready for connections";
        if self.options.is_galera_node {
            // The server itself is ready some time before its cluster lets it do anything.
            ready = "Synchronized with group, ready for connections";
            command.args(["--wsrep-on=ON", "--wsrep-new-cluster", "--wsrep-sst-method=skip"]);
            command.args(["--wsrep-cluster-address=gcomm://", "--wsrep-node-address=127.0.0.1"]);
            command.args(["--binlog-format=ROW", "--innodb-autoinc-lock-mode=2"]);
            command.arg(format!("--wsrep-provider={GALERA}"));
            let listen = format!("gmcast.listen_addr=tcp://{}", self.nodes_port.addr());
            command.arg(format!("--wsrep-provider-options={listen};gcache.size=8M"));
        }
        command.args(&self.options.args);
        let running = self.running.insert(Kept::launch(&command)?);
        running.begun().await?;
        if running.expect(|line| line.contains(ready)).await.is_err() {
            return Err(not_installed(io::Error::other(self.said())));
        }
        Ok(())
    }

    /// Asks the server to end: it breaks off what is under way, and leaves its data tidy.
    ///
    /// # Errors
    /// That it is down already, or paused.
    ///
    /// # Cancel safety
    /// The server may still be ending.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.running()?.stop(Signal::SIGTERM).await?;
        self.running = None;
        Ok(())
    }

    /// Kills the server as a crash would. It is gone when this returns.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Stops the server in its tracks, until [`resume`](Self::resume). When this has returned, it does nothing more.
    ///
    /// # Errors
    /// The operating system's; the server is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        self.running()?.pause()
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running()?.resume()
    }

    /// Runs statements, each in a transaction of its own unless they say otherwise, and returns the rows: one a line, with tabs between
    /// columns. They are asked in the name of `root`, who may do everything.
    ///
    /// # Errors
    /// The first refusal, in the server's words; or that it cannot be reached.
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn sql(&self, statements: &str) -> io::Result<String> {
        self.ask("app", statements).await
    }

    async fn ask(&self, database: &str, statements: &str) -> io::Result<String> {
        let mut client = Command::new("mariadb");
        client.args(["--no-defaults", "--batch", "--raw", "--skip-column-names", "--user=root"]);
        client.arg(format!("--socket={}", self.door()));
        client.arg(format!("--database={database}"));
        asked::run(client, statements).await
    }

    /// What the server has logged since it was started.
    #[must_use]
    pub fn said(&self) -> String {
        self.running.as_ref().map(Kept::said).unwrap_or_default()
    }

    /// Whether the server runs, paused or not.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.running.as_ref().is_some_and(Kept::is_up)
    }

    /// Where the server listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The server's URL, with the password if it wants one.
    #[must_use]
    pub fn url(&self) -> String {
        let password = self.options.password.as_ref();
        let password = password.map(|password| format!(":{password}")).unwrap_or_default();
        format!("mysql://root{password}@{}/app", self.addr())
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn running(&self) -> io::Result<&Kept> {
        self.running.as_ref().ok_or_else(down)
    }

    /// Where the server can be asked without a password or encryption.
    fn door(&self) -> String {
        self.file("door").display().to_string()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for MariaDbServer {
    fn drop(&mut self) {
        // Before the folder and the port go.
        self.kill();
    }
}

fn not_installed(error: io::Error) -> io::Error {
    io::Error::other(format!(
        "MariaDB does not start; is it installed (apt-get install mariadb-server)? It said:\n{error}"
    ))
}
