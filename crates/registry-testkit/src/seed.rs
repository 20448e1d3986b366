//! Runs a trial over many seeds and prints how to replay a failed seed. Makes no random choices
//! itself.

use std::any::Any;
use std::env;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use tokio::runtime::Builder;

/// The environment variable that replays one seed: decimal, or hexadecimal with the prefix `0x`.
pub const VARIABLE: &str = "LOCK_REGISTRY_SEED";

/// The number that determines all random choices of one trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seed(u64);

impl Seed {
    /// Creates a seed from a number.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns a generator for this seed: stream 0. Each call restarts the sequence.
    #[must_use]
    pub fn rng(self) -> fastrand::Rng {
        self.stream(0)
    }

    /// Returns one of many independent generators of this seed. If each client has its own stream,
    /// an additional client does not change the choices of the others. Stream 0 is
    /// [`rng`](Self::rng), and [`simulate`](Self::simulate) uses the stream `u64::MAX`.
    #[must_use]
    pub fn stream(self, stream: u64) -> fastrand::Rng {
        fastrand::Rng::with_seed(mix(mix(self.0).wrapping_add(stream)))
    }

    /// Runs `simulation` on paused time and on the current thread, so that a run is repeatable. The
    /// engine sees virtual time, and its jitter follows from this seed.
    ///
    /// Other sources of randomness are not repeated: a `select!` that is not `biased`, the order of
    /// a `HashMap`.
    ///
    /// # Panics
    /// Panics inside a tokio runtime, if the operating system has no resources for a runtime, or if
    /// `simulation` panics.
    pub fn simulate<T>(self, simulation: impl Future<Output = T>) -> T {
        // The engine draws its jitter from this thread-local generator. It is restored after a
        // simulation without a panic, so that other tests on this thread stay random.
        let before = fastrand::get_seed();
        fastrand::seed(self.stream(u64::MAX).u64(..));
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        let output = runtime.expect("a runtime can be built").block_on(simulation);
        fastrand::seed(before);
        output
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): maps neighbouring seeds to unrelated
/// values.
fn mix(seed: u64) -> u64 {
    let seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let seed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let seed = (seed ^ (seed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    seed ^ (seed >> 31)
}

/// The seeds to run, and the number of threads.
///
/// The seeds are the same in every run. Set [`VARIABLE`] to run only the seed that failed.
#[derive(Debug, Clone)]
#[must_use = "seeds do nothing until `run` is called"]
pub struct Seeds {
    count: u64,
    threads: usize,
}

impl Seeds {
    /// Selects the seeds 0, 1, … `count - 1`.
    pub const fn first(count: u64) -> Self {
        Self { count, threads: 1 }
    }

    /// Runs trials concurrently on this many threads. The default is one: trials run on the
    /// caller's thread.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Runs `trial` once for each seed and returns the number of completed trials. If [`VARIABLE`]
    /// is set, runs only its seed.
    ///
    /// # Panics
    /// If a trial panics, starts no further trial, prints the seed and how to replay it, and then
    /// resumes the panic. Panics if [`VARIABLE`] is not a number.
    pub fn run(self, trial: impl Fn(Seed) + Sync) -> u64 {
        let replayed_seed = env::var(VARIABLE).ok().map(|text| match parse_seed(&text) {
            Some(seed) => Seed(seed),
            None => panic!("{VARIABLE} is {text:?}, not a number"),
        });
        match replayed_seed {
            Some(seed) => self.run_range(seed.0..=seed.0, &trial),
            None if self.count == 0 => 0,
            None => self.run_range(0..=self.count - 1, &trial),
        }
    }

    fn run_range(
        &self,
        seeds: std::ops::RangeInclusive<u64>,
        trial: &(impl Fn(Seed) + Sync),
    ) -> u64 {
        let next = AtomicU64::new(0);
        let done = AtomicU64::new(0);
        let failed: Mutex<Option<(Seed, Panic)>> = Mutex::new(None);
        let span = seeds.end() - seeds.start();
        let work = || {
            loop {
                let step = next.fetch_add(1, Ordering::Relaxed);
                let first_failure = || failed.lock().unwrap_or_else(PoisonError::into_inner);
                if step > span || first_failure().is_some() {
                    return;
                }
                let seed = Seed(seeds.start() + step);
                match catch_unwind(AssertUnwindSafe(|| trial(seed))) {
                    Ok(()) => _ = done.fetch_add(1, Ordering::Relaxed),
                    Err(panic) => _ = first_failure().get_or_insert((seed, panic)),
                }
            }
        };
        if self.threads <= 1 {
            work();
        } else {
            thread::scope(|scope| {
                for _ in 0..self.threads {
                    scope.spawn(work);
                }
            });
        }
        if let Some((seed, panic)) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            print_replay_command(seed);
            resume_unwind(panic);
        }
        done.into_inner()
    }
}

type Panic = Box<dyn Any + Send>;

#[expect(clippy::print_stderr, reason = "a failing test must print its replay command")]
fn print_replay_command(seed: Seed) {
    // The test harness names each thread after its test.
    let current = thread::current();
    let test = current.name().filter(|name| *name != "main").unwrap_or("");
    eprintln!("\nseed {seed} failed; replay it with: {VARIABLE}={seed} cargo test {test}");
}

fn parse_seed(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Runs `trial` twice with `seed` and returns its trace.
///
/// # Panics
/// Panics with the first difference if the two traces differ, because a failing seed could not be
/// replayed.
#[track_caller]
pub fn assert_repeatable<T: PartialEq + fmt::Debug>(
    seed: Seed,
    trial: impl Fn(Seed) -> Vec<T>,
) -> Vec<T> {
    let (first, second) = (trial(seed), trial(seed));
    let steps = first.len().max(second.len());
    if let Some(step) = (0..steps).find(|step| first.get(*step) != second.get(*step)) {
        let (one, two) = (first.get(step), second.get(step));
        panic!("seed {seed} is not repeatable: step {step} is {one:?}, then {two:?}");
    }
    first
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    // Ignores the environment variable; `tests/it/seeds.rs` covers it.
    fn run(seeds: &Seeds, trial: impl Fn(Seed) + Sync) -> u64 {
        seeds.run_range(0..=seeds.count - 1, &trial)
    }

    #[test]
    fn every_seed_runs_once_with_any_number_of_threads() {
        for threads in [1, 4] {
            let seen = Mutex::new(Vec::new());
            let ran = run(&Seeds::first(100).threads(threads), |seed| {
                seen.lock().unwrap().push(seed.get());
            });
            let mut seen = seen.into_inner().unwrap();
            seen.sort_unstable();
            assert_eq!((ran, seen), (100, (0..100).collect()));
        }
    }

    #[test]
    fn a_failure_stops_the_run_and_keeps_its_own_panic() {
        let ran = AtomicU64::new(0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            run(&Seeds::first(1_000), |seed| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert!(seed.get() != 7, "seven is wrong");
            })
        }))
        .unwrap_err();
        assert!(panic.downcast_ref::<&str>().unwrap().contains("seven is wrong"));
        assert_eq!(ran.into_inner(), 8);
    }

    #[test]
    fn a_seed_repeats_its_choices_and_its_streams_differ() {
        let seed = Seed::new(42);
        assert_eq!(seed.rng().u64(..), seed.rng().u64(..));
        let firsts: HashSet<u64> = (0..10_000)
            .flat_map(|number| {
                [Seed::new(number).stream(0).u64(..), Seed::new(number).stream(1).u64(..)]
            })
            .collect();
        assert_eq!(firsts.len(), 20_000);
    }

    #[test]
    fn seeds_are_read_in_decimal_and_hexadecimal() {
        assert_eq!(parse_seed("42"), Some(42));
        assert_eq!(parse_seed(" 0xff "), Some(255));
        assert_eq!(parse_seed(&u64::MAX.to_string()), Some(u64::MAX));
        assert_eq!(parse_seed("forty-two"), None);
    }

    #[test]
    #[should_panic(expected = "step 1 is Some(0), then Some(1)")]
    fn a_trial_that_does_not_repeat_itself_is_found() {
        let calls = AtomicU64::new(0);
        assert_repeatable(Seed::new(3), |_| vec![0, calls.fetch_add(1, Ordering::Relaxed)]);
    }
}
