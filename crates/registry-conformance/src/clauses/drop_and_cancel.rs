//! Guards and futures may be dropped, or left unpolled, at any point: no key stays locked.
#![expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockGuard, LockOptions, Owner, Registry};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::context::{TestContext, unlock};
use crate::faulty::{Fault, Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

/// Dropping a guard releases the lock. Once its registry is idle, another process can acquire the
/// lock.
pub async fn a_dropped_guard_frees_the_lock(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    drop(guard);
    local.idle().await;
    let next = remote.obtain("orders:42").try_lock().await.expect("the store answers");
    unlock(next.expect("the background releaser is idle")).await;
}

/// Dropping a guard lets a waiter of the same process acquire the lock.
pub async fn a_waiter_acquires_the_lock_of_a_dropped_guard(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is acquired");
    let mut waiting = pin!(lock.lock());
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    drop(guard);
    let next = timeout(context.max_wait(), waiting).await.expect("the guard was dropped");
    unlock(next.expect("the store answers")).await;
}

/// A panic while a guard is in scope drops the guard, so that the lock is released.
pub async fn a_panic_in_the_critical_section_frees_the_lock(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let lock = local.obtain("orders:42");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _guard = lock.lock().await.expect("a free lock is acquired");
        // Without a message, because this panic is expected.
        std::panic::resume_unwind(Box::new(()));
    });
    let end = tasks.join_next().await.expect("one task runs");
    assert!(end.is_err_and(|error| error.is_panic()));
    context.assert_becomes_free(&remote, "orders:42").await;
    context.assert_becomes_free(&local, "orders:42").await;
}

/// A guard that is dropped on a thread without a runtime releases the lock.
pub async fn a_guard_dropped_outside_the_runtime_frees_the_lock(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    std::thread::spawn(move || drop(guard)).join().expect("dropping does not panic");
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// A waiting `lock` future that is dropped on a thread without a runtime leaves nothing behind: the
/// key is free after the holder's unlock.
pub async fn a_waiter_dropped_outside_the_runtime_leaves_the_key_free(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = local.obtain("orders:42");
    let mut waiting = Box::pin(async move { lock.lock().await.map(drop) });
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    std::thread::spawn(move || drop(waiting)).join().expect("dropping does not panic");
    guard.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// A `lock` future that was polled and is then left unpolled does not block other keys: they can be
/// locked, and held locks are renewed. For example, while `select!` runs the body of one branch, it
/// does not poll the futures of the others.
pub async fn an_unpolled_future_does_not_block_other_keys(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let held = registry.obtain("orders:1").lock().await.expect("a free lock is acquired");
    for n in 2..5 {
        let lock = registry.obtain(&format!("orders:n{n}"));
        let mut unpolled = pin!(lock.lock());
        // The request is now in flight, unless the store answers at once.
        let first = poll!(unpolled.as_mut());
        let other =
            registry.obtain(&format!("other:{n}")).try_lock().await.expect("the store answers");
        other.expect("it is not held").unlock().await.expect("a held lock is unlocked");
        if n == 2 {
            sleep(context.renewable_lease() * 2).await;
            assert!(held.is_held(), "nothing is renewed while a future is not polled");
        }
        drop(first);
    }
    held.unlock().await.expect("a held lock is unlocked");
}

/// If a waiting `lock` future is not polled for the length of a lease, its claim is released and
/// leaves the store's queue. If the future is polled again, it acquires the lock.
pub async fn an_unpolled_lock_leaves_the_queue_of_the_store(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.short_lease()).await, context.registry().await);
    let held = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = local.obtain("orders:42");
    let mut unpolled = pin!(lock.lock());
    // Long enough to receive a busy answer.
    assert!(timeout(REQUEST_TIME, unpolled.as_mut()).await.is_err(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&context.registry().await, "orders:42").await;
    // Polled again, the future starts a new acquisition.
    let late = timeout(context.max_wait(), unpolled).await.expect("no other caller wants the lock");
    late.expect("the store answers").unlock().await.expect("a held lock is unlocked");
}

/// A grant for a `lock` future that is left unpolled ends with its lease, also in a store that
/// binds grants to a session.
pub async fn a_grant_for_an_unpolled_lock_ends_with_its_lease(context: &TestContext) {
    let late = Fault::DelayReply(Duration::from_millis(50));
    let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, late)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.short_lease()), context.registry().await);
    let lock = local.obtain("orders:42");
    let mut unpolled = pin!(lock.lock());
    assert!(poll!(unpolled.as_mut()).is_pending(), "the store answers late");
    context.assert_becomes_free(&local, "orders:42").await;
    context.assert_becomes_free(&remote, "orders:42").await;
    let late = timeout(context.max_wait(), unpolled).await.expect("no other caller wants the lock");
    late.expect("the store answers").unlock().await.expect("a held lock is unlocked");
}

