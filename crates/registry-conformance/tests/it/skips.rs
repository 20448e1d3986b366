//! Checks that no backend passes by running no clauses. `check` compares the numbers and skips that
//! the caller states with the suite and with the store's features.

use std::panic::catch_unwind;

use crate::tiny::{StoreBug, Tiny};
use registry_conformance::{all_clauses, check, run};

/// The needs of clauses that the store [`Tiny`] does not meet.
const WITHOUT: [&str; 11] = [
    "fair",
    "fair_on_request",
    "shared",
    "upgradable",
    "permits",
    "values",
    "waiters",
    "namespaces",
    "restart",
    "wipe",
    "remote",
];

/// Returns all clauses, as `conformance!` emits them.
fn emitted() -> Vec<(&'static str, &'static str)> {
    all_clauses().iter().map(|clause| (clause.theme, clause.name)).collect()
}

/// Returns how many clauses run on [`Tiny`], and how many are skipped.
fn numbers() -> (usize, usize) {
    let is_skipped = |clause: &&registry_conformance::Clause| {
        clause.needs.iter().any(|need| WITHOUT.contains(&need.name()))
    };
    let skips = all_clauses().iter().filter(is_skipped).count();
    (all_clauses().len() - skips, skips)
}

/// Runs `check` and returns its panic message, if any.
fn panic_message(
    runs: usize,
    skips: usize,
    without: &[&str],
    emitted: &[(&str, &str)],
) -> Option<String> {
    let result = catch_unwind(|| check(&Tiny(StoreBug::None), runs, skips, without, emitted));
    result.err().map(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(_) => "a panic without a text".to_owned(),
    })
}

#[test]
fn correct_numbers_pass() {
    let (runs, skips) = numbers();
    assert_eq!(panic_message(runs, skips, &WITHOUT, &emitted()), None);
}

#[test]
fn wrong_numbers_are_found() {
    let (runs, skips) = numbers();
    assert!(
        panic_message(runs - 1, skips, &WITHOUT, &emitted())
            .unwrap()
            .contains("differ from the stated numbers")
    );
    assert!(
        panic_message(runs, skips + 1, &WITHOUT, &emitted())
            .unwrap()
            .contains("differ from the stated numbers")
    );
}

#[test]
fn a_feature_of_the_store_must_not_be_skipped() {
    let (runs, skips) = numbers();
    for feature in
        ["fencing", "wakes", "reports_invalidations", "labels", "inspect", "fault_free", "handoff"]
    {
        let mut without = WITHOUT.to_vec();
        without.push(feature);
        let panic_message = panic_message(runs, skips, &without, &emitted()).unwrap();
        assert!(
            panic_message.contains(&format!("the store has {feature}: it must not be skipped")),
            "{panic_message}"
        );
    }
}

#[test]
fn a_missing_feature_must_be_declared() {
    let (runs, skips) = numbers();
    for missing in WITHOUT {
        let without: Vec<_> = WITHOUT.into_iter().filter(|need| *need != missing).collect();
        let panic_message = panic_message(runs, skips, &without, &emitted()).unwrap();
        assert!(
            panic_message.contains(&format!("the store has no {missing}: list it in `without`")),
            "{panic_message}"
        );
    }
}

#[test]
fn an_unknown_need_is_found() {
    let (runs, skips) = numbers();
    let panic_message = panic_message(runs, skips, &["fencign"], &emitted()).unwrap();
    assert!(panic_message.contains("`fencign` is not a need"), "{panic_message}");
}

#[test]
fn a_clause_that_was_not_emitted_is_found() {
    let (runs, skips) = numbers();
    assert!(
        panic_message(runs, skips, &WITHOUT, &emitted()[1..])
            .unwrap()
            .contains("every clause becomes a test")
    );
}

#[test]
fn a_clause_that_cannot_run_fails_instead_of_passing() {
    for (theme, name) in [
        ("spi", "queued_claims_are_granted_in_the_order_of_their_arrival"),
        ("fencing", "tokens_increase_after_a_restart"),
        ("fencing", "tokens_increase_after_a_restart_without_data"),
        ("inspect", "namespaces_share_no_locks"),
        ("exclusion", "a_lock_that_another_process_holds_is_busy_here"),
        ("shared", "readers_of_two_processes_hold_together"),
        ("upgradable", "an_upgrade_without_readers_is_granted_at_once"),
        ("permits", "a_process_holds_several_permits"),
        ("fair_queue", "claims_that_join_are_granted_in_the_order_of_arrival"),
    ] {
        assert!(
            catch_unwind(|| run(Tiny(StoreBug::None), theme, name)).is_err(),
            "{name} ran without what it needs"
        );
    }
}
