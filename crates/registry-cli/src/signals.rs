//! Signals as messages. They stay blocked in every thread and one thread waits for them, so that no handler is
//! installed and no default is lost.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use tokio::sync::mpsc;

/// What is passed on to the command of `run`, or ends `lockreg` where there is none.
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

/// A terminal sends it to whoever writes to it, or hands it over, from the background. We do both.
const HARMLESS: Signal = Signal::SIGTTOU;

/// The signals that came and were not looked at yet.
#[derive(Debug)]
pub(crate) struct Signals {
    came: mpsc::UnboundedReceiver<Signal>,
}

impl Signals {
    /// Begins to catch signals. Must be called before this process has a second thread, or that thread would still die
    /// of them.
    pub(crate) fn catch() -> io::Result<Self> {
        let ignored = ignored_signals();
        let mut caught = SigSet::empty();
        // What our parent made us ignore (`nohup`, a shell's background job) stays ignored, for us and for the command.
        CAUGHT
            .into_iter()
            .filter(|signal| !is_in(*signal, ignored))
            .for_each(|signal| caught.add(signal));
        let mut blocked = caught;
        blocked.add(HARMLESS);
        blocked.thread_block()?;
        let (tell, came) = mpsc::unbounded_channel();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while let Ok(signal) = caught.wait() {
                if tell.send(signal).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { came })
    }

    /// The next signal.
    pub(crate) async fn next(&mut self) -> Signal {
        match self.came.recv().await {
            Some(signal) => signal,
            // The thread ends only with us.
            None => std::future::pending().await,
        }
    }

    /// Waits for a signal that asks this process to end; stops this process when it is asked to stop.
    pub(crate) async fn end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => crate::run::terminal::stop_self(),
                Signal::SIGWINCH => {}
                signal => return signal,
            }
        }
    }
}

/// Takes back for this thread what [`Signals::catch`] has blocked: it was inherited, and must not be by the command.
pub(crate) fn unblock() -> io::Result<()> {
    let mut blocked = SigSet::empty();
    CAUGHT.into_iter().chain([HARMLESS]).for_each(|signal| blocked.add(signal));
    Ok(blocked.thread_unblock()?)
}

/// Whether `signal` asks a process to end, for which it gets the grace time.
pub(crate) fn asks_to_end(signal: Signal) -> bool {
    matches!(signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT)
}

fn is_in(signal: Signal, set: u64) -> bool {
    set & (1 << (signal as u32 - 1)) != 0
}

/// The signals that this process was started to ignore, one bit each. Asked of the kernel: reading a disposition by a system
/// call needs `unsafe`. Where the kernel does not tell, none.
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
    fn ignored_signals_are_read_from_the_kernels_mask() {
        let set = ignored_in("Name:\tlockreg\nSigIgn:\t0000000000001001\nSigCgt:\t0\n");
        assert!(
            is_in(Signal::SIGHUP, set)
                && is_in(Signal::SIGPIPE, set)
                && !is_in(Signal::SIGTERM, set)
        );
        assert_eq!(ignored_in("no such line"), 0);
    }
}
