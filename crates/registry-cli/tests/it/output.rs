//! What `lockreg` prints as text and as JSON, on stdout and on stderr.

use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{CommandOutput, TestStore, wait_until};

/// Parses the JSON document that a command printed on stdout.
fn printed(done: &CommandOutput) -> Value {
    assert_eq!(done.stdout.lines().count(), 1, "one document per line: {done:?}");
    serde_json::from_str(&done.stdout).unwrap()
}

#[test]
fn the_default_store_is_in_a_private_directory_of_the_user() {
    let store = TestStore::new();
    assert_eq!(store.run(["run", "nightly", "--", "true"]).status, 0);
    let folder = store.path("lock-registry");
    assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(folder.join("locks.db").exists());
}

#[test]
fn show_and_list_print_the_holders() {
    let store = TestStore::new();
    let free = store.run(["show", "a"]);
    assert_eq!((free.status, free.stdout.as_str()), (1, "a is not locked\n"));
    assert_eq!(printed(&store.run(["--json", "show", "a"]))["held"], false);
    assert_eq!(store.run(["list"]).stdout, "no lock is held\n");
    assert_eq!(printed(&store.run(["list", "--json"])), json!([]));

    let a = store.start(["hold", "--label", "worker 7", "--lease", "1m", "a"]);
    let b = store.start(["hold", "b\x1b[31m"]);
    let (a_token, _) = (a.next_json()["token"].clone(), b.next_line());

    let shown = printed(&store.run(["show", "a", "--json"]));
    assert_eq!(
        (&shown["key"], &shown["held"], &shown["label"]),
        (&json!("a"), &json!(true), &json!("worker 7"))
    );
    assert_eq!(shown["token"], a_token);
    assert!(shown["held_for_ms"].is_u64());
    assert!((1..=60_000).contains(&shown["lease_left_ms"].as_u64().unwrap()), "{shown}");

    let listed = printed(&store.run(["--json", "list"]));
    let keys: Vec<&Value> =
        listed.as_array().unwrap().iter().map(|holder| &holder["key"]).collect();
    assert_eq!(keys, [&json!("a"), &json!("b\x1b[31m")]);

    let table = store.run(["list"]).stdout;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(lines[0].contains("HELD BY") && lines[1].contains("worker 7"), "{table}");
    // Escape sequences in the key of another user must not reach the terminal.
    assert!(!table.contains('\x1b'), "{table}");
    assert!(store.run(["show", "a"]).stdout.contains("worker 7"));
    assert_eq!((a.finish(), b.finish()), (0, 0));
}

#[test]
fn break_prints_the_holder_of_the_broken_lock() {
    let store = TestStore::new();
    let free = store.run(["break", "key", "--yes", "--json"]);
    assert_eq!(
        (free.status, printed(&free)),
        (1, json!({ "key": "key", "broken": false, "holder": null }))
    );
    let mut holder = store.start(["hold", "--label", "worker 7", "--lease", "3s", "key"]);
    holder.next_line();
    let broken = printed(&store.run(["break", "key", "--yes", "--json"]));
    assert_eq!((&broken["broken"], &broken["holder"]["label"]), (&json!(true), &json!("worker 7")));
    assert_eq!(holder.wait(), 76);
    assert_eq!(store.run(["break", "key", "--yes"]).stdout, "key is not locked\n");
}

#[test]
fn doctor_prints_the_capabilities_of_the_store() {
    let store = TestStore::new();
    let mut command = store.lockreg(["doctor", "--json"]);
    let report = printed(&CommandOutput::of(command.env("LOCK_REGISTRY_LEASE", "1m")));
    assert_eq!((&report["store"], &report["reachable"]), (&json!("sqlite"), &json!(true)));
    assert_eq!(
        (&report["capabilities"]["reach"], &report["capabilities"]["fencing"]),
        (&json!("host"), &json!(true))
    );
    assert!(report["findings"].is_array());
    assert!(
        report["settings"]
            .as_array()
            .unwrap()
            .contains(&json!({ "name": "lease", "value": "1m", "origin": "environment" })),
        "{report}"
    );
    let text = store.run(["doctor"]).stdout;
    for fact in ["sqlite", "this host", "fencing tokens", "locks.db"] {
        assert!(text.contains(fact), "{text}");
    }
    // A store within one process excludes no other command. `doctor` therefore states its reach.
    assert!(store.run(["--url", "memory:", "doctor"]).stdout.contains("this process"));
}

#[test]
fn schema_prints_sql_for_sqlite() {
    let store = TestStore::new();
    let done = store.run(["schema", "sqlite"]);
    assert!(done.status == 0 && done.stdout.contains("CREATE TABLE"), "{done:?}");
    let report = printed(&store.run(["schema", "sqlite", "--json"]));
    assert_eq!(
        (&report["dialect"], report["sql"].as_str()),
        (&json!("sqlite"), Some(done.stdout.as_str()))
    );
    assert!(!store.path("lock-registry").exists(), "the store was opened");
}

