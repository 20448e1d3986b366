//! The watchdog: a second process that ends the command of `run` or `elect` in two cases: `lockreg`
//! was killed, or a stop signal (SIGSTOP, SIGTSTP) has suspended `lockreg` when the lease ends.
//!
//! `lockreg` writes lines to the stdin of the watchdog: `group GROUP GRACE`, `until DEADLINE`,
//! `disarm`, `done`. An end of the stream without `done` means that `lockreg` has ended.
//!
//! A watchdog that resumes after a stop signal reads all lines in the pipe before it acts, so the
//! newest line decides. `lockreg` must therefore be able to write its newest line even if the pipe
//! is full.

use std::fmt;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, read};

use super::child::{has_processes, self_command};

pub(crate) const HIDDEN_SUBCOMMAND: &str = "__watchdog";

/// The handle of the watchdog process in `lockreg`.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
    sender: MessageSender,
}

impl Watchdog {
    /// Starts a watchdog, which does not know the process group of the command yet.
    pub(crate) fn start() -> io::Result<Self> {
        let (stdin, sender) = MessageSender::open()?;
        let process = self_command(HIDDEN_SUBCOMMAND)
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::null())
            // The watchdog has its own group. Signals of the terminal, or to the group of
            // `lockreg`, thus do not end the watchdog before `lockreg`.
            .process_group(0)
            // The environment may contain a password.
            .env_clear()
            .spawn()?;
        Ok(Self { process, sender })
    }

    /// Sets the process group of the command, and the time between SIGTERM and SIGKILL for this
    /// group.
    pub(crate) fn watch_group(&mut self, group: Pid, grace: Duration) {
        self.sender.set_group(group, grace);
    }

    /// Informs the watchdog that the command may run for `valid_for` from now.
    pub(crate) fn set_deadline(&mut self, valid_for: Duration) {
        self.sender.set_deadline(now().saturating_add(valid_for));
    }

    /// Makes the watchdog ignore the deadline, because `lockreg` has begun to terminate the
    /// command. If `lockreg` ends, the watchdog still terminates the command.
    pub(crate) fn disarm(&mut self) {
        self.sender.send("disarm\n");
    }

    /// Ends the watchdog. Kills a watchdog that does not end within [`SHUTDOWN_LIMIT`], for example
    /// because it is stopped.
    pub(crate) fn shut_down(mut self) {
        self.sender.send("done\n");
        let Self { mut process, sender } = self;
        drop(sender);
        let until = now().saturating_add(SHUTDOWN_LIMIT);
        while matches!(process.try_wait(), Ok(None)) {
            if now() >= until {
                let _ = process.kill();
                let _ = process.wait();
                return;
            }
            std::thread::sleep(SHUTDOWN_LIMIT / 50);
        }
    }
}

/// Sends messages to the watchdog. Sending never blocks, and the last message is never dropped.
#[derive(Debug)]
struct MessageSender {
    pipe: PipeWriter,
    /// The read end, which is used to remove old messages from a full pipe.
    read_end: PipeReader,
    /// The current `group` message.
    group_message: String,
}

impl MessageSender {
    /// Returns the read end for the watchdog, and the sender.
    fn open() -> io::Result<(PipeReader, Self)> {
        let (read_end, pipe) = io::pipe()?;
        // A stopped watchdog must not block `lockreg`. Nor must `discard_oldest` block: the
        // watchdog may have emptied the pipe since the write failed.
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        fcntl(&read_end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok((read_end.try_clone()?, Self { pipe, read_end, group_message: String::new() }))
    }

    fn set_group(&mut self, group: Pid, grace: Duration) {
        self.group_message = format!("group {group} {}\n", grace.as_millis());
        self.send("");
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.send(format_args!("until {}\n", deadline.as_nanos()));
    }

    /// Sends `message`, which is a line or empty. Each call repeats the `group` message, because
    /// `discard_oldest` may have removed the earlier `group` messages.
    fn send(&mut self, message: impl fmt::Display) {
        // The message is so short that the kernel writes it completely or not at all.
        let message = format!("{}{message}", self.group_message);
        if self.pipe.write_all(message.as_bytes()).is_err() {
            self.discard_oldest();
            // The first write can fail only because the pipe is full: this process has both ends.
            let _ = self.pipe.write_all(message.as_bytes());
        }
    }

    /// Removes the oldest messages, which a stopped watchdog has not read. Does not empty the pipe:
    /// a watchdog that resumes before the next write would find nothing, and act on an outdated
    /// deadline.
    fn discard_oldest(&mut self) {
        let _ = self.read_end.read(&mut [0; DISCARDED_BYTES]);
    }
}

/// Runs this subcommand.
pub(crate) fn main() -> u8 {
    // The watchdog blocks all signals, so that no signal ends it before `lockreg`. Exception:
    // SIGKILL, for example to a whole service.
    let _ = SigSet::all().thread_block();
    watch(MessageReader::new(io::stdin()));
    crate::output::flush_stderr();
    0
}

/// The messages of `lockreg`, line by line.
struct MessageReader<F> {
    pipe: F,
    /// Bytes that were read but not parsed yet.
    unparsed: Vec<u8>,
}

/// The result of waiting for a message.
#[derive(Debug, PartialEq, Eq)]
enum Received {
    Message(String),
    Timeout,
    /// `lockreg` has ended.
    Closed,
}

impl<F: AsFd> MessageReader<F> {
    fn new(pipe: F) -> Self {
        Self { pipe, unparsed: Vec::new() }
    }

