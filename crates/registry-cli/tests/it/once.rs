//! `lockreg run --once-per` and `--tick`: commands that run once per tick. `lockreg value`: value
//! blocks.

use nix::sys::signal::Signal;

use crate::support::{TestProcess, TestStore, is_alive, wait_until};

#[test]
fn a_command_runs_once_per_period() {
    let store = TestStore::new();
    // The period does not end during the test.
    let run = ["run", "--once-per", "36500days", "nightly", "--", "sh", "-c", "echo $LOCKREG_TICK"];
    let first = store.run(run);
    assert_eq!((first.status, first.stdout.as_str()), (0, "0\n"), "{first:?}");
    let second = store.run(run);
    assert_eq!((second.status, second.stdout.as_str()), (0, ""), "{second:?}");
    assert!(second.stderr.contains("nightly is not run: it ran for tick 0 at "), "{second:?}");
    let mut json = store.lockreg(["--json"]);
    let third = crate::support::CommandOutput::of(json.args(run));
    let line: serde_json::Value =
        serde_json::from_str(third.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((line["event"].as_str(), line["tick"].as_str()), (Some("already_done"), Some("0")));
    assert!(line["label"].as_str().is_some_and(|label| label.contains(':')), "{third:?}");
}

#[test]
fn a_failed_command_leaves_its_tick_available_unless_failures_count() {
    let store = TestStore::new();
    let fail = ["run", "--tick", "7", "key", "--", "sh", "-c", "echo ran; exit 3"];
    for _ in 0..2 {
        let done = store.run(fail);
        assert_eq!((done.status, done.stdout.as_str()), (3, "ran\n"), "{done:?}");
    }
    let counted =
        store.run(["run", "--tick", "7", "--count-failures", "key", "--", "sh", "-c", "exit 3"]);
    assert_eq!(counted.status, 3, "{counted:?}");
    let done = store.run(fail);
    assert_eq!((done.status, done.stdout.as_str()), (0, ""), "{done:?}");
}

#[test]
fn a_tick_is_a_growing_number_or_a_name() {
    let store = TestStore::new();
    for (tick, runs) in [
        ("7", true),
        ("6", false),
        ("8", true),
        ("v1.9", true),
        ("v1.9", false),
        ("v1.10", true),
        ("9", true),
    ] {
        let done = store.run(["run", "--tick", tick, "key", "--", "echo", "ran"]);
        assert_eq!((done.status, done.stdout == "ran\n"), (0, runs), "{tick}: {done:?}");
    }
}

#[test]
fn a_command_that_another_process_runs_is_not_due() {
    let store = TestStore::new();
    let mut first = store.start(["run", "--tick", "1", "key", "--", "sh", "-c", "echo on; read x"]);
    assert_eq!(first.next_line(), "on");
    let second = store.run(["run", "--tick", "1", "key", "--", "echo", "ran"]);
    assert_eq!((second.status, second.stdout.as_str()), (0, ""), "{second:?}");
    assert!(second.stderr.contains("key is not run"), "{second:?}");
    // A command that a signal ended has failed, so its tick is available again.
    first.signal(Signal::SIGTERM);
    assert_eq!(first.wait(), 143);
    let third = store.run(["run", "--tick", "1", "key", "--", "echo", "ran"]);
    assert_eq!((third.status, third.stdout.as_str()), (0, "ran\n"), "{third:?}");
}

#[test]
fn a_tick_that_cannot_be_recorded_is_an_error_after_the_status_of_the_command() {
    let store = TestStore::new();
    let done =
        store.run(["run", "--tick", "1", "key", "--", "sh", "-c", "rm $T/lock-registry/locks.db*"]);
    assert_eq!(done.status, 69, "{done:?}");
    let ended = done.stderr.find("the command ended with status 0");
    let failed = done.stderr.find("write the value on \"key\"");
    assert!(ended.is_some() && ended < failed, "{done:?}");
}

#[cfg(feature = "sqlite")]
#[test]
fn a_signal_ends_lockreg_while_the_store_does_not_confirm_the_tick() {
    use lock_registry::sqlite::sqlx::{Connection as _, Executor as _, SqliteConnection};

    let store = TestStore::new();
    let mut command = store.lockreg(["run", "--tick", "1", "--lease", "1h", "key", "--"]);
    command
        .args(["sh", "-c", "trap '' TERM; echo $$; read x; exit 0"])
        .env("LOCK_REGISTRY_TIMEOUT", "1s");
    let mut process = TestProcess::start(&mut command);
    let pid = process.next_line();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", store.path("lock-registry/locks.db").display());
        let mut writer = SqliteConnection::connect(&url).await.unwrap();
        // Blocks all other writers until the rollback.
        writer.execute("BEGIN IMMEDIATE").await.unwrap();
        process.close_stdin();
        wait_until("the command to be gone", || !is_alive(&pid));
        // Repeated: `lockreg` may still forward the first signal to the command, which has ended.
        wait_until("lockreg to end", || {
            process.signal(Signal::SIGTERM);
            process.try_wait().is_some()
        });
        writer.execute("ROLLBACK").await.unwrap();
    });
    assert_eq!(process.wait(), 69);
    let stderr = process.remaining_stderr();
    let ended = stderr.find("the command ended with status 0");
    let unconfirmed = stderr.find("was not confirmed in time");
    assert!(ended.is_some() && ended < unconfirmed, "{stderr}");
}

#[test]
fn invalid_schedules_are_refused() {
    let store = TestStore::new();
    for options in [
        &["--once-per", "10ms"][..],
        &["--once-per", "1h", "--tick", "1"],
        &["--once-per", "1h", "--shared"],
        &["--tick", "1", "--also", "other"],
        &["--count-failures"],
        &["--tick", "a\nb"],
        &["--tick", ""],
        &["--tick", "18446744073709551616"],
    ] {
        let mut command = store.lockreg(["run"]);
        let command = command.args(options).args(["key", "--", "true"]);
        let done = crate::support::CommandOutput::of(command);
        assert_eq!(done.status, 64, "{options:?}: {done:?}");
    }
}

#[test]
fn value_prints_the_value_block() {
    let store = TestStore::new();
    let none = store.run(["value", "key"]);
    assert_eq!((none.status, none.stdout.as_str()), (1, "key has no value\n"), "{none:?}");
    assert_eq!(store.run(["run", "--tick", "7", "key", "--", "true"]).status, 0);
    let value = store.run(["value", "key"]);
    assert!(value.status == 0 && value.stdout.contains("tick 7\n"), "{value:?}");
    let json = store.run(["--json", "value", "key"]);
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["value"].as_str(), Some(value.stdout.as_str()));
    assert!(json["token"].is_u64(), "{json}");
}
