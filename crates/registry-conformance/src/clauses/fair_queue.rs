//! The queue of a store in which waiters queue only on request. Claims are granted in the order of
//! arrival, the place of a dead waiter lapses, and callers of several processes acquire in turn.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use registry_core::{
    Claim, ClaimMode, LockBackend, LockError, LockOptions, LockRegistryExt as _, Queueing,
    Registry, Release,
};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::context::{
    TestContext, admin, assert_busy, assert_freed, assert_granted, is_free, key, release, unlock,
};
use crate::faulty::Faults;

/// Exclusive claims of several clients that join the queue are granted in the order of their first
/// attempts, regardless of the order in which the attempts are repeated.
pub async fn claims_that_join_are_granted_in_the_order_of_arrival(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    let claims: Vec<_> = (0..6).map(|_| queueing_claim(context, ClaimMode::Exclusive)).collect();
    assert_granted(&*clients[0], &claims[0]).await;
    for (n, claim) in claims.iter().enumerate().skip(1) {
        assert!(assert_busy(&*clients[n % 3], claim).await.is_queued, "the waiter has no place");
    }
    for first in 0..claims.len() {
        for (n, claim) in claims.iter().enumerate().skip(first + 1).rev() {
            assert_busy(&*clients[n % 3], claim).await;
        }
        assert_granted(&*clients[first % 3], &claims[first]).await;
        assert_freed(&*clients[first % 3], &claims[first]).await;
    }
    assert!(is_free(&*clients[0], claims[0].key()).await, "a released claim holds the key");
}

/// A claim that does not join the queue receives `Busy` while another claim waits in the queue,
/// even if no claim holds the key.
pub async fn a_claim_that_does_not_queue_does_not_overtake(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let waiter = queueing_claim(context, ClaimMode::Exclusive);
    assert_busy(&*second, &waiter).await;
    assert_freed(&*first, &holder).await;
    for client in [&first, &second] {
        for queueing in [Queueing::Skip, Queueing::ExclusiveIntent] {
            let other = context.claim(ClaimMode::Exclusive).with_queueing(queueing);
            assert_busy(&**client, &other).await;
            assert_eq!(release(&**client, &other).await, Release::NotHeld);
        }
    }
    assert_granted(&*second, &waiter).await;
    assert_freed(&*second, &waiter).await;
}

/// The place of a waiter lapses if the waiter does not repeat its attempt within its lease. The
/// next waiter is then first.
pub async fn the_place_of_a_waiter_lapses_with_its_lease(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let dead = queueing_claim(context, ClaimMode::Exclusive).with_lease(context.renewable_lease());
    assert_busy(&*second, &dead).await;
    let next = queueing_claim(context, ClaimMode::Exclusive);
    assert_busy(&*second, &next).await;
    assert_freed(&*first, &holder).await;
    assert_busy(&*second, &next).await;
    sleep(context.renewable_lease()).await;
    context.wait_until_granted(&*second, &next).await;
    assert_freed(&*second, &next).await;
    assert_eq!(release(&*second, &dead).await, Release::NotHeld);
    assert!(is_free(&*first, next.key()).await, "a lapsed place holds the key");
}

/// A waiter that repeats its attempt within its lease keeps its place for more than two leases.
pub async fn a_waiter_that_repeats_its_attempt_keeps_its_place(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let waiter =
        queueing_claim(context, ClaimMode::Exclusive).with_lease(context.renewable_lease());
    assert_busy(&*second, &waiter).await;
    let behind = queueing_claim(context, ClaimMode::Exclusive);
    assert_busy(&*first, &behind).await;
    for _ in 0..9 {
        sleep(context.renewable_lease() / 4).await;
        assert_busy(&*second, &waiter).await;
    }
    sleep(context.renewable_lease() / 4).await;
    assert_freed(&*first, &holder).await;
    assert_busy(&*first, &behind).await;
    assert_granted(&*second, &waiter).await;
    assert_freed(&*second, &waiter).await;
    assert_granted(&*first, &behind).await;
    assert_freed(&*first, &behind).await;
}

/// Releasing a waiter removes it from any position of the queue, and the others keep their order.
/// The released waiter can join again, at the end.
pub async fn a_released_waiter_leaves_the_queue(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let waiters: Vec<_> = (0..4).map(|_| queueing_claim(context, ClaimMode::Exclusive)).collect();
    for waiter in &waiters {
        assert_busy(&*second, waiter).await;
    }
    assert_eq!(release(&*second, &waiters[0]).await, Release::NotHeld);
    assert_eq!(release(&*second, &waiters[2]).await, Release::NotHeld);
    assert_busy(&*second, &waiters[0]).await;
    assert_freed(&*first, &holder).await;
    for n in [1, 3, 0] {
        for other in [1, 3, 0].into_iter().skip_while(|other| *other != n).skip(1) {
            assert_busy(&*second, &waiters[other]).await;
        }
        assert_granted(&*second, &waiters[n]).await;
        assert_freed(&*second, &waiters[n]).await;
    }
    assert!(is_free(&*first, holder.key()).await, "a released waiter has a place");
}

