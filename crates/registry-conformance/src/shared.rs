//! Runs the suite over servers that many clauses share, each clause in a namespace of its own. A
//! full run takes about a minute, because only clauses that restart or wipe a server start one.
//! [`conformance!`](crate::conformance) starts a store for each clause instead.

use std::any::Any;
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures_util::future::{BoxFuture, FutureExt as _};
use registry_core::{Claim, LockBackend};
use tokio::runtime::Runtime;
use tokio::sync::RwLock;

use crate::harness::{Harness, Store};
use crate::list::CLAUSES;
use crate::need::Need;
use crate::run::{Clause, run};

/// The number of clauses that run concurrently. Clauses mostly wait, so this may exceed the number
/// of cores.
const CONCURRENT_CLAUSES: usize = 8;

/// The environment variable with the number of retries of a failed clause.
const RETRIES_VARIABLE: &str = "CONFORMANCE_RETRIES";

/// One set of servers, with any number of namespaces that share no lock.
#[async_trait]
pub trait SharedServers: Debug + Send + Sync + 'static {
    /// Opens a further client of this namespace with connections of its own.
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend>;

    /// Returns the unmet needs that capabilities cannot express: any of [`Need::Restart`],
    /// [`Need::Wipe`] and [`Need::GrantsOutliveClient`]. The default is none.
    fn lacks(&self) -> &[Need] {
        &[]
    }

    /// Returns whether a clause whose needs are met applies to the servers. The default is true.
    fn applies(&self, _clause: &Clause) -> bool {
        true
    }

    /// See [`Store::may_split_votes`].
    fn may_split_votes(&self) -> bool {
        false
    }

    /// Stops the servers and starts them again with their data. Called only on servers that no
    /// other clause uses. The default panics.
    async fn restart(&mut self) {
        panic!("implement `restart`, or return `Need::Restart` from `lacks`");
    }

    /// Deletes all data, as a restart without persistence does. Called only on servers that no
    /// other clause uses. The default panics.
    async fn wipe(&mut self) {
        panic!("implement `wipe`, or return `Need::Wipe` from `lacks`");
    }

    /// See [`Store::break_claim`].
    async fn break_claim(&self, _namespace: &str, _claim: &Claim) -> bool {
        false
    }
}

/// Runs all clauses that the servers of `start` support, except those that need [`Need::Remote`].
/// Clauses that restart or wipe the servers get servers of their own. `runs` and `skips` are the
/// expected numbers of clauses, so that no clause is skipped unnoticed.
///
/// With the environment variable `CONFORMANCE_RETRIES`, a failed clause runs again up to that many
/// times and is reported on the standard output. Clauses of `exclusion` and `fencing` run once.
///
/// # Panics
/// If clauses fail, with their names. Also if the numbers differ, or if `CONFORMANCE_RETRIES` is
/// not a number.
pub fn assert_conformance_on_shared_servers<S, F>(
    start: impl Fn() -> F + Send + Sync + 'static,
    runs: usize,
    skips: usize,
) where
    S: SharedServers,
    F: Future<Output = S> + Send + 'static,
{
    let start: Arc<Start<S>> = Arc::new(move || start().boxed());
    let runtime = Runtime::new().expect("a runtime can be built");
    let servers = runtime.block_on(start());
    let (selected, skipped) = runtime.block_on(select(&servers));
    let servers = Arc::new(RwLock::new(servers));
    assert_eq!((selected.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let retries = std::env::var(RETRIES_VARIABLE).map_or(0, |number| {
        number.parse().unwrap_or_else(|_| panic!("{RETRIES_VARIABLE} is not a number: {number}"))
    });
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = selected.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness = |attempt| SharedHarness {
                        start: Arc::clone(&start),
                        servers: Arc::clone(&servers),
                        clause,
                        attempt,
                    };
                    if let Err(failure) = run_with_retries(harness, clause, retries) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failed.is_empty(), "{} clauses failed: {failed:#?}", failed.len());
}

/// Runs the clause until it passes, with at most `retries` further attempts. Clauses of `exclusion`
/// and `fencing` run once. Returns the last failure.
#[expect(clippy::print_stdout, reason = "reports flaky clauses")]
fn run_with_retries<H: Harness + 'static>(
    harness: impl Fn(u32) -> H,
    clause: &Clause,
    retries: u32,
) -> Result<(), String> {
    let retries = if matches!(clause.theme, "exclusion" | "fencing") { 0 } else { retries };
    let mut failures = 0;
    loop {
        let result =
            catch_unwind(AssertUnwindSafe(|| run(harness(failures), clause.theme, clause.name)));
        let Err(panic) = result else { return Ok(()) };
        let failure = format!("{clause:?}: {}", panic_message(&*panic));
        if failures == retries {
            return Err(failure);
        }
        failures += 1;
        println!("flaky clause, failure {failures}: {failure}");
    }
}

