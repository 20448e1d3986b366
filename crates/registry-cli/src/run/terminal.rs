//! Job control. The command of `run` or `elect` has its own process group. `lockreg` therefore acts
//! like a shell: it makes the command's group the foreground group of the terminal, and later makes
//! the group of `lockreg` the foreground group again. It also stops and resumes with the command.

use std::fs::File;
use std::io::{IsTerminal as _, stdin, stdout};

use nix::sys::signal::{Signal, killpg, raise};
use nix::unistd::{Pid, getpgrp, getpid, getppid, getsid, tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process, if it has one.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: Option<File>,
    own_group: Pid,
}

impl Terminal {
    pub(crate) fn open() -> Self {
        Self {
            tty: File::options().read(true).write(true).open("/dev/tty").ok(),
            own_group: getpgrp(),
        }
    }

    /// Returns whether the command gets the terminal when it starts.
    ///
    /// In a pipeline (`lockreg run … | less`) or in a script, other processes of this group need
    /// the terminal or its signals. The command then gets the terminal at its first use of the
    /// terminal.
    pub(crate) fn is_foreground_job(&self) -> bool {
        self.is_foreground(self.own_group)
            && getpid() == self.own_group
            && stdin().is_terminal()
            && stdout().is_terminal()
    }

    /// Returns the action after `signal` has stopped the process group `command`.
    pub(crate) fn after_stop(&self, command: Pid, signal: Signal) -> AfterStop {
        if self.is_foreground(command) {
            // Ctrl-Z or a stop signal has stopped the foreground command, so the whole job stops.
            return if can_be_continued() { AfterStop::StopJob } else { AfterStop::Resume };
        }
        match signal {
            // The command has tried to read from the terminal or to change its settings.
            Signal::SIGTTIN | Signal::SIGTTOU if self.is_foreground(self.own_group) => {
                AfterStop::Resume
            }
            Signal::SIGTTIN | Signal::SIGTTOU if self.tty.is_some() && can_be_continued() => {
                AfterStop::StopJob
            }
            // Another process has stopped only the command, and must continue it.
            _ => AfterStop::Ignore,
        }
    }

    /// Makes `command` the foreground process group, if this process's group is in the foreground.
    pub(crate) fn move_to(&self, command: Pid) {
        if self.is_foreground(self.own_group) {
            self.set_foreground(command);
        }
    }

    /// Makes this process's group the foreground group, if `command` is in the foreground.
    pub(crate) fn reclaim(&self, command: Pid) {
        if self.is_foreground(command) {
            self.set_foreground(self.own_group);
        }
    }

    /// Returns whether `group` is the foreground group of the terminal.
    pub(crate) fn is_foreground(&self, group: Pid) -> bool {
        self.tty.as_ref().is_some_and(|tty| tcgetpgrp(tty) == Ok(group))
    }

    fn set_foreground(&self, group: Pid) {
        if let Some(tty) = &self.tty {
            // The call fails if the group or the terminal no longer exists. No process then needs
            // the terminal.
            let _ = tcsetpgrp(tty, group);
        }
    }
}

/// The action after the command was stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AfterStop {
    /// Stop this job too, and continue the command when this process is continued.
    StopJob,
    /// Continue the command, with the terminal if possible.
    Resume,
    /// Do nothing.
    Ignore,
}

/// Stops all processes in the group of this process, as the terminal would. Returns when this
/// process is continued.
pub(crate) fn stop_job() {
    // The terminal stopped only the group of the command.
    let _ = killpg(getpgrp(), Signal::SIGSTOP);
}

/// Stops this process alone, if another process can continue it. Returns when this process is
/// continued.
pub(crate) fn stop_self() {
    if can_be_continued() {
        let _ = raise(Signal::SIGSTOP);
    }
}

/// Returns whether the parent process is in the same session, as a shell is, and can thus continue
/// this process. The kernel has a similar rule: SIGTSTP does not stop an orphaned process group.
fn can_be_continued() -> bool {
    let session = getsid(None);
    getppid() != Pid::from_raw(1) && session != Ok(getpid()) && getsid(Some(getppid())) == session
}