/// After the holder has expired, the first waiter is granted before any other claim.
pub async fn the_first_waiter_follows_an_expired_holder(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.claim(ClaimMode::Exclusive).with_lease(context.short_lease());
    assert_granted(&*first, &holder).await;
    let waiters = [(); 2].map(|()| queueing_claim(context, ClaimMode::Exclusive));
    for waiter in &waiters {
        assert_busy(&*second, waiter).await;
    }
    context.wait_until_expired(&*first, &holder).await;
    assert_busy(&*first, &context.claim(ClaimMode::Exclusive)).await;
    assert_busy(&*second, &waiters[1]).await;
    context.wait_until_granted(&*second, &waiters[0]).await;
    assert_freed(&*second, &waiters[0]).await;
    assert_granted(&*second, &waiters[1]).await;
    assert_freed(&*second, &waiters[1]).await;
}

/// A forced release ends the grant and leaves the queue unchanged. `inspect` returns no waiters.
pub async fn a_forced_release_keeps_the_queue(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let waiters = [(); 2].map(|()| queueing_claim(context, ClaimMode::Exclusive));
    for waiter in &waiters {
        assert_busy(&*second, waiter).await;
    }
    let inspect = async || admin(&*first).inspect(&key("orders:42")).await.expect("it answers");
    assert_eq!(inspect().await.len(), 1, "a waiter is returned as a holder");
    let released = admin(&*first).force_release(&key("orders:42")).await.expect("it answers");
    assert_eq!(released, Release::Freed);
    assert_eq!(inspect().await, []);
    assert_busy(&*first, &context.claim(ClaimMode::Exclusive)).await;
    for waiter in &waiters {
        assert_granted(&*second, waiter).await;
        assert_freed(&*second, waiter).await;
    }
}

/// In a store with wake-ups, the release of the holder ends the `wait` of the first waiter. If the
/// first waiter is released instead of granted, the `wait` of the next one ends.
pub async fn the_next_waiter_is_woken(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let waiters = [(); 3].map(|()| queueing_claim(context, ClaimMode::Exclusive));
    for waiter in &waiters {
        assert_busy(&*second, waiter).await;
    }
    assert_woken(context, &*second, &waiters[0], async { assert_freed(&*first, &holder).await })
        .await;
    assert_granted(&*second, &waiters[0]).await;
    assert_freed(&*second, &waiters[0]).await;
    assert_woken(context, &*second, &waiters[2], async {
        assert_eq!(release(&*second, &waiters[1]).await, Release::NotHeld);
    })
    .await;
    assert_granted(&*second, &waiters[2]).await;
    assert_freed(&*second, &waiters[2]).await;
}

/// A reader that joins behind a waiting writer is granted after it. A reader that joined before the
/// writer is granted before it, and readers that are next to each other in the queue hold the key
/// together.
pub async fn readers_and_writers_are_granted_in_the_order_of_arrival(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    let early = [(); 2].map(|()| queueing_claim(context, ClaimMode::Shared));
    let writer = queueing_claim(context, ClaimMode::Exclusive);
    let late = [(); 2].map(|()| queueing_claim(context, ClaimMode::Shared));
    for claim in early.iter().chain([&writer]).chain(&late) {
        assert_busy(&*second, claim).await;
    }
    assert_freed(&*first, &holder).await;
    assert_busy(&*second, &late[0]).await;
    assert_busy(&*second, &writer).await;
    assert_granted(&*second, &early[1]).await;
    assert_granted(&*second, &early[0]).await;
    assert_busy(&*second, &late[1]).await;
    assert_freed(&*second, &early[0]).await;
    assert_busy(&*second, &writer).await;
    assert_freed(&*second, &early[1]).await;
    assert_busy(&*second, &late[0]).await;
    assert_granted(&*second, &writer).await;
    assert_busy(&*second, &late[0]).await;
    assert_freed(&*second, &writer).await;
    assert_granted(&*second, &late[1]).await;
    assert_granted(&*second, &late[0]).await;
    assert_freed(&*second, &late[1]).await;
    assert_freed(&*second, &late[0]).await;
}

