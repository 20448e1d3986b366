//! `lockreg run`: the environment, status and signals of its command. Also the end of `lockreg
//! hold`.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::support::{CommandOutput, TestProcess, TestStore, contents, is_alive, wait_until};

#[test]
fn the_command_receives_its_arguments_environment_and_streams_unchanged() {
    let store = TestStore::new();
    let odd = std::ffi::OsStr::from_bytes(b"\xff--url=x\n$y");
    let script = r#"printf '%s|%s|%s|' "$LOCKREG_KEY" "$1" "$2"; cat; test "$LOCKREG_FENCING_TOKEN" -gt 0; echo err >&2"#;
    let mut command =
        store.lockreg(["--local", "run", "odd key/ü", "--", "sh", "-c", script, "sh", "--wait"]);
    let mut child = command
        .arg(odd)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"in").unwrap();
    let output = child.wait_with_output().unwrap();
    let mut expected = "odd key/ü|--wait|".as_bytes().to_vec();
    expected.extend_from_slice(odd.as_bytes());
    expected.extend_from_slice(b"|in");
    assert_eq!((output.stdout, output.stderr), (expected, b"err\n".to_vec()));
}

#[test]
fn the_exit_status_is_the_status_of_the_command_as_in_a_shell() {
    let store = TestStore::new();
    for (script, status) in [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 75", 75),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -INT $$", 130),
        // A real-time signal.
        ("kill -40 $$", 168),
    ] {
        assert_eq!(store.run(["run", "key", "--", "sh", "-c", script]).status, status, "{script}");
        assert_eq!(store.holder("key"), None);
    }
}

#[test]
fn a_command_that_cannot_be_executed_acquires_no_lock() {
    let store = TestStore::new();
    let data = store.path("data");
    std::fs::write(&data, "").unwrap();
    for (command, status) in [
        ("absent-command", 127),
        ("./absent/command", 127),
        ("", 127),
        (data.to_str().unwrap(), 126),
        ("/", 126),
    ] {
        let done = store.run(["run", "key", "--", command]);
        assert_eq!(done.status, status, "{command:?}: {done:?}");
        assert!(done.stderr.starts_with("lockreg: error: command "), "{done:?}");
    }
    assert!(!store.path("lock-registry").exists(), "the store was opened");
}

#[test]
fn a_script_without_an_interpreter_line_runs_as_in_a_shell() {
    let store = TestStore::new();
    let script = store.path("script");
    std::fs::write(&script, "exit 9\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(store.run(["run", "key", "--", script.to_str().unwrap()]).status, 9);
}

#[test]
fn a_busy_lock_is_status_75_and_the_holder_is_printed() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "the nightly job", "key"]);
    holder.next_line();
    for arguments in [["run", "--no-wait"], ["run", "--wait=0s"], ["run", "--wait=50ms"]] {
        let mut command = store.lockreg(arguments);
        let done = CommandOutput::of(command.args(["key", "--", "touch"]).arg(store.path("ran")));
        assert_eq!(done.status, 75, "{done:?}");
        assert!(done.stderr.contains("held by the nightly job (for "), "{done:?}");
        assert!(done.stderr.contains("lease ends in"), "{done:?}");
        assert_eq!(done.stdout, "");
    }
    assert!(!store.path("ran").exists());
    assert_eq!(holder.finish(), 0);
}

#[test]
fn a_waiter_prints_the_holder_and_acquires_the_lock_after_its_release() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.next_line();
    let mut waiter = store.start(["run", "key", "--", "echo", "mine"]);
    let line = waiter.wait_for_stderr("waiting for key");
    assert!(line.starts_with("lockreg: waiting for key, held by worker 7 (for "), "{line}");
    assert_eq!(holder.finish(), 0);
    assert_eq!(waiter.next_line(), "mine");
    assert_eq!(waiter.wait(), 0);
}

#[test]
fn sigterm_ends_the_process_group_of_the_command_and_releases_the_lock() {
    let store = TestStore::new();
    for (signal, status) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let mut process =
            store.start(["run", "key", "--", "sh", "-c", "sleep 1000 & echo $! $$; wait"]);
        let pids = process.next_line();
        process.signal(signal);
        assert_eq!(process.wait(), status);
        assert!(pids.split(' ').all(|pid| !is_alive(pid)), "{pids}");
        assert_eq!(store.holder("key"), None);
    }
}

