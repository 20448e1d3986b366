//! One server: started, killed, paused, asked.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::connection::RedisConnection;
use super::options::ServerOptions;
use super::reply::Reply;
use crate::ports::Port;
use crate::process::HelperProcess;

/// How long a server may take to answer. Usually it takes 50 ms.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the kernel may take to stop or to end a process.
const SIGNAL_LIMIT: Duration = Duration::from_secs(30);

/// Starts its arguments as a server and says the server's process id. Ends when the server does; and ends the server when
/// its own input ends, because a test that is killed runs no `Drop`.
const KEEPER: &str = r#"
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
echo "server $server"
{ cat <&3 >/dev/null; kill -9 $server; } &
exec 3<&-
wait $server
"#;

/// A server that is killed with this handle. It writes each command to its file before it answers, so it can be killed and
/// started again with its data.
#[derive(Debug)]
pub struct RedisServer {
    port: Port,
    folder: TempDir,
    options: ServerOptions,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    keeper: HelperProcess,
    /// Known once the keeper has said it.
    pid: Option<Pid>,
    paused: AtomicBool,
}

impl RedisServer {
    /// Starts a server; `options` are lines of its configuration as arguments, such as `["--maxmemory", "3mb"]`.
    ///
    /// # Errors
    /// When there is no `redis-server` on the path, or it does not answer in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start(options: &[&str]) -> io::Result<Self> {
        Self::start_with(ServerOptions::new().args(options)).await
    }

    /// As [`start`](Self::start), with other programs, environments and logins.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: ServerOptions) -> io::Result<Self> {
        let mut server = Self::launch(Port::reserve()?, options)?;
        server.ready().await?;
        Ok(server)
    }

    /// Starts a server on `port` and does not wait until it is [`ready`](Self::ready), so that several can start at once.
    pub(super) fn launch(port: Port, options: ServerOptions) -> io::Result<Self> {
        let mut server = Self { port, folder: tempfile::tempdir()?, options, running: None };
        server.launch_again()?;
        Ok(server)
    }

    /// Starts the server after it was killed, on the same port with the data that it had.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// The server may be up or down afterwards; it can be killed or started again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.kill();
        self.launch_again()?;
        self.ready().await
    }

    fn launch_again(&mut self) -> io::Result<()> {
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "sh", "env"]);
        for (name, value) in &self.options.environment {
            let mut setting = std::ffi::OsString::from(format!("{name}="));
            setting.push(value);
            command.arg(setting);
        }
        command.arg(&self.options.program);
        if self.options.sentinel.is_some() {
            command.arg(self.sentinel_file()?).arg("--sentinel");
        } else {
            command.args(["--port", &self.port.number().to_string()]);
            command.args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"]);
            command.args(["--appendonly", "yes", "--appendfsync", "always"]);
            command.arg("--dir").arg(self.folder.path());
            for line in self.options.login_lines() {
                command.arg(format!("--{}", line[0])).args(&line[1..]);
            }
            command.args(&self.options.args);
        }
        let keeper = HelperProcess::spawn(command)?;
        self.running = Some(Running { keeper, pid: None, paused: AtomicBool::new(false) });
        Ok(())
    }

    /// A sentinel keeps what it has learnt in the file with which it was started, so that is written only once.
    fn sentinel_file(&self) -> io::Result<std::path::PathBuf> {
        let file = self.folder.path().join("sentinel.conf");
        if !file.exists() {
            let mut lines = vec![
                format!("port {}", self.port.number()),
                "bind 127.0.0.1".to_owned(),
                "daemonize no".to_owned(),
                format!("dir \"{}\"", self.folder.path().display()),
            ];
            lines.extend(self.options.login_lines().iter().map(|line| line.join(" ")));
            lines.extend(self.options.sentinel.clone());
            fs::write(&file, lines.join("\n") + "\n")?;
        }
        Ok(file)
    }

    /// Waits until a launched server answers.
    pub(super) async fn ready(&mut self) -> io::Result<()> {
        let Some(running) = &mut self.running else { return Err(down()) };
        let number = |line: &str| line.strip_prefix("server ")?.parse().ok();
        let pid = running.keeper.expect_map(number, START_LIMIT).await.map_err(io::Error::other)?;
        running.pid = Some(Pid::from_raw(pid));
        let deadline = Instant::now() + START_LIMIT;
        while Instant::now() < deadline && self.is_up() {
            if let Ok(answer) = self.ask("PING").await
                && ["+PONG", "-NOAUTH", "-NOPERM"].iter().any(|known| answer.starts_with(known))
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let program = self.options.program.display();
        Err(io::Error::other(format!(
            "{program} does not answer; is it installed (apt-get install redis-server)? It said:\n{}",
            self.said()
        )))
    }

    /// What the server has logged since it was started.
    #[must_use]
    pub fn said(&self) -> String {
        let Some(running) = &self.running else { return String::new() };
        format!("{}\n{}", running.keeper.lines().join("\n"), running.keeper.stderr())
    }

    /// Kills the server as a crash would. It is gone when this returns.
    pub fn kill(&mut self) {
        let Some(running) = self.running.take() else { return };
        // The keeper reaps the server and then ends, so its end says that the port is free again.
        if let Some(pid) = running.pid
            && !running.keeper.has_exited()
            && kill(pid, Signal::SIGKILL).is_ok()
        {
            blocking(|| running.keeper.has_exited());
        }
    }

    /// Whether the server runs, paused or not.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.keeper.has_exited())
    }

    /// Whether the server was paused and not resumed since.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.paused.load(Ordering::Relaxed))
    }

    /// Whether an answer can be expected.
    pub(super) fn answers(&self) -> bool {
        self.is_up() && !self.is_paused()
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

    /// Stops the server in its tracks, until [`resume`](Self::resume). When this has returned, it does nothing more.
    ///
    /// # Errors
    /// The operating system's; the server is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        let running = self.signal(Signal::SIGSTOP)?;
        running.paused.store(true, Ordering::Relaxed);
        // Elsewhere than on Linux nobody tells whether the signal has arrived.
        if let Some(pid) = running.pid.filter(|_| cfg!(target_os = "linux")) {
            let stat = format!("/proc/{pid}/stat");
            blocking(|| fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T ")));
        }
        Ok(())
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)?.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn signal(&self, signal: Signal) -> io::Result<&Running> {
        let running = self.running.as_ref().filter(|_| self.is_up()).ok_or_else(down)?;
        kill(running.pid.ok_or_else(down)?, signal)?;
        Ok(running)
    }

    /// Sends one command line and returns the answer as it comes.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn ask(&self, command: &str) -> io::Result<String> {
        self.connect().await?.ask_line(command).await
    }

    /// Sends one command, given as its words, and returns the answer. Words may contain anything.
    ///
    /// # Errors
    /// The connection's. A refusal is an answer; see [`Reply::granted`].
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn ask_args(&self, words: &[impl AsRef<[u8]> + Sync]) -> io::Result<Reply> {
        self.connect().await?.ask_args(words).await
    }

    /// Opens a connection, for commands that must come from one client. It is logged in with the
    /// [login](ServerOptions::login) of the options.
    ///
    /// # Errors
    /// The connection's, or that the login was refused.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub async fn connect(&self) -> io::Result<RedisConnection> {
        let mut connection = RedisConnection::new(TcpStream::connect(self.addr()).await?);
        if let Some((user, password)) = &self.options.login {
            connection.ask_args(&["AUTH", user, password]).await?.granted()?;
        }
        Ok(connection)
    }

    /// Cuts all connections of one kind (`normal`, `pubsub`, `replica` or `master`), except those of this call. Returns how
    /// many there were.
    ///
    /// # Errors
    /// The connection's, or the server's refusal.
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn client_kill(&self, kind: &str) -> io::Result<usize> {
        let reply = self.ask_args(&["CLIENT", "KILL", "TYPE", kind]).await?.granted()?;
        Ok(reply.number().and_then(|number| number.try_into().ok()).unwrap_or_default())
    }

    /// What the section `section` of `INFO` says of `name`.
    pub(super) async fn info(&self, section: &str, name: &str) -> io::Result<Option<String>> {
        let info = self.ask_args(&["INFO", section]).await?.granted()?.text().unwrap_or_default();
        let mut fields = info.lines().filter_map(|line| line.split_once(':'));
        Ok(fields.find(|(field, _)| *field == name).map(|(_, value)| value.to_owned()))
    }

    pub(super) fn login(&self) -> Option<&(String, String)> {
        self.options.login.as_ref()
    }

    /// How many replicas follow this master without a gap.
    pub(super) async fn replicas_online(&self) -> io::Result<usize> {
        let text = self.ask_args(&["INFO", "replication"]).await?.granted()?.text();
        let text = text.unwrap_or_default();
        Ok(text.lines().filter(|line| line.contains(",state=online,")).count())
    }

    /// Where the server listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The server's URL, without a login.
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

impl Drop for RedisServer {
    fn drop(&mut self) {
        // Before the folder and the port go.
        self.kill();
    }
}

fn down() -> io::Error {
    io::Error::other("the server is down")
}

/// Waits for what the kernel does in no time. The thread may be that of a test's tasks, so this is short.
fn blocking(mut done: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !done() && begun.elapsed() < SIGNAL_LIMIT {
        thread::sleep(Duration::from_micros(200));
    }
}