/// A `lock` future with the local permit waits for the store on behalf of its process. If it is
/// left unpolled, the next caller of the process can proceed after a lease.
pub async fn an_unpolled_lock_does_not_block_the_next_caller_of_its_process(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.short_lease()).await, context.registry().await);
    let held = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = local.obtain("orders:42");
    let mut unpolled = pin!(lock.lock());
    assert!(timeout(REQUEST_TIME, unpolled.as_mut()).await.is_err(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&local, "orders:42").await;
    let late = timeout(context.max_wait(), unpolled).await.expect("no other caller wants the lock");
    late.expect("the store answers").unlock().await.expect("a held lock is unlocked");
}

/// If a waiter is left unpolled after it became the next holder, the next caller acquires the lock
/// after a lease. The waiter may have received the local permit, a claim by hand-over, or a further
/// guard of its owner's lock.
pub async fn an_unpolled_waiter_passes_its_lock_to_the_next_caller(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.short_lease()).await, context.registry().await);
    let lock = local.obtain("orders:42");
    let held = lock.lock().await.expect("a free lock is acquired");
    let mut unpolled = pin!(lock.lock());
    assert!(poll!(unpolled.as_mut()).is_pending(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&local, "orders:42").await;
    context.assert_becomes_free(&remote, "orders:42").await;
    let late = timeout(context.max_wait(), unpolled).await.expect("no other caller wants the lock");
    late.expect("the store answers").unlock().await.expect("a held lock is unlocked");

    let owner = Owner::new();
    let lock_as_owner = || lock.lock_with(LockOptions::new().owner(&owner));
    let held = lock.lock().await.expect("a free lock is acquired");
    let (mut first, mut unpolled) = (pin!(lock_as_owner()), pin!(lock_as_owner()));
    assert!(poll!(first.as_mut()).is_pending(), "two guards of one key");
    assert!(poll!(unpolled.as_mut()).is_pending(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    let first = timeout(context.max_wait(), first).await.expect("the lock is free");
    let first = first.expect("the store answers");
    first.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:42").await;
    let late = timeout(context.max_wait(), unpolled).await.expect("no other caller wants the lock");
    let late = late.expect("the store answers");
    late.unlock().await.expect("a held lock is unlocked");
}

/// An `unlock` that was polled once and is then left unpolled still releases the lock.
pub async fn an_unpolled_unlock_frees_the_lock(context: &TestContext) {
    let late = Fault::DelayReply(Duration::from_millis(50));
    let faulty = context.faulty(Faults::none().at_call(Operation::Release, 1, late)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.short_lease()), context.registry().await);
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let mut unpolled = pin!(guard.unlock());
    assert!(poll!(unpolled.as_mut()).is_pending(), "the store answers late");
    context.assert_becomes_free(&local, "orders:42").await;
    context.assert_becomes_free(&remote, "orders:42").await;
    let result = timeout(context.max_wait(), unpolled).await.expect("the release is answered");
    // The lease may have ended before the release.
    assert!(matches!(result, Ok(()) | Err(LockError::Lost { .. })), "{result:?}");
}

/// Dropping the lock handle or the registry does not release a held lock, which is still renewed.
pub async fn a_dropped_handle_or_registry_releases_no_lock(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let lock = local.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is acquired");
    drop(lock);
    drop(local);
    sleep(context.renewable_lease() * 2).await;
    assert!(guard.is_held(), "a guard that outlives its registry is not renewed");
    assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    guard.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// A `lock` future that is dropped while it waits leaves no record in the store. After the holder's
/// unlock, another process can acquire the lock at once.
pub async fn a_dropped_waiter_leaves_no_record(context: &TestContext) {
    let (holder, waiter) = (context.registry().await, context.registry().await);
    let guard = holder.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for _ in 0..5 {
        let lock = waiter.obtain("orders:42");
        let dropped_wait = timeout(Duration::from_millis(20), lock.lock()).await;
        assert!(dropped_wait.is_err(), "two guards of one key");
    }
    guard.unlock().await.expect("a held lock is unlocked");
    waiter.idle().await;
    let third = context.registry().await;
    let next = third.obtain("orders:42").try_lock().await.expect("the store answers");
    unlock(next.expect("the dropped waiters left the queue")).await;
}

/// If the first waiter is dropped after the lock passed to it, the second waiter acquires the lock.
pub async fn a_dropped_waiter_does_not_block_the_next_one(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is acquired");
    let mut first = Box::pin(lock.lock());
    let mut second = Box::pin(lock.lock());
    assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
    // The lock passes to the first waiter, which is dropped before it is polled again.
    guard.unlock().await.expect("a held lock is unlocked");
    drop(first);
    let next = timeout(context.max_wait(), second).await.expect("the first waiter was dropped");
    unlock(next.expect("the store answers")).await;
}

/// If a `lock` future is dropped while its acquire is in flight, the key is soon free, for this
/// process and for others.
pub async fn an_acquisition_dropped_in_flight_is_released(context: &TestContext) {
    for delay in [Fault::DelayRequest, Fault::DelayReply] {
        let late = delay(Duration::from_millis(200));
        let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, late)).await;
        let registry = context.registry_over(&faulty, context.long_lease());
        let lock = registry.obtain("orders:42");
        let dropped_wait = timeout(Duration::from_millis(50), lock.lock()).await;
        assert!(dropped_wait.is_err(), "the store answers late");
        context.assert_becomes_free(&registry, "orders:42").await;
        let other = context.registry().await;
        context.assert_becomes_free(&other, "orders:42").await;
    }
}