/// Claims for permits that join the queue are granted in the order of arrival: a claim for one unit
/// waits behind a claim for three, although one unit is free.
pub async fn permits_are_granted_in_the_order_of_arrival(context: &TestContext) {
    let permit = |take| ClaimMode::Permits { take, of: 3 };
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_in(&*first, permit(2)).await;
    let three = queueing_claim(context, permit(3));
    assert!(assert_busy(&*second, &three).await.is_queued, "the waiter has no place");
    let one = queueing_claim(context, permit(1));
    assert_busy(&*first, &one).await;
    assert_busy(&*first, &context.claim(permit(1))).await;
    assert_freed(&*first, &holder).await;
    assert_busy(&*first, &one).await;
    assert_granted(&*second, &three).await;
    assert_freed(&*second, &three).await;
    assert_granted(&*first, &one).await;
    let last = context.acquire_in(&*second, permit(2)).await;
    assert_freed(&*second, &last).await;
    assert_freed(&*first, &one).await;
}

/// A claim that joins the queue of a free key is granted at once. If it repeats its acquire, it
/// still has only one grant.
pub async fn a_claim_that_joins_a_free_key_is_granted_at_once(context: &TestContext) {
    let client = context.client().await;
    for _ in 0..3 {
        let claim = queueing_claim(context, ClaimMode::Exclusive);
        let token = assert_granted(&*client, &claim).await.token;
        let again = assert_granted(&*client, &claim).await;
        assert!(!context.capabilities().fencing || again.token == token, "{again:?}");
        assert_freed(&*client, &claim).await;
        assert!(is_free(&*client, claim.key()).await, "a granted claim keeps its place");
    }
}

/// `fair` returns `InvalidOption` before any request in a store without a queue. In a store with a
/// queue, the lock is acquired.
pub async fn fair_is_refused_before_any_request_by_a_store_without_a_queue(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("orders:42");
    let result = lock.lock_with(fair()).await;
    if context.capabilities().fair || context.capabilities().fair_on_request {
        unlock(result.expect("the store queues")).await;
        return;
    }
    assert!(matches!(result, Err(LockError::InvalidOption(_))), "{result:?}");
    let result = lock.try_lock_with(fair()).await;
    assert!(matches!(result, Err(LockError::InvalidOption(_))), "{result:?}");
    assert_eq!(faulty.requests(), 0, "a request was sent");
    let unfair = LockOptions::new().fair(false);
    unlock(lock.lock_with(unfair).await.expect("it needs no queue")).await;
}

/// Fair callers of several processes acquire the lock in the order in which they requested it.
pub async fn fair_callers_of_several_processes_acquire_in_turn(context: &TestContext) {
    let holding = context.registry().await;
    let guard = holding.obtain("orders:42").lock_with(fair()).await.expect("the lock is free");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut callers = Vec::new();
    // Kept until the end, as a process keeps its registry while its callers wait.
    let mut registries = Vec::new();
    for n in 0..4 {
        let (registry, count) = context.counting_registry().await;
        let (lock, order) = (registry.obtain("orders:42"), Arc::clone(&order));
        callers.push(tokio::spawn(async move {
            let guard = lock.lock_with(fair()).await.expect("the lock is acquired");
            order.lock().await.push(n);
            unlock(guard).await;
        }));
        context
            .eventually("the caller has a place in the queue", async || count.queued() > 0)
            .await;
        registries.push(registry);
    }
    unlock(guard).await;
    for caller in callers {
        output_of(context, caller).await;
    }
    assert_eq!(*order.lock().await, [0, 1, 2, 3]);
}

/// `try_lock` without `fair` does not overtake a waiting fair caller of another process.
pub async fn a_call_that_does_not_wait_does_not_overtake_a_fair_one(context: &TestContext) {
    let (holding, other) = (context.registry().await, context.registry().await);
    let (waiting, count) = context.counting_registry().await;
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let caller = spawn_fair_lock(&waiting);
    context.eventually("the caller has a place in the queue", async || count.queued() > 0).await;
    unlock(guard).await;
    // `None`, because the waiter is still queued or already holds the lock.
    for registry in [&holding, &other] {
        let none = registry.obtain("orders:42").try_lock().await.expect("busy is no error");
        assert!(none.is_none(), "a call overtook the fair one");
    }
    let guard = output_of(context, caller).await;
    unlock(guard).await;
    context.assert_becomes_free(&other, "orders:42").await;
}

