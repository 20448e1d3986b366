//! A second process that ends the command of `run` if `lockreg` cannot: if `lockreg` was killed, or
//! is stopped while the lease ends. It does nothing else.
//!
//! `lockreg` writes lines to its stdin: `guard GROUP GRACE`, `until MOMENT`, `mine`, `done`. An end
//! of the stream without `done` means that `lockreg` has ended. A watchdog that was stopped reads
//! all missed lines before it acts. The last line must therefore always fit into the pipe.

use std::fmt;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, read, setsid};

use super::child::{is_anybody_left, own_program};

pub(crate) const ROLE: &str = "__watchdog";

/// The watchdog process, seen from `lockreg`.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
    orders: Dispatch,
}

impl Watchdog {
    /// Starts a watchdog without a group to guard.
    pub(crate) fn start() -> io::Result<Self> {
        let (stdin, orders) = Dispatch::open()?;
        let process = own_program(ROLE)
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::null())
            // In its own group, so that signals of the terminal or to our group do not end it
            // before us.
            .process_group(0)
            // The environment may contain a password.
            .env_clear()
            .spawn()?;
        Ok(Self { process, orders })
    }

    /// Makes the watchdog guard the process group `group`, which gets `grace` to end.
    pub(crate) fn guard(&mut self, group: Pid, grace: Duration) {
        self.orders.guard(group, grace);
    }

    /// Informs the watchdog that the lock is held for `valid_for` from now.
    pub(crate) fn held_for(&mut self, valid_for: Duration) {
        self.orders.until(now().saturating_add(valid_for));
    }

    /// Informs the watchdog that `lockreg` itself ends the command.
    pub(crate) fn mine(&mut self) {
        self.orders.send("mine\n");
    }

    /// Ends the watchdog. Kills it if it does not end within [`DISMISSAL`], for example because it
    /// is stopped.
    pub(crate) fn dismiss(mut self) {
        self.orders.send("done\n");
        let Self { mut process, orders } = self;
        drop(orders);
        let until = now().saturating_add(DISMISSAL);
        while matches!(process.try_wait(), Ok(None)) {
            if now() >= until {
                let _ = process.kill();
                let _ = process.wait();
                return;
            }
            std::thread::sleep(DISMISSAL / 50);
        }
    }
}

/// Sends orders to the watchdog. Sending never blocks, and the last order is never dropped.
#[derive(Debug)]
struct Dispatch {
    pipe: PipeWriter,
    /// The read end, to remove old orders from a full pipe.
    unread: PipeReader,
    /// The current `guard` order.
    guard: String,
}

impl Dispatch {
    /// Returns the read end for the watchdog, and the sender.
    fn open() -> io::Result<(PipeReader, Self)> {
        let (unread, pipe) = io::pipe()?;
        // A stopped watchdog must not block `lockreg`. The read end must not block either, because
        // the watchdog may empty the pipe first.
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        fcntl(&unread, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok((unread.try_clone()?, Self { pipe, unread, guard: String::new() }))
    }

    fn guard(&mut self, group: Pid, grace: Duration) {
        self.guard = format!("guard {group} {}\n", grace.as_millis());
        self.send("");
    }

    fn until(&mut self, moment: Duration) {
        self.send(format_args!("until {}\n", moment.as_nanos()));
    }

    /// Sends `order`, which is a line or empty. Repeats the `guard` order each time, because an
    /// earlier one may have been removed.
    fn send(&mut self, order: impl fmt::Display) {
        // Short enough to be written completely or not at all.
        let order = format!("{}{order}", self.guard);
        if self.pipe.write_all(order.as_bytes()).is_err() {
            self.make_room();
            // Cannot fail for another reason, because this process has both ends of the pipe.
            let _ = self.pipe.write_all(order.as_bytes());
        }
    }

    /// Removes the oldest orders, which a stopped watchdog has not read. Keeps newer ones, because
    /// a watchdog that continues at this point must find a newer order than its last.
    fn make_room(&mut self) {
        let _ = self.unread.read(&mut [0; PAGE]);
    }
}

/// Runs this role.
pub(crate) fn main() -> u8 {
    // In its own session and with all signals blocked, so that it ends only after `lockreg`.
    // Signals of the terminal, to a group or to a service do not end it.
    let _ = setsid();
    let _ = SigSet::all().thread_block();
    watch(Orders::new(io::stdin()));
    crate::say::flush_stderr();
    0
}

/// The orders of `lockreg`, line by line.
struct Orders<F> {
    pipe: F,
    /// Bytes that were read but not parsed yet.
    read: Vec<u8>,
}

/// The result of waiting for an order.
#[derive(Debug, PartialEq, Eq)]
enum News {
    Order(String),
    None,
    /// `lockreg` has ended.
    End,
}

impl<F: AsFd> Orders<F> {
    fn new(pipe: F) -> Self {
        Self { pipe, read: Vec::new() }
    }