    /// Waits for the next message, at most until `until`. Always returns a message that was written
    /// before `until`, even if this process runs late.
    fn next(&mut self, until: Option<Duration>) -> Received {
        let mut until = until;
        let mut read_at = (now(), Instant::now());
        loop {
            if let Some(end) = self.unparsed.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unparsed.drain(..=end).collect();
                return Received::Message(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            // An `Instant` does not count the time for which the host was suspended.
            let suspended = now().saturating_sub(read_at.0).saturating_sub(read_at.1.elapsed());
            if suspended > REACTION_LIMIT {
                // `lockreg` has been suspended too, and may be about to renew the lease, or to
                // detect its loss.
                until = until.map(|until| until.max(now().saturating_add(RESUME_LIMIT)));
                read_at = (now(), Instant::now());
            }
            let left = until.map(|until| until.saturating_sub(now()));
            // `poll` does not count that time either, so the clock is read again after
            // `CLOCK_READ_INTERVAL`. The timeout is rounded up. A timeout of zero would make this
            // loop spin in the last millisecond.
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left.min(CLOCK_READ_INTERVAL).as_millis().saturating_add(1))
                    .unwrap_or(PollTimeout::MAX)
            });
            let mut polled = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            match poll(&mut polled, timeout) {
                Ok(0) if left == Some(Duration::ZERO) => return Received::Timeout,
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(_) => return Received::Closed,
            }
            let mut bytes = [0; 4_096];
            match read(&self.pipe, &mut bytes) {
                Ok(count @ 1..) => self.unparsed.extend_from_slice(&bytes[..count]),
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Ok(0) | Err(_) => return Received::Closed,
            }
        }
    }
}

#[derive(Debug, Default)]
struct WatchdogState {
    group: Option<Pid>,
    grace: Duration,
    /// The time of the last `until` message. For `run`, it is the end of the lease. For `elect`, it
    /// is about a third of the lease earlier, or `KILL_MARGIN` earlier once the termination has
    /// begun. The watchdog ends the group [`REACTION_LIMIT`] later. `None` if it is not known yet,
    /// or if `lockreg` already ends the group.
    until: Option<Duration>,
}

fn watch(mut messages: MessageReader<impl AsFd>) {
    let mut state = WatchdogState::default();
    loop {
        match messages.next(state.until.map(|until| until.saturating_add(REACTION_LIMIT))) {
            Received::Message(message) if message == "done" => return,
            Received::Message(message) => state.apply(&message),
            Received::Closed => {
                let Some(group) = state.group else { return };
                let lease = state.until.map_or(Duration::MAX, |until| until.saturating_sub(now()));
                let reason = "lockreg was killed; sent SIGTERM to its command";
                return terminate_group(group, state.grace.min(lease), reason);
            }
            Received::Timeout => {
                state.until = None;
                let Some(group) = state.group else { continue };
                let reason = "the lease was not renewed in time and lockreg does not respond; sent SIGTERM to its command";
                // After that, the group has ended, and another process may get its id.
                return terminate_group(group, state.grace, reason);
            }
        }
    }
}