/// Like the first process of a container, a child subreaper inherits orphans. `prctl` sets this
/// attribute (36), and `exec` keeps it.
#[test]
fn as_the_first_process_of_a_container_lockreg_ends_with_the_last_process_of_the_group() {
    const START: &str = "\
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])";
    let store = TestStore::new();
    let mut command = Command::new("python3");
    command
        .args(["-c", START, env!("CARGO_BIN_EXE_lockreg"), "run", "--grace", "1h", "key", "--"])
        .args(["sh", "-c", "sleep 1000 & echo up; wait"])
        .env("XDG_STATE_HOME", store.folder());
    let mut process = TestProcess::start(&mut command);
    assert_eq!(process.next_line(), "up");
    // After the end of the shell, `sleep` becomes a zombie child of `lockreg`.
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(), 143);
    assert_eq!(store.holder("key"), None);
}

#[test]
fn signals_are_forwarded_to_the_command() {
    let store = TestStore::new();
    let script = r#"
        trap 'echo usr1' USR1
        trap 'echo usr2' USR2
        trap 'echo int; exit 7' INT
        echo up
        while :; do sleep 0.1; done
    "#;
    let mut process = store.start(["run", "key", "--", "sh", "-c", script]);
    assert_eq!(process.next_line(), "up");
    for (signal, line) in
        [(Signal::SIGUSR1, "usr1"), (Signal::SIGUSR2, "usr2"), (Signal::SIGINT, "int")]
    {
        process.signal(signal);
        assert_eq!(process.next_line(), line);
    }
    assert_eq!(process.wait(), 7);
}

#[test]
fn a_command_that_ignores_sigterm_is_killed_after_the_grace_time() {
    let store = TestStore::new();
    for grace in ["0s", "200ms"] {
        let script = "trap '' TERM; echo $$; while :; do sleep 1; done";
        let mut process = store.start(["run", "--grace", grace, "key", "--", "sh", "-c", script]);
        let pid = process.next_line();
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(), 137);
        assert!(!is_alive(&pid));
        assert_eq!(store.holder("key"), None);
    }
}

#[test]
fn after_sigkill_the_lock_is_held_until_the_last_process_of_the_group_has_ended() {
    let store = TestStore::new();
    // `setsid` leaves the group, and does not reap its child. The killed child thus stays in the
    // group, like a process that the kernel cannot end yet.
    let inner = r#"trap "" TERM; sleep 1000 & echo $! $$; exec setsid sleep 1000"#;
    let script = format!("trap '' TERM; sh -c '{inner}' & wait");
    let mut process = store.start(["run", "--grace", "0s", "key", "--", "sh", "-c", &script]);
    let pids = process.next_line();
    let (child, parent) = pids.split_once(' ').unwrap();
    wait_until("the parent to leave the group", || {
        contents(Path::new(&format!("/proc/{parent}/comm"))) == "sleep\n"
    });
    process.signal(Signal::SIGTERM);
    wait_until("SIGKILL", || !is_alive(child));
    assert!(store.holder("key").is_some());
    let parent = nix::unistd::Pid::from_raw(parent.parse().unwrap());
    nix::sys::signal::kill(parent, Signal::SIGKILL).unwrap();
    assert_eq!(process.wait(), 137);
    assert_eq!(store.holder("key"), None);
}

#[test]
fn a_stopped_command_can_still_be_ended() {
    let store = TestStore::new();
    let mut process = store.start(["run", "key", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = process.next_line();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.parse().unwrap()), Signal::SIGSTOP)
        .unwrap();
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(), 143);
}

