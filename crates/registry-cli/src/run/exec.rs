//! The hidden subcommand `__exec`: executes the command of `run` or `elect` in its own process.
//! Before the exec, it waits until the command may start. On Linux, it also sets a death signal:
//! the kernel sends SIGTERM to the command when `lockreg` dies.
//!
//! Without this subcommand, `lockreg` would need `unsafe` code between fork and exec.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, close, getpgrp, getppid, tcsetpgrp};

use super::child::self_command;
use super::command::Program;
use crate::exit::{OS, USAGE, status_of_signal};
use crate::signals;

pub(crate) const HIDDEN_SUBCOMMAND: &str = "__exec";

/// The message on the gate pipe that starts the command. If the stream ends without this message,
/// the command does not start.
pub(super) const START: &[u8] = b"!";

const FOREGROUND: &str = "foreground";
const BACKGROUND: &str = "background";

/// Returns the command that starts `program` through this subcommand.
///
/// The subcommand waits until it reads [`START`] from `gate`. The new process must inherit `gate`.
pub(super) fn exec_command(program: &Program, foreground: bool, gate: &PipeReader) -> Command {
    let mut command = self_command(HIDDEN_SUBCOMMAND);
    command
        .arg(std::process::id().to_string())
        .arg(gate.as_raw_fd().to_string())
        .arg(if foreground { FOREGROUND } else { BACKGROUND })
        .arg(&program.path)
        .args(&program.argv);
    command
}

/// Runs this subcommand. Returns the exit status if the command could not be executed.
pub(crate) fn main(mut arguments: impl Iterator<Item = OsString>) -> u8 {
    let parent = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let gate = arguments.next().and_then(|gate| gate.to_str()?.parse().ok());
    let job_kind = arguments.next();
    let (Some(parent), Some(gate), Some(job_kind), Some(path), Some(name)) =
        (parent, gate, job_kind, arguments.next(), arguments.next())
    else {
        return USAGE;
    };
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGTERM) {
        print_error(&format!("cannot request a death signal for the command: {error}"));
    }
    if getppid() != parent {
        // The parent died before the death signal was requested.
        return status_of_signal(Signal::SIGTERM as i32);
    }
    match wait_for_start(gate) {
        Ok(true) => {}
        // `lockreg` has ended, or the lock was lost.
        Ok(false) => return status_of_signal(Signal::SIGTERM as i32),
        // Without the message, it is unknown whether the lock is held.
        Err(error) => {
            print_error(&format!("cannot wait for lockreg: {error}"));
            return OS;
        }
    }
    if job_kind.as_bytes() == FOREGROUND.as_bytes() {
        set_foreground_group();
    }
    if let Err(error) = signals::unblock() {
        print_error(&format!("cannot unblock signals: {error}"));
    }
    let error = Command::new(path).arg0(&name).args(arguments).exec();
    print_error(&format!("cannot execute {name:?}: {error}"));
    match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    }
}

/// Waits until `lockreg` has sent the group of this process to the watchdog, and has then verified
/// the lock. Returns false if `lockreg` has ended, or the lock was lost.
fn wait_for_start(gate: RawFd) -> io::Result<bool> {
    // The gate is opened by its path, because a use of the descriptor number needs `unsafe`.
    let opened = File::open(format!("/dev/fd/{gate}"));
    // The command must not inherit the gate.
    let _ = close(gate);
    let mut message = [0; START.len()];
    match opened?.read_exact(&mut message) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn set_foreground_group() {
    // `tcsetpgrp` in a background process causes SIGTTOU, which would stop the process. The
    // inherited signal mask blocks SIGTTOU.
    if let Ok(tty) = File::open("/dev/tty") {
        let _ = tcsetpgrp(tty, getpgrp());
    }
}

fn print_error(message: &str) {
    // The line is written at once, because the command replaces this process.
    crate::output::line_to_stderr_at_once(&format!("lockreg: error: {message}"));
}