#[test]
fn bench_prints_its_statistics() {
    let store = TestStore::new();
    let report = printed(&store.run(["bench", "--for", "100ms", "--tasks", "2", "--json"]));
    assert!(report["pairs"].as_u64().unwrap() > 0);
    for figures in [&report["pair"], &report["round_trip"]] {
        assert!(
            figures["median_us"].as_f64().unwrap() <= figures["max_us"].as_f64().unwrap(),
            "{report}"
        );
    }
    assert!(store.run(["bench", "--for", "100ms"]).stdout.contains("inspect a free key"));
    assert_eq!(printed(&store.run(["list", "--json"])), json!([]));
}

#[cfg(target_os = "linux")]
#[test]
fn a_write_error_of_stdout_is_reported() {
    let store = TestStore::new();
    for argument in ["--help", "--version", "list"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let status = store.lockreg([argument]).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(74), "{argument}");
    }
}

#[test]
fn run_leaves_stdout_to_its_command_and_writes_json_to_stderr_if_requested() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.next_line();
    let done = store.run(["--json", "run", "--wait", "50ms", "key", "--", "echo", "out"]);
    assert_eq!((done.status, done.stdout.as_str()), (75, ""));
    let events: Vec<Value> =
        done.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["key"]), (&json!("not_obtained"), &json!("key")));
    assert_eq!(last["holder"]["label"], "worker 7");
    assert_eq!(holder.finish(), 0);

    let done = store.run(["--local", "run", "key", "--", "echo", "out"]);
    assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("out\n", ""));
    let done = store.run(["--json", "--url", "sqlite:/absent/x.db", "list"]);
    let error: Value = serde_json::from_str(&done.stderr).unwrap();
    assert_eq!((&error["event"], &error["status"]), (&json!("error"), &json!(69)));
    assert!(error["message"].is_string() && error["causes"].is_array());
    // The same for an invalid command line.
    let done = store.run(["run", "--json", "--wait", "5", "key", "--", "true"]);
    let error: Value = serde_json::from_str(&done.stderr).unwrap();
    assert_eq!((&error["event"], &error["status"]), (&json!("error"), &json!(64)));
    assert!(error["message"].as_str().unwrap().starts_with("invalid value '5'"), "{error}");
    // A `--json` of the command does not apply to `lockreg`.
    let done = store.run(["run", "--wait", "5", "key", "--", "true", "--json"]);
    assert!(done.stderr.starts_with("lockreg: error: "), "{done:?}");
}

#[test]
fn a_waiter_reports_how_long_it_waited() {
    let store = TestStore::new();
    let holder = store.start(["hold", "key"]);
    holder.next_line();
    let event = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let done = store.run(["--local", "--json", "run", "--no-wait", "key", "--", "true"]);
    let notice = event(&done.stderr);
    assert!(notice["event"] == "not_obtained" && notice["waited_ms"].is_u64(), "{notice}");

    let mut waiter = store.start(["--json", "run", "--wait", "2s", "key", "--", "true"]);
    waiter.wait_for_stderr("\"waiting\"");
    let started = Instant::now();
    // The process is stopped when its wait ends.
    waiter.signal(Signal::SIGSTOP);
    wait_until("the wait to be over", || started.elapsed() > Duration::from_millis(2_500));
    waiter.signal(Signal::SIGCONT);
    let notice = event(&waiter.wait_for_stderr("\"not_obtained\""));
    assert!(notice["waited_ms"].as_u64().unwrap() > 2_500, "{notice}");
    assert_eq!((waiter.wait(), holder.finish()), (75, 0));
}

#[test]
fn the_default_label_is_host_and_pid_and_an_option_overrides_it() {
    let store = TestStore::new();
    let label = |store: &TestStore| printed(&store.run(["--json", "show", "key"]))["label"].clone();
    let holder = store.start(["hold", "key"]);
    holder.next_line();
    assert!(label(&store).as_str().unwrap().ends_with(&format!(":{}", holder.pid())));
    assert_eq!(holder.finish(), 0);

    let mut command = store.lockreg(["hold", "key"]);
    let holder = crate::support::TestProcess::start(
        command.env("LOCK_REGISTRY_LABEL", "from the environment"),
    );
    holder.next_line();
    assert_eq!(label(&store), "from the environment");
    assert_eq!(holder.finish(), 0);
}

#[test]
fn a_closed_stdout_is_no_error() {
    let store = TestStore::new();
    let exe = env!("CARGO_BIN_EXE_lockreg");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("{{ {exe} schema sqlite; echo $? >&2; }} | true")]);
    let done = CommandOutput::of(command.env("XDG_STATE_HOME", store.folder()));
    assert_eq!(done.stderr, "0\n");
}

#[test]
fn the_log_goes_to_stderr_and_is_off_by_default() {
    let store = TestStore::new();
    assert_eq!(store.run(["--local", "run", "key", "--", "true"]).stderr, "");
    assert!(store.run(["-vv", "run", "key", "--", "true"]).stderr.contains("lock granted"));
    let mut command = store.lockreg(["run", "key", "--", "true"]);
    let done = CommandOutput::of(command.env("LOCK_REGISTRY_LOG", "lock_registry=debug"));
    assert!(done.stderr.contains("lock released"), "{done:?}");
}
