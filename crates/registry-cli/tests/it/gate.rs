//! The command begins only when `lockreg` has made sure that the lock is held, and never without it.

use std::io::{PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;
use std::process::{Child, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::Signal;

use crate::support::{Process, Store, children, is_alive, plays, until};

/// What `lockreg` with the process id `parent` starts for a command that makes the file `ran`, and the writing end of its gate.
fn shim(store: &Store, parent: u32) -> (Child, PipeWriter) {
    let (waits_at, gate) = std::io::pipe().unwrap();
    // Whatever else this process starts meanwhile inherits it as well, which harms nobody.
    fcntl(&waits_at, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let mut command = store.lockreg(["__exec"]);
    command.arg(parent.to_string()).arg(waits_at.as_raw_fd().to_string());
    command.args(["background", "/bin/sh", "sh", "-c", RUN]).stdin(Stdio::null());
    (command.spawn().unwrap(), gate)
}

const RUN: &str = r#": > "$T/ran""#;

#[test]
fn the_command_begins_when_it_is_told_to() {
    let store = Store::new();
    let (mut child, mut gate) = shim(&store, std::process::id());
    gate.write_all(b"!").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(store.path("ran").exists());
}

#[test]
fn the_command_never_begins_if_the_gate_is_closed() {
    let store = Store::new();
    let (mut child, gate) = shim(&store, std::process::id());
    drop(gate);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!store.path("ran").exists());
}

#[test]
fn the_command_never_begins_if_lockreg_has_died_before_it_could_be_tied_to_it() {
    let store = Store::new();
    // It is a child of this test, as that of a dead `lockreg` is a child of somebody else.
    let (mut child, mut gate) = shim(&store, 1);
    // It may be gone already.
    let _ = gate.write_all(b"!");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!store.path("ran").exists());
}

#[test]
fn the_command_never_begins_if_the_gate_cannot_be_watched() {
    let store = Store::new();
    let parent = std::process::id().to_string();
    let done = store.done(["__exec", &parent, "1000000", "background", "/bin/sh", "sh", "-c", RUN]);
    assert_eq!(done.status, 71, "{done:?}");
    assert!(done.stderr.contains("cannot wait for lockreg"), "{done:?}");
    assert!(!store.path("ran").exists());
}

/// A `lockreg run` that was stopped after it had got the lock and before its command began, and has lost the lock since.
fn overtaken() -> (Store, Process) {
    let mut caught = None;
    until("lockreg to be caught at the right moment", || {
        let store = Store::new();
        let mut process =
            store.start(["run", "--lease", "1s", "--grace", "10m", "job", "--", "sh", "-c", RUN]);
        // With its first child, the watchdog, it has the lock. The second one becomes the command.
        while children(process.pid()).is_empty() && process.try_wait().is_none() {}
        process.signal(Signal::SIGSTOP);
        assert_eq!(store.done(["run", "--wait", "80s", "job", "--", "true"]).status, 0);
        // What has not begun by now waits.
        if !store.path("ran").exists() {
            caught = Some((store, process));
        }
        caught.is_some()
    });
    caught.unwrap()
}

#[test]
fn a_command_that_has_not_begun_when_the_lock_is_lost_never_does() {
    let (store, mut process) = overtaken();
    process.signal(Signal::SIGCONT);
    assert_eq!(process.wait(), 76);
    assert!(process.complaints().contains("lost"));
    assert!(!store.path("ran").exists());
}

#[test]
fn a_command_that_has_not_begun_when_lockreg_is_killed_never_does() {
    let (store, mut process) = overtaken();
    let started = children(process.pid());
    process.signal(Signal::SIGKILL);
    process.wait();
    until("all that it has started to be gone", || !started.iter().any(|pid| is_alive(pid)));
    assert!(!started.iter().any(|pid| plays(pid, "__exec")));
    assert!(!store.path("ran").exists());
}
