//! A server process that ends when its handle is dropped. Starts, pauses and kills the process
//! together with its children. Contains nothing specific to a server program.

use std::ffi::OsString;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::HelperProcess;

/// The maximum time until a server is ready, or until it has ended. A typical start takes 50 ms.
pub(crate) const SERVER_TIME_LIMIT: Duration = Duration::from_secs(60);
/// The maximum time for a process to stop or end after a signal.
const SIGNAL_LIMIT: Duration = Duration::from_secs(30);

/// A shell script that runs its arguments as a server and first prints the server's process id. The
/// script ends when the server ends.
///
/// A watcher in the script kills the server when the script's input ends, because a killed test
/// runs no `Drop`. The kernel sends SIGHUP to an orphaned process group with a stopped member; the
/// trap lets the watcher survive it. The watcher also kills the server's children, because a paused
/// child would never notice that the server has ended.
const SUPERVISOR_SCRIPT: &str = r#"
trap '' HUP
exec 3<&0
sh -c 'echo "server $$"; exec "$@"' sh "$@" </dev/null 3<&- 2>&1 &
server=$!
{ cat <&3; kill -9 $server $(cat /proc/$server/task/$server/children); } >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait $server
kill -9 $watcher
"#;

/// The process of a server.
#[derive(Debug)]
pub(crate) struct ManagedProcess {
    supervisor: HelperProcess,
    /// `Some` once the script has printed it.
    pid: Option<Pid>,
    paused: AtomicBool,
}

impl ManagedProcess {
    /// Starts `command`, which must stay in the foreground. Uses only its program, its arguments
    /// and the environment variables that it sets.
    pub(crate) fn launch(command: &Command) -> io::Result<Self> {
        let mut supervisor = Command::new("sh");
        supervisor.args(["-c", SUPERVISOR_SCRIPT, "sh", "env"]);
        for (name, value) in command.get_envs() {
            let Some(value) = value else { continue };
            let mut setting = OsString::from(name);
            setting.push("=");
            setting.push(value);
            supervisor.arg(setting);
        }
        supervisor.arg(command.get_program()).args(command.get_args());
        let supervisor = HelperProcess::spawn(supervisor)?;
        Ok(Self { supervisor, pid: None, paused: AtomicBool::new(false) })
    }

    /// Waits until the server has a process id.
    pub(crate) async fn wait_until_started(&mut self) -> io::Result<()> {
        if self.pid.is_some() {
            return Ok(());
        }
        let number = |line: &str| line.strip_prefix("server ")?.parse().ok();
        let pid = self
            .supervisor
            .expect_map(number, SERVER_TIME_LIMIT)
            .await
            .map_err(io::Error::other)?;
        self.pid = Some(Pid::from_raw(pid));
        Ok(())
    }

    /// Waits for the remaining output of a server that has ended.
    pub(crate) async fn wait_for_remaining_output(&mut self) {
        if self.supervisor.has_exited() {
            _ = self.supervisor.expect_line(|_| false, SERVER_TIME_LIMIT).await;
        }
    }

    /// Returns the server's output.
    pub(crate) fn output_text(&self) -> String {
        let lines: Vec<Arc<str>> = self.supervisor.lines();
        lines.join("\n")
    }