    /// Waits for the next order until this time. Orders that were written in time are always
    /// returned, even if this process runs late.
    fn next(&mut self, until: Option<Duration>) -> News {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return News::Order(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let left = until.map(|until| until.saturating_sub(now()));
            // Rounded up, because a timeout of zero would make this loop spin in the last
            // millisecond.
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left.as_millis().saturating_add(1))
                    .unwrap_or(PollTimeout::MAX)
            });
            let mut polled = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            match poll(&mut polled, timeout) {
                Ok(0) if left == Some(Duration::ZERO) => return News::None,
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(_) => return News::End,
            }
            let mut bytes = [0; 4_096];
            match read(&self.pipe, &mut bytes) {
                Ok(count @ 1..) => self.read.extend_from_slice(&bytes[..count]),
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Ok(0) | Err(_) => return News::End,
            }
        }
    }
}

#[derive(Debug, Default)]
struct Charge {
    group: Option<Pid>,
    grace: Duration,
    /// The end of the lease, or `None` if `lockreg` or this watchdog already ends the group.
    until: Option<Duration>,
}

fn watch(mut orders: Orders<impl AsFd>) {
    let mut charge = Charge::default();
    loop {
        match orders.next(charge.until.map(|until| until.saturating_add(MARGIN))) {
            News::Order(order) if order == "done" => return,
            News::Order(order) => charge.obey(&order),
            News::End => {
                let Some(group) = charge.group else { return };
                let lease = charge.until.map_or(Duration::MAX, |until| until.saturating_sub(now()));
                let why = "lockreg was killed; its command gets SIGTERM";
                return end(group, charge.grace.min(lease), why);
            }
            News::None => {
                charge.until = None;
                let Some(group) = charge.group else { continue };
                let why =
                    "the lock's lease is over and lockreg does not react; its command gets SIGTERM";
                end(group, charge.grace, why);
            }
        }
    }
}

impl Charge {
    fn obey(&mut self, order: &str) {
        let mut words = order.split(' ');
        let verb = words.next();
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        match verb {
            Some("guard") => {
                self.group =
                    number().and_then(|group| i32::try_from(group).ok()).map(Pid::from_raw);
                self.grace = Duration::from_millis(number().unwrap_or(0));
            }
            Some("until") => self.until = number().map(Duration::from_nanos),
            Some("mine") => self.until = None,
            _ => {}
        }
    }
}

/// Sends SIGTERM to the group, reports why, and sends SIGKILL after `limit`.
fn end(group: Pid, limit: Duration, why: &str) {
    let _ = killpg(group, Signal::SIGTERM);
    let _ = killpg(group, Signal::SIGCONT);
    tell(why);
    let until = now().saturating_add(limit);
    while is_anybody_left(group) && now() < until {
        std::thread::sleep(LOOK.min(until.saturating_sub(now())));
    }
    if is_anybody_left(group) {
        let _ = killpg(group, Signal::SIGKILL);
    }
}

fn tell(message: &str) {
    crate::say::line_to_stderr(&format!("lockreg: {message}"));
}

/// Returns the time of a clock that all processes of this host share. It includes suspended time
/// where such a clock exists.
fn now() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;
    clock_gettime(CLOCK).map_or(Duration::ZERO, Duration::from)
}

