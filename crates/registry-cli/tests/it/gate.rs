//! The gate is a pipe at which the process of the command waits. `lockreg` writes the start message
//! to the gate after it has verified that the lock is held. Without this message, the command never
//! starts.

use std::io::{PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;
use std::process::{Child, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::Signal;

use crate::support::{TestProcess, TestStore, children, is_alive, wait_until};

/// Starts the process that waits at the gate and then executes the command, as `lockreg run` does.
/// `parent` is the process id that it expects of its parent. The command creates the file `ran`.
/// Also returns the write end of the gate.
fn shim(store: &TestStore, parent: u32) -> (Child, PipeWriter) {
    let (gate_reader, gate) = std::io::pipe().unwrap();
    // Other processes that the tests start in the meantime inherit the read end too, which has no
    // effect.
    fcntl(&gate_reader, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let mut command = store.lockreg(["__exec"]);
    command.arg(parent.to_string()).arg(gate_reader.as_raw_fd().to_string());
    command.args(["background", "/bin/sh", "sh", "-c", RUN]).stdin(Stdio::null());
    (command.spawn().unwrap(), gate)
}

const RUN: &str = r#": > "$T/ran""#;

#[test]
fn the_command_starts_after_the_start_message() {
    let store = TestStore::new();
    let (mut child, mut gate) = shim(&store, std::process::id());
    gate.write_all(b"!").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(store.path("ran").exists());
}

#[test]
fn the_command_never_starts_if_the_gate_is_closed() {
    let store = TestStore::new();
    let (mut child, gate) = shim(&store, std::process::id());
    drop(gate);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!store.path("ran").exists());
}

#[test]
fn the_command_never_starts_if_lockreg_died_before_the_death_signal_was_requested() {
    let store = TestStore::new();
    // The parent of the child is this test and not process 1. The child of a `lockreg` that died
    // would also have a parent that it does not expect.
    let (mut child, mut gate) = shim(&store, 1);
    // The child may have ended already.
    let _ = gate.write_all(b"!");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!store.path("ran").exists());
}

#[test]
fn the_command_never_starts_if_the_gate_cannot_be_read() {
    let store = TestStore::new();
    let parent = std::process::id().to_string();
    let done = store.run(["__exec", &parent, "1000000", "background", "/bin/sh", "sh", "-c", RUN]);
    assert_eq!(done.status, 71, "{done:?}");
    assert!(done.stderr.contains("cannot wait for lockreg"), "{done:?}");
    assert!(!store.path("ran").exists());
}

/// Returns a `lockreg run` that SIGSTOP has stopped after it acquired the lock and started
/// `started` processes, but before its command started. Its lease has ended since.
fn stopped_after(started: usize) -> (TestStore, TestProcess) {
    let mut caught = None;
    wait_until("lockreg to be caught at the right moment", || {
        let store = TestStore::new();
        let mut process =
            store.start(["run", "--lease", "1s", "--grace", "10m", "job", "--", "sh", "-c", RUN]);
        while children(process.pid()).len() < started {
            if process.try_wait().is_some() {
                // Too late: `lockreg` has already ended.
                return false;
            }
        }
        process.signal(Signal::SIGSTOP);
        assert_eq!(store.run(["run", "--wait", "80s", "job", "--", "true"]).status, 0);
        // If the command has not started by now, it waits at the gate.
        if children(process.pid()).len() == started && !store.path("ran").exists() {
            caught = Some((store, process));
        }
        caught.is_some()
    });
    caught.unwrap()
}

/// The first process is the watchdog, and the second becomes the command.
const WATCHDOG: usize = 1;
const WATCHDOG_AND_COMMAND: usize = 2;

#[test]
fn a_command_that_has_not_started_when_the_lock_is_lost_never_starts() {
    let (store, mut process) = stopped_after(WATCHDOG_AND_COMMAND);
    process.signal(Signal::SIGCONT);
    assert_eq!(process.wait(), 76);
    assert!(!store.path("ran").exists());
}

#[test]
fn a_loss_is_detected_before_the_command_starts() {
    let (store, mut process) = stopped_after(WATCHDOG);
    process.signal(Signal::SIGCONT);
    assert_eq!(process.wait(), 76);
    let stderr = process.remaining_stderr();
    // A message about the command would mean that it was started and then ended.
    assert!(stderr.contains("lost") && !stderr.contains("the command"), "{stderr}");
    assert!(!store.path("ran").exists());
}

#[test]
fn a_command_that_has_not_started_when_lockreg_is_killed_never_starts() {
    let (store, mut process) = stopped_after(WATCHDOG_AND_COMMAND);
    let started = children(process.pid());
    process.signal(Signal::SIGKILL);
    process.wait();
    wait_until("all that it has started to be gone", || !started.iter().any(|pid| is_alive(pid)));
    assert!(!store.path("ran").exists());
}
