//! `lockreg` in cron jobs and pods: distinct exit statuses, `--quiet`, time limits of a hold,
//! variables of the environment, and a store that starts late. Also `help`, `man` and `doctor`.

use std::net::TcpListener;

use crate::support::{CommandOutput, TestStore};

/// Returns the URL and the address of a port on which no server listens.
#[cfg(feature = "redis")]
fn refused_url() -> (String, String) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    (format!("redis://{address}"), address.to_string())
}

#[test]
fn a_busy_lock_ends_with_the_conflict_exit_code() {
    let store = TestStore::new();
    let holder = store.start(["hold", "key"]);
    holder.next_line();
    for (options, status) in [
        (&["--no-wait"][..], 75),
        (&["--no-wait", "-E", "0"], 0),
        (&["--wait", "10ms", "--conflict-exit-code", "200"], 200),
    ] {
        let mut command = store.lockreg(["run", "--local"]);
        let done = CommandOutput::of(command.args(options).args(["key", "--", "false"]));
        assert_eq!(done.status, status, "{options:?}: {done:?}");
        assert!(done.stderr.contains("key is held by"), "{done:?}");
        let mut command = store.lockreg(["hold", "--local", "--quiet"]);
        let done = CommandOutput::of(command.args(options).arg("key"));
        assert_eq!((done.status, done.stderr.as_str()), (status, ""), "{options:?}");
    }
    assert_eq!(holder.finish(), 0);
    // The status of the command is not changed, even if it is 75.
    assert_eq!(store.run(["run", "-E", "9", "key", "--", "sh", "-c", "exit 75"]).status, 75);
    let done = store.run(["run", "-E", "256", "key", "--", "true"]);
    assert!(done.status == 64 && done.stderr.contains("--conflict-exit-code"), "{done:?}");
}

#[test]
fn quiet_suppresses_notices_but_no_error() {
    let store = TestStore::new();
    assert_eq!(store.run(["--quiet", "run", "key", "--", "true"]).stderr, "");
    let done = store.run(["--quiet", "--url", "sqlite:/no/such/folder/locks.db", "list"]);
    assert!(done.status == 69 && done.stderr.contains("/no/such/folder/locks.db"), "{done:?}");
}

#[test]
fn min_hold_keeps_the_key_locked_after_a_short_command() {
    let store = TestStore::new();
    let mut first = store.start(["run", "--min-hold", "1h", "key", "--", "echo", "done"]);
    assert_eq!(first.next_line(), "done");
    // The command has ended or is about to end. Another host that starts the same job later must
    // find the key locked.
    let other = store.run(["run", "--wait", "300ms", "key", "--", "true"]);
    assert_eq!(other.status, 75, "{other:?}");
    assert!(first.try_wait().is_none());
    // A signal ends the wait; the key then stays locked until its lease ends.
    first.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(first.wait(), 0);
    assert!(store.holder("key").is_some());

    // 76 is also the status of `lockreg` for a lost lock.
    for status in [0, 76] {
        let started = std::time::Instant::now();
        let command = format!("exit {status}");
        let short = store.run(["run", "--min-hold", "1s", "other", "--", "sh", "-c", &command]);
        assert_eq!(short.status, status, "{short:?}");
        assert!(started.elapsed() >= std::time::Duration::from_millis(900));
        assert!(store.holder("other").is_none(), "it was released when min_hold was over");
    }
}

#[test]
fn max_hold_stops_the_command() {
    let store = TestStore::new();
    let done = store.run(["run", "--max-hold", "300ms", "key", "--", "sleep", "1000"]);
    assert_eq!(done.status, 76, "{done:?}");
    assert!(done.stderr.contains("max_hold"), "{done:?}");
    for (options, hint) in [
        (
            ["--min-hold", "10s", "--max-hold", "1s"],
            "--min-hold is 10s, which is longer than max_hold",
        ),
        (["--min-hold", "0s", "--max-hold", "1ms"], "--max-hold is 1ms, which is shorter"),
    ] {
        let mut command = store.lockreg(["run"]);
        let done = CommandOutput::of(command.args(options).args(["key", "--", "true"]));
        assert!(done.status == 64 && done.stderr.contains(hint), "{done:?}");
    }
}

#[test]
fn variables_of_a_kubernetes_service_are_ignored() {
    let store = TestStore::new();
    let mut command = store.lockreg(["--local", "list"]);
    command
        .env("LOCK_REGISTRY_PORT", "tcp://10.0.0.1:6379")
        .env("LOCK_REGISTRY_SERVICE_HOST", "10.0.0.1")
        .env("LOCK_REGISTRY_SERVICE_PORT_REDIS", "6379")
        .env("LOCK_REGISTRY_REDIS_PORT_6379_TCP_ADDR", "10.0.0.1");
    let done = CommandOutput::of(&mut command);
    assert_eq!((done.status, done.stderr.as_str()), (0, ""));
}

#[test]
fn the_default_store_prints_a_warning_without_a_terminal_unless_local_is_set() {
    let store = TestStore::new();
    let warning = "do not exclude other hosts";
    let done = store.run(["run", "key", "--", "true"]);
    assert!(done.status == 0 && done.stderr.lines().count() == 1, "{done:?}");
    assert!(done.stderr.contains(warning) && done.stderr.contains("--local"), "{done:?}");
    assert_eq!(store.run(["--local", "run", "key", "--", "true"]).stderr, "");
    let url = format!("sqlite:{}", store.path("own.db").display());
    assert_eq!(store.run(["--url", &url, "run", "key", "--", "true"]).stderr, "");
    let both = store.run(["--local", "--url", &url, "list"]);
    assert!(both.status == 64 && both.stderr.contains("cannot be used with"), "{both:?}");
    // Like every option, `--local` overrides the variable.
    let mut command = store.lockreg(["--local", "--json", "doctor"]);
    let doctor = CommandOutput::of(command.env("LOCK_REGISTRY_URL", "memory:"));
    assert!(doctor.stdout.contains("\"store\":\"sqlite\""), "{doctor:?}");
}

