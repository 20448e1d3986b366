//! Only one process at a time runs its command, even if many are started at once.

use crate::support::{TestProcess, TestStore, contents, wait_until};

const PROCESSES: usize = 20;

/// A script that fails if another process is in its critical section. It appends its token to a
/// file.
const CRITICAL: &str = r#"
    set -C
    { : > "$T/inside"; } 2>/dev/null || { echo two at once >> "$T/violations"; exit 99; }
    echo "$LOCKREG_FENCING_TOKEN" >> "$T/tokens"
    read -r _
    rm "$T/inside"
"#;

#[test]
fn exactly_one_of_many_processes_that_do_not_wait_runs() {
    let store = TestStore::new();
    let start = || {
        let mut command =
            store.lockreg(["run", "--no-wait", "nightly", "--", "sh", "-c", CRITICAL]);
        // On a loaded machine, each process may wait long for the file.
        command.env("LOCK_REGISTRY_TIMEOUT", "60s").env("LOCK_REGISTRY_BUSY_TIMEOUT", "50s");
        TestProcess::start(&mut command)
    };
    let mut processes: Vec<TestProcess> = (0..PROCESSES).map(|_| start()).collect();

    // The command of the only holder waits for the end of its stdin.
    wait_until("all but one to be refused", || {
        processes.retain_mut(|process| match process.try_wait() {
            Some(status) => {
                assert_eq!(status.code(), Some(75));
                false
            }
            None => true,
        });
        processes.len() == 1
    });
    let runner = processes.pop().unwrap();
    assert_eq!(runner.finish(), 0);
    assert_eq!(contents(&store.path("tokens")).lines().count(), 1);
    assert_eq!(store.holder("nightly"), None);
}

#[test]
fn many_waiting_processes_run_one_after_the_other_with_increasing_tokens() {
    let store = TestStore::new();
    let processes: Vec<TestProcess> = (0..PROCESSES)
        .map(|_| {
            let mut process =
                store.start(["run", "--wait", "80s", "nightly", "--", "sh", "-c", CRITICAL]);
            process.close_stdin();
            process
        })
        .collect();
    for process in processes {
        assert_eq!(process.finish(), 0);
    }
    assert_eq!(contents(&store.path("violations")), "");
    let tokens: Vec<u64> =
        contents(&store.path("tokens")).lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), PROCESSES);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn several_keys_are_locked_together_and_the_busy_one_is_named() {
    let store = TestStore::new();
    let mut holder = store.start(["hold", "b"]);
    holder.next_line();
    let refused = store.run(["run", "--no-wait", "--also", "b", "a", "--", "true"]);
    assert_eq!(refused.status, 75, "{}", refused.stderr);
    assert!(refused.stderr.contains("b is held by"), "{}", refused.stderr);
    assert_eq!(store.holder("a"), None);
    let waiting = store.start(["run", "--also", "b", "a", "--", "true"]);
    waiting.wait_for_stderr("waiting for b, held by");
    holder.close_stdin();
    assert_eq!(holder.finish(), 0);
    assert_eq!(waiting.finish(), 0);
    assert_eq!((store.holder("a"), store.holder("b")), (None, None));
}

#[test]
fn more_units_than_permits_are_refused_with_the_name_of_the_option() {
    let store = TestStore::new();
    let refused = store.run(["run", "--permits", "3", "--take", "4", "s", "--", "true"]);
    assert_eq!(refused.status, 64, "{}", refused.stderr);
    assert!(refused.stderr.contains("--take is 4"), "{}", refused.stderr);
}

#[test]
fn different_keys_and_namespaces_are_independent() {
    let store = TestStore::new();
    let hold = |arguments: [&str; 4]| {
        let held = store.start(arguments);
        held.next_line();
        held
    };
    let one = hold(["hold", "--no-wait", "a", "--json"]);
    let other = hold(["hold", "--no-wait", "b", "--json"]);
    let other_namespace = hold(["hold", "--no-wait", "a", "--namespace=elsewhere"]);
    for held in [one, other, other_namespace] {
        assert_eq!(held.finish(), 0);
    }
}
