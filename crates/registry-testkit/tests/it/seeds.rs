//! Tests the replay of one seed through the environment variable, in a child process.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::env;
use std::process::Command;

use registry_testkit::seed::{Seed, Seeds, VARIABLE};

/// Set only in the child process, in which the first test below fails on purpose.
const CHILD: &str = "SEEDS_TEST_CHILD";

#[test]
fn a_trial_that_fails_at_seed_17() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let ran = Seeds::first(100).threads(2).run(|seed| assert!(seed != Seed::new(17), "broken"));
    println!("ran {ran} seeds");
}

fn run_child_test(seed: Option<&str>) -> (bool, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "seeds::a_trial_that_fails_at_seed_17", "--nocapture"])
        .env(CHILD, "1");
    command.env_remove(VARIABLE).envs(seed.map(|seed| (VARIABLE, seed)));
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn a_failing_seed_is_printed_with_its_replay_command() {
    let (passed, text) = run_child_test(None);
    assert!(!passed, "{text}");
    let replay = format!("{VARIABLE}=17 cargo test seeds::a_trial_that_fails_at_seed_17");
    assert!(text.contains(&replay), "{text}");
}

#[test]
fn the_named_seed_alone_is_replayed() {
    let (passed, text) = run_child_test(Some("17"));
    assert!(!passed && text.contains("broken"), "{text}");
    let (passed, text) = run_child_test(Some("0x10"));
    assert!(passed && text.contains("ran 1 seeds"), "{text}");
}

#[test]
fn a_seed_that_is_not_a_number_is_rejected() {
    let (passed, text) = run_child_test(Some("seventeen"));
    assert!(!passed && text.contains("not a number"), "{text}");
}
