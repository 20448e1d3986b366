//! Invalid input and stores that cannot be opened are refused with a status, a reason and a hint.
//! Unusual but valid keys are accepted.

use std::os::unix::ffi::OsStrExt as _;

use crate::support::{CommandOutput, TestStore};

/// Runs `command`, and checks that it is refused with `hint` and creates no file.
fn assert_refused(
    store: &TestStore,
    command: &mut std::process::Command,
    hint: &str,
) -> CommandOutput {
    let done = CommandOutput::of(command);
    assert_eq!(done.status, 64, "{command:?}: {done:?}");
    assert!(done.stderr.starts_with("lockreg: "), "{command:?}: {done:?}");
    assert!(done.stderr.contains(hint), "{command:?} should contain {hint:?}: {done:?}");
    assert_eq!(done.stdout, "");
    assert!(
        !done.stderr.contains("panicked") && !done.stderr.contains("RUST_BACKTRACE"),
        "{done:?}"
    );
    assert_eq!(std::fs::read_dir(store.folder()).unwrap().count(), 0, "{command:?} created a file");
    done
}

#[test]
fn an_invalid_option_is_reported_before_a_missing_command() {
    let store = TestStore::new();
    for (option, hint) in [(&["--also", ""][..], "empty"), (&["--count-failures"], "--tick")] {
        let mut command = store.lockreg(["run"]);
        command.args(option).args(["key", "--", "/no/such/program"]);
        assert_refused(&store, &mut command, hint);
    }
}

#[test]
fn invalid_options_of_run_are_usage_errors() {
    let store = TestStore::new();
    let cases: &[(&[&str], &str)] = &[
        (&["--wait", "1s", "--no-wait"], "cannot be used with"),
        (&["--wait", "-5s"], "negative"),
        (&["--wait=-5s"], "negative"),
        (&["--wait", "5"], "no unit"),
        (&["--wait", "soon"], "`30s`"),
        (&["--wait", "100years"], "leave --wait out"),
        (&["--wait", "99999999999999999999999s"], "not a time"),
        (&["--lease", "0s"], "--lease is 0s, less than the minimum"),
        (&["--lease", "1ms"], "--lease"),
        (&["--lease", "99ms"], "less than the minimum 100ms"),
        (&["--lease", "25h"], "more than the maximum 1day"),
        (&["--lease", "-1s"], "negative"),
        (&["--lease", "100years"], "more than the maximum"),
        (&["--grace", "100years"], "longer than"),
        (&["--wiat", "1s"], "--wait"),
        (&["--url", "bogus:x"], "sqlite"),
        (&["--url", "kafka:x"], "does not start with a known scheme"),
        (&["--url", "sqlit:x"], "did you mean \"sqlite\"?"),
        (&["--url", "postgres://localhost"], "contains no database"),
        (&["--url", "memory:?leese=1s"], "did you mean \"lease\"?"),
        (&["--url", "memory:?lease=1ms"], "less than the minimum"),
        (&["--url", "memory:?layout=spring"], "`native`"),
        (&["--url", "memory:?layout=sprnig"], "did you mean `spring`?"),
        (&["--url", "memory:?replicas=1"], "is an option of redis stores"),
        (&["--url", "memory:?restart_guard=30s"], "is an option of redis+quorum stores"),
        (&["--url", ""], "empty"),
        (&["--url", "locks.db"], "sqlite:PATH"),
        (&["--namespace", &"n".repeat(300)], "--namespace has 300 bytes"),
        (&["--label", &"l".repeat(2_000)], "--label has 2000 bytes"),
    ];
    for (options, hint) in cases {
        let mut command = store.lockreg(["run"]);
        command.args(*options).args(["key", "--", "true"]);
        let done = assert_refused(&store, &mut command, hint);
        // For a value that was set through the API, the error text of the library names "the code"
        // as its source. `lockreg` must name the command-line option instead.
        assert!(!done.stderr.contains("the code"), "{done:?}");
    }
}

#[cfg(not(feature = "etcd"))]
#[test]
fn an_error_about_etcd_without_its_feature_names_the_feature() {
    let store = TestStore::new();
    let mut command = store.lockreg(["list"]);
    command.env("LOCK_REGISTRY_URL", "etcd://localhost");
    assert_refused(&store, &mut command, "--features etcd");
}

