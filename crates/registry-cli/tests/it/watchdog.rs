//! The watchdog, which ends the command if `lockreg` cannot: in which order, until when, and that
//! it ends itself.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Process, Store, children, is_alive, plays, until};

fn watchdog_of(process: &Process) -> String {
    let watchdog = children(process.pid()).into_iter().find(|pid| plays(pid, "__watchdog"));
    watchdog.expect("a command that runs is watched over")
}

fn signal(pid: &str, signal: Signal) {
    kill(Pid::from_raw(pid.parse().unwrap()), signal).unwrap();
}

#[test]
fn the_key_of_a_killed_holder_stays_taken_until_its_command_is_gone() {
    let store = Store::new();
    let script =
        "trap '' TERM; (while :; do sleep 1; done) & echo $! $$; while :; do sleep 1; done";
    let mut holder =
        store.start(["run", "--lease", "1m", "--grace", "100ms", "job", "--", "sh", "-c", script]);
    let pids = holder.says();
    let token = store.holder("job");
    holder.signal(Signal::SIGKILL);
    holder.wait();
    until("the command to be gone", || pids.split(' ').all(|pid| !is_alive(pid)));
    assert!(token.is_some());
    assert_eq!(store.holder("job"), token);
}

#[test]
fn a_watchdog_is_dismissed_at_the_end_and_touches_nothing_that_was_left_behind() {
    let store = Store::new();
    let script = "sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!; read -r _; exit 3";
    let mut process = store.start(["run", "key", "--", "sh", "-c", script]);
    let left_behind = process.says();
    let watchdog = watchdog_of(&process);
    process.close_stdin();
    assert_eq!(process.wait(), 3);
    assert!(!is_alive(&watchdog));
    assert!(is_alive(&left_behind));
    signal(&left_behind, Signal::SIGKILL);
}

#[test]
fn a_watchdog_that_is_stopped_or_killed_does_not_hold_up_the_end() {
    let store = Store::new();
    for sent in [Signal::SIGSTOP, Signal::SIGKILL] {
        let process = store.start(["run", "key", "--", "sh", "-c", "echo up; read -r _"]);
        process.says();
        let watchdog = watchdog_of(&process);
        signal(&watchdog, sent);
        assert_eq!(process.finish(), 1);
        assert!(!is_alive(&watchdog));
        assert_eq!(store.holder("key"), None);
    }
}

#[test]
fn a_watchdog_ignores_whoever_asks_it_to_end() {
    let store = Store::new();
    let mut process = store.start(["run", "key", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = process.says();
    let watchdog = watchdog_of(&process);
    for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signal(&watchdog, sent);
    }
    process.signal(Signal::SIGKILL);
    process.wait();
    until("the command to be gone", || !is_alive(&pid));
    until("the watchdog to be gone", || !is_alive(&watchdog));
}

#[test]
fn the_lock_is_renewed_while_what_the_command_has_started_is_waited_for() {
    let store = Store::new();
    // The command ends at SIGTERM. The process that it started ignores SIGTERM.
    let script = r#"
        (trap '' TERM; echo up; while ! test -e "$T/enough"; do sleep 0.1; done) &
        echo $! $$
        exec sleep 1000
    "#;
    let mut process = store.start([
        "--local", "run", "--lease", "6s", "--grace", "10m", "key", "--", "sh", "-c", script,
    ]);
    let mut lines = [process.says(), process.says()];
    lines.sort_by_key(|line| line == "up");
    let (straggler, command) = lines[0].split_once(' ').unwrap();
    let token = store.holder("key").unwrap();

    process.signal(Signal::SIGTERM);
    until("the command to be gone", || !is_alive(command));
    until("more than a lease to pass", || {
        assert_eq!(process.try_wait(), None);
        store.held_for("key").unwrap() > Duration::from_secs(8)
    });
    assert_eq!(store.holder("key"), Some(token));
    // The watchdog also knows that the lock is held.
    assert!(is_alive(straggler));

    std::fs::write(store.path("enough"), "").unwrap();
    assert_eq!(process.wait(), 143);
    assert!(!is_alive(straggler));
    assert_eq!(store.holder("key"), None);
    assert_eq!(process.complaints(), "");
}

#[test]
fn what_is_waited_for_still_gets_signals() {
    let store = Store::new();
    let script = r#"
        (trap '' TERM; trap 'exit' HUP; echo up; while :; do sleep 0.1; done) &
        echo $! $$
        exec sleep 1000
    "#;
    let mut process = store.start(["run", "--grace", "10m", "key", "--", "sh", "-c", script]);
    let mut lines = [process.says(), process.says()];
    lines.sort_by_key(|line| line == "up");
    let (straggler, command) = lines[0].split_once(' ').unwrap();
    process.signal(Signal::SIGTERM);
    until("the command to be gone", || !is_alive(command));
    assert!(is_alive(straggler));
    process.signal(Signal::SIGHUP);
    assert_eq!(process.wait(), 143);
    assert!(!is_alive(straggler));
}