impl WatchdogState {
    fn apply(&mut self, message: &str) {
        let mut words = message.split(' ');
        let verb = words.next();
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        match verb {
            Some("group") => {
                self.group =
                    number().and_then(|group| i32::try_from(group).ok()).map(Pid::from_raw);
                self.grace = Duration::from_millis(number().unwrap_or(0));
            }
            Some("until") => {
                if let Some(until) = number() {
                    self.until = Some(Duration::from_nanos(until));
                }
            }
            Some("disarm") => self.until = None,
            _ => {}
        }
    }
}

/// Sends SIGTERM to the group, reports `reason`, and sends SIGKILL after `limit`.
fn terminate_group(group: Pid, limit: Duration, reason: &str) {
    let _ = killpg(group, Signal::SIGTERM);
    let _ = killpg(group, Signal::SIGCONT);
    report(reason);
    let until = now().saturating_add(limit);
    while has_processes(group) && now() < until {
        std::thread::sleep(GROUP_POLL_INTERVAL.min(until.saturating_sub(now())));
    }
    if has_processes(group) {
        let _ = killpg(group, Signal::SIGKILL);
    }
}

fn report(message: &str) {
    crate::output::line_to_stderr(&format!("lockreg: {message}"));
}

/// Returns the time of a clock that all processes of this host share. On Linux and Android, it
/// includes the time for which the host was suspended.
fn now() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;
    clock_gettime(CLOCK).map_or(Duration::ZERO, Duration::from)
}

