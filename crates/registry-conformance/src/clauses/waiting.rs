//! A wait ends when the lock is acquired, at its deadline, or with an error. Waiters of one process
//! acquire the lock in order and share their store requests.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use futures_util::poll;
use registry_core::{Claim, LockBackend, LockError, LockRegistry as _, Registry};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, is_free, key, unlock,
};
use crate::faulty::{Fault, Faults, FaultyBackend, Operation};
use crate::harness::RemoteLock;

/// In a store with wake-ups, a release ends the `wait` of another claim of the same client.
pub async fn a_release_ends_the_wait_of_the_same_client(context: &TestContext) {
    let client = context.client().await;
    assert_a_release_wakes(context, &*client, &*client).await;
}

/// In a store with wake-ups, a release ends the `wait` of a claim of another client.
pub async fn a_release_ends_the_wait_of_another_client(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    // The first direction runs twice, because the first wait of a client may set up its
    // subscription.
    assert_a_release_wakes(context, &*first, &*second).await;
    assert_a_release_wakes(context, &*second, &*first).await;
    assert_a_release_wakes(context, &*first, &*second).await;
}

async fn assert_a_release_wakes(
    context: &TestContext,
    holding: &dyn LockBackend,
    waiting: &dyn LockBackend,
) {
    let holder = Claim::new(key("orders:42"), context.long_lease());
    let waiter = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(holding, &holder).await;
    let busy = assert_busy(waiting, &waiter).await;
    let wait = timeout(context.max_wait(), waiting.wait(&waiter, &busy));
    let release = async {
        sleep(Duration::from_millis(50)).await;
        assert_freed(holding, &holder).await;
    };
    let (woken, ()) = join(wait, release).await;
    woken.expect("a release ends the wait");
    assert_granted(waiting, &waiter).await;
    assert_freed(waiting, &waiter).await;
}

/// In a store with wake-ups, a release between the busy answer and the call of `wait` ends the
/// `wait`.
pub async fn a_release_between_busy_and_wait_is_not_missed(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for _ in 0..5 {
        let holder = Claim::new(key("orders:42"), context.long_lease());
        let waiter = Claim::new(key("orders:42"), context.long_lease());
        assert_granted(&*first, &holder).await;
        let busy = assert_busy(&*second, &waiter).await;
        assert_freed(&*first, &holder).await;
        let wait = timeout(context.max_wait(), second.wait(&waiter, &busy));
        wait.await.expect("a release before the wait ends the wait");
    }
}

/// In a store with wake-ups, one client waits for five keys, and each `wait` ends when its own key
/// is released.
pub async fn each_wait_ends_with_the_release_of_its_own_key(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holders: Vec<_> =
        (0..5).map(|n| Claim::new(key(&format!("orders:n{n}")), context.long_lease())).collect();
    let mut waiters = Vec::new();
    for holder in &holders {
        assert_granted(&*first, holder).await;
        let waiter = Claim::new(holder.key().clone(), context.long_lease());
        let busy = assert_busy(&*second, &waiter).await;
        waiters.push((waiter, busy));
    }
    let waits = join_all(waiters.iter().map(async |(waiter, busy)| {
        timeout(context.max_wait(), second.wait(waiter, busy)).await.expect("its key was released");
    }));
    let releases = async {
        sleep(Duration::from_millis(50)).await;
        for holder in holders.iter().rev() {
            assert_freed(&*first, holder).await;
        }
    };
    join(waits, releases).await;
}

/// Dropping a `wait` future at any time leaves nothing behind: after the holder's release, the key
/// is free. `wait` is the only future of a backend that the engine drops before it is ready.
pub async fn a_wait_may_be_dropped_at_any_time(context: &TestContext) {
    let client = context.client().await;
    let holder = context.acquire_with_lease(&*client, context.long_lease()).await;
    for n in 0..10 {
        let waiter = Claim::new(key("orders:42"), context.long_lease());
        let busy = assert_busy(&*client, &waiter).await;
        drop(timeout(Duration::from_millis(n), client.wait(&waiter, &busy)).await);
    }
    assert_freed(&*client, &holder).await;
    assert!(is_free(&*client, holder.key()).await, "a dropped wait left a record");
}

