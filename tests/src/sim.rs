//! A seeded simulation: the real engine in several "processes" on one in-process store, on paused time, with a network
//! that loses, delays and repeats, and clients that overstay, give up and vanish. One seed drives everything, so a seed
//! that fails can be replayed.
//!
//! Checked along the way or at the end: tokens order all grants and no stale write is accepted (I1), two guards of one key
//! are never valid at once (I2), a loss is told (I3), only the owner can let go and is not told "ok" for what it had lost
//! (I4), every key can be taken soon after the faults have stopped (I5), nothing unknown stays behind (I6), what was
//! dropped leaves nothing behind (I7), one contender per key and process and no slot left (I8).

mod client;
mod probe;
mod world;

use std::time::Duration;

use registry_testkit::check::{fenced_writes, token_order, validity};
use registry_testkit::seed::Seed;

use self::world::World;

/// What befalls the processes of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Weather {
    /// Requests and replies take their time, and that is all.
    Calm,
    /// Requests, replies and wake-ups are lost, and locks are said to be lost that are not.
    Lossy,
    /// As [`Lossy`](Self::Lossy), and some requests hang for much longer than anybody waits, or arrive twice.
    Stormy,
}

/// What a trial did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// How many grants there were.
    pub grants: u64,
    /// How many holds ended by loss.
    pub lost: u64,
    /// How many acquisitions and releases were dropped half-way.
    pub dropped: u64,
    /// How many faults the network put in.
    pub faults: u64,
    /// All that happened: when, to which client, and what.
    pub trace: Vec<Step>,
}

/// One thing that happened in a trial.
pub type Step = (Duration, usize, &'static str);

/// The weather of a seed: all kinds take turns.
#[must_use]
pub fn weather(seed: Seed) -> Weather {
    match seed.get() % 3 {
        0 => Weather::Calm,
        1 => Weather::Lossy,
        _ => Weather::Stormy,
    }
}

/// Runs one trial of about `grants` grants.
///
/// # Panics
/// When a promise is broken; the message names it.
#[must_use]
pub fn run(seed: Seed, weather: Weather, grants: u64) -> Outcome {
    // The engine's own jitter comes from this thread's generator.
    fastrand::seed(seed.get());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can always be built");
    let outcome = runtime.block_on(async {
        let mut world = World::new(seed, weather, grants);
        world.live().await;
        world.settle().await;
        let history = world.history();
        // Not `busy_answers`: a caller without patience is also turned away by a local one that is just asking.
        let judge = || {
            token_order(&history)?;
            fenced_writes(&history)?;
            validity(&history)
        };
        let judged = judge().unwrap_or_else(|violation| panic!("I1/I2: {violation}"));
        let outcome = world.outcome();
        assert_eq!(judged as u64, outcome.grants, "the record is complete");
        outcome
    });
    drop(runtime);
    outcome
}

/// No trial takes longer than this on its own clock, unless somebody hangs.
const TRIAL_MAX: Duration = Duration::from_secs(24 * 60 * 60);
