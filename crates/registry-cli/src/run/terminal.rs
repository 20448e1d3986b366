//! Job control: the command of `run` has a process group of its own, so somebody must hand it the terminal, take it back,
//! and stop and go on together with it, as a shell would.

use std::fs::File;
use std::io::{IsTerminal as _, stdin, stdout};

use nix::sys::signal::{Signal, killpg, raise};
use nix::unistd::{Pid, getpgrp, getpid, getppid, getsid, tcgetpgrp, tcsetpgrp};

/// The controlling terminal of this process, if there is one.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: Option<File>,
    ours: Pid,
}

impl Terminal {
    pub(crate) fn open() -> Self {
        Self { tty: File::options().read(true).write(true).open("/dev/tty").ok(), ours: getpgrp() }
    }

    /// Whether the command should have the terminal from the start.
    ///
    /// It must not be taken away from others: in a pipeline (`lockreg run … | less`) or in a script they are in our group and
    /// want the terminal, or its signals, themselves. Then the command gets it when it asks for it.
    pub(crate) fn is_ours_alone(&self) -> bool {
        self.is_held_by(self.ours)
            && getpid() == self.ours
            && stdin().is_terminal()
            && stdout().is_terminal()
    }

    /// What is to be done when the process group `command` was stopped by `signal`.
    pub(crate) fn after_stop(&self, command: Pid, signal: Signal) -> AfterStop {
        if self.is_held_by(command) {
            // Ctrl-Z, or somebody stopped what the user is looking at: the whole job stops.
            return if can_be_continued() { AfterStop::StopJob } else { AfterStop::GoOn };
        }
        match signal {
            // It wants to read from the terminal, or to set it.
            Signal::SIGTTIN | Signal::SIGTTOU if self.is_held_by(self.ours) => AfterStop::GoOn,
            Signal::SIGTTIN | Signal::SIGTTOU if self.tty.is_some() && can_be_continued() => {
                AfterStop::StopJob
            }
            // Somebody stopped the command alone, and will let it go on.
            _ => AfterStop::Leave,
        }
    }

    /// Hands the terminal to the process group `command` if it is ours.
    pub(crate) fn give(&self, command: Pid) {
        if self.is_held_by(self.ours) {
            self.set(command);
        }
    }

    /// Takes the terminal back if the process group `command` has it.
    pub(crate) fn take_back(&self, command: Pid) {
        if self.is_held_by(command) {
            self.set(self.ours);
        }
    }

    fn is_held_by(&self, group: Pid) -> bool {
        self.tty.as_ref().is_some_and(|tty| tcgetpgrp(tty) == Ok(group))
    }

    fn set(&self, group: Pid) {
        if let Some(tty) = &self.tty {
            // Fails when the group or the terminal is gone: then nobody needs it any more.
            let _ = tcsetpgrp(tty, group);
        }
    }
}

/// What follows when the command was stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AfterStop {
    /// Stop as well; go on with the command when we are continued.
    StopJob,
    /// Let the command go on, with the terminal if it can have it.
    GoOn,
    /// Nothing.
    Leave,
}

/// Stops this process and everything else in its process group, as the terminal would. Returns when it is continued.
pub(crate) fn stop_job() {
    // Our own group was not stopped by the terminal: the command's was.
    let _ = killpg(getpgrp(), Signal::SIGSTOP);
}

/// Stops this process alone. Returns when it is continued.
pub(crate) fn stop_self() {
    if can_be_continued() {
        let _ = raise(Signal::SIGSTOP);
    }
}

/// Whether there is a shell that would let us go on. The kernel asks the same before it stops a process.
fn can_be_continued() -> bool {
    let session = getsid(None);
    getppid() != Pid::from_raw(1) && session != Ok(getpid()) && getsid(Some(getppid())) == session
}
