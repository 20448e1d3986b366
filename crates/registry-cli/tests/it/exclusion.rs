//! Of many processes started at once, only one at a time runs its command.

use crate::support::{Process, Store, contents, until};

const TOGETHER: usize = 20;

/// Fails if another process is in the critical section. Appends the token to a file.
const CRITICAL: &str = r#"
    set -C
    { : > "$T/inside"; } 2>/dev/null || { echo two at once >> "$T/violations"; exit 99; }
    echo "$LOCKREG_FENCING_TOKEN" >> "$T/tokens"
    read -r _
    rm "$T/inside"
"#;

#[test]
fn of_many_that_do_not_wait_exactly_one_runs() {
    let store = Store::new();
    let start = || store.start(["run", "--no-wait", "nightly", "--", "sh", "-c", CRITICAL]);
    let mut together: Vec<Process> = (0..TOGETHER).map(|_| start()).collect();

    // The winner waits for the end of its stdin.
    until("all but one to be refused", || {
        together.retain_mut(|process| match process.try_wait() {
            Some(status) => {
                assert_eq!(status.code(), Some(75));
                false
            }
            None => true,
        });
        together.len() == 1
    });
    let winner = together.pop().unwrap();
    assert_eq!(winner.finish(), 0);
    assert_eq!(contents(&store.path("tokens")).lines().count(), 1);
    assert_eq!(store.holder("nightly"), None);
}

#[test]
fn of_many_that_wait_all_run_one_after_the_other_with_rising_tokens() {
    let store = Store::new();
    let together: Vec<Process> = (0..TOGETHER)
        .map(|_| {
            let mut process =
                store.start(["run", "--wait", "80s", "nightly", "--", "sh", "-c", CRITICAL]);
            process.close_stdin();
            process
        })
        .collect();
    for process in together {
        assert_eq!(process.finish(), 0);
    }
    assert_eq!(contents(&store.path("violations")), "");
    let tokens: Vec<u64> =
        contents(&store.path("tokens")).lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), TOGETHER);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn different_keys_and_namespaces_do_not_meet() {
    let store = Store::new();
    let hold = |arguments: [&str; 4]| {
        let held = store.start(arguments);
        held.says();
        held
    };
    let one = hold(["hold", "--no-wait", "a", "--json"]);
    let other = hold(["hold", "--no-wait", "b", "--json"]);
    let elsewhere = hold(["hold", "--no-wait", "a", "--namespace=elsewhere"]);
    for held in [one, other, elsewhere] {
        assert_eq!(held.finish(), 0);
    }
}
