//! Effects of a lost lock, or of the end of `lockreg`, on the command of `run` and on `hold`.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{TestProcess, TestStore, full_pipe, is_alive, wait_until};

/// A script that starts a process, and prints the process ids of both. Both ignore SIGTERM.
const IGNORES_SIGTERM: &str = r#"
    trap '' TERM
    (while :; do sleep 1; done) &
    echo $! $$
    while :; do sleep 1; done
"#;

const LEASE: Duration = Duration::from_secs(2);

#[test]
fn the_command_of_a_killed_holder_is_ended_and_its_key_is_free_after_the_lease() {
    let store = TestStore::new();
    let mut holder = store.start([
        "run",
        "--lease",
        "2s",
        "--grace",
        "60s",
        "job",
        "--",
        "sh",
        "-c",
        IGNORES_SIGTERM,
    ]);
    let pids = holder.next_line();

    holder.signal(Signal::SIGKILL);
    let killed = Instant::now();
    holder.wait();
    assert_eq!(store.run(["run", "--wait", "80s", "job", "--", "true"]).status, 0);
    let freed = killed.elapsed();

    // The lease, one second of tolerance for the wake-up of the waiter, and ten seconds to start
    // two programs on a busy machine.
    assert!(freed < LEASE + Duration::from_secs(11), "{freed:?}");
    wait_until("the command to be gone", || pids.split(' ').all(|pid| !is_alive(pid)));
}

#[test]
fn the_command_receives_sigterm_when_lockreg_is_killed() {
    let store = TestStore::new();
    let script =
        r#"trap 'echo sigterm > "$T/sigterm"; exit' TERM; echo up; while :; do sleep 0.1; done"#;
    let mut holder = store.start(["run", "job", "--", "sh", "-c", script]);
    holder.next_line();
    holder.signal(Signal::SIGKILL);
    holder.wait();
    wait_until("SIGTERM to arrive", || store.path("sigterm").exists());
}