#[test]
fn a_store_with_too_short_a_reach_is_refused() {
    let store = TestStore::new();
    let done =
        store.run(["--local", "--require-reach", "network", "run", "key", "--", "touch", "ran"]);
    assert_eq!(done.status, 64, "{done:?}");
    assert!(
        done.stderr.contains("this host") && done.stderr.contains("--require-reach"),
        "{done:?}"
    );
    assert!(!store.path("ran").exists());
    for reach in ["process", "host"] {
        let done = store.run(["--local", "--require-reach", reach, "run", "key", "--", "true"]);
        assert_eq!((done.status, done.stderr.as_str()), (0, ""));
    }
    assert_eq!(store.run(["--require-reach", "galaxy", "list"]).status, 64);
}

#[cfg(feature = "redis")]
#[test]
fn a_refused_connection_is_retried_within_the_wait_and_the_error_names_the_address() {
    let store = TestStore::new();
    let (url, address) = refused_url();
    let started = std::time::Instant::now();
    let done = store.run(["--url", &url, "run", "--wait", "3s", "key", "--", "true"]);
    assert_eq!(done.status, 69, "{done:?}");
    assert!(started.elapsed() >= std::time::Duration::from_secs(2), "it gave up early");
    assert!(done.stderr.contains(&address) && done.stderr.contains("refused"), "{done:?}");
}

#[cfg(all(feature = "redis", feature = "server-tests"))]
#[test]
fn a_server_that_starts_during_the_wait_is_used() {
    use registry_testkit::redis::RedisServer;
    let store = TestStore::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let mut server = runtime.block_on(RedisServer::start(&[])).unwrap();
    server.kill();
    let url = server.url();
    let mut waiting = store.start(["--url", &url, "run", "--wait", "80s", "key", "--", "true"]);
    // `lockreg` prints nothing while its connection is refused. The test therefore waits for a
    // fixed time, in which some attempts fail.
    std::thread::sleep(std::time::Duration::from_millis(500));
    runtime.block_on(server.restart()).unwrap();
    assert_eq!(waiting.wait(), 0);
}

#[cfg(feature = "redis")]
#[test]
fn an_error_about_an_unresolved_host_names_the_host() {
    let store = TestStore::new();
    let url = "redis://no-such-host.invalid:6379";
    let done = store.run(["--url", url, "run", "--wait", "10ms", "key", "--", "true"]);
    assert_eq!(done.status, 69, "{done:?}");
    assert!(done.stderr.contains("cannot resolve no-such-host.invalid"), "{done:?}");
}

#[test]
fn help_completions_and_manual_pages_are_printed() {
    let store = TestStore::new();
    for arguments in [
        &["help"][..],
        &["help", "run"],
        &["man"],
        &["man", "run"],
        &["completions", "bash"],
        &["completions", "zsh"],
    ] {
        let mut command = store.lockreg([]);
        let done = CommandOutput::of(command.args(arguments));
        assert_eq!((done.status, done.stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(done.stdout.contains("lockreg"), "{arguments:?}: {done:?}");
    }
    assert!(store.run(["man", "run"]).stdout.contains("conflict"), "options are in the page");
    let overview = store.run(["--help"]).stdout;
    let (_, commands) = overview.split_once("Commands:\n").unwrap();
    let commands: Vec<&str> = (commands.lines().take_while(|line| line.starts_with("  ")))
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|command| *command != "help")
        .collect();
    assert!(commands.contains(&"top") && commands.len() > 10, "{commands:?}");
    for command in commands {
        let help = store.run([command, "--help"]).stdout;
        assert!(help.contains("Examples:\n  "), "{command}: {help}");
    }
    let wrong = store.run(["man", "rnu"]);
    assert!(wrong.status == 64 && wrong.stderr.contains("run"), "{wrong:?}");
}

#[test]
fn doctor_prints_origins_and_strict_turns_a_warning_into_status_1() {
    let store = TestStore::new();
    let done = store.run(["--local", "doctor", "--strict"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert!(done.stdout.contains("the default of lockreg"), "{done:?}");
    let mut command = store.lockreg(["--json", "--namespace", "n", "doctor"]);
    let done = CommandOutput::of(command.env("LOCK_REGISTRY_URL", "pass-through:"));
    let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    let origin = |name: &str| {
        let settings = report["settings"].as_array().unwrap();
        settings.iter().find(|row| row["name"] == name).map(|row| row["origin"].clone()).unwrap()
    };
    assert_eq!((origin("url"), origin("namespace")), ("environment".into(), "command_line".into()));
    let warned =
        report["findings"].as_array().unwrap().iter().any(|row| row["severity"] == "warning");
    let mut command = store.lockreg(["--url", "pass-through:", "doctor", "--strict"]);
    assert_eq!(CommandOutput::of(&mut command).status, i32::from(warned));
    assert!(warned, "turned-off locking is a warning: {report}");
}

#[cfg(not(feature = "postgres"))]
#[test]
fn an_error_about_a_schema_without_its_feature_names_the_store() {
    let done = TestStore::new().run(["schema", "postgres"]);
    assert_eq!(done.status, 64, "{done:?}");
    assert!(done.stderr.contains("was built without postgres stores"), "{done:?}");
}
