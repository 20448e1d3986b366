//! Lock options take effect, and invalid options are refused before any request to the store.

use std::time::Duration;

use futures_util::poll;
use registry_core::{Capabilities, ConfigError, LockError, LockOptions, LostReason};
use tokio::time::{Instant, sleep};

use crate::context::{TestContext, admin, key, unlock};
use crate::faulty::Faults;

/// `try_lock_with` refuses a lease outside the store's limits before any request, and the registry
/// builder refuses it too. The store's limits are within those of the engine.
pub async fn a_lease_out_of_range_is_refused_before_any_request(context: &TestContext) {
    for lease in [Duration::ZERO, Duration::from_millis(1), HUNDRED_YEARS, Duration::MAX] {
        assert_refused(context, LockOptions::new().lease(lease), "lease").await;
        let built = context.builder(context.client().await).lease(lease).build();
        assert!(
            matches!(built, Err(ConfigError::Invalid(_))),
            "a registry with a lease of {lease:?}: {built:?}"
        );
    }
    let capabilities = context.capabilities();
    assert!(capabilities.lease_min >= Capabilities::LEASE_MIN, "{capabilities:?}");
    assert!(capabilities.lease_max <= Capabilities::LEASE_MAX, "{capabilities:?}");
}

/// A wait of a hundred years is accepted, as a wait without a limit. The caller acquires the lock
/// when it becomes free.
pub async fn a_wait_of_a_hundred_years_has_no_limit(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    for wait in [HUNDRED_YEARS, Duration::MAX] {
        let held = lock.lock().await.expect("a free lock is acquired");
        let mut waiter = Box::pin(lock.lock_with(LockOptions::new().wait(wait)));
        assert!(poll!(waiter.as_mut()).is_pending(), "two guards of one key");
        held.unlock().await.expect("a held lock is unlocked");
        let guard = waiter.await.expect("the waiter acquires the lock");
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// A `max_hold` of at most 1 ms, a `min_hold` of a hundred years, and a `min_hold` above `max_hold`
/// are refused with `LockError::InvalidOption` before any request.
pub async fn hold_limits_out_of_range_are_refused_before_any_request(context: &TestContext) {
    assert_refused(context, LockOptions::new().max_hold(Duration::ZERO), "max_hold").await;
    assert_refused(context, LockOptions::new().max_hold(Duration::from_millis(1)), "max_hold")
        .await;
    assert_refused(context, LockOptions::new().min_hold(HUNDRED_YEARS), "min_hold").await;
    let crossed =
        LockOptions::new().min_hold(context.long_lease()).max_hold(context.renewable_lease());
    assert_refused(context, crossed, "min_hold").await;
}

async fn assert_refused(context: &TestContext, options: LockOptions, option: &str) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    match registry.obtain("orders:42").try_lock_with(options.clone()).await {
        Err(LockError::InvalidOption(why)) => assert_eq!(why.option, option, "{why:?}"),
        other => panic!("{options:?} returned {other:?}"),
    }
    assert_eq!(faulty.requests(), 0, "a request with {options:?} reached the store");
}

/// The lease in the lock's options replaces the lease of the registry.
pub async fn a_lock_may_have_its_own_lease(context: &TestContext) {
    let registry = context.registry().await;
    let options = LockOptions::new().lease(context.renewable_lease());
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
    assert!(guard.valid_for() <= context.renewable_lease(), "{guard:?}");
    assert_eq!(guard.claim().lease(), context.renewable_lease());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// The label in the lock's options replaces the label of the registry. Without it, the holder has
/// the label of the registry.
pub async fn a_lock_may_have_its_own_label(context: &TestContext) {
    let client = context.client().await;
    let registry = context
        .builder(context.client().await)
        .label("host:1")
        .build()
        .expect("the registry is built");
    for (options, label) in [
        (LockOptions::new(), "host:1"),
        (LockOptions::new().label("nightly report"), "nightly report"),
    ] {
        let guard =
            registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
        let mut holders =
            admin(&*client).inspect(&key("orders:42")).await.expect("inspect answers");
        assert_eq!(holders.pop().and_then(|holder| holder.label).as_deref(), Some(label));
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// A lock is lost with `LostReason::MaxHold` at the end of its `max_hold`, regardless of its lease
/// and its renewals. The key is then free, even while the guard exists.
pub async fn a_lock_ends_with_its_max_hold(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let options = LockOptions::new().max_hold(context.renewable_lease());
    let started = Instant::now();
    let guard = local.obtain("orders:42").lock_with(options).await.expect("the store answers");
    // The renewal asks for more time than `max_hold` leaves.
    context.renew_with_retries(&guard, context.long_lease()).await.expect("a held lock is renewed");
    assert!(guard.valid_for() <= context.renewable_lease(), "{guard:?}");
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    assert!(
        started.elapsed() + Duration::from_secs(1) >= context.renewable_lease(),
        "lost after {:?}",
        started.elapsed()
    );
    assert!(!guard.is_held());
    // The guard still exists, but the key is free.
    context.assert_becomes_free(&remote, "orders:42").await;
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::MaxHold, .. })
    ));
}