#[test]
fn a_holder_that_was_stopped_beyond_its_lease_reports_the_loss_and_the_next_holder_keeps_its_lock()
{
    let store = TestStore::new();
    let mut holder =
        store.start(["run", "--lease", "1s", "job", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = holder.next_line();
    holder.signal(Signal::SIGSTOP);

    let mut successor =
        store.start(["run", "--wait", "80s", "job", "--", "sh", "-c", "echo mine; cat"]);
    assert_eq!(successor.next_line(), "mine");
    let token = store.holder("job").unwrap();
    // The watchdog ended the command at the end of the lease, although `lockreg` was stopped.
    wait_until("the command to be gone", || !is_alive(&pid));

    holder.signal(Signal::SIGCONT);
    assert_eq!(holder.wait(), 76);
    assert!(holder.remaining_stderr().contains("was lost"));
    assert_eq!(store.holder("job"), Some(token));
    assert_eq!(successor.try_wait(), None);
    assert_eq!(successor.finish(), 0);
}

#[test]
fn breaking_a_lock_ends_the_command_of_its_holder() {
    let store = TestStore::new();
    let mut holder =
        store.start(["run", "--lease", "3s", "job", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = holder.next_line();
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    assert_eq!(holder.wait(), 76);
    assert!(!is_alive(&pid));
    let stderr = holder.remaining_stderr();
    assert!(stderr.contains("\"job\" was lost") || stderr.contains("job was lost"), "{stderr}");
    assert!(stderr.contains("ended by SIGTERM"), "{stderr}");
}

#[test]
fn a_command_that_ignores_the_loss_is_killed_after_the_grace_time() {
    let store = TestStore::new();
    let mut holder = store.start([
        "run",
        "--lease",
        "3s",
        "--grace",
        "200ms",
        "job",
        "--",
        "sh",
        "-c",
        IGNORES_SIGTERM,
    ]);
    let pids = holder.next_line();
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    assert_eq!(holder.wait(), 76);
    wait_until("the command to be gone", || pids.split(' ').all(|pid| !is_alive(pid)));
}

#[test]
fn a_lock_that_was_broken_before_its_first_renewal_is_reported_lost() {
    let store = TestStore::new();
    // The lease is so long that no renewal finds the loss.
    let mut holder =
        store.start(["run", "--lease", "1h", "job", "--", "sh", "-c", "echo up; read -r _"]);
    holder.next_line();
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    holder.close_stdin();
    assert_eq!(holder.wait(), 76);
}

#[cfg(feature = "sqlite")]
#[test]
fn a_loss_is_reported_while_the_store_does_not_respond() {
    use lock_registry::sqlite::sqlx::{Connection as _, Executor as _, SqliteConnection};

    let store = TestStore::new();
    // The loss must be reported long before a request to the store times out.
    let start =
        |command: &mut Command| TestProcess::start(command.env("LOCK_REGISTRY_TIMEOUT", "1h"));
    let script = "echo $$; exec sleep 1000";
    let mut run =
        start(&mut store.lockreg(["run", "--lease", "2s", "job", "--", "sh", "-c", script]));
    let pid = run.next_line();
    let mut hold = start(&mut store.lockreg(["hold", "--lease", "2s", "other job"]));
    hold.next_line();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", store.path("lock-registry/locks.db").display());
        let mut writer = SqliteConnection::connect(&url).await.unwrap();
        // Blocks all other writers until the rollback.
        writer.execute("BEGIN IMMEDIATE").await.unwrap();
        run.wait_for_stderr("job was lost");
        let reported_at = Instant::now();
        assert_eq!(run.wait(), 76);
        assert!(reported_at.elapsed() < Duration::from_secs(7), "{:?}", reported_at.elapsed());
        assert!(!is_alive(&pid));
        assert_eq!(hold.next_json()["lost"], "expired");
        assert_eq!(hold.wait(), 76);
        writer.execute("ROLLBACK").await.unwrap();
    });
}

#[test]
fn hold_prints_the_loss_and_ends() {
    let store = TestStore::new();
    let mut holder = store.start(["hold", "--lease", "3s", "job"]);
    let held = holder.next_json();
    assert_eq!(held["key"], "job");
    assert_eq!(held["token"].as_u64(), store.holder("job"));
    assert!(held["valid_for_ms"].as_u64().unwrap() <= 3_000);
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    assert_eq!(holder.next_json(), serde_json::json!({ "key": "job", "lost": "gone" }));
    assert_eq!(holder.wait(), 76);
}

#[test]
fn a_resumed_hold_prints_the_loss_of_its_expired_lock_at_once() {
    let store = TestStore::new();
    let mut holder = store.start(["hold", "--lease", "3s", "job"]);
    holder.next_line();
    holder.signal(Signal::SIGSTOP);
    let successor = store.start(["hold", "--wait", "80s", "job"]);
    let token = successor.next_json()["token"].as_u64();
    holder.signal(Signal::SIGCONT);
    assert!(holder.next_json()["lost"].is_string());
    assert_eq!(holder.wait(), 76);
    assert_eq!(store.holder("job"), token);
    assert_eq!(successor.finish(), 0);
}

#[test]
fn a_loss_ends_the_command_even_if_stderr_is_blocked() {
    let store = TestStore::new();
    let (_unread, full) = full_pipe();
    let mut holder = store
        .lockreg(["run", "--lease", "3s", "job", "--", "sh", "-c", "echo $$; exec sleep 1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(full)
        .spawn()
        .unwrap();
    let mut pid = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut pid).unwrap();
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    wait_until("the command to be gone", || !is_alive(pid.trim()));
    wait_until("lockreg to end", || holder.try_wait().unwrap().is_some());
    assert_eq!(holder.wait().unwrap().code(), Some(76));
}

#[test]
fn hold_reports_the_loss_by_its_status_if_stdout_is_closed() {
    let store = TestStore::new();
    let mut holder = store
        .lockreg(["hold", "--lease", "3s", "job"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut held = String::new();
    // The end of this statement drops the reader, which closes the pipe.
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut held).unwrap();
    // The test keeps stdin open, because the end of stdin would end `hold` too.
    let _stdin = holder.stdin.take();
    assert_eq!(store.run(["break", "job", "--yes"]).status, 0);
    wait_until("lockreg to end", || holder.try_wait().unwrap().is_some());
    let done = holder.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(76));
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert!(stderr.contains("job was lost"), "{stderr}");
}

#[test]
fn hold_fails_if_its_stdout_is_closed_before_it_reports_the_lock() {
    let store = TestStore::new();
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let mut holder = store
        .lockreg(["hold", "job"])
        .stdin(Stdio::piped())
        .stdout(closed)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The test keeps stdin open, because the end of stdin would end `hold` too.
    let _stdin = holder.stdin.take();
    wait_until("lockreg to end", || holder.try_wait().unwrap().is_some());
    assert_eq!(holder.wait().unwrap().code(), Some(74));
    assert_eq!(store.holder("job"), None);
}

#[test]
fn hold_with_a_blocked_stdout_ends_when_its_stdin_is_closed() {
    let store = TestStore::new();
    let (_unread, full) = full_pipe();
    let mut holder = store
        .lockreg(["hold", "job"])
        .stdin(Stdio::piped())
        .stdout(full)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the lock to be held", || store.holder("job").is_some());
    drop(holder.stdin.take());
    wait_until("lockreg to end", || holder.try_wait().unwrap().is_some());
    assert_eq!(store.holder("job"), None);
}
