//! Lock options take effect, and invalid options are refused before any request to the store.

use std::time::Duration;

use registry_core::{
    Capabilities, ConfigError, LockError, LockOptions, LockRegistry as _, LostReason,
};
use tokio::time::{Instant, sleep};

use crate::faulty::Faults;
use crate::lab::{Lab, key};

/// A lease outside the store's limits returns an error from `lock_with`, before any request, and
/// from the registry builder. The store's limits are within those of the engine.
pub async fn a_lease_out_of_range_is_refused_before_any_request(lab: &Lab) {
    for lease in [Duration::ZERO, Duration::from_millis(1), HUNDRED_YEARS, Duration::MAX] {
        refused(lab, LockOptions::new().lease(lease), "lease").await;
        let built = lab.builder(lab.client().await).lease(lease).build();
        assert!(
            matches!(built, Err(ConfigError::Invalid(_))),
            "a registry with a lease of {lease:?}: {built:?}"
        );
    }
    let capabilities = lab.capabilities();
    assert!(capabilities.lease_min >= Capabilities::LEASE_MIN, "{capabilities:?}");
    assert!(capabilities.lease_max <= Capabilities::LEASE_MAX, "{capabilities:?}");
}

/// A wait of a hundred years returns `LockError::InvalidOption` before any request, and
/// `LockOptions::WAIT_MAX` is accepted. A wait without limit is expressed by leaving out `wait`.
pub async fn a_wait_of_a_hundred_years_is_refused_before_any_request(lab: &Lab) {
    for wait in [HUNDRED_YEARS, Duration::MAX] {
        refused(lab, LockOptions::new().wait(wait), "wait").await;
    }
    let registry = lab.registry().await;
    let options = LockOptions::new().wait(LockOptions::WAIT_MAX);
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("no trouble");
    guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
}

/// A `max_hold` of at most 1 ms, a `min_hold` of a hundred years, and a `min_hold` above `max_hold`
/// return `LockError::InvalidOption` before any request.
pub async fn holds_out_of_range_are_refused_before_any_request(lab: &Lab) {
    refused(lab, LockOptions::new().max_hold(Duration::ZERO), "max_hold").await;
    refused(lab, LockOptions::new().max_hold(Duration::from_millis(1)), "max_hold").await;
    refused(lab, LockOptions::new().min_hold(HUNDRED_YEARS), "min_hold").await;
    let crossed = LockOptions::new().min_hold(lab.long()).max_hold(lab.renewed());
    refused(lab, crossed, "min_hold").await;
}

async fn refused(lab: &Lab, options: LockOptions, option: &str) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.long());
    match registry.obtain("orders:42").lock_with(options.clone()).await {
        Err(LockError::InvalidOption(why)) => assert_eq!(why.option, option, "{why:?}"),
        other => panic!("{options:?} gives {other:?}"),
    }
    assert_eq!(faulty.requests(), 0, "the store heard of {options:?}");
}

/// The lease in the lock's options replaces the lease of the registry.
pub async fn a_lock_may_have_its_own_lease(lab: &Lab) {
    let registry = lab.registry().await;
    let options = LockOptions::new().lease(lab.renewed());
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    assert!(guard.valid_for() <= lab.renewed(), "{guard:?}");
    assert_eq!(guard.claim().lease(), lab.renewed());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// The label in the lock's options replaces the label of the registry. Without it, the holder has
/// the label of the registry.
pub async fn a_lock_may_have_its_own_label(lab: &Lab) {
    let client = lab.client().await;
    let registry =
        lab.builder(lab.client().await).label("host:1").build().expect("the registry is built");
    for (options, label) in [
        (LockOptions::new(), "host:1"),
        (LockOptions::new().label("nightly report"), "nightly report"),
    ] {
        let guard = registry.obtain("orders:42").lock_with(options).await.expect("no trouble");
        let holder = client.inspect(&key("orders:42")).await.expect("inspect answers");
        assert_eq!(holder.and_then(|holder| holder.label).as_deref(), Some(label));
        let guard = guard.expect("without a wait there is always a guard");
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// A lock is lost with `LostReason::MaxHold` at the end of its `max_hold`, whatever its lease and
/// its renewals. The key is then free, even while the guard exists.
pub async fn a_lock_ends_with_its_max_hold(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let options = LockOptions::new().max_hold(lab.renewed());
    let begun = Instant::now();
    let guard = here.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    // The renewal asks for more time than `max_hold` leaves.
    lab.renew_by_hand(&guard, lab.long()).await.expect("a held lock is renewed");
    assert!(guard.valid_for() <= lab.renewed(), "{guard:?}");
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    assert!(
        begun.elapsed() + Duration::from_secs(1) >= lab.renewed(),
        "lost after {:?}",
        begun.elapsed()
    );
    assert!(!guard.is_held());
    // The guard still exists, but the key is free.
    lab.free_soon(&there, "orders:42").await;
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::MaxHold, .. })
    ));
}

