//! Measures locks of several holders, and of several keys, next to exclusive locks in the same
//! store.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    Attempt, Claim, ClaimMode, Key, LockBackend, LockGuard, LockRegistryExt as _, Registry,
};

use crate::{compare, row};

/// The number of readers of one key.
const READERS: usize = 64;
const READERS_ROW: &str = "64 readers of one process, against 64 shared claims of one key";
/// The keys that one lock of several keys has.
const KEYS: [&str; 5] = ["accounts/1", "accounts/2", "accounts/3", "accounts/4", "accounts/5"];

const LEASE: Duration = Duration::from_secs(30);
/// The number of tokens that a grant of the engine reserves by default.
const TOKENS: u32 = 65;

/// Compares the modes of a store with its exclusive lock, and records the ratios. Leaves out the
/// modes that the store does not have.
///
/// Must be called in a task of a multi-thread runtime: the wake-up of a future outside of a task
/// always crosses threads.
pub async fn compare_modes(store: &str, registry: &Registry, backend: &dyn LockBackend) {
    let exclusive = registry.obtain("exclusive");
    let exclusive_pair = || async { unlock(exclusive.lock().await.unwrap()).await };
    let row = |name: &str| row("modes", name).column(store);
    let against = "an exclusive pair";

    if registry.capabilities().supports(ClaimMode::Shared) {
        let shared = registry.obtain("shared");
        let shared_pair = || async { unlock(shared.read().await.unwrap()).await };
        compare(row("shared lock and unlock"), against, exclusive_pair, shared_pair).await;

        let claims = || shared_claims("claims");
        let grants = || async { acquire_and_release(backend, &claims()).await };
        let readers = registry.obtain("readers");
        let local_readers = || async {
            let guards = join_all((0..READERS).map(|_| readers.read())).await;
            join_all(guards.into_iter().map(|guard| unlock(guard.unwrap()))).await;
        };
        let (row, against) = (row(READERS_ROW), "64 shared claims of a key");
        compare(row, against, grants, local_readers).await;
    }
    let permit = ClaimMode::Permits { take: 1, of: 8 };
    if registry.capabilities().supports(permit) {
        let semaphore = registry.semaphore("permits", 8);
        let permit_pair = || async { unlock(semaphore.acquire().await.unwrap()).await };
        let row = row("permit of a semaphore, and unlock");
        compare(row, against, exclusive_pair, permit_pair).await;
    }
    let several = registry.obtain_all(KEYS);
    let lock_all = || async { several.lock().await.unwrap().unlock().await.unwrap() };
    compare(row("lock and unlock of 5 keys"), against, exclusive_pair, lock_all).await;
}

async fn unlock(guard: LockGuard) {
    guard.unlock().await.unwrap();
}

/// Returns one shared claim for each reader, as if each reader were a process of its own.
fn shared_claims(key: &str) -> Vec<Claim> {
    let key = Key::new(key).unwrap();
    let claim = |_| {
        let claim = Claim::new(key.clone(), LEASE).with_token_block(TOKENS);
        claim.with_mode(ClaimMode::Shared)
    };
    (0..READERS).map(claim).collect()
}

/// Acquires all claims at the same time, holds them together, and releases them.
async fn acquire_and_release(backend: &dyn LockBackend, claims: &[Claim]) {
    join_all(claims.iter().map(|claim| {
        repeat(move || async move {
            matches!(backend.try_acquire(claim).await, Ok(Attempt::Granted(_)))
        })
    }))
    .await;
    join_all(
        claims
            .iter()
            .map(|claim| repeat(move || async move { backend.release(claim).await.is_ok() })),
    )
    .await;
}

/// Repeats a request until it succeeds, as the engine does. A store may refuse one of many requests
/// that change the same record.
async fn repeat<F: Future<Output = bool>>(request: impl Fn() -> F) {
    for _ in 0..1_000 {
        if request().await {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("1,000 requests failed");
}
