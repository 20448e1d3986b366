//! The watchdog is a process of its own. If `lockreg` was killed, it ends the command before the
//! lease ends. If `lockreg` is stopped when the lease ends, it sends SIGTERM then, and SIGKILL
//! after the grace time. Each renewal moves its deadline. It ends together with the command.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{TestProcess, TestStore, children, has_role, is_alive, wait_until};

fn watchdog_of(process: &TestProcess) -> String {
    let watchdog = children(process.pid()).into_iter().find(|pid| has_role(pid, "__watchdog"));
    watchdog.expect("a running command has a watchdog")
}

fn signal(pid: &str, signal: Signal) {
    kill(Pid::from_raw(pid.parse().unwrap()), signal).unwrap();
}

#[test]
fn the_key_of_a_killed_holder_stays_locked_until_its_command_has_ended() {
    let store = TestStore::new();
    let script =
        "trap '' TERM; (while :; do sleep 1; done) & echo $! $$; while :; do sleep 1; done";
    let mut holder =
        store.start(["run", "--lease", "1m", "--grace", "100ms", "job", "--", "sh", "-c", script]);
    let pids = holder.next_line();
    let token = store.holder("job");
    holder.signal(Signal::SIGKILL);
    holder.wait();
    wait_until("the command to be gone", || pids.split(' ').all(|pid| !is_alive(pid)));
    assert!(token.is_some());
    assert_eq!(store.holder("job"), token);
}

#[test]
fn the_watchdog_ends_with_the_command_and_ignores_background_processes() {
    let store = TestStore::new();
    let script = "sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!; read -r _; exit 3";
    let mut process = store.start(["run", "key", "--", "sh", "-c", script]);
    let left_behind = process.next_line();
    let watchdog = watchdog_of(&process);
    process.close_stdin();
    assert_eq!(process.wait(), 3);
    assert!(!is_alive(&watchdog));
    assert!(is_alive(&left_behind));
    signal(&left_behind, Signal::SIGKILL);
}

#[test]
fn lockreg_ends_although_its_watchdog_is_stopped_or_killed() {
    let store = TestStore::new();
    for sent in [Signal::SIGSTOP, Signal::SIGKILL] {
        let process = store.start(["run", "key", "--", "sh", "-c", "echo up; read -r _"]);
        process.next_line();
        let watchdog = watchdog_of(&process);
        signal(&watchdog, sent);
        assert_eq!(process.finish(), 1);
        assert!(!is_alive(&watchdog));
        assert_eq!(store.holder("key"), None);
    }
}

#[test]
fn the_watchdog_ignores_termination_signals() {
    let store = TestStore::new();
    // The kernel sends SIGTERM to the command when `lockreg` is killed. Only the watchdog sends
    // SIGKILL.
    let script = "trap '' TERM; echo $$; while :; do sleep 1; done";
    let mut process = store.start(["run", "--grace", "100ms", "key", "--", "sh", "-c", script]);
    let pid = process.next_line();
    let watchdog = watchdog_of(&process);
    for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signal(&watchdog, sent);
    }
    process.signal(Signal::SIGKILL);
    process.wait();
    wait_until("the command to be gone", || !is_alive(&pid));
    wait_until("the watchdog to be gone", || !is_alive(&watchdog));
}

#[test]
fn the_lock_is_renewed_until_the_process_group_of_the_command_has_ended() {
    let store = TestStore::new();
    // The command ends at SIGTERM. Its background process ignores SIGTERM.
    let script = r#"
        (trap '' TERM; echo up; while ! test -e "$T/enough"; do sleep 0.1; done) &
        echo $! $$
        exec sleep 1000
    "#;
    let mut process = store.start([
        "--local", "run", "--lease", "6s", "--grace", "10m", "key", "--", "sh", "-c", script,
    ]);
    let mut lines = [process.next_line(), process.next_line()];
    lines.sort_by_key(|line| line == "up");
    let (background_pid, command) = lines[0].split_once(' ').unwrap();
    let token = store.holder("key").unwrap();

    process.signal(Signal::SIGTERM);
    wait_until("the command to be gone", || !is_alive(command));
    wait_until("more than a lease to pass", || {
        assert_eq!(process.try_wait(), None);
        store.held_for("key").unwrap() > Duration::from_secs(8)
    });
    assert_eq!(store.holder("key"), Some(token));
    // `lockreg` has notified the watchdog of each renewal, so the watchdog has not ended the group.
    assert!(is_alive(background_pid));

    std::fs::write(store.path("enough"), "").unwrap();
    assert_eq!(process.wait(), 143);
    assert!(!is_alive(background_pid));
    assert_eq!(store.holder("key"), None);
    assert_eq!(process.remaining_stderr(), "");
}

#[test]
fn a_remaining_process_of_the_group_still_receives_signals() {
    let store = TestStore::new();
    let script = r#"
        (trap '' TERM; trap 'exit' HUP; echo up; while :; do sleep 0.1; done) &
        echo $! $$
        exec sleep 1000
    "#;
    let mut process = store.start(["run", "--grace", "10m", "key", "--", "sh", "-c", script]);
    let mut lines = [process.next_line(), process.next_line()];
    lines.sort_by_key(|line| line == "up");
    let (background_pid, command) = lines[0].split_once(' ').unwrap();
    process.signal(Signal::SIGTERM);
    wait_until("the command to be gone", || !is_alive(command));
    assert!(is_alive(background_pid));
    process.signal(Signal::SIGHUP);
    assert_eq!(process.wait(), 143);
    assert!(!is_alive(background_pid));
}