/// A lock whose guard is never dropped is released at the end of its `max_hold`.
pub async fn a_forgotten_guard_with_a_max_hold_is_freed(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let options = LockOptions::new().max_hold(lab.short());
    let guard = here.obtain("orders:42").lock_with(options).await.expect("no trouble");
    std::mem::forget(guard);
    lab.free_soon(&there, "orders:42").await;
    lab.free_soon(&here, "orders:42").await;
}

/// A key stays locked until its `min_hold` has passed since the grant, even if its guard is
/// unlocked or dropped earlier. The `min_hold` may be longer than the lease. ShedLock calls this
/// `lockAtLeastFor`.
pub async fn a_key_stays_taken_for_its_min_hold(lab: &Lab) {
    // First within the lease, then beyond it.
    for unlock in [true, false] {
        stays_taken(lab, lab.long(), lab.short(), unlock).await;
        stays_taken(lab, lab.renewed(), lab.renewed() + lab.short(), unlock).await;
    }
}

async fn stays_taken(lab: &Lab, lease: Duration, min_hold: Duration, unlock: bool) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let options = LockOptions::new().lease(lease).min_hold(min_hold);
    let guard = here.obtain("orders:42").lock_with(options).await.expect("no trouble");
    // Counted from after the grant, so that the measured time never exceeds the real one.
    let held_since = Instant::now();
    let guard = guard.expect("without a wait there is always a guard");
    if unlock {
        guard.unlock().await.expect("a held lock is unlocked");
    } else {
        drop(guard);
    }
    let next = there.obtain("orders:42").try_lock_for(lab.patience()).await.expect("no trouble");
    let taken = held_since.elapsed() + Duration::from_millis(20);
    assert!(taken >= min_hold, "the key was taken for {taken:?} of {min_hold:?}");
    next.expect("the min_hold is over").unlock().await.expect("a held lock is unlocked");
}

/// `force_release` ends the `min_hold` of an unlocked key. If the process that unlocked the key
/// calls it, its own callers can acquire the lock too.
pub async fn a_key_that_is_kept_for_its_min_hold_may_be_broken(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    for by_holder in [true, false] {
        // Longer than any wait below.
        let min_hold = lab.patience() * 4;
        let options = LockOptions::new().min_hold(min_hold).max_hold(min_hold);
        let guard = here.obtain("orders:42").lock_with(options).await.expect("no trouble");
        guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
        let kept = there.obtain("orders:42").try_lock().await.expect("busy is no error");
        assert!(kept.is_none(), "the key is not kept");
        let breaks = if by_holder { &here } else { &there };
        assert!(breaks.force_release("orders:42").await.expect("breaking answers"));
        lab.free_soon(&there, "orders:42").await;
        if by_holder {
            lab.free_soon(&here, "orders:42").await;
        }
    }
}

/// A lock that is unlocked after its `min_hold` is free at once.
pub async fn a_min_hold_that_is_over_delays_nothing(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let min_hold = lab.short();
    let options = LockOptions::new().min_hold(min_hold);
    let guard = here.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    sleep(min_hold * 3 / 2).await;
    guard.unlock().await.expect("a held lock is unlocked");
    let next = there.obtain("orders:42").try_lock().await.expect("no trouble");
    next.expect("the lock was unlocked").unlock().await.expect("a held lock is unlocked");
}

/// `renew` with a lease outside the limits returns `LockError::InvalidOption` without a request to
/// the store. The lock stays held.
pub async fn a_renewal_out_of_range_is_refused_and_costs_nothing(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let requests = faulty.requests();
    for lease in [Duration::ZERO, Duration::from_millis(1), HUNDRED_YEARS] {
        match guard.renew(lease).await {
            Err(LockError::InvalidOption(why)) => assert_eq!(why.option, "lease", "{why:?}"),
            other => panic!("a renewal for {lease:?} gives {other:?}"),
        }
    }
    assert_eq!(faulty.requests(), requests, "the store heard of it");
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// `capabilities` of a registry returns the capabilities of its store.
pub async fn a_registry_tells_what_its_store_can(lab: &Lab) {
    assert_eq!(lab.registry().await.capabilities(), lab.client().await.capabilities());
}

const HUNDRED_YEARS: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);
