//! One server process: starts, kills, pauses and queries it.

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::options::MariaDbOptions;
use crate::data_cache;
use crate::managed_process::{ManagedProcess, down_error};
use crate::ports::Port;
use crate::run_command;
use crate::server_user::ServerUser;

/// The log size for both the installation and the server, which must match. Writing the default of
/// 96 MB takes five times as long.
const LOG_SIZE: &str = "--innodb-log-file-size=8M";

/// The Galera library of Debian's package.
const GALERA: &str = "/usr/lib/galera/libgalera_smm.so";

/// A server. Dropping this handle kills it. Committed data is on disk, so the server keeps its data
/// when it is killed and started again. Its user is `root` and its database `app`.
#[derive(Debug)]
pub struct MariaDbServer {
    port: Port,
    folder: TempDir,
    options: MariaDbOptions,
    server_user: ServerUser,
    running: Option<ManagedProcess>,
    /// The port for other nodes of a Galera cluster.
    nodes_port: Port,
}

impl MariaDbServer {
    /// Starts a server that requires no password.
    ///
    /// # Errors
    /// Returns an error if MariaDB is not installed or does not start.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(MariaDbOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: MariaDbOptions) -> io::Result<Self> {
        let server_user = ServerUser::for_root("mysql")?;
        let (port, folder) = (Port::reserve()?, tempfile::tempdir()?);
        server_user.chown(folder.path())?;
        let nodes_port = Port::reserve()?;
        let mut server = Self { port, folder, options, server_user, running: None, nodes_port };
        if let Some(tls) = server.options.tls.clone() {
            server.install_file(&tls.server_cert_file(), "server.pem")?;
            server.install_file(&tls.server_key_file(), "server.key")?;
            server.install_file(&tls.ca_file(), "ca.pem")?;
        }
        server.create_data().await?;
        server.start_again().await?;
        server.sql_in("mysql", "CREATE DATABASE app").await?;
        if let Some(password) = server.options.password.clone() {
            server.sql(&format!("ALTER USER root@'127.0.0.1' IDENTIFIED BY '{password}'")).await?;
        }
        Ok(server)
    }

    /// Copies a file into the server's folder, readable only by the server's account.
    fn install_file(&self, file: &Path, name: &str) -> io::Result<()> {
        let copy = self.file(name);
        fs::copy(file, &copy)?;
        fs::set_permissions(&copy, Permissions::from_mode(0o600))?;
        self.server_user.chown(&copy)
    }

    async fn create_data(&self) -> io::Result<()> {
        let data = self.file("data");
        data_cache::fill(&data, self.options.program.as_os_str(), self.initialise()).await
    }

    async fn initialise(&self) -> io::Result<()> {
        let mut install = self.server_user.command("mariadb-install-db");
        // Skips fsync, because no file needs to be on disk before the server starts.
        install.args(["--no-defaults", "--skip-test-db", "--innodb-flush-method=nosync", LOG_SIZE]);
        install.args(["--auth-root-authentication-method=normal", "--skip-name-resolve"]);
        install.arg(format!("--datadir={}", self.file("data").display()));
        install.arg(format!("--tmpdir={}", self.folder.path().display()));
        // The account may have no access to the working directory of the test.
        install.current_dir(self.folder.path());
        run_command::run(install, "").await.map(drop).map_err(not_installed)
    }

    /// Kills the server if it runs, and starts it on the same port with its previous data.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// The server may be up or down. You can kill it or start it again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.kill();
        let mut command = self.server_user.command(&self.options.program);
        command.envs(self.options.environment.iter().map(|(name, value)| (name, value)));
        command.arg("--no-defaults");
        let folder = self.folder.path().display();
        command
            .arg(format!("--datadir={folder}/data"))
            .arg(format!("--socket={}", self.socket_path()));
        // A starting server removes all temporary tables from this folder, including those of other
        // servers.
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
        let running = self.running.insert(ManagedProcess::launch(&command)?);
        running.wait_until_started().await?;
        if running.expect(|line| line.contains(ready)).await.is_err() {
            return Err(not_installed(io::Error::other(self.output_text())));
        }
        Ok(())
    }

    /// Shuts the server down: it aborts running transactions and leaves consistent data.
    ///
    /// # Errors
    /// Returns an error if the server is down, or if it is paused and so does not end in time.
    ///
    /// # Cancel safety
    /// The server may still be shutting down.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.running()?.stop(Signal::SIGTERM).await?;
        self.running = None;
        Ok(())
    }

    /// Kills the server, as a crash would. The process has ended when this returns.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Stops the server (SIGSTOP) until [`resume`](Self::resume). It executes nothing after this
    /// returns.
    ///
    /// # Errors
    /// Returns the error of the operating system, or an error if the server is down.
    pub fn pause(&self) -> io::Result<()> {
        self.running()?.pause()
    }

    /// Resumes a paused server.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running()?.resume()
    }

    /// Runs statements as `root` and returns the rows, one for each line, with tabs between
    /// columns. Each statement runs in its own transaction, unless the statements contain explicit
    /// transactions.
    ///
    /// # Errors
    /// Returns the first error of the server, or an error if the server cannot be reached.
    ///
    /// # Cancel safety
    /// The server may have executed the statements.
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

    /// Returns the server's output since it started.
    #[must_use]
    pub fn output_text(&self) -> String {
        self.running.as_ref().map(ManagedProcess::output_text).unwrap_or_default()
    }

    /// Returns whether the server runs, paused or not.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.running.as_ref().is_some_and(ManagedProcess::is_up)
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns the server's URL, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        let password = self.options.password.as_ref();
        let password = password.map(|password| format!(":{password}")).unwrap_or_default();
        format!("mysql://root{password}@{}/app", self.addr())
    }

    /// Returns the folder of the server's files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn running(&self) -> io::Result<&ManagedProcess> {
        self.running.as_ref().ok_or_else(down_error)
    }

    /// Returns the Unix socket, which requires neither a password nor encryption.
    fn socket_path(&self) -> String {
        self.file("socket").display().to_string()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for MariaDbServer {
    fn drop(&mut self) {
        // The process must end before the folder and the port are dropped.
        self.kill();
    }
}

fn not_installed(error: io::Error) -> io::Error {
    io::Error::other(format!(
        "MariaDB does not start; is it installed (apt-get install mariadb-server)? Its output:\n{error}"
    ))
}