/// A waiter acquires the lock after another caller of the same process unlocks it.
pub async fn a_waiter_acquires_the_lock_when_this_process_unlocks_it(context: &TestContext) {
    let registry = context.registry().await;
    assert_waiter_acquires(&registry, &registry).await;
}

/// A waiter acquires the lock after another process unlocks it.
pub async fn a_waiter_acquires_the_lock_when_another_process_unlocks_it(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    assert_waiter_acquires(&remote, &local).await;
    assert_waiter_acquires(&local, &remote).await;
}

async fn assert_waiter_acquires(holder: &Registry, waiter: &Registry) {
    let guard = holder.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = waiter.obtain("orders:42");
    let mut waiting = pin!(lock.lock());
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    let (next, unlocked) = join(waiting, async {
        sleep(Duration::from_millis(50)).await;
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    unlock(next.expect("the waiter acquires the lock")).await;
}

/// `try_lock_for` with a wait of zero makes one attempt and acquires a free lock.
pub async fn a_wait_of_zero_acquires_a_free_lock(context: &TestContext) {
    let registry = context.registry().await;
    let guard =
        registry.obtain("orders:42").try_lock_for(Duration::ZERO).await.expect("the store answers");
    guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
}

/// `try_lock_for` with a wait of zero or one nanosecond returns `Ok(None)` for a held lock, in the
/// holder's process and in another. It does not wait without limit.
pub async fn a_wait_of_zero_does_not_wait(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for registry in [&local, &remote] {
        for wait in [Duration::ZERO, Duration::from_nanos(1)] {
            let lock = registry.obtain("orders:42");
            let none =
                timeout(context.max_wait(), lock.try_lock_for(wait)).await.expect("it returns");
            assert!(none.expect("busy is no error").is_none());
        }
    }
    guard.unlock().await.expect("a held lock is unlocked");
}

/// If this process holds the lock, `try_lock_for` returns `Ok(None)` at its deadline and not
/// before.
pub async fn a_wait_for_a_holder_in_this_process_returns_none_at_its_deadline(
    context: &TestContext,
) {
    let registry = context.registry().await;
    assert_wait_ends_at_its_deadline(context, &registry, &registry).await;
}

/// If another process holds the lock, `try_lock_for` returns `Ok(None)` at its deadline and not
/// before.
pub async fn a_wait_for_a_holder_in_another_process_returns_none_at_its_deadline(
    context: &TestContext,
) {
    let (local, remote) = (context.registry().await, context.registry().await);
    assert_wait_ends_at_its_deadline(context, &remote, &local).await;
}

async fn assert_wait_ends_at_its_deadline(
    context: &TestContext,
    holding: &Registry,
    waiting: &Registry,
) {
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let wait = Duration::from_millis(600);
    let started = Instant::now();
    let none = timeout(context.max_wait(), waiting.obtain("orders:42").try_lock_for(wait)).await;
    let none = none.expect("the wait ends").expect("busy is no error");
    assert!(none.is_none(), "two guards of one key");
    assert!(started.elapsed() >= wait, "given up after {:?}", started.elapsed());
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// Callers of one process acquire the lock in the order of their arrival.
pub async fn callers_of_one_process_acquire_in_the_order_of_their_arrival(context: &TestContext) {
    let registry = context.registry().await;
    assert_eq!(acquisition_order(&registry, 6, &[]).await, [0, 1, 2, 3, 4, 5]);
}

/// Dropping waiters does not change the order of the other waiters.
pub async fn a_cancelled_waiter_does_not_change_the_order_of_the_others(context: &TestContext) {
    let registry = context.registry().await;
    assert_eq!(acquisition_order(&registry, 6, &[0, 3, 5]).await, [1, 2, 4]);
}

/// Queues `callers` behind a guard, drops those in `dropped`, and returns the order in which the
/// others acquire the lock.
async fn acquisition_order(registry: &Registry, callers: usize, dropped: &[usize]) -> Vec<usize> {
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let order = tokio::sync::Mutex::new(Vec::new());
    let mut waiting = Vec::new();
    for n in 0..callers {
        let (lock, order) = (registry.obtain("orders:42"), &order);
        let mut caller = Box::pin(async move {
            let guard = lock.lock().await.expect("the lock is acquired");
            order.lock().await.push(n);
            guard.unlock().await.expect("a held lock is unlocked");
        });
        // The first poll queues the caller.
        assert!(poll!(caller.as_mut()).is_pending(), "two guards of one key");
        waiting.push(Some(caller));
    }
    for n in dropped {
        waiting[*n] = None;
    }
    guard.unlock().await.expect("a held lock is unlocked");
    join_all(waiting.into_iter().flatten()).await;
    order.into_inner()
}

/// One unlock ends the wait of one of two processes. The other process continues to wait and
/// acquires the lock at the next unlock.
pub async fn one_unlock_ends_the_wait_of_one_of_two_processes(context: &TestContext) {
    let holder = context.registry().await;
    let waiters = [context.registry().await, context.registry().await];
    let guard = holder.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let mut tasks = JoinSet::new();
    for registry in &waiters {
        let lock = registry.obtain("orders:42");
        let wait = context.max_wait();
        tasks.spawn(async move { lock.try_lock_for(wait).await });
    }
    sleep(Duration::from_millis(100)).await;
    guard.unlock().await.expect("a held lock is unlocked");
    for _ in 0..2 {
        let next = tasks.join_next().await.expect("two tasks run").expect("no panic");
        let next = next.expect("the store answers").expect("the waiter acquires the lock");
        // While one process holds the lock, the wait of the other must not end, either with a guard
        // or without one.
        let other = timeout(Duration::from_millis(100), tasks.join_next()).await;
        assert!(!matches!(other, Ok(Some(_))), "the wait of the other process ended: {other:?}");
        next.unlock().await.expect("a held lock is unlocked");
    }
}

/// A waiter whose wake-ups are lost acquires the lock, because the engine also polls.
pub async fn a_waiter_acquires_the_lock_after_a_lost_wake_up(context: &TestContext) {
    let faulty = context.faulty(Faults::none().always(Operation::Wait, Fault::LoseWake)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    assert_waiter_acquires(&remote, &local).await;
}

/// A premature wake-up neither ends the wait nor grants the lock. The waiter tries to acquire, and
/// then continues to wait.
pub async fn a_premature_wake_up_neither_ends_the_wait_nor_grants(context: &TestContext) {
    let premature = Fault::WakeEarly(Duration::from_millis(20));
    let faulty = context.faulty(Faults::none().always(Operation::Wait, premature)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    assert_wait_ends_at_its_deadline(context, &remote, &local).await;
    assert_waiter_acquires(&remote, &local).await;
}

/// A waiter retries after a refused request, a lost request and a lost reply, and acquires the
/// lock.
pub async fn a_waiter_retries_after_transient_store_errors(context: &TestContext) {
    let faults = Faults::none()
        .at_call(Operation::Acquire, 1, Fault::Refuse)
        .at_call(Operation::Acquire, 2, Fault::LoseRequest)
        .at_call(Operation::Acquire, 3, Fault::LoseReply);
    let faulty = context.faulty(faults).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let guard = registry.obtain("orders:42").try_lock_for(context.max_wait()).await;
    let guard =
        guard.expect("the store error was retried").expect("no other caller wants the lock");
    guard.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// `try_lock_for` returns `LockError::Backend`, not `Ok(None)`, if the store is unreachable for the
/// whole wait.
pub async fn an_outage_for_the_whole_wait_is_an_error(context: &TestContext) {
    let faulty = context.faulty(Faults::outage()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    match registry.obtain("orders:42").try_lock_for(Duration::from_millis(700)).await {
        Err(LockError::Backend { .. }) => {}
        other => panic!("an outage is reported as {other:?}"),
    }
}

/// A store error that is not retryable ends the wait at once, after one attempt.
pub async fn a_permanent_store_error_ends_the_wait_at_once(context: &TestContext) {
    let faulty = context.faulty(Faults::none().always(Operation::Acquire, Fault::Deny)).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("orders:42");
    match timeout(context.max_wait(), lock.lock()).await.expect("a permanent error ends the wait") {
        Err(error @ LockError::Backend { .. }) => assert!(!error.is_retryable(), "{error:?}"),
        other => panic!("a store that denies is reported as {other:?}"),
    }
    assert_eq!(faulty.calls(Operation::Acquire), 1, "the engine retries a permanent error");
}

/// Fifty waiters of one process send about as many requests to the store as one waiter: at most two
/// attempts per poll interval, and five more in total.
pub async fn fifty_waiters_of_one_process_poll_as_rarely_as_one(context: &TestContext) {
    let remote = context.registry().await;
    let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let faulty = context.faulty(Faults::none()).await;
    let poll = Duration::from_millis(200);
    let client: Arc<dyn LockBackend> = Arc::<FaultyBackend>::clone(&faulty);
    let local = context.builder(client).poll(poll).build().expect("the registry is built");
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let lock = local.obtain("orders:42");
        tasks.spawn(async move {
            let guard = lock.lock().await.expect("the lock is acquired");
            guard.unlock().await.expect("a held lock is unlocked");
        });
    }
    sleep(poll * 10).await;
    let attempts = faulty.calls(Operation::Acquire);
    // Each premature wake-up from the store adds an attempt.
    let polls = started.elapsed().as_millis() / poll.as_millis();
    assert!(u128::from(attempts) <= 2 * polls + 5, "{attempts} attempts in {polls} poll intervals");
    assert!(attempts > 0, "no attempt was sent");
    guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(tasks.join_all().await.len(), 50, "all waiters acquire the lock");
}

/// Twenty waiters of one key do not delay callers of other keys in the same process.
pub async fn waiters_of_one_key_do_not_delay_callers_of_other_keys(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = remote.obtain("held").lock().await.expect("a free lock is acquired");
    let lock = local.obtain("held");
    let waiting = pin!(join_all((0..20).map(|_| lock.lock())));
    let others = pin!(async {
        for n in 0..10 {
            let other =
                local.obtain(&format!("orders:n{n}")).try_lock().await.expect("the store answers");
            other.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
        }
    });
    match timeout(context.max_wait(), select(waiting, others)).await {
        Ok(Either::Right(_)) => {}
        Ok(Either::Left((guards, _))) => panic!("two guards of one key: {guards:?}"),
        Err(_) => panic!("callers of other keys wait for the waiters"),
    }
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter here acquires the lock after a separate operating-system process unlocks it.
pub async fn a_waiter_acquires_the_lock_when_a_separate_process_unlocks_it(context: &TestContext) {
    let mut remote = context.remote(context.long_lease()).await;
    let local = context.registry().await;
    assert!(matches!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    let lock = local.obtain("orders:42");
    let waiting = lock.try_lock_for(context.max_wait());
    let (guard, unlocked) = join(waiting, async {
        sleep(Duration::from_millis(200)).await;
        remote.unlock("orders:42").await
    })
    .await;
    assert!(unlocked, "the other process did not hold the lock");
    let guard = guard.expect("the store answers").expect("the lock is released during the wait");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter in a separate operating-system process acquires the lock after it is unlocked here.
pub async fn a_separate_process_acquires_the_lock_when_it_is_unlocked_here(context: &TestContext) {
    let mut remote = context.remote(context.long_lease()).await;
    let local = Arc::new(context.registry().await);
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let wait = context.max_wait();
    let (held, unlocked) = join(remote.lock("orders:42", wait), async {
        sleep(Duration::from_millis(200)).await;
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    assert!(matches!(held, RemoteLock::Held { .. }));
    assert!(remote.unlock("orders:42").await, "the other process did not hold the lock");
}
