//! Checks that planted bugs (mutants) are found. Most mutants of the engine violate a property of
//! the simulation within 120 seeds. Mutants of queue positions are found by a check of all queues
//! of at most four entries, and one mutant by a caller that is no longer polled. The modules check
//! the other mutants, on real servers of Redis, PostgreSQL and MariaDB.
//!
//! Built only with `--cfg lock_registry_mutants`; CONTRIBUTING.md has the command. The switch does
//! not exist in any other build.
#![cfg(lock_registry_mutants)]

#[path = "mutants/redis.rs"]
mod redis;
#[path = "mutants/sql.rs"]
mod sql;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_registry_simulation::{TrialModes, fault_profile, run};
use registry_core::{
    ClaimMode, MemoryBackend, Mutant, QueuedEntry, Registry, UpgradePosition, granted_entries,
    switch_mutant, upgrade_position,
};
use registry_testkit::seed::Seed;

/// Serializes the tests of this binary, because a mutant is switched on for the whole process.
fn serialized() -> MutexGuard<'static, ()> {
    static SERIALIZED: Mutex<()> = Mutex::new(());
    SERIALIZED.lock().unwrap_or_else(PoisonError::into_inner)
}

const SEEDS: u64 = 120;
const GRANTS: u64 = 300;

/// Runs the simulation with the current mutant. Returns the first failing seed and its message as
/// an error.
fn run_seeds(modes: TrialModes) -> Result<u64, (Seed, String)> {
    for seed in (0..SEEDS).map(Seed::new) {
        if let Err(panic) =
            catch_unwind(AssertUnwindSafe(|| run(seed, fault_profile(seed), modes, GRANTS)))
        {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|message| (*message).to_owned()));
            return Err((seed, message.unwrap_or_default()));
        }
    }
    Ok(SEEDS)
}

/// Checks that a caller that is no longer polled does not block the next local caller. The
/// simulation has no such callers.
fn check_unpolled_caller() -> Result<u64, (Seed, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can always be built");
    let next = runtime.block_on(async {
        let store = Arc::new(MemoryBackend::new());
        let remote = Registry::builder(Arc::clone(&store) as _).build().expect("a runtime is here");
        let local = Registry::builder(store).build().expect("a runtime is here");
        let held = remote.obtain("k").lock().await.expect("it is free");
        let lock = local.obtain("k");
        let mut unpolled = std::pin::pin!(lock.lock());
        assert!(futures_util::poll!(unpolled.as_mut()).is_pending(), "it is held");
        held.unlock().await.expect("it is held");
        tokio::time::timeout(Duration::from_secs(3_600), lock.lock()).await.is_ok()
    });
    if next {
        Ok(1)
    } else {
        Err((Seed::new(0), "an unpolled caller blocks the next one".to_owned()))
    }
}

/// Prints how a mutant was found. Returns a message if it was not found.
fn survived(mutant: Mutant, result: Result<u64, (Seed, String)>) -> Option<String> {
    match result {
        Ok(seeds) => Some(format!("{mutant:?} survived {seeds} seeds")),
        Err((seed, message)) => {
            let promise = message.lines().next().unwrap_or_default();
            println!("{mutant:?}: found by seed {seed}: {promise}");
            None
        }
    }
}

/// Checks all queues of at most four entries: the claims that hold a key are compatible, their
/// units do not exceed the limit, and an upgrade is granted only without other holders.
fn check_queues() -> Result<u64, (Seed, String)> {
    const OF: u32 = 3;
    let permits = |take| QueuedEntry::Claim(ClaimMode::Permits { take, of: OF });
    let claims = [ClaimMode::Exclusive, ClaimMode::Shared, ClaimMode::Upgradable];
    let claims = claims.map(QueuedEntry::Claim).into_iter().chain([permits(1), permits(2)]);
    let kinds: Vec<QueuedEntry> = claims.chain([QueuedEntry::UpgradeRequest]).collect();
    let mut queues: Vec<Vec<QueuedEntry>> = vec![Vec::new()];
    let mut checked = 0;
    while let Some(queue) = queues.pop() {
        checked += 1;
        let granted = granted_entries(&queue);
        let held: Vec<(usize, ClaimMode)> = (0..queue.len())
            .filter(|index| granted[*index])
            .filter_map(|index| match queue[index] {
                QueuedEntry::Claim(mode) => Some((index, mode)),
                _ => None,
            })
            .collect();
        let units: u32 = held.iter().map(|(_, mode)| mode.units()).sum();
        let mut pairs = held.iter().enumerate().flat_map(|(number, (_, one))| {
            held[number + 1..].iter().map(move |(_, other)| one.is_compatible(*other))
        });
        let is_alone = |own: usize| held.iter().all(|(index, _)| *index == own);
        let mut upgrades = held.iter().filter(|(_, mode)| *mode == ClaimMode::Upgradable);
        let upgrades_alone = upgrades.all(|(own, _)| {
            is_alone(*own)
                || !matches!(upgrade_position(&queue, *own), UpgradePosition::Grantable(_))
        });
        if units > OF || !pairs.all(|fits| fits) || !upgrades_alone {
            return Err((Seed::new(0), format!("the queue {queue:?} has holders that exclude")));
        }
        if queue.len() < 4 {
            queues.extend(kinds.iter().map(|kind| [&queue[..], &[*kind]].concat()));
        }
    }
    Ok(checked)
}

// One test, because the switch is global to the process. The tests of the other modules wait for it
// in `serialized`.
#[test]
fn every_seeded_bug_is_found_and_nothing_else() {
    let _serialized = serialized();
    // A detected bug panics. The default hook would print hundreds of messages.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for mutant in Mutant::OF_EXCLUSIVE_LOCKS {
        switch_mutant(Some(mutant));
        missed.extend(survived(mutant, run_seeds(TrialModes::Exclusive)));
    }
    for mutant in Mutant::OF_MODES {
        switch_mutant(Some(mutant));
        missed.extend(survived(mutant, run_seeds(TrialModes::All)));
    }
    for mutant in Mutant::OF_QUEUES {
        switch_mutant(Some(mutant));
        missed.extend(survived(mutant, check_queues()));
    }
    switch_mutant(Some(Mutant::UnpolledCallerKept));
    if check_unpolled_caller().is_ok() {
        missed.push("UnpolledCallerKept".to_owned());
    }
    switch_mutant(None);
    let sound = run_seeds(TrialModes::Exclusive)
        .and_then(|_| run_seeds(TrialModes::All))
        .and_then(|seeds| check_unpolled_caller().map(|_| seeds))
        .and_then(|seeds| check_queues().map(|_| seeds));
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "{missed:#?}");
    assert_eq!(sound, Ok(SEEDS), "without a bug, nothing is found");
}
