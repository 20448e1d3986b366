//! A seeded simulation on paused time: the real engine in several simulated processes on one
//! in-process store. The network loses, delays and repeats messages. Clients hold locks beyond
//! their leases, stop waiting, and drop their futures. One seed determines a whole trial, so a
//! failing trial can be replayed.
//!
//! In a trial of all modes, clients also read, upgrade, downgrade, take units of semaphores and
//! lock several keys. Processes also crash: their network fails permanently, their futures and
//! guards are dropped, and new processes replace them.
//!
//! Checks during a trial or at its end:
//!
//! - I1: tokens order all grants, and no stale write is accepted.
//! - I2: two guards of one key are never valid at the same time, unless their modes and units
//!   allow it.
//! - I3: every loss is reported.
//! - I4: only the owner can release, and the release of a lost lock never returns `Ok`.
//! - I5: every key can be acquired soon after the faults have stopped.
//! - I6: no unknown grant remains.
//! - I7: dropped futures and guards leave no claim behind.
//! - I8: only one claim of a process competes for a key, and no local lock remains.
//! - I9: callers of a process are served in order, readers do not starve a writer, and all units of
//!   a semaphore can be taken together.

mod client;
mod checking_backend;
mod modes;
mod trial;

use std::time::Duration;

use registry_testkit::check::{fenced_writes, token_order, validity};
use registry_testkit::seed::Seed;

use self::trial::Trial;

/// The faults that a trial injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultProfile {
    /// Requests and replies are only delayed.
    Calm,
    /// Requests, replies and wake-ups are also lost, requests are refused, waiters wake early, and
    /// false invalidations arrive.
    Lossy,
    /// As [`Lossy`](Self::Lossy). Also, some requests and replies take much longer than the request
    /// timeout, and some requests arrive twice.
    Stormy,
}

/// The result of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TrialOutcome {
    /// The number of grants.
    pub grants: u64,
    /// The number of holds that ended by loss.
    pub lost: u64,
    /// The number of acquisitions and releases that were dropped before they completed.
    pub dropped: u64,
    /// The number of faults that the network injected.
    pub faults: u64,
    /// The number of processes that crashed.
    pub crashes: u64,
    /// All steps in order.
    pub trace: Vec<Step>,
}

/// One step of a trial: its time, the number of the client, and what happened.
pub type Step = (Duration, usize, &'static str);

/// Returns the fault profile of a seed. Consecutive seeds cycle through all profiles.
#[must_use]
pub fn fault_profile(seed: Seed) -> FaultProfile {
    match seed.get() % 3 {
        0 => FaultProfile::Calm,
        1 => FaultProfile::Lossy,
        _ => FaultProfile::Stormy,
    }
}

/// The modes in which the clients of a trial lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrialModes {
    /// Only exclusive locks of single keys.
    Exclusive,
    /// All modes, conversions, fair locks and several keys, with crashes of processes.
    All,
}

/// Runs one trial of about `grants` grants.
///
/// # Panics
/// If a property is violated. The message names the property.
#[must_use]
pub fn run(
    seed: Seed,
    fault_profile: FaultProfile,
    modes: TrialModes,
    grants: u64,
) -> TrialOutcome {
    // The engine's own jitter comes from this thread's generator.
    fastrand::seed(seed.get());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can always be built");
    let outcome = runtime.block_on(async {
        let mut trial = Trial::new(seed, fault_profile, modes, grants);
        trial.run_to_end().await;
        trial.check_final_state().await;
        let history = trial.history();
        // The check `busy_answers` is left out: a caller that does not wait also receives "busy"
        // while the store has not answered another local caller.
        let check_history = || {
            token_order(&history)?;
            fenced_writes(&history)?;
            validity(&history)
        };
        let checked = check_history().unwrap_or_else(|violation| panic!("I1/I2: {violation}"));
        let outcome = trial.outcome();
        assert_eq!(checked as u64, outcome.grants, "the record is complete");
        outcome
    });
    drop(runtime);
    outcome
}

/// A trial that takes longer than this on its own clock is stuck. Others take at most 12 minutes.
const TRIAL_MAX: Duration = Duration::from_secs(60 * 60);
