//! Starts, pauses and stops a server program, with a port, a folder and an account of its own.
//! [`ServerDescription`] describes the program. The modules of the programs send the queries.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::managed_process::{ManagedProcess, SERVER_TIME_LIMIT, down_error};
use crate::ports::Port;
use crate::server_options::ServerOptions;
use crate::server_user::ServerUser;

/// The pause between two checks of whether a server serves.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Describes one server program. The implementing type contains the options that only this program
/// has.
pub trait ServerDescription: Debug + Clone + Default + Send + Sync {
    /// What a server has besides its options, such as further ports.
    type State: Debug + Send + Sync;

    /// The program's name, and how it is stopped.
    const PROGRAM: ServerProgram;

    /// Returns the server program that is used if the options name none.
    fn program() -> PathBuf;

    /// Returns the command that starts the server. It must stay in the foreground.
    fn command(server: &ManagedServer<Self>) -> io::Result<Command>;

    /// Returns whether a started server serves.
    fn is_serving(server: &ManagedServer<Self>) -> impl Future<Output = bool> + Send;

    /// Returns the port for clients.
    fn client_port(server: &ManagedServer<Self>) -> &Port {
        &server.port
    }
}

/// The name of a server program, and how it is stopped.
#[derive(Debug)]
pub struct ServerProgram {
    /// The name in error messages.
    pub(crate) name: &'static str,
    /// Debian's package.
    pub(crate) package: &'static str,
    /// The account for tests that run as root, if the server refuses to run as root.
    pub(crate) account: Option<&'static str>,
    /// Shuts the server down and leaves consistent data.
    pub(crate) stop: Signal,
    /// The signal after which the server waits for its killed children and then exits. `None` for a
    /// server without permanent child processes. See [`ManagedProcess::kill_and_reap`].
    pub(crate) reap_signal: Option<Signal>,
}

/// A server process that can be killed, paused and started again. Dropping this handle kills it.
/// Each program has a type alias, such as `RedisServer`.
#[derive(Debug)]
pub struct ManagedServer<S: ServerDescription> {
    pub(crate) options: ServerOptions<S>,
    pub(crate) state: S::State,
    account: ServerUser,
    port: Port,
    folder: TempDir,
    running: Option<ManagedProcess>,
}

impl<S: ServerDescription> ManagedServer<S> {
    /// Creates a server that is down, with an empty folder.
    pub(crate) fn new(options: ServerOptions<S>, state: S::State) -> io::Result<Self> {
        let account = ServerUser::for_root(S::PROGRAM.account)?;
        let folder = tempfile::tempdir()?;
        account.chown(folder.path())?;
        Ok(Self { options, state, account, port: Port::reserve()?, folder, running: None })
    }

