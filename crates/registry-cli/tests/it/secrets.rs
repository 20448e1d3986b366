//! The password of a URL is never printed, even if the URL is invalid or in the wrong place.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use crate::support::{CommandOutput, TestStore};

const URLS: &[&str] = &[
    "redis+cluster://user:canary@localhost/1",
    "redis+cluster://user:canary@a,canary@b",
    "redis+sentinel://user:canary@a,b",
    "redis+sentinel://a,b/main?sentinel_user=canary",
    "redis+sentinel://a,b/main?sentinel_pasword=canary",
    "redis+quorum://user:canary@a,b",
    "redis+unix://user:canary@host/run/redis.sock",
    "redis+unix://user:canary@/absent/redis.sock",
    "rediss+quorum://user:canary@a,b,c?key=canary",
    "rediss://127.0.0.1:1?cert=Cargo.toml&key=canary",
    "postgres://user:can%61ry-canary@localhost/db",
    "postgress://user:canary@localhost/db",
    "user:canary@localhost",
    "redis://user:can/ary@canary",
    "redis://user:canary",
    "sqlite://user:canary@localhost/locks.db",
    "sqlite:///absent/locks.db?password=canary",
    "sqlite:///absent/locks.db?canary",
    "memory:?url=canary",
    "canary",
];

fn output_of(done: &CommandOutput) -> String {
    format!("{}{}", done.stdout, done.stderr)
}

#[test]
fn no_output_contains_the_password_of_the_url() {
    let store = TestStore::new();
    let check_url = |url: &str| {
        for arguments in [
            &["list"][..],
            &["doctor", "--json"],
            &["-vvv", "run", "key", "--", "true"],
            &["hold", "key", "--json"],
        ] {
            let mut by_argument = store.lockreg([]);
            by_argument.args(["--url", url]).args(arguments);
            let mut by_variable = store.lockreg([]);
            by_variable
                .args(arguments)
                .env("LOCK_REGISTRY_URL", url)
                .env("LOCK_REGISTRY_LOG", "trace");
            for command in [&mut by_argument, &mut by_variable] {
                let done = CommandOutput::of(command);
                assert_ne!(done.status, 0);
                assert!(!output_of(&done).contains("canary"), "{url}: {done:?}");
            }
        }
    };
    // Concurrent, because some of the commands retry until a time limit.
    std::thread::scope(|scope| {
        for url in URLS {
            scope.spawn(|| check_url(url));
        }
    });
}

#[test]
fn a_misplaced_url_is_not_printed() {
    let store = TestStore::new();
    let url = "redis://user:canary@localhost/0";
    for arguments in [
        &[url][..],
        &["list", url],
        &["--ulr", url, "list"],
        &["--url", url, "--url", url, "list"],
        &["run", url],
        &["schema", url],
        &["man", url],
        &["bench", "--tasks", url],
        &["run", "--wait", url, "key", "--", "true"],
    ] {
        let mut command = store.lockreg([]);
        let done = CommandOutput::of(command.args(arguments));
        assert_eq!(done.status, 64, "{arguments:?}: {done:?}");
        assert!(!output_of(&done).contains("canary"), "{arguments:?}: {done:?}");
    }
    let done = store.run(["run", "key", "--", url]);
    assert_eq!(done.status, 127, "{done:?}");
    assert!(done.stderr.contains("redis://***@localhost/0"), "{done:?}");
    let with_option = format!("{url}?lease=30s");
    let done = CommandOutput::of(store.lockreg(["list"]).env("LOCK_REGISTRY_LOG", with_option));
    assert_eq!(done.status, 64, "{done:?}");
    assert!(!output_of(&done).contains("canary"), "{done:?}");
    let mut joined = store.lockreg([]);
    let done = CommandOutput::of(joined.args([&format!("--ulr={url}"), "list"]));
    assert!(!output_of(&done).contains("canary"), "{done:?}");
}

#[test]
fn a_misplaced_malformed_url_is_not_printed() {
    let store = TestStore::new();
    for url in [
        &b"redis://user:canary\xff@localhost/0"[..],
        b"redis://user:can'\"\\\tary-canary@localhost/0",
        b"redis://user:x@y@canary\x1b[31m@localhost/0",
        b"user:canary",
        b"canary@localhost",
        b"canary:canary",
    ] {
        let url = OsStr::from_bytes(url);
        for arguments in [&["list"][..], &["--ulr"], &["run", "--wait"], &["bench", "--tasks"]] {
            let mut command = store.lockreg([]);
            // The last two arguments are also parts of the URL. The whole URL must be redacted, not
            // only these parts.
            let done =
                CommandOutput::of(command.args(arguments).arg(url).args(["user:", "redis:"]));
            assert_eq!(done.status, 64, "{arguments:?}: {done:?}");
            assert!(!output_of(&done).contains("canary"), "{arguments:?}: {done:?}");
        }
    }
}
