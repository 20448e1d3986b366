//! The child process in which `lockreg run` or `elect` executes its command: starts it, reports
//! when it stops or ends, and signals its group.

use std::ffi::OsString;
use std::io::{self, PipeWriter, Write as _};
use std::os::unix::process::CommandExt as _;
#[cfg(any(target_os = "linux", target_os = "android"))]
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill, killpg};
#[cfg(any(target_os = "linux", target_os = "android"))]
use nix::sys::wait::{Id, waitid};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::sync::{mpsc, oneshot};

use super::command::Program;
use super::exec;
use crate::exit::status_of_signal;

/// A process that executes the command once its gate is open. It leads its own process group.
#[derive(Debug)]
pub(crate) struct CommandProcess {
    pid: Pid,
    /// The command starts after a message on this pipe.
    gate: Option<PipeWriter>,
    changes: mpsc::UnboundedReceiver<StateChange>,
}

/// A change of the command's state.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StateChange {
    Stopped(Signal),
    Ended(CommandExit),
}

/// How the command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandExit {
    Status(i32),
    Signal(Signal),
    /// A real-time signal, which `Signal` cannot represent.
    RealTimeSignal(i32),
}

impl CommandExit {
    /// Returns the exit status that a shell would report.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Status(status) => u8::try_from(status).unwrap_or(u8::MAX),
            Self::Signal(signal) => status_of_signal(signal as i32),
            Self::RealTimeSignal(number) => status_of_signal(number),
        }
    }
}

impl std::fmt::Display for CommandExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "ended with status {status}"),
            Self::Signal(signal) => write!(f, "was ended by {signal}"),
            Self::RealTimeSignal(number) => write!(f, "was ended by signal {number}"),
        }
    }
}

impl CommandProcess {
    /// Starts the process of `program` with these changes to its environment. With `foreground`,
    /// its group becomes the foreground group of the terminal. The program itself does not run
    /// before [`CommandProcess::open_gate`].
    pub(crate) async fn start(
        program: &Program,
        environment: Vec<(&'static str, Option<String>)>,
        foreground: bool,
    ) -> io::Result<Self> {
        let (gate_reader, gate) = io::pipe()?;
        // Without `FD_CLOEXEC`, the child inherits the read end. The child then closes it.
        fcntl(&gate_reader, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let mut command = exec::exec_command(program, foreground, &gate_reader);
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.process_group(0);
        let (started_sender, started) = oneshot::channel();
        let (change_sender, changes) = mpsc::unbounded_channel();
        // One thread starts the command and waits for its end. The kernel sends the death signal
        // when the *thread* that started the command ends.
        std::thread::Builder::new().name("command".to_owned()).spawn(move || {
            match command.spawn() {
                Ok(mut child) => {
                    let _ = started_sender.send(Ok(pid_of(&child)));
                    wait_for_changes(&mut child, &change_sender);
                }
                Err(error) => {
                    let _ = started_sender.send(Err(error));
                }
            }
        })?;
        let pid = started.await.map_err(io::Error::other)??;
        Ok(Self { pid, gate: Some(gate), changes })
    }

    /// Lets the command start.
    pub(crate) fn open_gate(&mut self) {
        if let Some(mut gate) = self.gate.take() {
            // The write fails if the process has been killed.
            let _ = gate.write_all(exec::START);
        }
    }

    /// Returns the process group of the command.
    pub(crate) fn group(&self) -> Pid {
        self.pid
    }

    /// Waits for the next change of the command's state. After the end of the command, waits
    /// forever.
    pub(crate) async fn next_change(&mut self) -> StateChange {
        match self.changes.recv().await {
            Some(change) => change,
            None => std::future::pending().await,
        }
    }

    /// Signals the command and all processes in its group.
    pub(crate) fn signal_all(&self, signal: Signal) {
        // The call fails if all processes have just ended.
        let _ = killpg(self.pid, signal);
    }

    /// Signals the command alone. Do not call this method after [`StateChange::Ended`], because the
    /// process id may then be reused.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill(self.pid, signal);
    }

    /// Returns whether the command's group contains any process. Do not call this method before
    /// [`StateChange::Ended`], because it reaps the ended processes of the group.
    pub(crate) fn has_processes(&self) -> bool {
        // As the first process of a container, or as a child subreaper, `lockreg` inherits the
        // orphans of the group. An orphan that is not reaped stays in the group.
        reap_group(self.pid);
        has_processes(self.pid)
    }
}

/// Returns whether `group` contains any process. The kernel does not reuse the id of a group that
/// contains a process.
pub(super) fn has_processes(group: Pid) -> bool {
    killpg(group, None) != Err(Errno::ESRCH)
}

/// Reaps all ended processes of `group` that are children of this process.
fn reap_group(group: Pid) {
    // Returns whether another process may follow.
    let reap_next = || match waitpid(Pid::from_raw(-group.as_raw()), Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::StillAlive) => false,
        // `EINVAL` means that a real-time signal ended the process, which is reaped too.
        Ok(_) | Err(Errno::EINTR | Errno::EINVAL) => true,
        Err(_) => false,
    };
    while reap_next() {}
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

/// Waits until the process ends. Sends each stop and the end.
fn wait_for_changes(child: &mut Child, change_sender: &mpsc::UnboundedSender<StateChange>) {
    let pid = pid_of(child);
    loop {
        if let Some(number) = wait_and_reap_if_real_time_signal(child) {
            let _ = change_sender.send(StateChange::Ended(CommandExit::RealTimeSignal(number)));
            return;
        }
        let change = match waitpid(pid, Some(WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Stopped(_, signal)) => StateChange::Stopped(signal),
            Ok(WaitStatus::Exited(_, status)) => StateChange::Ended(CommandExit::Status(status)),
            Ok(WaitStatus::Signaled(_, signal, _)) => {
                StateChange::Ended(CommandExit::Signal(signal))
            }
            Ok(_) | Err(Errno::EINTR) => continue,
            // This error cannot occur. No other code waits for this process, and
            // `keep_exit_statuses` has set a handler for SIGCHLD.
            Err(_) => StateChange::Ended(CommandExit::Status(i32::from(u8::MAX))),
        };
        let ended = matches!(change, StateChange::Ended(_));
        if change_sender.send(change).is_err() || ended {
            return;
        }
    }
}

/// Waits for the next change of the process. If a real-time signal has ended the process, reaps the
/// process and returns the number of the signal. `waitpid` of `nix` would lose this number.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn wait_and_reap_if_real_time_signal(child: &mut Child) -> Option<i32> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
    match waitid(Id::Pid(pid_of(child)), flags) {
        // `nix` cannot represent the signal.
        Err(Errno::EINVAL) => child.wait().ok()?.signal(),
        _ => None,
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn wait_and_reap_if_real_time_signal(_child: &mut Child) -> Option<i32> {
    None
}

/// Returns a command that starts this program with a hidden subcommand. On Linux, the command uses
/// `/proc/self/exe`, because an upgrade may have replaced the file at the program's path.
pub(super) fn self_command(hidden_subcommand: &str) -> Command {
    let path = if cfg!(target_os = "linux") { Some(PathBuf::from("/proc/self/exe")) } else { None };
    let path = path
        .filter(|path| path.exists())
        .or_else(|| std::env::current_exe().ok())
        .unwrap_or_else(|| PathBuf::from("lockreg"));
    let mut command = Command::new(path);
    command.arg0("lockreg").arg(OsString::from(hidden_subcommand));
    command
}