    /// Creates a command that runs `program` under the server's account.
    pub(crate) fn account_command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.account.command(program);
        // The account may have no access to the working directory of the test.
        command.current_dir(self.folder());
        command
    }

    /// Creates a command that runs the server program with the environment of the options.
    pub(crate) fn program_command(&self) -> Command {
        let mut command = self.account_command(&self.options.program);
        self.options.set_environment(&mut command);
        command
    }

    /// Copies the authority's certificate, the server's certificate and its key into the server's
    /// folder, as `ca.pem`, `server.pem` and `server.key`, if the options enable TLS.
    #[cfg(target_os = "linux")]
    pub(crate) fn install_certificates(&self) -> io::Result<()> {
        let Some(tls) = &self.options.tls else { return Ok(()) };
        self.write_file("ca.pem", fs::read(tls.ca_file())?)?;
        self.write_file("server.pem", fs::read(tls.server_cert_file())?)?;
        self.write_file("server.key", fs::read(tls.server_key_file())?)
    }

    /// Writes a file in the server's folder, readable only by the server's account.
    pub(crate) fn write_file(&self, name: &str, content: impl AsRef<[u8]>) -> io::Result<()> {
        let file = self.file(name);
        fs::write(&file, content)?;
        fs::set_permissions(&file, Permissions::from_mode(0o600))?;
        self.account.chown(&file)
    }

    /// Returns the path of a file in the server's folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Returns the folder of the server's data.
    #[cfg(target_os = "linux")]
    pub(crate) fn data(&self) -> PathBuf {
        self.file("data")
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Kills the server if it runs, and starts it with its previous data. Does not wait until the
    /// process id is known, as [`restart_without_waiting`](Self::restart_without_waiting) does.
    /// Until then, [`pause`](Self::pause) fails.
    pub(crate) fn launch(&mut self) -> io::Result<()> {
        // `S::command` may write the configuration file, which a running server may rewrite.
        self.kill();
        self.running = Some(ManagedProcess::launch(&S::command(self)?)?);
        Ok(())
    }

    /// Kills the server if it runs, starts it on the same ports with its previous data, and waits
    /// until it serves. A member of a cluster may serve only while there is a majority.
    pub async fn restart(&mut self) -> io::Result<()> {
        self.launch()?;
        self.wait_until_serving().await
    }

    /// Like [`restart`](Self::restart), without waiting until the server serves.
    pub async fn restart_without_waiting(&mut self) -> io::Result<()> {
        self.launch()?;
        self.wait_until_started().await
    }

    /// Waits until a launched server has a process id, so that it can be paused and killed.
    async fn wait_until_started(&mut self) -> io::Result<()> {
        self.running.as_mut().ok_or_else(down_error)?.wait_until_started().await
    }

    /// Waits until a launched server serves.
    pub async fn wait_until_serving(&mut self) -> io::Result<()> {
        self.wait_until_started().await?;
        let deadline = Instant::now() + SERVER_TIME_LIMIT;
        while Instant::now() < deadline && self.is_up() {
            if S::is_serving(self).await {
                return Ok(());
            }
            sleep(CHECK_INTERVAL).await;
        }
        if let Some(running) = &mut self.running {
            running.wait_for_remaining_output().await;
        }
        Err(self.start_error(&self.output_text()))
    }

    /// Returns the error of a server that does not start.
    pub(crate) fn start_error(&self, output: &str) -> io::Error {
        let ServerProgram { name, package, .. } = S::PROGRAM;
        io::Error::other(format!(
            "{name} has ended or did not serve within {SERVER_TIME_LIMIT:?}; if it is not installed, run apt-get install {package}; its output:\n{output}"
        ))
    }

    pub(crate) fn running(&self) -> io::Result<&ManagedProcess> {
        self.running.as_ref().ok_or_else(down_error)
    }

    /// Returns the server's output since it started. Empty after [`kill`](Self::kill) and
    /// [`stop`](Self::stop).
    #[must_use]
    pub fn output_text(&self) -> String {
        self.running.as_ref().map(ManagedProcess::output_text).unwrap_or_default()
    }

    /// Kills the server and its child processes (SIGKILL), so that it does not shut down cleanly,
    /// and waits for their end.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Shuts the server down. The server aborts running requests and leaves consistent data.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.running()?.shut_down(S::PROGRAM.stop).await?;
        self.running = None;
        Ok(())
    }

    /// Pauses the server and its child processes (SIGSTOP) until [`resume`](Self::resume). On
    /// Linux, they execute nothing after this returns. On other systems, pauses only the server.
    pub fn pause(&self) -> io::Result<()> {
        self.running()?.pause()
    }

    /// Resumes all paused processes of the server.
    pub fn resume(&self) -> io::Result<()> {
        self.running()?.resume()
    }

    /// Returns whether the server runs, paused or not.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.running.as_ref().is_some_and(ManagedProcess::is_up)
    }

    /// Returns whether the server is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.running.as_ref().is_some_and(ManagedProcess::is_paused)
    }

    /// Returns whether the server can respond: it runs and is not paused.
    pub(crate) fn is_responsive(&self) -> bool {
        self.is_up() && !self.is_paused()
    }

    /// Returns the server's address for clients.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        S::client_port(self).addr()
    }

    /// Returns the folder of the server's files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl<S: ServerDescription> Drop for ManagedServer<S> {
    fn drop(&mut self) {
        // The process must end before the folder and the ports are dropped.
        match (self.running.take(), S::PROGRAM.reap_signal) {
            (Some(running), Some(signal)) => running.kill_and_reap(signal),
            (Some(running), None) => running.kill(),
            (None, _) => {}
        }
    }
}