#[cfg(feature = "redis")]
#[test]
fn invalid_redis_topologies_are_usage_errors() {
    let store = TestStore::new();
    for (url, hint) in [
        ("redis://a,b", "`redis+cluster:`"),
        ("redis+sentinel://a,b", "write `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`"),
        ("redis+cluster://a,b/1", "number 0"),
        ("redis+cluster://a,a", "twice"),
        ("redis+quorum://a,b", "write `redis+quorum://HOST:PORT,HOST:PORT,HOST:PORT`"),
        ("redis+quorum://a,b,c?layout=redisson", "`native`"),
        ("redis+unix://run/redis.sock", "write `redis+unix:///PATH`"),
        ("redis://a?ca=ca.pem", "`rediss://`"),
    ] {
        assert_refused(&store, store.lockreg(["list"]).env("LOCK_REGISTRY_URL", url), hint);
    }
    let mut command = store.lockreg(["list"]);
    command.env("LOCK_REGISTRY_URL", "redis://a").env("LOCK_REGISTRY_REPLICA_TIMEOUT", "3s");
    assert_refused(&store, &mut command, "LOCK_REGISTRY_REPLICA_TIMEOUT is 3s");
}

#[cfg(not(feature = "redis-tls"))]
#[test]
fn an_error_about_redis_tls_without_its_feature_names_the_feature() {
    let store = TestStore::new();
    for kind in ["", "+sentinel", "+cluster", "+quorum"] {
        let url = format!("rediss{kind}://localhost");
        let hint = "--features redis-tls";
        assert_refused(&store, store.lockreg(["list"]).env("LOCK_REGISTRY_URL", url), hint);
    }
}

#[test]
fn invalid_keys_are_usage_errors() {
    let store = TestStore::new();
    for subcommand in [&["run"][..], &["hold"], &["show"], &["break", "--yes"]] {
        for (key, hint) in [("", "must not be empty"), (&"k".repeat(4_097), "4097")] {
            let mut command = store.lockreg([]);
            command.args(subcommand).arg(key);
            if subcommand == ["run"] {
                command.args(["--", "true"]);
            }
            assert_refused(&store, &mut command, hint);
        }
        let mut command = store.lockreg([]);
        command.args(subcommand).arg(std::ffi::OsStr::from_bytes(b"\xff"));
        if subcommand == ["run"] {
            command.args(["--", "true"]);
        }
        assert_refused(&store, &mut command, "not UTF-8");
    }
}

#[test]
fn keys_with_special_characters_are_distinct_locks() {
    let store = TestStore::new();
    let long = "k".repeat(4_096);
    let keys =
        ["/", "..", "a b", "'", "\"", "$(x)", "🔒", "\u{202e}abc", "\n", "%2F", long.as_str()];
    for key in keys {
        let done =
            store.run(["--json", "run", key, "--", "sh", "-c", "printf %s \"$LOCKREG_KEY\""]);
        assert_eq!((done.status, done.stdout.as_str()), (0, key));
    }
    // All are held at the same time, so no two keys are the same lock.
    let _held = keys.map(|key| {
        let held = store.start(["hold", "--no-wait", key]);
        assert_eq!(held.next_json()["key"], key);
        held
    });
}

#[test]
fn a_key_that_begins_with_a_dash_is_accepted_after_two_dashes() {
    let store = TestStore::new();
    for key in ["-key-", "--json", "--", "-"] {
        let script = ["sh", "-c", "printf %s \"$LOCKREG_KEY\"; exit 3"];
        let mut command = store.lockreg(["run", "--", key, "--"]);
        let done = CommandOutput::of(command.args(script));
        assert_eq!((done.status, done.stdout.as_str()), (3, key), "{done:?}");

        let mut held = store.start(["hold", "--no-wait", "--", key]);
        assert_eq!(held.next_json()["key"], key);
        assert_eq!(store.run(["show", "--", key]).status, 0);
        assert_eq!(store.run(["break", "--yes", "--", key]).status, 0);
        held.close_stdin();
        assert_eq!(held.wait(), 76);
    }
    assert_eq!(store.run(["run", "--", "-key-", "sh", "-c", "exit 3"]).status, 3);
    // If `--` is missing before a key that begins with `-`, the message contains the correction.
    for arguments in [&["run", "-k", "--", "true"][..], &["hold", "-k"], &["show", "-k"]] {
        let mut command = store.lockreg([]);
        let done = CommandOutput::of(command.args(arguments));
        assert!(done.status == 64 && done.stderr.contains("use '-- -k'"), "{done:?}");
    }
}

