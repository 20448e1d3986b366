//! A claim can be handed over to the next caller of its process without a store request. The number
//! of hand-overs is limited, and each has its own token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use registry_core::{LockGuard, LockOptions, Registry};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::context::TestContext;
use crate::faulty::{Faults, FaultyBackend, Operation};

/// Ten callers of one process, nine of them queued, share one claim: one acquire and one release
/// reach the store.
pub async fn a_hand_over_sends_no_request_to_the_store(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    tokens_of_callers(&registry, 10).await;
    assert_eq!(faulty.calls(Operation::Acquire), 1, "one claim serves ten callers");
    assert_eq!(faulty.calls(Operation::Release), 1, "one claim serves ten callers");
}

/// With `handoff(0)`, each of ten callers, nine of them queued, has a claim of its own.
pub async fn without_hand_over_each_caller_has_its_own_claim(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context
        .builder(Arc::<FaultyBackend>::clone(&faulty))
        .handoff(0)
        .build()
        .expect("the registry is built");
    tokens_of_callers(&registry, 10).await;
    assert_eq!(faulty.calls(Operation::Release), 10, "each caller has a claim of its own");
}

/// With `handoff(4)`, a claim serves its first caller and four more, so that other processes can
/// acquire the lock in between.
pub async fn a_claim_is_handed_over_a_bounded_number_of_times(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context
        .builder(Arc::<FaultyBackend>::clone(&faulty))
        .handoff(4)
        .build()
        .expect("the registry is built");
    tokens_of_callers(&registry, 15).await;
    assert_eq!(faulty.calls(Operation::Release), 3, "each claim serves five callers");
}

/// A caller of another process acquires the lock three times while four callers of this process
/// request it continuously.
pub async fn many_local_callers_do_not_starve_another_registry(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let stop = Arc::new(AtomicBool::new(false));
    let mut busy = JoinSet::new();
    for _ in 0..4 {
        let (lock, stop) = (local.obtain("orders:42"), Arc::clone(&stop));
        busy.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let guard = lock.lock().await.expect("the lock is acquired");
                sleep(Duration::from_millis(1)).await;
                guard.unlock().await.expect("a held lock is unlocked");
            }
        });
    }
    let max_wait = context.max_wait();
    let lock = remote.obtain("orders:42");
    let mut other = JoinSet::new();
    other.spawn(async move {
        for _ in 0..3 {
            let guard = timeout(max_wait, lock.lock()).await.expect("no process starves");
            guard.expect("the store answers").unlock().await.expect("a held lock is unlocked");
        }
    });
    other.join_all().await;
    stop.store(true, Ordering::Relaxed);
    busy.join_all().await;
}

/// Each hand-over has a larger token than the guard before it. The next grant to another process
/// also has a larger token.
pub async fn each_hand_over_has_a_larger_token(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let mut last = None;
    for _ in 0..2 {
        for guard_token in tokens_of_callers(&local, 40).await {
            assert!(Some(guard_token) > last, "{guard_token} after {last:?}");
            last = Some(guard_token);
        }
        let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
        let next = guard.fencing_token();
        assert!(Some(next) > last, "{next} after {last:?}");
        last = Some(next);
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// A lock that was handed over is renewed, stays held beyond its lease, and can be unlocked.
pub async fn a_handed_over_lock_is_renewed_beyond_its_lease(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let lock = local.obtain("orders:42");
    let first = lock.lock().await.expect("a free lock is acquired");
    let mut second = Box::pin(lock.lock());
    assert!(poll!(second.as_mut()).is_pending(), "two guards of one key");
    let (unlocked, second) = futures_util::future::join(first.unlock(), second).await;
    unlocked.expect("a held lock is unlocked");
    let second = second.expect("the waiter acquires the lock");
    sleep(context.renewable_lease() * 2).await;
    assert!(second.is_held(), "a handed-over lock is not renewed");
    assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    second.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// A waiter with a different lease and label receives a claim of its own instead of a hand-over.
pub async fn a_claim_is_handed_over_only_for_equal_options(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("orders:42");
    let first = lock.lock().await.expect("a free lock is acquired");
    let options = LockOptions::new().lease(context.renewable_lease()).label("nightly report");
    let mut second = Box::pin(lock.lock_with(options));
    assert!(poll!(second.as_mut()).is_pending(), "two guards of one key");
    let (unlocked, second) = futures_util::future::join(first.unlock(), second).await;
    unlocked.expect("a held lock is unlocked");
    let second: LockGuard = second.expect("the waiter acquires the lock");
    assert_eq!(second.claim().lease(), context.renewable_lease());
    assert_eq!(second.claim().label(), Some("nightly report"));
    second.unlock().await.expect("a held lock is unlocked");
}

/// A claim that was used for a fenced write, even through a re-entered guard, is not handed over.
/// The write may still be open, and only the claim id distinguishes it from writes of the next
/// caller.
pub async fn a_claim_with_a_fenced_write_is_not_handed_over(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    for by_reentry in [false, true] {
        let first = lock.lock().await.expect("a free lock is acquired");
        let fenced = if by_reentry {
            let again = first.reenter().expect("a held lock is re-entered");
            again.claim_for_fence().expect("a held lock is fenced").id()
        } else {
            first.claim_for_fence().expect("a held lock is fenced").id()
        };
        let mut second = Box::pin(lock.lock());
        assert!(poll!(second.as_mut()).is_pending(), "two guards of one key");
        let (unlocked, second) = futures_util::future::join(first.unlock(), second).await;
        unlocked.expect("a held lock is unlocked");
        let second = second.expect("the waiter acquires the lock");
        assert_ne!(second.claim().id(), fenced, "the claim of an open write was handed over");
        second.unlock().await.expect("a held lock is unlocked");
    }
}

/// Makes `callers` calls for one lock: the first acquires it, and the others queue. Returns the
/// tokens of their guards, in the order in which they acquired the lock.
async fn tokens_of_callers(
    registry: &Registry,
    callers: usize,
) -> Vec<registry_core::FencingToken> {
    let lock = registry.obtain("orders:42");
    let first = lock.lock().await.expect("a free lock is acquired");
    let observed_tokens = tokio::sync::Mutex::new(vec![first.fencing_token()]);
    let mut waiting = Vec::new();
    for _ in 1..callers {
        let (lock, observed_tokens) = (&lock, &observed_tokens);
        let mut waiter = Box::pin(async move {
            let guard = lock.lock().await.expect("the lock is acquired");
            observed_tokens.lock().await.push(guard.fencing_token());
            guard.unlock().await.expect("a held lock is unlocked");
        });
        assert!(poll!(waiter.as_mut()).is_pending(), "two guards of one key");
        waiting.push(waiter);
    }
    let (unlocked, _) = futures_util::future::join(first.unlock(), join_all(waiting)).await;
    unlocked.expect("a held lock is unlocked");
    observed_tokens.into_inner()
}
