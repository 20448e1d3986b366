//! Runs seeded trials of the simulation, and checks that none violates a property. The long form,
//! which `.ci/run` selects with `SIMULATION=long`, exceeds a million grants.

use std::env;
use std::sync::atomic::{AtomicU64, Ordering};

use lock_registry_simulation::{TrialModes, fault_profile, run};
use registry_testkit::seed::{Seed, Seeds, assert_repeatable};

/// The numbers of trials in the short and the long form, and the number of grants of each trial.
const SHORT: u64 = 200;
const LONG: u64 = 600;
const SHORT_OF_ALL_MODES: u64 = 60;
const GRANTS: u64 = 900;

#[test]
fn no_trial_violates_a_property() {
    let totals = assert_no_trial_violates_a_property(TrialModes::Exclusive, SHORT, LONG);
    println!("{totals}");
}

#[test]
fn no_trial_of_all_modes_violates_a_property() {
    let totals = assert_no_trial_violates_a_property(TrialModes::All, SHORT_OF_ALL_MODES, LONG);
    println!("{totals}");
}

/// Runs the trials, which panic at a violation. Returns the totals as text.
fn assert_no_trial_violates_a_property(modes: TrialModes, short: u64, long: u64) -> String {
    let crashes = AtomicU64::new(0);
    let (grants, lost, dropped, faults) =
        (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let count = match env::var("SIMULATION").as_deref() {
        Ok("long") => long,
        Err(_) => short,
        Ok(other) => panic!("SIMULATION is {other:?}; the only value is \"long\""),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let seeds = Seeds::first(count).threads(threads).run(|seed| {
        let outcome = run(seed, fault_profile(seed), modes, GRANTS);
        crashes.fetch_add(outcome.crashes, Ordering::Relaxed);
        grants.fetch_add(outcome.grants, Ordering::Relaxed);
        lost.fetch_add(outcome.lost, Ordering::Relaxed);
        dropped.fetch_add(outcome.dropped, Ordering::Relaxed);
        faults.fetch_add(outcome.faults, Ordering::Relaxed);
    });
    let (grants, lost) = (grants.into_inner(), lost.into_inner());
    let (dropped, faults) = (dropped.into_inner(), faults.into_inner());
    let crashes = crashes.into_inner();
    // The totals of a single replayed seed are not meaningful.
    if seeds == count {
        assert!(grants >= count * GRANTS * 95 / 100, "only {grants} grants");
        assert!(
            lost > grants / 100 && dropped > grants / 100 && faults > grants,
            "the fault profile injects too few faults"
        );
        assert!(modes == TrialModes::Exclusive || crashes > count, "only {crashes} crashes");
    }
    format!(
        "{seeds} seeds, {grants} grants, {lost} lost, {dropped} dropped, {faults} faults, \
         {crashes} crashes"
    )
}

#[test]
fn a_seed_repeats_itself_exactly() {
    for modes in [TrialModes::Exclusive, TrialModes::All] {
        let trial = |seed| run(seed, fault_profile(seed), modes, 300).trace;
        for seed in 0..6 {
            let steps = assert_repeatable(Seed::new(seed), trial);
            assert!(steps.iter().filter(|(.., what)| what.ends_with("granted")).count() >= 300);
        }
        assert_ne!(trial(Seed::new(0)), trial(Seed::new(3)), "seeds differ");
    }
}
