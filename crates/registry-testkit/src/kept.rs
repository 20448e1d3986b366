//! A program that serves until its handle is dropped: started, paused, killed, together with the processes that it started. Knows
//! nothing of what it serves.

use std::ffi::OsString;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::eventually::NotInTime;
use crate::process::HelperProcess;

/// How long a server may take until it is ready. Usually it takes 50 ms.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the kernel may take to stop or to end a process.
const SIGNAL_LIMIT: Duration = Duration::from_secs(30);

/// Starts its arguments as a server and says the server's process id, before the server says anything. Ends when the server does; and ends the server when
/// its own input ends, because a test that is killed runs no `Drop`. The kernel then hangs up on groups that it leaves
/// behind with a paused member; without the trap, that would be the end of the watcher. What a server has started can be paused on
/// its own, and would then never notice that the server is gone.
const KEEPER: &str = r#"
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

/// A server's process.
#[derive(Debug)]
pub(crate) struct Kept {
    keeper: HelperProcess,
    /// Known once the keeper has said it.
    pid: Option<Pid>,
    paused: AtomicBool,
}

impl Kept {
    /// Starts `command`, which must stay in the foreground. Of its settings, the program, the arguments and the environment count.
    pub(crate) fn launch(command: &Command) -> io::Result<Self> {
        let mut keeper = Command::new("sh");
        keeper.args(["-c", KEEPER, "sh", "env"]);
        for (name, value) in command.get_envs() {
            let Some(value) = value else { continue };
            let mut setting = OsString::from(name);
            setting.push("=");
            setting.push(value);
            keeper.arg(setting);
        }
        keeper.arg(command.get_program()).args(command.get_args());
        let keeper = HelperProcess::spawn(keeper)?;
        Ok(Self { keeper, pid: None, paused: AtomicBool::new(false) })
    }

    /// Waits until the server has a process id.
    pub(crate) async fn begun(&mut self) -> io::Result<()> {
        let number = |line: &str| line.strip_prefix("server ")?.parse().ok();
        let pid = self.keeper.expect_map(number, START_LIMIT).await.map_err(io::Error::other)?;
        self.pid = Some(Pid::from_raw(pid));
        Ok(())
    }

    /// Waits until the server has said something `such`.
    pub(crate) async fn expect(&mut self, such: impl Fn(&str) -> bool) -> Result<(), NotInTime> {
        self.keeper.expect_line(such, START_LIMIT).await.map(|_| ())
    }

    /// Waits for the last words of a server that has ended; they may still be on their way.
    pub(crate) async fn last_words(&mut self) {
        if self.keeper.has_exited() {
            _ = self.keeper.expect_line(|_| false, START_LIMIT).await;
        }
    }

    /// What the server has logged.
    pub(crate) fn said(&self) -> String {
        let lines: Vec<Arc<str>> = self.keeper.lines();
        lines.join("\n")
    }

    /// Whether the server runs, paused or not.
    pub(crate) fn is_up(&self) -> bool {
        !self.keeper.has_exited()
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// The processes that the server has started, as far as they live.
    fn children(&self) -> Vec<Pid> {
        let Some(pid) = self.pid else { return Vec::new() };
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect()
    }

    /// Stops the server and what it has started in their tracks. When this has returned, they do nothing more.
    pub(crate) fn pause(&self) -> io::Result<()> {
        let pid = self.pid()?;
        stop(pid)?;
        self.paused.store(true, Ordering::Relaxed);
        // It starts no more of them now. One that has ended meanwhile does nothing more, either.
        self.children().into_iter().for_each(|child| _ = stop(child));
        Ok(())
    }

    /// Lets all that is paused go on.
    pub(crate) fn resume(&self) -> io::Result<()> {
        let pid = self.pid()?;
        self.children().into_iter().for_each(|child| _ = kill(child, Signal::SIGCONT));
        kill(pid, Signal::SIGCONT)?;
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Stops one of the processes that the server has started.
    #[cfg(target_os = "linux")]
    pub(crate) fn pause_child(&self, child: i32) -> io::Result<()> {
        stop(self.child(child)?)
    }

    /// Lets one of the processes that the server has started go on.
    #[cfg(target_os = "linux")]
    pub(crate) fn resume_child(&self, child: i32) -> io::Result<()> {
        Ok(kill(self.child(child)?, Signal::SIGCONT)?)
    }

    /// Ends one of the processes that the server has started, without its knowledge.
    #[cfg(target_os = "linux")]
    pub(crate) fn kill_child(&self, child: i32) -> io::Result<()> {
        Ok(kill(self.child(child)?, Signal::SIGKILL)?)
    }

    /// Signals go to nobody else.
    #[cfg(target_os = "linux")]
    fn child(&self, child: i32) -> io::Result<Pid> {
        let known = self.children().into_iter().find(|known| known.as_raw() == child);
        known.ok_or_else(|| io::Error::other(format!("the server has no process {child}")))
    }

    /// Asks the server to end, and waits until it has.
    #[cfg(target_os = "linux")]
    pub(crate) async fn stop(&self, signal: Signal) -> io::Result<ExitStatus> {
        kill(self.pid()?, signal)?;
        self.keeper.wait_exit(START_LIMIT).await.map_err(io::Error::other)
    }

    /// Kills the server and all that it has started, as a crash of the machine would. They are gone when this returns.
    pub(crate) fn kill(self) {
        let Some(pid) = self.pid.filter(|_| self.is_up()) else { return };
        let children = self.children();
        if kill(pid, Signal::SIGKILL).is_err() {
            return;
        }
        children.iter().for_each(|&child| _ = kill(child, Signal::SIGKILL));
        // The keeper reaps the server and then ends, so its end says that the port is free again.
        blocking(|| !self.is_up() && children.iter().all(|&child| state(child).is_none()));
    }

    /// As [`kill`](Self::kill), for a server that at `signal` only waits for its children: it reaps them. Those that a crash leaves to
    /// the first process of the machine may stay in its table for ever; in a container that process is often one that reaps nobody.
    #[cfg(target_os = "linux")]
    pub(crate) fn kill_and_reap(self, signal: Signal) {
        if let Ok(pid) = self.pid() {
            let children = self.children();
            _ = kill(pid, signal);
            children.into_iter().for_each(|child| _ = kill(child, Signal::SIGKILL));
            _ = kill(pid, Signal::SIGCONT);
            blocking(|| !self.is_up());
        }
        self.kill();
    }

    fn pid(&self) -> io::Result<Pid> {
        self.pid.filter(|_| self.is_up()).ok_or_else(down)
    }
}

/// What is told of a server that does not run.
pub(crate) fn down() -> io::Error {
    io::Error::other("the server is down")
}

fn stop(pid: Pid) -> io::Result<()> {
    kill(pid, Signal::SIGSTOP)?;
    // Elsewhere than on Linux nobody tells whether the signal has arrived.
    if cfg!(target_os = "linux") {
        blocking(|| matches!(state(pid), None | Some('T')));
    }
    Ok(())
}

/// What the kernel says that a process does; nothing of one that is gone, reaped or not.
fn state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next().filter(|&state| state != 'Z')
}

/// Waits for what the kernel does in no time. The thread may be that of a test's tasks, so this is short.
fn blocking(mut done: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !done() && begun.elapsed() < SIGNAL_LIMIT {
        thread::sleep(Duration::from_micros(200));
    }
}