type Start<S> = dyn Fn() -> BoxFuture<'static, S> + Send + Sync;
type Clauses = Vec<&'static Clause>;

/// Returns the clauses that the servers support, and the others.
async fn select(servers: &impl SharedServers) -> (Clauses, Clauses) {
    let probe = servers.client("probe").await;
    let capabilities = probe.capabilities();
    probe.close().await;
    let is_met = |need: &Need| match need {
        Need::Remote => false,
        need if servers.lacks().contains(need) => false,
        need => need.stated_by(&capabilities).unwrap_or(true),
    };
    CLAUSES.iter().partition(|clause| clause.needs.iter().all(is_met) && servers.applies(clause))
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

/// The harness of one clause: the shared servers, or new servers if the clause restarts or wipes
/// them.
struct SharedHarness<S> {
    start: Arc<Start<S>>,
    servers: Arc<RwLock<S>>,
    clause: &'static Clause,
    /// Counts from 0. Each attempt has a namespace of its own, because a failed attempt can leave
    /// locks.
    attempt: u32,
}

impl<S> Debug for SharedHarness<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedHarness").field("clause", self.clause).finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: SharedServers> Harness for SharedHarness<S> {
    async fn store(&self) -> Box<dyn Store> {
        let is_disruptive = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let servers = if self.clause.needs.iter().any(is_disruptive) {
            Arc::new(RwLock::new((self.start)().await))
        } else {
            Arc::clone(&self.servers)
        };
        let Clause { theme, name, .. } = self.clause;
        let namespace = match self.attempt {
            0 => format!("{theme}-{name}"),
            attempt => format!("{theme}-{name}-{attempt}"),
        };
        let shared = servers.read().await;
        let grants_outlive_client = !shared.lacks().contains(&Need::GrantsOutliveClient);
        let may_split_votes = shared.may_split_votes();
        drop(shared);
        Box::new(NamespaceStore { servers, namespace, grants_outlive_client, may_split_votes })
    }
}

#[derive(Debug)]
struct NamespaceStore<S> {
    servers: Arc<RwLock<S>>,
    namespace: String,
    grants_outlive_client: bool,
    may_split_votes: bool,
}

#[async_trait]
impl<S: SharedServers> Store for NamespaceStore<S> {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.servers.read().await.client(&self.namespace).await
    }

    fn grants_outlive_client(&self) -> bool {
        self.grants_outlive_client
    }

    fn may_split_votes(&self) -> bool {
        self.may_split_votes
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.servers.read().await.client(&format!("{}-other", self.namespace)).await)
    }

    async fn restart(&self) -> bool {
        self.servers.write().await.restart().await;
        true
    }

    async fn wipe(&self) -> bool {
        self.servers.write().await.wipe().await;
        true
    }

    async fn break_claim(&self, claim: &Claim) -> bool {
        self.servers.read().await.break_claim(&self.namespace, claim).await
    }
}
