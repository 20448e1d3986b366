//! Runs one clause against one harness, and checks that the suite is complete. Called by `shared`
//! and by the tests that [`conformance!`](crate::conformance) emits.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::context::TestContext;
use crate::harness::{Clock, Harness};
use crate::list::CLAUSES;
use crate::need::Need;

/// One promise, as a function that panics if the promise is broken.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Clause {
    /// The module of the clause.
    pub theme: &'static str,
    /// The name of the clause, which states the promise.
    pub name: &'static str,
    /// The features that a store needs for the clause to apply.
    pub needs: &'static [Need],
    pub(crate) call: for<'a> fn(&'a TestContext) -> LocalBoxFuture<'a, ()>,
}

impl fmt::Debug for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.theme, self.name)
    }
}

/// Returns all clauses of the suite, grouped by theme.
#[must_use]
pub fn clauses() -> &'static [Clause] {
    CLAUSES
}

/// Runs the clause `theme::name` against a fresh store of `harness`, on a runtime of its own.
///
/// # Panics
/// If the promise is broken, the clause exceeds its time limit, no such clause exists, or the store
/// lacks what the clause needs. A clause that cannot run is a failure unless it is declared as a
/// skip.
pub fn run(harness: impl Harness + 'static, theme: &str, name: &str) {
    let clause = find(theme, name);
    let (done_sender, done) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        // Dropped when the clause ends or panics.
        let _done_sender = done_sender;
        runtime(&harness).block_on(run_clause(&harness, clause));
    });
    // On paused time, a clause that loops without waiting would never reach its limit in
    // `run_clause`.
    if let Err(RecvTimeoutError::Timeout) = done.recv_timeout(CLAUSE_LIMIT) {
        panic!("{clause:?} is not complete after {CLAUSE_LIMIT:?}");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[expect(clippy::future_not_send, reason = "a clause stays on its thread")]
async fn run_clause(harness: &dyn Harness, clause: &Clause) {
    let context = TestContext::open(harness).await;
    for need in clause.needs {
        let known = match need {
            Need::FaultFree => Some(context.store().fault_free()),
            Need::GrantsOutliveClient => Some(context.store().grants_outlive_client()),
            need => need.stated_by(context.capabilities()),
        };
        // Other needs are checked by the call that uses the feature, such as
        // `TestContext::restart`.
        assert!(known != Some(false), "the store has no {need}: list it in `without`");
    }
    if timeout(context.limit(), (clause.call)(&context)).await.is_err() {
        panic!("{clause:?} is not complete after {:?} on its store's clock", context.limit());
    }
    context.store().close().await;
}

/// Checks the tests that [`conformance!`](crate::conformance) emitted: each clause was emitted, the
/// numbers of run and skipped clauses are those that the caller states, and `without` lists exactly
/// the features that the store lacks.
///
/// # Panics
/// If one of these checks fails.
pub fn check(
    harness: &dyn Harness,
    runs: usize,
    skips: usize,
    without: &[&str],
    emitted: &[(&str, &str)],
) {
    let without: Vec<Need> = without
        .iter()
        .map(|name| {
            Need::of_name(name).unwrap_or_else(|| {
                let known: Vec<_> = Need::ALL.iter().map(|need| need.name()).collect();
                panic!("`{name}` is not a need; the needs are {}", known.join(", "))
            })
        })
        .collect();
    let listed: Vec<_> = CLAUSES.iter().map(|clause| (clause.theme, clause.name)).collect();
    assert_eq!(emitted, listed, "every clause becomes a test");

    runtime(harness).block_on(async {
        for need in Need::ALL {
            let met = need.is_met_by(harness).await;
            let declared = without.contains(&need);
            assert!(!(met && declared), "the store has {need}: it must not be skipped");
            assert!(met || declared, "the store has no {need}: list it in `without`");
        }
    });

    let is_skipped = |clause: &&Clause| clause.needs.iter().any(|need| without.contains(need));
    let skipped = CLAUSES.iter().filter(is_skipped).count();
    assert_eq!(
        (CLAUSES.len() - skipped, skipped),
        (runs, skips),
        "(runs, skips) of {} clauses differ from the stated numbers",
        CLAUSES.len()
    );
}

fn find(theme: &str, name: &str) -> &'static Clause {
    CLAUSES
        .iter()
        .find(|clause| clause.theme == theme && clause.name == name)
        .unwrap_or_else(|| panic!("there is no clause {theme}::{name}"))
}

fn runtime(harness: &dyn Harness) -> Runtime {
    let mut builder = match harness.clock() {
        Clock::Paused => Builder::new_current_thread(),
        Clock::Real => Builder::new_multi_thread(),
    };
    builder.enable_all();
    match harness.clock() {
        Clock::Paused => builder.start_paused(true),
        // Many tests run at once, and two threads are enough for a real race.
        Clock::Real => builder.worker_threads(2),
    };
    builder.build().expect("a runtime can be built")
}

/// How long a clause may take on this machine's clock, whatever the clock of its store.
const CLAUSE_LIMIT: Duration = Duration::from_secs(300);