/// The place of a fair caller is removed if the caller is dropped or its wait ends. The next caller
/// then acquires the lock.
pub async fn a_fair_caller_that_leaves_does_not_block_the_next_one(context: &TestContext) {
    let holding = context.registry().await;
    let (waiting, count) = context.counting_registry().await;
    let (next, count_of_next) = context.counting_registry().await;
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let wait = Duration::from_millis(300);
    let none = waiting.obtain("orders:42").try_lock_with(fair().wait(wait)).await;
    assert!(none.expect("busy is no error").is_none());
    let before = count.queued();
    let dropped = spawn_fair_lock(&waiting);
    context
        .eventually("the caller has a place in the queue", async || count.queued() > before)
        .await;
    let caller = spawn_fair_lock(&next);
    context
        .eventually("the caller has a place in the queue", async || count_of_next.queued() > 0)
        .await;
    dropped.abort();
    unlock(guard).await;
    unlock(output_of(context, caller).await).await;
    context.assert_becomes_free(&holding, "orders:42").await;
}

/// A fair caller acquires the lock although a waiter before it has died, because the place of the
/// dead waiter lapses.
pub async fn a_fair_caller_acquires_the_lock_after_a_dead_waiter(context: &TestContext) {
    let (dead, waiting) = (context.client().await, context.registry().await);
    let holder = context.acquire_in(&*dead, ClaimMode::Exclusive).await;
    let dead_waiter =
        queueing_claim(context, ClaimMode::Exclusive).with_lease(context.renewable_lease());
    assert_busy(&*dead, &dead_waiter).await;
    let caller = spawn_fair_lock(&waiting);
    assert_freed(&*dead, &holder).await;
    let limit = context.renewable_lease() + context.max_wait();
    let guard = timeout(limit, caller).await.expect("the place of the dead waiter lapses");
    unlock(guard.expect("no panic")).await;
}

/// A fair caller of another process acquires the lock before callers that are queued in the
/// holder's process: a fair lock is not handed over.
pub async fn many_local_callers_do_not_overtake_a_fair_caller(context: &TestContext) {
    let busy_process = context.registry().await;
    let (waiting, count) = context.counting_registry().await;
    let guard = busy_process.obtain("orders:42").lock_with(fair()).await.expect("it is free");
    let order = Arc::new(Mutex::new(Vec::new()));
    let call = |registry: &Registry, name| {
        let (lock, order) = (registry.obtain("orders:42"), Arc::clone(&order));
        tokio::spawn(async move {
            let guard = lock.lock_with(fair()).await.expect("the lock is acquired");
            order.lock().await.push(name);
            unlock(guard).await;
        })
    };
    let local = [call(&busy_process, "local"), call(&busy_process, "local")];
    let remote = call(&waiting, "remote");
    context.eventually("the caller has a place in the queue", async || count.queued() > 0).await;
    unlock(guard).await;
    for caller in local.into_iter().chain([remote]) {
        output_of(context, caller).await;
    }
    assert_eq!(*order.lock().await, ["remote", "local", "local"]);
}

/// Fair readers, writers and semaphore callers of two processes all acquire the key.
pub async fn fair_callers_of_all_modes_get_the_key(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let mut callers = Vec::new();
    for n in 0..6 {
        let registry = registries[n % 2].clone();
        callers.push(tokio::spawn(async move {
            for round in 0..3 {
                let guard = match (n / 2 + round) % 3 {
                    0 => registry.obtain("orders:42").read_with(fair()).await,
                    1 => registry.obtain("orders:42").lock_with(fair()).await,
                    _ => registry.semaphore("orders:42", 3).acquire_with(2, fair()).await,
                };
                unlock(guard.expect("the key is acquired")).await;
            }
        }));
    }
    for caller in callers {
        output_of(context, caller).await;
    }
    context.assert_becomes_free(&registries[0], "orders:42").await;
}

/// Returns a claim that joins the store's queue.
fn queueing_claim(context: &TestContext, mode: ClaimMode) -> Claim {
    context.claim(mode).with_queueing(Queueing::Join)
}

fn fair() -> LockOptions {
    LockOptions::new().fair(true)
}

/// Starts a fair `lock` call.
fn spawn_fair_lock(registry: &Registry) -> JoinHandle<registry_core::LockGuard> {
    let lock = registry.obtain("orders:42");
    tokio::spawn(async move { lock.lock_with(fair()).await.expect("the lock is acquired") })
}

/// Returns the output of `task`. Panics unless it ends soon.
async fn output_of<T>(context: &TestContext, task: JoinHandle<T>) -> T {
    let output = timeout(context.max_wait(), task).await.expect("the call ends");
    output.expect("no panic")
}

/// Asserts that `claim` is busy, and that `change` ends its `wait`.
async fn assert_woken(
    context: &TestContext,
    client: &dyn LockBackend,
    claim: &Claim,
    change: impl Future<Output = ()>,
) {
    let busy = assert_busy(client, claim).await;
    let wait = timeout(context.max_wait(), client.wait(claim, &busy));
    let later = async {
        sleep(Duration::from_millis(50)).await;
        change.await;
    };
    let (woken, ()) = join(wait, later).await;
    woken.expect("the change ends the wait");
}