/// A lock whose guard is never dropped is released at the end of its `max_hold`.
pub async fn a_lock_with_a_leaked_guard_ends_with_its_max_hold(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let options = LockOptions::new().max_hold(context.short_lease());
    let guard = local.obtain("orders:42").lock_with(options).await.expect("the store answers");
    std::mem::forget(guard);
    context.assert_becomes_free(&remote, "orders:42").await;
    context.assert_becomes_free(&local, "orders:42").await;
}

/// A key stays locked until its `min_hold` has passed since the grant, even if its guard is
/// unlocked or dropped earlier. The `min_hold` may be longer than the lease. ShedLock calls this
/// `lockAtLeastFor`.
pub async fn a_key_stays_locked_for_its_min_hold(context: &TestContext) {
    // The `min_hold` is first shorter than the lease, then longer.
    for is_unlocked in [true, false] {
        assert_stays_locked(context, context.long_lease(), context.short_lease(), is_unlocked)
            .await;
        assert_stays_locked(
            context,
            context.renewable_lease(),
            context.renewable_lease() + context.short_lease(),
            is_unlocked,
        )
        .await;
    }
}

async fn assert_stays_locked(
    context: &TestContext,
    lease: Duration,
    min_hold: Duration,
    is_unlocked: bool,
) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let options = LockOptions::new().lease(lease).min_hold(min_hold);
    let guard = local.obtain("orders:42").lock_with(options).await.expect("the store answers");
    // The key has been locked since the grant, slightly earlier than this. The 20 ms below cover
    // the difference.
    let held_since = Instant::now();
    if is_unlocked {
        guard.unlock().await.expect("a held lock is unlocked");
    } else {
        drop(guard);
    }
    let next = remote
        .obtain("orders:42")
        .try_lock_for(context.max_wait())
        .await
        .expect("the store answers");
    let locked_for = held_since.elapsed() + Duration::from_millis(20);
    assert!(locked_for >= min_hold, "the key was locked for {locked_for:?} of {min_hold:?}");
    unlock(next.expect("the min_hold is over")).await;
}

/// `force_release` ends the `min_hold` of an unlocked key. If the process that unlocked the key
/// calls `force_release`, callers of that process can acquire the lock too.
pub async fn a_forced_release_ends_a_min_hold(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    for by_holder in [true, false] {
        // Longer than any wait below.
        let min_hold = context.max_wait() * 4;
        let options = LockOptions::new().min_hold(min_hold).max_hold(min_hold);
        let guard = local.obtain("orders:42").lock_with(options).await.expect("the store answers");
        guard.unlock().await.expect("a held lock is unlocked");
        let next = remote.obtain("orders:42").try_lock().await.expect("busy is no error");
        assert!(next.is_none(), "the key is not locked");
        let releasing = if by_holder { &local } else { &remote };
        assert!(releasing.force_release("orders:42").await.expect("force_release answers"));
        context.assert_becomes_free(&remote, "orders:42").await;
        if by_holder {
            context.assert_becomes_free(&local, "orders:42").await;
        }
    }
}

/// A lock that is unlocked after its `min_hold` is free at once.
pub async fn an_elapsed_min_hold_does_not_delay_the_release(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let min_hold = context.short_lease();
    let options = LockOptions::new().min_hold(min_hold);
    let guard = local.obtain("orders:42").lock_with(options).await.expect("the store answers");
    sleep(min_hold * 3 / 2).await;
    guard.unlock().await.expect("a held lock is unlocked");
    let next = remote.obtain("orders:42").try_lock().await.expect("the store answers");
    unlock(next.expect("the lock was unlocked")).await;
}

/// `extend` with a lease outside the limits returns `LockError::InvalidOption` without a request to
/// the store. The lock stays held.
pub async fn a_renewal_out_of_range_is_refused_before_any_request(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let requests = faulty.requests();
    for lease in [Duration::ZERO, Duration::from_millis(1), HUNDRED_YEARS] {
        match guard.extend(lease).await {
            Err(LockError::InvalidOption(why)) => assert_eq!(why.option, "lease", "{why:?}"),
            other => panic!("a renewal for {lease:?} returned {other:?}"),
        }
    }
    assert_eq!(faulty.requests(), requests, "a request reached the store");
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// `capabilities` of a registry returns the capabilities of its store.
pub async fn a_registry_returns_the_capabilities_of_its_store(context: &TestContext) {
    assert_eq!(context.registry().await.capabilities(), context.client().await.capabilities());
}

const HUNDRED_YEARS: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);
