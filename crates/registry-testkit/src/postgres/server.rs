//! One server: started, killed, paused, asked, copied.

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::options::PostgresOptions;
use crate::account::Account;
use crate::asked;
use crate::kept::{Kept, down};
use crate::ports::Port;

/// A server that is killed with this handle, with all its processes. What is committed is on the disk, so it can be killed and
/// started again with its data. It has one user and one database, both `postgres`.
#[derive(Debug)]
pub struct PostgresServer {
    port: Port,
    folder: TempDir,
    options: PostgresOptions,
    account: Account,
    running: Option<Kept>,
}

impl PostgresServer {
    /// Starts a server that lets everybody in.
    ///
    /// # Errors
    /// When PostgreSQL is not installed, or does not start.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(PostgresOptions::new()).await
    }

    /// As [`start`](Self::start), with other settings, clocks, passwords or certificates.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: PostgresOptions) -> io::Result<Self> {
        let mut server = Self::empty(options)?;
        server.make_data().await?;
        server.start_again().await?;
        Ok(server)
    }

    /// A server without data.
    fn empty(options: PostgresOptions) -> io::Result<Self> {
        let account = Account::for_root("postgres")?;
        let (port, folder) = (Port::reserve()?, tempfile::tempdir()?);
        account.own(folder.path())?;
        let server = Self { port, folder, options, account, running: None };
        if let Some(tls) = &server.options.tls {
            server.keep(&tls.server_cert_file(), "server.pem")?;
            server.keep(&tls.server_key_file(), "server.key")?;
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
        let mut initdb = self.companion("initdb");
        initdb.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]);
        initdb.arg("-D").arg(self.data());
        if let Some(password) = &self.options.password {
            let file = self.file("password");
            fs::write(&file, password)?;
            self.account.own(&file)?;
            initdb.arg("--pwfile").arg(file);
        }
        asked::run(initdb, "").await.map_err(not_installed)?;
        let doors = self.data().join("pg_hba.conf");
        fs::write(doors, self.options.doors())
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
        command.env("LC_ALL", "C");
        command.envs(self.options.environment.iter().map(|(name, value)| (name, value)));
        command.arg("-D").arg(self.data()).arg("-p").arg(self.port.number().to_string());
        let folder = self.folder.path().display();
        let mut settings = vec![
            "listen_addresses=127.0.0.1".to_owned(),
            format!("unix_socket_directories={folder}"),
            "shared_buffers=32MB".to_owned(),
        ];
        if self.options.tls.is_some() {
            settings.push("ssl=on".to_owned());
            settings.push(format!("ssl_cert_file={folder}/server.pem"));
            settings.push(format!("ssl_key_file={folder}/server.key"));
        }
        for setting in settings.iter().chain(&self.options.settings) {
            command.args(["-c", setting]);
        }
        let running = self.running.insert(Kept::launch(&command)?);
        running.begun().await?;
        // Without the end: a standby is ready for read-only connections.
        let ready = |line: &str| line.contains("database system is ready to accept");
        if running.expect(ready).await.is_err() {
            return Err(not_installed(io::Error::other(self.said())));
        }
        Ok(())
    }

    /// Asks the server to end as soon as it can: it breaks off what is under way, and leaves its data tidy.
    ///
    /// # Errors
    /// That it is down already, or paused.
    ///
    /// # Cancel safety
    /// The server may still be ending.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.running()?.stop(Signal::SIGINT).await?;
        self.running = None;
        Ok(())
    }

    /// Kills the server with all its processes, as a crash of the machine would. They are gone when this returns.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Stops all processes of the server in their tracks, until [`resume`](Self::resume). When this has returned, they do nothing more.
    ///
    /// # Errors
    /// The operating system's; the server is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        self.running()?.pause()
    }

    /// Lets all that is paused go on, single processes too.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running()?.resume()
    }

    /// Stops the process `pid` of the server, such as the backend of one connection (`pg_backend_pid()`) or the one that tells a standby
    /// (`pg_stat_replication`).
    ///
    /// # Errors
    /// That the server has no such process.
    pub fn pause_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.pause_child(pid)
    }

    /// Lets the process `pid` of the server go on.
    ///
    /// # Errors
    /// As [`pause_backend`](Self::pause_backend).
    pub fn resume_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.resume_child(pid)
    }

    /// Kills the process `pid` of the server. The server then breaks off all others, and begins anew.
    ///
    /// # Errors
    /// As [`pause_backend`](Self::pause_backend).
    pub fn kill_backend(&self, pid: i32) -> io::Result<()> {
        self.running()?.kill_child(pid)
    }

    /// Starts a second server that follows this one, asynchronously: a commit does not wait for it. It has the same options, and a port and
    /// a folder of its own.
    ///
    /// # Errors
    /// That this server is down, or as [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the standby.
    pub async fn standby(&self) -> io::Result<Self> {
        let mut standby = Self::empty(self.options.clone())?;
        let mut copy = standby.companion("pg_basebackup");
        copy.args(["-R", "-X", "stream", "-c", "fast", "--no-sync"]).arg("-D").arg(standby.data());
        self.reach(&mut copy);
        asked::run(copy, "").await?;
        standby.start_again().await?;
        Ok(standby)
    }

    /// Makes a standby a server of its own. It takes writes when this returns.
    ///
    /// # Errors
    /// That this is no standby, or down.
    ///
    /// # Cancel safety
    /// It may become one or not.
    pub async fn promote(&self) -> io::Result<()> {
        match self.sql("select pg_promote()").await?.as_str() {
            "t" => Ok(()),
            _ => Err(io::Error::other("the standby was not promoted in time")),
        }
    }

    /// Runs statements, each in a transaction of its own unless they say otherwise, and returns the rows: one a line, with `|` between columns.
    ///
    /// # Errors
    /// The first refusal, in the server's words; or that it cannot be reached.
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn sql(&self, statements: &str) -> io::Result<String> {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", "postgres"]);
        self.reach(&mut psql);
        asked::run(psql, statements).await
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
        url(self.password(), self.addr())
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn password(&self) -> Option<&str> {
        self.options.password.as_deref()
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.options.tls.is_some()
    }

    /// Tells a client program the way through the side door.
    fn reach(&self, client: &mut Command) {
        client.arg("-h").arg(self.folder.path()).arg("-p").arg(self.port.number().to_string());
        client.args(["-U", "postgres"]).env("LC_ALL", "C");
    }

    /// A program of the same installation, run by the server's account.
    fn companion(&self, name: &str) -> Command {
        let mut command = self.account.command(self.options.program.with_file_name(name));
        // The account may have no right to be where the test is.
        command.env("LC_ALL", "C").current_dir(self.folder.path());
        command
    }

    fn running(&self) -> io::Result<&Kept> {
        self.running.as_ref().ok_or_else(down)
    }

    fn data(&self) -> PathBuf {
        self.file("data")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // Before the folder and the port go.
        if let Some(running) = self.running.take() {
            running.kill_and_reap(Signal::SIGQUIT);
        }
    }
}

/// The URL of a server that has the user and the database `postgres`.
pub(crate) fn url(password: Option<&str>, addr: SocketAddr) -> String {
    let password = password.map(|password| format!(":{password}")).unwrap_or_default();
    format!("postgres://postgres{password}@{addr}/postgres")
}

fn not_installed(error: io::Error) -> io::Error {
    io::Error::other(format!(
        "PostgreSQL does not start; is it installed (apt-get install postgresql)? It said:\n{error}"
    ))
}