/// A grant whose reply was lost is released long before its lease ends.
pub async fn a_grant_with_a_lost_reply_is_released(context: &TestContext) {
    let faulty =
        context.faulty(Faults::none().at_call(Operation::Acquire, 1, Fault::LoseReply)).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let other = context.registry().await;
    match registry.obtain("orders:42").try_lock().await {
        Err(LockError::Backend { .. }) => {}
        Ok(Some(guard)) => guard.unlock().await.expect("a held lock is unlocked"),
        other => panic!("a lost reply is reported as {other:?}"),
    }
    context.assert_becomes_free(&other, "orders:42").await;
}

/// An acquire that reaches the store after its own release leaves the key locked for at most its
/// lease.
pub async fn an_acquire_that_arrives_after_its_release_ends_with_its_lease(context: &TestContext) {
    let late = Fault::RepeatLate(Duration::from_millis(100));
    let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, late)).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    guard.unlock().await.expect("a held lock is unlocked");
    faulty.wait_for_late_repetitions().await;
    context.assert_becomes_free(&context.registry().await, "orders:42").await;
}

/// A registry keeps no local lock for keys that are no longer used.
pub async fn no_local_lock_remains_for_unused_keys(context: &TestContext) {
    let registry = context.registry().await;
    let remote = context.registry().await;
    let remote_guard = remote.obtain("orders:n3").lock().await.expect("a free lock is acquired");
    for n in 0..20 {
        let lock = registry.obtain(&format!("orders:n{}", n % 4));
        match n % 4 {
            0 => drop(lock.lock().await.expect("a free lock is acquired")),
            1 => lock
                .lock()
                .await
                .expect("a free lock is acquired")
                .unlock()
                .await
                .expect("a held lock is unlocked"),
            2 => assert!(lock.try_lock().await.expect("the store answers").is_some()),
            _ => assert!(lock.try_lock().await.expect("busy is no error").is_none()),
        }
        registry.idle().await;
    }
    assert_eq!(registry.local_locks(), 0);
    remote_guard.unlock().await.expect("a held lock is unlocked");
}

