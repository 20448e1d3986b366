//! The simulation finds bugs: each of these, switched on, breaks a promise within some dozens of seeds.
//!
//! Built only with `RUSTFLAGS="--cfg lock_registry_mutants"`; the switch does not exist in any other build.
#![cfg(lock_registry_mutants)]

#[path = "mutants/sql.rs"]
mod sql;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lock_registry_tests::sim::{run, weather};
use registry_core::{Mutant, switch_mutant};
use registry_testkit::seed::Seed;

/// One test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const SEEDS: u64 = 120;
const GRANTS: u64 = 300;

/// What the simulation says to the engine as it is switched now.
fn verdict() -> Result<u64, (Seed, String)> {
    for seed in (0..SEEDS).map(Seed::new) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, weather(seed), GRANTS))) {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|message| (*message).to_owned()));
            return Err((seed, message.unwrap_or_default()));
        }
    }
    Ok(SEEDS)
}

// One test, because the switch is the whole process's; the other one, which uses the engine too, waits for it.
#[test]
fn every_seeded_bug_is_found_and_nothing_else() {
    let _alone = alone();
    // A bug shows as a panic, and would print hundreds of them.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for mutant in Mutant::ALL {
        switch_mutant(Some(mutant));
        match verdict() {
            Ok(seeds) => missed.push(format!("{mutant:?} survived {seeds} seeds")),
            Err((seed, message)) => {
                let promise = message.lines().next().unwrap_or_default();
                println!("{mutant:?}: found by seed {seed}: {promise}");
            }
        }
    }
    switch_mutant(None);
    let sound = verdict();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "{missed:#?}");
    assert_eq!(sound, Ok(SEEDS), "without a bug, nothing is found");
}