#[test]
fn invalid_commands_are_usage_errors() {
    let store = TestStore::new();
    for (arguments, hint) in [
        (&["run", "key"][..], "COMMAND"),
        (&["run", "key", "--"], "COMMAND"),
        (&["run", "nightly", "echo", "hi"], "Write `--` before the command"),
        (&["run", "--", "true"], "KEY"),
        (&["run", "--", "sudo", "true"], "KEY"),
        (&["run", "--", "-key-"], "COMMAND"),
        (&["runn"], "run"),
        (&["show"], "KEY"),
        (&["list", "extra"], "extra"),
        (&["schema", "oracle"], "sqlite"),
        (&["bench", "--tasks", "0"], "1..=1024"),
        (&["bench", "--for", "2h"], "longer than"),
    ] {
        let mut command = store.lockreg([]);
        assert_refused(&store, command.args(arguments), hint);
    }
    assert_eq!(store.run([]).status, 64);
}

#[test]
fn invalid_variables_are_usage_errors() {
    let store = TestStore::new();
    for (name, value, hint) in [
        ("LOCK_REGISTRY_LEESE", "1s", "LOCK_REGISTRY_LEASE"),
        ("LOCK_REGISTRY_LEASE", "1", "no unit"),
        ("LOCK_REGISTRY_URL", "bogus:x", "sqlite"),
        ("LOCK_REGISTRY_URL", "", "empty"),
        ("LOCK_REGISTRY_LOG", "loud=[", "LOCK_REGISTRY_LOG"),
    ] {
        let mut command = store.lockreg(["list"]);
        assert_refused(&store, command.env(name, value), hint);
    }
    let mut without_home = store.lockreg(["list"]);
    assert_refused(
        &store,
        without_home.env_remove("HOME").env("XDG_STATE_HOME", "relative"),
        "--url",
    );
}

#[test]
fn break_without_yes_prints_the_holder_and_releases_nothing() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.next_line();
    let done = store.run(["break", "key"]);
    assert_eq!(done.status, 64);
    assert!(done.stderr.contains("held by worker 7") && done.stderr.contains("--yes"), "{done:?}");
    assert!(store.holder("key").is_some());
    assert_eq!(holder.finish(), 0);
    for arguments in [&["break", "key"][..], &["break", "key", "--yes"]] {
        let mut command = store.lockreg([]);
        let done = CommandOutput::of(command.args(arguments));
        assert_eq!((done.status, done.stdout.as_str()), (1, "key is not locked\n"), "{done:?}");
    }
}

#[test]
fn a_store_that_cannot_be_opened_is_status_69_with_a_cause() {
    let store = TestStore::new();
    let folder = store.folder().to_str().unwrap();
    let garbage = store.path("garbage.db");
    std::fs::write(
        &garbage,
        "this is no database, it is only text that goes on and on".repeat(100),
    )
    .unwrap();
    std::fs::write(store.path("file"), "").unwrap();
    for (url, hint) in [
        (format!("sqlite:{folder}/absent/locks.db"), "absent"),
        (format!("sqlite:{folder}"), "sqlite"),
        (format!("sqlite:{}", garbage.display()), "garbage.db"),
    ] {
        for arguments in [
            &["list"][..],
            &["doctor"],
            &["show", "key"],
            &["run", "key", "--", "true"],
            &["hold", "key"],
        ] {
            let mut command = store.lockreg([]);
            let done = CommandOutput::of(command.args(["--url", &url]).args(arguments));
            assert_eq!(done.status, 69, "{url} {arguments:?}: {done:?}");
            assert!(done.stderr.contains(hint), "{url}: {done:?}");
        }
    }
    let mut command = store.lockreg(["list"]);
    let done = CommandOutput::of(command.env("XDG_STATE_HOME", store.path("file")));
    assert_eq!(done.status, 69, "{done:?}");
    assert!(done.stderr.contains("directory"), "{done:?}");
}

#[test]
fn help_and_version_exit_with_status_0() {
    let store = TestStore::new();
    for arguments in [&["--help"][..], &["run", "--help"], &["-h"], &["--version"]] {
        let mut command = store.lockreg([]);
        let done = CommandOutput::of(command.args(arguments));
        assert_eq!((done.status, done.stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(!done.stdout.is_empty());
    }
    let help = store.run(["--help"]).stdout;
    for status in ["0", "1", "64", "69", "70", "71", "74", "75", "76", "126", "127"] {
        let line = format!("\n  {status} ");
        assert!(help.contains(&line), "{status}: {help}");
    }
    let help = store.run(["bench", "--help"]).stdout;
    for limit in ["1024", "1h", "5 million"] {
        assert!(help.contains(limit), "{limit}: {help}");
    }
}