/// Drops the acquisition that `make` creates after each possible number of polls, in one run for
/// each number. A completed acquisition must return a guard. After each run, each of `registries`
/// acquires the lock, in this order.
async fn sweep_acquisition<F>(
    context: &TestContext,
    make: impl AsyncFnMut() -> F,
    registries: [&Registry; 2],
) where
    F: Future<Output = Result<Option<LockGuard>, LockError>>,
{
    sweep(make, POLLS_MAX, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            let guard = output.expect("the store answers");
            unlock(guard.expect("the lock is released during the wait")).await;
        }
        for registry in registries {
            context.assert_becomes_free(registry, "orders:42").await;
        }
    })
    .await;
}

/// A `lock` future may be dropped at every poll. The key is soon free, for this process and for
/// others.
pub async fn lock_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let make = async || {
        let lock = local.obtain("orders:42");
        async move { lock.lock().await.map(Some) }
    };
    sweep_acquisition(context, make, [&remote, &local]).await;
}

/// A `try_lock_for` future that waits for another process may be dropped at every poll. The key is
/// soon free.
pub async fn a_waiting_lock_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let unlocking = Mutex::new(JoinSet::new());
    let make = async || {
        let guard = remote.obtain("orders:42").lock().await.expect("the lock is acquired");
        lock_mutex(&unlocking).spawn(unlock_soon(guard));
        let lock = local.obtain("orders:42");
        async move { lock.try_lock_for(Duration::from_secs(300)).await }
    };
    sweep_acquisition(context, make, [&third, &local]).await;
}

/// A `lock` future that waits for a guard of its own process, and may receive its claim by
/// hand-over, may be dropped at every poll. The key is soon free.
pub async fn a_queued_lock_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let unlocking = Mutex::new(JoinSet::new());
    let make = async || {
        let lock = local.obtain("orders:42");
        let guard = lock.lock().await.expect("the lock is acquired");
        lock_mutex(&unlocking).spawn(unlock_soon(guard));
        async move { lock.lock().await.map(Some) }
    };
    sweep_acquisition(context, make, [&remote, &local]).await;
}

/// A `try_lock_for` future may be dropped at every poll while the store is slow. The engine
/// completes requests in flight, and the key is soon free.
pub async fn a_slow_try_lock_for_may_be_dropped_at_every_poll(context: &TestContext) {
    let slow = Fault::DelayRequest(Duration::from_millis(15));
    let slow_reply = Fault::DelayReply(Duration::from_millis(15));
    let faults =
        Faults::none().always(Operation::Acquire, slow).always(Operation::Acquire, slow_reply);
    let faulty = context.faulty(faults).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let make = async || {
        let lock = local.obtain("orders:42");
        async move { lock.try_lock_for(Duration::from_secs(300)).await }
    };
    // `local` is first, because its callers queue behind the request in flight. A caller of
    // `remote` would not wait for this request.
    sweep_acquisition(context, make, [&local, &remote]).await;
}

/// An `unlock` future may be dropped at every poll, and the lock is still released.
pub async fn unlock_may_be_dropped_at_every_poll(context: &TestContext) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faulty = context.faulty(Faults::none().always(Operation::Release, slow)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let make = async || {
        let guard = local.obtain("orders:42").lock().await.expect("the lock is acquired");
        guard.unlock()
    };
    sweep(make, POLLS_MAX, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            output.expect("a held lock is unlocked");
        }
        context.assert_becomes_free(&remote, "orders:42").await;
        context.assert_becomes_free(&local, "orders:42").await;
    })
    .await;
}

