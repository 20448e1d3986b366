//! Checks that no backend passes by running nothing: `check` compares the caller's numbers and
//! skips with the suite and the store.

mod tiny;

use std::panic::catch_unwind;

use registry_conformance::{all_clauses, check, run};
use tiny::{Bug, Tiny};

const WITHOUT: [&str; 5] = ["fair", "namespaces", "restart", "wipe", "remote"];

fn emitted() -> Vec<(&'static str, &'static str)> {
    all_clauses().iter().map(|clause| (clause.theme, clause.name)).collect()
}

fn figures() -> (usize, usize) {
    let is_skipped = |clause: &&registry_conformance::Clause| {
        clause.needs.iter().any(|need| WITHOUT.contains(&need.name()))
    };
    let skips = all_clauses().iter().filter(is_skipped).count();
    (all_clauses().len() - skips, skips)
}

/// Runs `check` and returns its panic message, if any.
fn complaint(
    runs: usize,
    skips: usize,
    without: &[&str],
    emitted: &[(&str, &str)],
) -> Option<String> {
    let end = catch_unwind(|| check(&Tiny(Bug::None), runs, skips, without, emitted));
    end.err().map(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(_) => "a panic without a text".to_owned(),
    })
}

#[test]
fn the_truth_passes() {
    let (runs, skips) = figures();
    assert_eq!(complaint(runs, skips, &WITHOUT, &emitted()), None);
}

#[test]
fn wrong_figures_are_found() {
    let (runs, skips) = figures();
    assert!(
        complaint(runs - 1, skips, &WITHOUT, &emitted())
            .unwrap()
            .contains("not what the caller states")
    );
    assert!(
        complaint(runs, skips + 1, &WITHOUT, &emitted())
            .unwrap()
            .contains("not what the caller states")
    );
}

#[test]
fn what_a_store_can_do_must_not_be_skipped() {
    let (runs, skips) = figures();
    for can in
        ["fencing", "wakes", "reports_invalidations", "labels", "inspect", "faithful", "handoff"]
    {
        let mut without = WITHOUT.to_vec();
        without.push(can);
        let complaint = complaint(runs, skips, &without, &emitted()).unwrap();
        assert!(
            complaint.contains(&format!("the store has {can}: it must not be skipped")),
            "{complaint}"
        );
    }
}

#[test]
fn what_a_store_cannot_do_must_be_declared() {
    let (runs, skips) = figures();
    for cannot in WITHOUT {
        let without: Vec<_> = WITHOUT.into_iter().filter(|need| *need != cannot).collect();
        let complaint = complaint(runs, skips, &without, &emitted()).unwrap();
        assert!(
            complaint.contains(&format!("the store has no {cannot}: say so in `without`")),
            "{complaint}"
        );
    }
}

#[test]
fn a_need_that_nobody_knows_is_found() {
    let (runs, skips) = figures();
    let complaint = complaint(runs, skips, &["fencign"], &emitted()).unwrap();
    assert!(complaint.contains("`fencign` is nothing a clause needs"), "{complaint}");
}

#[test]
fn a_clause_that_was_not_emitted_is_found() {
    let (runs, skips) = figures();
    assert!(
        complaint(runs, skips, &WITHOUT, &emitted()[1..])
            .unwrap()
            .contains("every clause becomes a test")
    );
}

#[test]
fn a_clause_that_cannot_run_fails_instead_of_passing() {
    for (theme, name) in [
        ("spi", "queued_claims_are_granted_in_the_order_of_their_arrival"),
        ("fencing", "tokens_grow_over_a_restart"),
        ("fencing", "tokens_grow_even_when_the_store_lost_its_data"),
        ("inspect", "namespaces_share_no_locks"),
        ("exclusion", "a_lock_that_another_process_holds_is_busy_here"),
    ] {
        assert!(
            catch_unwind(|| run(Tiny(Bug::None), theme, name)).is_err(),
            "{name} ran without what it needs"
        );
    }
}