    /// Returns whether the server runs, paused or not.
    pub(crate) fn is_up(&self) -> bool {
        !self.supervisor.has_exited()
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Returns the child processes of the server.
    fn children(&self) -> Vec<Pid> {
        let Some(pid) = self.pid else { return Vec::new() };
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect()
    }

    /// Stops the server and its children (SIGSTOP). On Linux, they execute nothing after this
    /// returns.
    pub(crate) fn pause(&self) -> io::Result<()> {
        let pid = self.pid()?;
        pause_process(pid)?;
        self.paused.store(true, Ordering::Relaxed);
        // The stopped server starts no further children. An error means that a child has ended.
        self.children().into_iter().for_each(|child| _ = pause_process(child));
        Ok(())
    }

    /// Resumes the server and its children (SIGCONT).
    pub(crate) fn resume(&self) -> io::Result<()> {
        let pid = self.pid()?;
        self.children().into_iter().for_each(|child| _ = kill(child, Signal::SIGCONT));
        kill(pid, Signal::SIGCONT)?;
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Stops one child process of the server.
    #[cfg(target_os = "linux")]
    pub(crate) fn pause_child(&self, child: i32) -> io::Result<()> {
        pause_process(self.child(child)?)
    }

    /// Resumes one child process of the server.
    #[cfg(target_os = "linux")]
    pub(crate) fn resume_child(&self, child: i32) -> io::Result<()> {
        Ok(kill(self.child(child)?, Signal::SIGCONT)?)
    }

    /// Kills one child process of the server (SIGKILL).
    #[cfg(target_os = "linux")]
    pub(crate) fn kill_child(&self, child: i32) -> io::Result<()> {
        Ok(kill(self.child(child)?, Signal::SIGKILL)?)
    }

    /// Returns the pid `child` if it is a child of the server. Signals thus reach no other process.
    #[cfg(target_os = "linux")]
    fn child(&self, child: i32) -> io::Result<Pid> {
        let known = self.children().into_iter().find(|known| known.as_raw() == child);
        known.ok_or_else(|| io::Error::other(format!("the server has no process {child}")))
    }

    /// Sends `signal` to the server and waits until it has ended.
    pub(crate) async fn shut_down(&self, signal: Signal) -> io::Result<ExitStatus> {
        kill(self.pid()?, signal)?;
        self.supervisor.wait_exit(SERVER_TIME_LIMIT).await.map_err(io::Error::other)
    }

    /// Kills the server and its children (SIGKILL), so that the server does not shut down cleanly.
    /// They have ended when this returns.
    pub(crate) fn kill(self) {
        let Some(pid) = self.pid.filter(|_| self.is_up()) else { return };
        let children = self.children();
        if kill(pid, Signal::SIGKILL).is_err() {
            return;
        }
        children.iter().for_each(|&child| _ = kill(child, Signal::SIGKILL));
        // The script ends after it has reaped the server, so its end means that the port is free.
        let children_ended = || children.iter().all(|&child| process_state(child).is_none());
        block_until(|| !self.is_up() && children_ended());
    }

    /// Like [`kill`](Self::kill), but the server reaps its killed children before it ends: `signal`
    /// makes the server shut down and wait for them. If the server were killed first, the init
    /// process would inherit its killed children. In a container, that process often reaps no
    /// children, so they would stay in the process table.
    pub(crate) fn kill_and_reap(self, signal: Signal) {
        if let Ok(pid) = self.pid() {
            let children = self.children();
            _ = kill(pid, signal);
            children.into_iter().for_each(|child| _ = kill(child, Signal::SIGKILL));
            _ = kill(pid, Signal::SIGCONT);
            block_until(|| !self.is_up());
        }
        self.kill();
    }

    fn pid(&self) -> io::Result<Pid> {
        self.pid.filter(|_| self.is_up()).ok_or_else(down_error)
    }
}

/// Returns the error for a server that does not run.
pub(crate) fn down_error() -> io::Error {
    io::Error::other("the server is down")
}

fn pause_process(pid: Pid) -> io::Result<()> {
    kill(pid, Signal::SIGSTOP)?;
    // Only Linux has `/proc`, which shows whether the signal has taken effect.
    if cfg!(target_os = "linux") {
        block_until(|| matches!(process_state(pid), None | Some('T')));
    }
    Ok(())
}

/// Returns the process state from `/proc`. Returns `None` for a process that has ended, reaped or
/// not.
fn process_state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next().filter(|&state| state != 'Z')
}

/// Blocks the thread until `done` returns true or [`SIGNAL_LIMIT`] has passed. The thread may run
/// async tasks, so call this function only for operations that normally end within milliseconds.
fn block_until(mut done: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !done() && started.elapsed() < SIGNAL_LIMIT {
        thread::sleep(Duration::from_micros(200));
    }
}