/// An `extend` future may be dropped at every poll. The guard stays held and can be extended again.
pub async fn extend_may_be_dropped_at_every_poll(context: &TestContext) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faulty = context.faulty(Faults::none().always(Operation::Renew, slow)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    sweep_with_guard(context, &local, &remote, async |guard| {
        context
            .renew_with_retries(guard, context.long_lease())
            .await
            .expect("a held lock is renewed");
    })
    .await;
}

/// A `protect` future may be dropped at every poll. The work is dropped, and the guard stays held
/// and usable.
pub async fn protect_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    sweep_with_guard(context, &local, &remote, async |guard| {
        let work = async {
            for _ in 0..3 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        guard.protect(work).await.expect("the lock is held");
    })
    .await;
}

/// Drops the future of `work` on a held guard after each possible number of polls. After each run,
/// the guard must still be held, and `work` must succeed.
#[expect(
    clippy::future_not_send,
    reason = "the future is `Send` if that of `work` is, which no bound can express yet"
)]
async fn sweep_with_guard(
    context: &TestContext,
    local: &Registry,
    remote: &Registry,
    work: impl AsyncFn(&LockGuard),
) {
    let slot: Mutex<Option<Arc<LockGuard>>> = Mutex::new(None);
    let work = &work;
    let make = async || {
        let guard = local.obtain("orders:42").lock().await.expect("the lock is acquired");
        let guard = Arc::new(guard);
        *lock_mutex(&slot) = Some(Arc::clone(&guard));
        async move { work(&guard).await }
    };
    sweep(make, POLLS_MAX, async |_| {
        let guard =
            lock_mutex(&slot).take().and_then(Arc::into_inner).expect("the future was dropped");
        assert!(guard.is_held(), "the dropped future affected the guard");
        work(&guard).await;
        guard.unlock().await.expect("a held lock is unlocked");
        context.assert_becomes_free(remote, "orders:42").await;
    })
    .await;
}

/// A `close` future may be dropped at every poll. A second call of `close` completes, and no key
/// stays locked.
pub async fn close_may_be_dropped_at_every_poll(context: &TestContext) {
    let remote = context.registry().await;
    let slot: Mutex<Option<(Registry, LockGuard)>> = Mutex::new(None);
    let make = async || {
        let local = context.registry().await;
        let guard = local.obtain("orders:42").lock().await.expect("the lock is acquired");
        let dropped = local.obtain("orders:43").lock().await.expect("the lock is acquired");
        drop(dropped);
        *lock_mutex(&slot) = Some((local.clone(), guard));
        async move { local.close(Duration::from_millis(20)).await }
    };
    sweep(make, POLLS_MAX, async |_| {
        let (local, guard) = lock_mutex(&slot).take().expect("the value was set");
        _ = local.close(Duration::from_millis(20)).await;
        assert!(!guard.is_held(), "the guard of a closed registry is still held");
        context.assert_becomes_free(&remote, "orders:42").await;
        context.assert_becomes_free(&remote, "orders:43").await;
    })
    .await;
}

/// A re-entrant `lock_with` future may be dropped at every poll. The outer guard keeps the lock.
pub async fn reentry_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let owner = Owner::new();
    let lock = local.obtain("orders:42");
    let owner_options = || LockOptions::new().owner(&owner);
    let outer = lock.lock_with(owner_options()).await.expect("the store answers");
    let make = async || {
        let (lock, options) = (lock.clone(), owner_options());
        async move { lock.lock_with(options).await }
    };
    sweep(make, POLLS_MAX, async |end| {
        drop(end);
        assert!(outer.is_held());
        assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    })
    .await;
    outer.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// Locks the mutex even if it is poisoned, because the panic that poisoned it is reported
/// elsewhere.
fn lock_mutex<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn unlock_soon(guard: LockGuard) {
    sleep(Duration::from_millis(20)).await;
    guard.unlock().await.expect("a held lock is unlocked");
}

const POLLS_MAX: usize = 1_000;

/// Long enough for the store to answer one attempt.
const REQUEST_TIME: Duration = Duration::from_millis(300);
