//! Redis servers for tests: real ones, each on a port and in a folder of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::ports::Port;
use crate::process::HelperProcess;

/// How long a server may take to answer. Usually it takes 50 ms.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A server that is killed with this handle. It writes each command to its file before it answers, so it can be killed and
/// started again with its data.
#[derive(Debug)]
pub struct RedisServer {
    port: Port,
    folder: TempDir,
    options: Vec<String>,
    process: Option<HelperProcess>,
}

impl RedisServer {
    /// Starts a server; `options` are lines of its configuration as arguments, such as `["--maxmemory", "3mb"]`.
    ///
    /// # Errors
    /// When there is no `redis-server` on the path, or it does not answer in time.
    pub async fn start(options: &[&str]) -> io::Result<Self> {
        let mut server = Self {
            port: Port::reserve()?,
            folder: tempfile::tempdir()?,
            options: options.iter().map(|&option| option.to_owned()).collect(),
            process: None,
        };
        server.start_again().await?;
        Ok(server)
    }

    /// Starts the server after it was killed, on the same port with the data that it had.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_again(&mut self) -> io::Result<()> {
        // A test that is killed runs no `Drop`. Its end closes the input of this shell, which then ends the server.
        let mut command = Command::new("sh");
        command.args(["-c", "\"$@\" </dev/null & server=$!; cat; kill -9 $server", "sh"]);
        command.arg("redis-server").args(["--port", &self.port.number().to_string()]);
        command.args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"]);
        command.args(["--appendonly", "yes", "--appendfsync", "always"]);
        command.arg("--dir").arg(self.folder.path()).arg("--pidfile").arg(self.pid_file());
        command.args(&self.options);
        self.process = Some(HelperProcess::spawn(command)?);
        let deadline = Instant::now() + START_LIMIT;
        while Instant::now() < deadline {
            if let Ok(answer) = self.ask("PING").await
                && (answer.starts_with("+PONG") || answer.starts_with("-NOAUTH"))
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let said = self.process.as_ref().map(HelperProcess::stderr).unwrap_or_default();
        Err(io::Error::other(format!(
            "redis-server does not answer; is it installed (apt-get install redis-server)? It said: {said}"
        )))
    }

    /// Kills the server as a crash would.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Removes all that the server has written. To be called while it is down.
    ///
    /// # Errors
    /// The operating system's.
    pub fn lose_data(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.folder.path())? {
            let path = entry?.path();
            if path.is_dir() {
                fs::remove_dir_all(path)?;
            } else {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Stops the server in its tracks, until [`resume`](Self::resume).
    ///
    /// # Errors
    /// The operating system's; the server is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.process.is_none() {
            return Err(io::Error::other("the server is down"));
        }
        let pid = fs::read_to_string(self.pid_file())?;
        let pid = pid.trim().parse().map_err(io::Error::other)?;
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    fn pid_file(&self) -> PathBuf {
        self.folder.path().join("server.pid")
    }

    /// Sends one command line and returns the beginning of the answer as it comes.
    ///
    /// # Errors
    /// The connection's.
    pub async fn ask(&self, command: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(self.addr()).await?;
        stream.write_all(format!("{command}\r\n").as_bytes()).await?;
        let mut answer = vec![0; 64 * 1_024];
        let read = stream.read(&mut answer).await?;
        answer.truncate(read);
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Where the server listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The server's URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}
