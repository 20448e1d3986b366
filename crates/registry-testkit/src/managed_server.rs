//! What the servers of all stores have in common: a process with its port, its folder and its
//! account. How a server is configured and queried is in the modules of the stores.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::ops::DerefMut;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::managed_process::{ManagedProcess, START_LIMIT, down_error};
use crate::ports::Port;
use crate::server_user::ServerUser;

/// The pause between two checks of whether a server is ready.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What differs between the server programs.
#[derive(Debug)]
pub(crate) struct ServerProgram {
    /// The name in error messages.
    pub(crate) name: &'static str,
    /// Debian's package.
    pub(crate) package: &'static str,
    /// The account for tests that run as root, if the server refuses to run as root.
    pub(crate) account: Option<&'static str>,
    /// Shuts the server down and leaves consistent data.
    pub(crate) stop: Signal,
    /// Makes the server wait only for its children, if it has any. See
    /// [`ManagedProcess::kill_and_reap`].
    pub(crate) reap: Option<Signal>,
}

/// A server process that can be killed, paused and started again. Dropping this handle kills it.
/// Each store has a type for its servers that dereferences to this one.
#[derive(Debug)]
pub struct ManagedServer {
    program: &'static ServerProgram,
    account: ServerUser,
    port: Port,
    folder: TempDir,
    running: Option<ManagedProcess>,
}

impl ManagedServer {
    /// Creates a server that is down, with an empty folder.
    pub(crate) fn new(program: &'static ServerProgram) -> io::Result<Self> {
        Self::on_port(Port::reserve()?, program)
    }

    /// Like [`new`](Self::new), on this port.
    pub(crate) fn on_port(port: Port, program: &'static ServerProgram) -> io::Result<Self> {
        let account = ServerUser::for_root(program.account)?;
        let folder = tempfile::tempdir()?;
        account.chown(folder.path())?;
        Ok(Self { program, account, port, folder, running: None })
    }

    /// Creates a command that runs `program` under the server's account.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.account.command(program);
        // The account may have no access to the working directory of the test.
        command.current_dir(self.folder());
        command
    }

    /// Copies a file into the server's folder, readable only by the server's account.
    pub(crate) fn install_file(&self, file: &Path, name: &str) -> io::Result<()> {
        self.write_file(name, fs::read(file)?)
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

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Kills the server if it runs, and launches `command`, which must stay in the foreground.
    pub(crate) fn launch(&mut self, command: &Command) -> io::Result<()> {
        self.kill();
        self.running = Some(ManagedProcess::launch(command)?);
        Ok(())
    }

    /// Waits until a launched server has a process id, so that it can be paused and killed.
    pub(crate) async fn wait_until_started(&mut self) -> io::Result<()> {
        self.running.as_mut().ok_or_else(down_error)?.wait_until_started().await
    }

    /// Waits until a launched server has printed a line that contains `ready`.
    pub(crate) async fn wait_until_printed(&mut self, ready: &str) -> io::Result<()> {
        self.wait_until_started().await?;
        let running = self.running.as_mut().ok_or_else(down_error)?;
        if running.expect(|line| line.contains(ready)).await.is_err() {
            return Err(self.not_started(&self.output_text()));
        }
        Ok(())
    }

    /// Returns the error of a server that does not start.
    pub(crate) fn not_started(&self, output: &str) -> io::Error {
        let ServerProgram { name, package, .. } = self.program;
        io::Error::other(format!(
            "{name} does not start; is it installed (apt-get install {package})? Its output:\n{output}"
        ))
    }

    pub(crate) fn running(&self) -> io::Result<&ManagedProcess> {
        self.running.as_ref().ok_or_else(down_error)
    }

    /// Returns the server's output since it started.
    #[must_use]
    pub fn output_text(&self) -> String {
        self.running.as_ref().map(ManagedProcess::output_text).unwrap_or_default()
    }

    /// Kills the server with all its processes, as a machine crash would. They have ended when this
    /// returns.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Shuts the server down. It aborts what it executes and leaves consistent data.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.running()?.stop(self.program.stop).await?;
        self.running = None;
        Ok(())
    }

    /// Stops all processes of the server (SIGSTOP) until [`resume`](Self::resume). They execute
    /// nothing after this returns.
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

    /// Returns the server's address for clients.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns the folder of the server's files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Waits until `is_ready` returns true for a launched server.
pub(crate) async fn wait_until_ready<S: DerefMut<Target = ManagedServer>>(
    server: &mut S,
    is_ready: impl AsyncFn(&S) -> bool,
) -> io::Result<()> {
    server.wait_until_started().await?;
    let deadline = Instant::now() + START_LIMIT;
    while Instant::now() < deadline && server.is_up() {
        if is_ready(server).await {
            return Ok(());
        }
        sleep(CHECK_INTERVAL).await;
    }
    if let Some(running) = &mut server.running {
        running.wait_for_remaining_output().await;
    }
    Err(server.not_started(&server.output_text()))
}

impl Drop for ManagedServer {
    fn drop(&mut self) {
        // The process must end before the folder and the port are dropped.
        match (self.running.take(), self.program.reap) {
            (Some(running), Some(signal)) => running.kill_and_reap(signal),
            (Some(running), None) => running.kill(),
            (None, _) => {}
        }
    }
}

/// Lets a store's server dereference to its field `server`.
macro_rules! impl_managed_server {
    ($server:ty) => {
        impl std::ops::Deref for $server {
            type Target = $crate::managed_server::ManagedServer;

            fn deref(&self) -> &Self::Target {
                &self.server
            }
        }

        impl std::ops::DerefMut for $server {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.server
            }
        }
    };
}
pub(crate) use impl_managed_server;