/// How long `lockreg` has to react to the end of the lease before the watchdog does.
const MARGIN: Duration = Duration::from_millis(100);
/// How much is removed from a full pipe at once. It holds many orders, and its removal makes room
/// for one.
const PAGE: usize = 4_096;
/// How long the watchdog has to end after `done`.
const DISMISSAL: Duration = Duration::from_millis(100);
/// How often the group is checked for remaining processes. There is no notification of the end of
/// another process's child.
const LOOK: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn orders_are_understood_and_nonsense_is_not() {
        let mut charge = Charge::default();
        for order in ["guard 4242 1500", "until 77", "nonsense", "until"] {
            charge.obey(order);
        }
        assert_eq!(
            (charge.group, charge.grace),
            (Some(Pid::from_raw(4242)), Duration::from_millis(1_500))
        );
        assert_eq!(charge.until, None);
        charge.obey("until 77");
        assert_eq!(charge.until, Some(Duration::from_nanos(77)));
        charge.obey("mine");
        assert_eq!(charge.until, None);
    }

    #[test]
    fn a_watchdog_that_is_dismissed_ends() {
        let (pipe, mut writer) = io::pipe().unwrap();
        writer.write_all(b"guard 1 0\nuntil 99999999999999999\ndone\n").unwrap();
        watch(Orders::new(pipe));
    }

    /// Starts a shell in a group of its own, and waits until it has printed `up`.
    fn group(script: &str) -> (Child, Pid) {
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

    const STUBBORN: &str = "trap '' TERM; echo up; while :; do sleep 1; done";
    const POLITE: &str = "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done";

    fn in_ms(ms: u64) -> u128 {
        now().saturating_add(Duration::from_millis(ms)).as_nanos()
    }

    #[test]
    fn a_group_whose_lockreg_is_gone_is_killed_with_the_lease_however_long_its_grace() {
        let (mut shell, group) = group(STUBBORN);
        let (pipe, mut orders) = io::pipe().unwrap();
        writeln!(orders, "guard {group} 3600000\nuntil {}", in_ms(200)).unwrap();
        drop(orders);
        let watching = thread::spawn(move || watch(Orders::new(pipe)));
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        watching.join().unwrap();
    }

    #[test]
    fn a_group_whose_lockreg_is_gone_is_killed_after_the_grace_however_long_its_lease() {
        let (mut shell, group) = group(STUBBORN);
        let (pipe, mut orders) = io::pipe().unwrap();
        writeln!(orders, "guard {group} 200\nuntil {}", in_ms(3_600_000)).unwrap();
        drop(orders);
        let watching = thread::spawn(move || watch(Orders::new(pipe)));
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        watching.join().unwrap();
    }

    #[test]
    fn a_group_is_asked_to_end_before_it_is_killed() {
        let (mut shell, group) = group(POLITE);
        let (pipe, mut orders) = io::pipe().unwrap();
        writeln!(orders, "guard {group} 3600000\nuntil {}", in_ms(3_600_000)).unwrap();
        drop(orders);
        let watching = thread::spawn(move || watch(Orders::new(pipe)));
        assert_eq!(shell.wait().unwrap().code(), Some(7));
        watching.join().unwrap();
    }

    #[test]
    fn a_lease_that_ends_unheard_ends_the_group_and_the_watch_goes_on() {
        let (mut shell, group) = group(POLITE);
        let (pipe, mut orders) = io::pipe().unwrap();
        writeln!(orders, "guard {group} 3600000\nuntil {}", in_ms(0)).unwrap();
        let watching = thread::spawn(move || watch(Orders::new(pipe)));
        assert_eq!(shell.wait().unwrap().code(), Some(7));
        writeln!(orders, "done").unwrap();
        watching.join().unwrap();
    }

    #[test]
    fn a_lease_is_left_to_lockreg_that_ends_the_command_itself() {
        let (mut shell, group) =
            group("trap 'exit 7' TERM; echo up; while :; do sleep 0.1; echo on; done");
        let (pipe, mut orders) = io::pipe().unwrap();
        let watching = thread::spawn(move || watch(Orders::new(pipe)));
        writeln!(orders, "guard {group} 3600000\nuntil {}\nmine", in_ms(300)).unwrap();
        // The command continues for longer than the lease.
        let mut on = [0; 30];
        shell.stdout.as_mut().unwrap().read_exact(&mut on).unwrap();
        writeln!(orders, "done").unwrap();
        watching.join().unwrap();
        shell.kill().unwrap();
        assert_eq!(shell.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    }

    #[test]
    fn a_watchdog_that_was_stopped_for_long_knows_the_newest_orders_when_it_goes_on() {
        // More orders than a pipe holds. The watchdog was stopped before it read, or after it had
        // read some bytes.
        for had_read in [0, 1, 30, 5_000] {
            let (pipe, mut dispatch) = Dispatch::open().unwrap();
            let mut orders = Orders::new(pipe);
            dispatch.guard(Pid::from_raw(4242), Duration::from_secs(10));
            for moment in 1..=50_000 {
                dispatch.until(Duration::from_secs(moment));
                if moment == 1_000 {
                    let mut bytes = vec![0; had_read];
                    let count = read(&orders.pipe, &mut bytes).unwrap();
                    assert_eq!(count, had_read);
                    orders.read.extend(bytes);
                }
            }
            let mut charge = Charge::default();
            while let News::Order(order) = orders.next(Some(Duration::ZERO)) {
                charge.obey(&order);
            }
            assert_eq!(
                (charge.group, charge.grace, charge.until),
                (
                    Some(Pid::from_raw(4242)),
                    Duration::from_secs(10),
                    Some(Duration::from_secs(50_000))
                )
            );
            dispatch.send("done\n");
            watch(orders);
        }
    }

    #[test]
    fn orders_that_came_in_time_are_seen_however_late_we_look() {
        let (pipe, mut writer) = io::pipe().unwrap();
        let mut orders = Orders::new(pipe);
        writer.write_all(b"until 1\nuntil").unwrap();
        let past = Some(Duration::ZERO);
        assert_eq!(orders.next(past), News::Order("until 1".to_owned()));
        assert_eq!(orders.next(past), News::None);
        writer.write_all(b" 2\n").unwrap();
        drop(writer);
        assert_eq!(orders.next(past), News::Order("until 2".to_owned()));
        assert_eq!(orders.next(None), News::End);
    }
}
