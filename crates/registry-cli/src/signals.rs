//! Receives signals through a channel. Every thread blocks the signals, and one thread waits for
//! them by `sigwait`. Ignored signals stay ignored, in `lockreg` and in its command.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// The signals that `run` and `elect` pass on to their command. Without a command, most of them end
/// `lockreg`.
const CAUGHT: [Signal; 8] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGTSTP,
    Signal::SIGWINCH,
];

/// The kernel sends this signal to a background process that changes the foreground group of the
/// terminal or, with `TOSTOP`, writes to it. `lockreg` does both and must not be stopped.
const BLOCKED_ONLY: Signal = Signal::SIGTTOU;

/// Receives the signals of this process.
#[derive(Debug)]
pub(crate) struct Signals {
    receiver: mpsc::UnboundedReceiver<Signal>,
}

impl Signals {
    /// Starts to receive signals. Call this function before this process starts a thread that does
    /// not block all signals, because the kernel could deliver a signal to such a thread.
    pub(crate) fn catch() -> io::Result<Self> {
        let ignored = ignored_signals();
        let mut caught = SigSet::empty();
        // The parent process may have set signals to be ignored (`nohup`, background jobs of a
        // shell). `lockreg` and the command then ignore these signals too.
        CAUGHT
            .into_iter()
            .filter(|signal| !contains(*signal, ignored))
            .for_each(|signal| caught.add(signal));
        let mut blocked = caught;
        blocked.add(BLOCKED_ONLY);
        blocked.thread_block()?;
        let (sender, receiver) = mpsc::unbounded_channel();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while let Ok(signal) = caught.wait() {
                if sender.send(signal).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { receiver })
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> Signal {
        match self.receiver.recv().await {
            Some(signal) => signal,
            // The thread has ended, because `sigwait` failed.
            None => std::future::pending().await,
        }
    }

    /// Waits for a signal other than SIGTSTP and SIGWINCH. SIGTSTP stops this process if its parent
    /// can continue it, and SIGWINCH is ignored.
    pub(crate) async fn next_termination(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => crate::run::terminal::stop_self(),
                Signal::SIGWINCH => {}
                signal => return signal,
            }
        }
    }
}

/// Stops ignoring SIGCHLD, if this process inherited that. While SIGCHLD is ignored, the kernel
/// discards the exit statuses of child processes. Call this in the runtime, before the first child.
///
/// `tokio` installs a handler and never removes it. A child process starts with the default
/// disposition, because the kernel resets handlers at an exec.
pub(crate) fn keep_exit_statuses() -> io::Result<()> {
    signal(SignalKind::child()).map(drop)
}

/// Unblocks the signals of [`Signals::catch`] in this thread. The thread has inherited the mask
/// that blocks them, and the command must not inherit this mask.
pub(crate) fn unblock() -> io::Result<()> {
    let mut blocked = SigSet::empty();
    CAUGHT.into_iter().chain([BLOCKED_ONLY]).for_each(|signal| blocked.add(signal));
    Ok(blocked.thread_unblock()?)
}

/// Returns whether `signal` requests the end of the command, which then has the grace time to end.
pub(crate) fn is_termination_signal(signal: Signal) -> bool {
    matches!(signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT)
}

fn contains(signal: Signal, set: u64) -> bool {
    set & (1 << (signal as u32 - 1)) != 0
}

/// Returns the signals that this process inherited as ignored, one bit per signal. Returns 0
/// without `/proc`.
///
/// The function reads `/proc`, because the system call for dispositions would need `unsafe`.
fn ignored_signals() -> u64 {
    std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_in(&status))
}

fn ignored_in(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_parsed_from_proc_status() {
        let set = ignored_in("Name:\tlockreg\nSigIgn:\t0000000000001001\nSigCgt:\t0\n");
        assert!(
            contains(Signal::SIGHUP, set)
                && contains(Signal::SIGPIPE, set)
                && !contains(Signal::SIGTERM, set)
        );
        assert_eq!(ignored_in("no such line"), 0);
    }
}
