//! The hidden role `__exec`: makes itself the command of `run`, after it has arranged to be told when `lockreg` dies.
//!
//! `lockreg` cannot do this for its child without `unsafe` code between fork and exec; a program of its own can.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpgrp, getppid, tcsetpgrp};

use super::child::own_program;
use super::command::Program;
use crate::exit::{USAGE, by_signal};
use crate::signals;

pub(crate) const ROLE: &str = "__exec";

const FOREGROUND: &str = "foreground";
const BACKGROUND: &str = "background";

/// What starts `program` by way of this role.
pub(super) fn shim(program: &Program, foreground: bool) -> Command {
    let mut command = own_program(ROLE);
    command
        .arg(std::process::id().to_string())
        .arg(if foreground { FOREGROUND } else { BACKGROUND })
        .arg(&program.path)
        .args(&program.argv);
    command
}

/// Plays the role. Returns the exit status if the command could not be executed.
pub(crate) fn main(mut arguments: impl Iterator<Item = OsString>) -> u8 {
    let parent = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let terminal = arguments.next();
    let (Some(parent), Some(terminal), Some(path), Some(name)) =
        (parent, terminal, arguments.next(), arguments.next())
    else {
        return USAGE;
    };
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGTERM) {
        tell(&format!("cannot tie the command to lockreg: {error}"));
    }
    if getppid() != parent {
        // It died before we were tied to it.
        return by_signal(Signal::SIGTERM as i32);
    }
    if terminal.as_bytes() == FOREGROUND.as_bytes() {
        take_terminal();
    }
    if let Err(error) = signals::unblock() {
        tell(&format!("cannot unblock signals: {error}"));
    }
    let error = Command::new(path).arg0(&name).args(arguments).exec();
    tell(&format!("cannot execute {name:?}: {error}"));
    match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    }
}

fn take_terminal() {
    // The terminal would stop us for this, had we not inherited its signal as blocked.
    if let Ok(tty) = std::fs::File::open("/dev/tty") {
        let _ = tcsetpgrp(tty, getpgrp());
    }
}

fn tell(message: &str) {
    // There is no later: the command takes our place.
    crate::say::line_to_stderr_at_once(&format!("lockreg: error: {message}"));
}