#[test]
fn a_waiter_that_receives_a_signal_never_runs_its_command() {
    let store = TestStore::new();
    let holder = store.start(["hold", "key"]);
    holder.next_line();
    for (signal, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let mut command = store.lockreg(["run", "key", "--", "touch"]);
        let mut waiter = TestProcess::start(command.arg(store.path("ran")));
        waiter.wait_for_stderr("waiting for key");
        waiter.signal(signal);
        assert_eq!(waiter.wait(), status);
    }
    let mut waiter = store.start(["hold", "key"]);
    waiter.wait_for_stderr("waiting for key");
    waiter.signal(Signal::SIGTERM);
    assert_eq!(waiter.wait(), 143);
    assert_eq!(holder.finish(), 0);
    assert!(!store.path("ran").exists());
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let store = TestStore::new();
    let mut command = Command::new("sh");
    command.args([
        "-c",
        r#"trap '' HUP; exec "$@""#,
        "sh",
        env!("CARGO_BIN_EXE_lockreg"),
        "run",
        "key",
        "--",
    ]);
    command.args(["sh", "-c", "trap 'echo usr1' USR1; echo up; while :; do sleep 0.1; done"]);
    let mut process = TestProcess::start(command.env("XDG_STATE_HOME", store.folder()));
    assert_eq!(process.next_line(), "up");
    process.signal(Signal::SIGHUP);
    process.signal(Signal::SIGUSR1);
    assert_eq!(process.next_line(), "usr1");
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(), 143);
}

#[test]
fn the_status_of_the_command_is_reported_even_if_sigchld_was_ignored_at_the_start() {
    let store = TestStore::new();
    let mut command = Command::new("env");
    command
        .args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_lockreg")])
        .args(["run", "key", "--", "sh", "-c", "grep SigIgn: /proc/self/status; exit 7"])
        .env("XDG_STATE_HOME", store.folder());
    let done = CommandOutput::of(&mut command);
    assert_eq!(done.status, 7, "{done:?}");
    let ignored = done.stdout.split_whitespace().nth(1).unwrap();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    assert_eq!(ignored & (1 << (Signal::SIGCHLD as u32 - 1)), 0);
}

#[test]
fn the_command_inherits_no_blocked_signals() {
    let store = TestStore::new();
    let done = store.run(["run", "key", "--", "cat", "/proc/self/status"]);
    let mask = |name: &str| {
        let line = done.stdout.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    assert_eq!(mask("SigBlk:"), 0);
    assert_eq!(mask("SigIgn:") & (1 << (Signal::SIGPIPE as u32 - 1)), 0);
}

#[test]
fn a_background_process_of_an_ended_command_continues() {
    let store = TestStore::new();
    let script = "sleep 1000 > /dev/null 2>&1 & echo $! > \"$T/pid\"";
    let done = store.run(["run", "key", "--", "sh", "-c", script]);
    assert_eq!(done.status, 0, "{done:?}");
    let pid = contents(&store.path("pid")).trim().to_owned();
    assert!(is_alive(&pid));
    let _ =
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.parse().unwrap()), Signal::SIGKILL);
}

#[test]
fn nested_locks_are_released_together() {
    let store = TestStore::new();
    let exe = env!("CARGO_BIN_EXE_lockreg");
    let script = "echo $LOCKREG_KEY; sleep 1000 & echo $!; wait";
    let mut outer =
        store.start(["run", "outer", "--", exe, "run", "inner", "--", "sh", "-c", script]);
    assert_eq!(outer.next_line(), "inner");
    let pid = outer.next_line();
    assert!(store.holder("outer").is_some() && store.holder("inner").is_some());
    // The inner command is in a process group of its own, which the outer `lockreg` does not know.
    outer.signal(Signal::SIGTERM);
    assert_eq!(outer.wait(), 143);
    wait_until("the inner command to be gone", || !is_alive(&pid));
    assert_eq!((store.holder("outer"), store.holder("inner")), (None, None));
}

#[test]
fn hold_ends_with_its_stdin_or_a_signal_and_releases_the_lock() {
    let store = TestStore::new();
    let mut holder = store.start(["hold", "key"]);
    holder.next_line();
    holder.write_line("what is written is thrown away");
    assert!(store.holder("key").is_some());
    assert_eq!(holder.finish(), 0);
    assert_eq!(store.holder("key"), None);

    let mut holder = store.start(["hold", "key"]);
    holder.next_line();
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.wait(), 0);
    assert_eq!(store.holder("key"), None);
}