/// The time that `lockreg` has to react to the end of the lease before the watchdog reacts.
const REACTION_LIMIT: Duration = Duration::from_millis(100);
/// The interval at which a watchdog with a deadline reads the clock.
const CLOCK_READ_INTERVAL: Duration = Duration::from_secs(1);
/// The time that `lockreg` has to react after the host was suspended. It reads the clock once per
/// second, and may then have to wait for the store.
const RESUME_LIMIT: Duration = Duration::from_secs(3);
/// The number of bytes that are removed from a full pipe at once. They contain many messages, and
/// thus make space for one message.
const DISCARDED_BYTES: usize = 4_096;
/// The time that the watchdog has to end after `done`.
const SHUTDOWN_LIMIT: Duration = Duration::from_millis(100);
/// The interval at which the group is checked for remaining processes. The kernel sends no
/// notification of the end of another process's child.
const GROUP_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn messages_are_parsed_and_invalid_messages_are_ignored() {
        let mut state = WatchdogState::default();
        for message in ["group 4242 1500", "until 77", "nonsense", "until", "until soon"] {
            state.apply(message);
        }
        assert_eq!(
            (state.group, state.grace),
            (Some(Pid::from_raw(4242)), Duration::from_millis(1_500))
        );
        assert_eq!(state.until, Some(Duration::from_nanos(77)));
        state.apply("disarm");
        assert_eq!(state.until, None);
    }

    #[test]
    fn a_watchdog_ends_after_done() {
        let (pipe, mut writer) = io::pipe().unwrap();
        writer.write_all(b"group 1 0\nuntil 99999999999999999\ndone\n").unwrap();
        watch(MessageReader::new(pipe));
    }

    /// Starts a shell in its own group, and waits until the shell has printed `up`.
    fn start_group(script: &str) -> (Child, Pid) {
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        shell.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        assert_eq!(&up, b"up\n");
        let group = Pid::from_raw(shell.id().cast_signed());
        (shell, group)
    }

    const IGNORES_SIGTERM: &str = "trap '' TERM; echo up; while :; do sleep 1; done";
    const EXITS_ON_SIGTERM: &str = "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done";

    fn deadline_nanos_after_ms(ms: u64) -> u128 {
        now().saturating_add(Duration::from_millis(ms)).as_nanos()
    }

    #[test]
    fn without_lockreg_the_group_is_killed_at_the_end_of_the_lease_if_the_grace_time_is_longer() {
        let (mut shell, group) = start_group(IGNORES_SIGTERM);
        let (pipe, mut writer) = io::pipe().unwrap();
        writeln!(writer, "group {group} 3600000\nuntil {}", deadline_nanos_after_ms(200)).unwrap();
        drop(writer);
        let watching = thread::spawn(move || watch(MessageReader::new(pipe)));
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        watching.join().unwrap();
    }

    #[test]
    fn without_lockreg_the_group_is_killed_after_the_grace_time_if_the_lease_is_longer() {
        let (mut shell, group) = start_group(IGNORES_SIGTERM);
        let (pipe, mut writer) = io::pipe().unwrap();
        writeln!(writer, "group {group} 200\nuntil {}", deadline_nanos_after_ms(3_600_000))
            .unwrap();
        drop(writer);
        let watching = thread::spawn(move || watch(MessageReader::new(pipe)));
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        watching.join().unwrap();
    }

    #[test]
    fn a_group_gets_sigterm_before_sigkill() {
        let (mut shell, group) = start_group(EXITS_ON_SIGTERM);
        let (pipe, mut writer) = io::pipe().unwrap();
        writeln!(writer, "group {group} 3600000\nuntil {}", deadline_nanos_after_ms(3_600_000))
            .unwrap();
        drop(writer);
        let watching = thread::spawn(move || watch(MessageReader::new(pipe)));
        assert_eq!(shell.wait().unwrap().code(), Some(7));
        watching.join().unwrap();
    }

    #[test]
    fn an_expired_lease_terminates_the_group_and_ends_the_watchdog() {
        let (mut shell, group) = start_group(EXITS_ON_SIGTERM);
        let (pipe, mut writer) = io::pipe().unwrap();
        writeln!(writer, "group {group} 3600000\nuntil {}", deadline_nanos_after_ms(0)).unwrap();
        let watching = thread::spawn(move || watch(MessageReader::new(pipe)));
        assert_eq!(shell.wait().unwrap().code(), Some(7));
        watching.join().unwrap();
        drop(writer);
    }

    #[test]
    fn a_disarmed_watchdog_ignores_the_end_of_the_lease() {
        let (mut shell, group) =
            start_group("trap 'exit 7' TERM; echo up; while :; do sleep 0.1; echo on; done");
        let (pipe, mut writer) = io::pipe().unwrap();
        let watching = thread::spawn(move || watch(MessageReader::new(pipe)));
        writeln!(writer, "group {group} 3600000\nuntil {}\ndisarm", deadline_nanos_after_ms(300))
            .unwrap();
        // The command runs for longer than the lease.
        let mut on = [0; 30];
        shell.stdout.as_mut().unwrap().read_exact(&mut on).unwrap();
        writeln!(writer, "done").unwrap();
        watching.join().unwrap();
        shell.kill().unwrap();
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    }

    #[test]
    fn a_resumed_watchdog_reads_the_newest_messages() {
        // The sender writes more messages than a pipe can contain. The watchdog was stopped before
        // its first read, or after it had read some bytes.
        for had_read in [0, 1, 30, 5_000] {
            let (pipe, mut sender) = MessageSender::open().unwrap();
            let mut reader = MessageReader::new(pipe);
            sender.set_group(Pid::from_raw(4242), Duration::from_secs(10));
            for second in 1..=50_000 {
                sender.set_deadline(Duration::from_secs(second));
                if second == 1_000 {
                    let mut bytes = vec![0; had_read];
                    let count = read(&reader.pipe, &mut bytes).unwrap();
                    assert_eq!(count, had_read);
                    reader.unparsed.extend(bytes);
                }
            }
            let mut state = WatchdogState::default();
            while let Received::Message(message) = reader.next(Some(Duration::ZERO)) {
                state.apply(&message);
            }
            assert_eq!(
                (state.group, state.grace, state.until),
                (
                    Some(Pid::from_raw(4242)),
                    Duration::from_secs(10),
                    Some(Duration::from_secs(50_000))
                )
            );
            sender.send("done\n");
            watch(reader);
        }
    }

    #[test]
    fn messages_that_were_sent_in_time_are_read_after_the_deadline() {
        let (pipe, mut writer) = io::pipe().unwrap();
        let mut reader = MessageReader::new(pipe);
        writer.write_all(b"until 1\nuntil").unwrap();
        let past = Some(Duration::ZERO);
        assert_eq!(reader.next(past), Received::Message("until 1".to_owned()));
        assert_eq!(reader.next(past), Received::Timeout);
        writer.write_all(b" 2\n").unwrap();
        drop(writer);
        assert_eq!(reader.next(past), Received::Message("until 2".to_owned()));
        assert_eq!(reader.next(None), Received::Closed);
    }
}
