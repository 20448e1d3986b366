//! Tests what a registry promises to its callers, over the in-process store and mostly on paused
//! time.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ConfigError, FencingToken, Grant,
    GuaranteeClass, Invalidations, LockBackend, LockError, LockOptions, LockRegistry,
    LockRegistryExt, LostReason, MemoryBackend, Owner, Reach, Registry, RegistryBuilder, Release,
    Renewal,
};
use tokio::time::advance;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn two_processes() -> (Registry, Registry) {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    (open(), open())
}

#[tokio::test(start_paused = true)]
async fn a_lock_excludes_other_callers_until_unlock() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(guard.is_held());
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    assert!(ours.obtain("k").try_lock().await.unwrap().is_none());
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = theirs.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().await.unwrap();
    assert_eq!((ours.local_locks(), theirs.local_locks()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_held_lock_is_renewed_for_as_long_as_it_is_held() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    tokio::time::sleep(secs(600)).await;
    assert!(guard.is_held());
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_renewal_the_holder_is_notified_before_another_client_acquires_the_lock() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().auto_renew(false).lease(secs(10));
    let guard = ours.obtain("k").lock_with(options).await.unwrap();
    let lost = guard.lost();
    let next = tokio::spawn(async move { theirs.obtain("k").lock().await });
    assert_eq!(lost.await, LostReason::Expired);
    assert!(!guard.is_held());
    assert!(!next.is_finished());
    let next = next.await.unwrap().unwrap();
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::Expired, .. })
    ));
    assert!(next.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_frees_the_key_in_the_background() {
    let (ours, theirs) = two_processes();
    drop(ours.obtain("k").lock().await.unwrap());
    ours.idle().await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_owner_reenters_and_others_wait_for_the_last_guard() {
    let (ours, theirs) = two_processes();
    let owner = Owner::new();
    let options = LockOptions::new().owner(&owner);
    let lock = ours.obtain("k");
    let outer = lock.lock_with(options.clone()).await.unwrap();
    let inner = lock.lock_with(options).await.unwrap();
    assert_eq!(outer.fencing_token(), inner.fencing_token());
    outer.unlock().await.unwrap();
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    inner.unlock().await.unwrap();
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_handed_over_to_local_waiters_in_order_with_growing_tokens() {
    let (ours, theirs) = two_processes();
    let first = ours.obtain("k").lock().await.unwrap();
    let mut token = first.fencing_token();
    let lock = ours.obtain("k");
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..10 {
        let lock = lock.clone();
        waiters.spawn(async move { (n, lock.lock().await.unwrap()) });
        tokio::task::yield_now().await;
    }
    first.unlock().await.unwrap();
    let mut order = Vec::new();
    while let Some(next) = waiters.join_next().await {
        let (n, guard) = next.unwrap();
        assert!(guard.fencing_token() > token && guard.is_held());
        token = guard.fencing_token();
        order.push(n);
        guard.unlock().await.unwrap();
    }
    assert_eq!(order, (0..10).collect::<Vec<_>>());
    drop(lock);
    let after = theirs.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(after.fencing_token() > token);
    assert_eq!(ours.local_locks(), 0);
}

/// Each call of `holders` registers with the stall detector for a moment.
#[tokio::test(start_paused = true)]
async fn frequent_short_calls_do_not_postpone_the_check_for_unpolled_callers() {
    let registry = Registry::in_memory().unwrap();
    let lock = registry.obtain("k");
    let holder = lock.lock().await.unwrap();
    let mut unpolled = Box::pin(lock.lock());
    assert!(futures_util::poll!(unpolled.as_mut()).is_pending());
    // The lock is handed over to the caller that is not polled.
    holder.unlock().await.unwrap();
    let waiter = lock.clone();
    let waiter = tokio::spawn(async move { waiter.lock().await });
    let calls = async {
        loop {
            registry.obtain("another").holders().await.unwrap();
            tokio::time::sleep(secs(1)).await;
        }
    };
    tokio::select! {
        guard = tokio::time::timeout(secs(120), waiter) => drop(guard.unwrap().unwrap().unwrap()),
        () = calls => {}
    }
    drop(unpolled);
}

#[tokio::test(start_paused = true)]
async fn close_notifies_the_holders_and_frees_their_keys() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    let waiter = tokio::spawn({
        let lock = ours.obtain("k");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let report = ours.close(secs(1)).await;
    assert_eq!((report.lost, report.abandoned), (1, 0));
    assert!(matches!(waiter.await.unwrap(), Err(LockError::Closed)));
    assert_eq!(guard.lost().await, LostReason::Closed);
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
    assert!(matches!(ours.obtain("x").lock().await, Err(LockError::Closed)));
    assert_eq!(ours.close(secs(1)).await.lost, 1);
}

#[tokio::test(start_paused = true)]
async fn the_work_is_stopped_when_its_lock_is_lost() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(theirs.force_release("k").await.unwrap());
    let outcome = guard.protect(std::future::pending::<()>()).await;
    assert!(matches!(outcome, Err(LockError::Lost { reason: LostReason::Gone, .. })));
}

#[tokio::test(start_paused = true)]
async fn execute_locked_can_be_spawned_and_returns_both_results() {
    let (ours, _) = two_processes();
    let registry: Arc<dyn LockRegistry> = Arc::new(ours);
    let done = tokio::spawn(async move {
        registry.execute_locked("k", async |guard| guard.key().to_owned()).await
    });
    let done = done.await.unwrap().unwrap();
    assert!(done.output == "k" && done.unlocked.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_free_after_the_min_hold_of_its_released_lock() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().min_hold(secs(60));
    ours.obtain("k").lock_with(options).await.unwrap().unlock().await.unwrap();
    advance(secs(58)).await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    tokio::time::sleep(secs(3)).await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn unlock_before_the_end_of_a_min_hold_detects_an_earlier_forced_release() {
    let (ours, theirs) = two_processes();
    // Longer than the lease, so `unlock` renews the lease.
    let options = LockOptions::new().min_hold(secs(60));
    let guard = ours.obtain("k").lock_with(options).await.unwrap();
    assert!(theirs.force_release("k").await.unwrap());
    let outcome = guard.unlock().await;
    assert!(
        matches!(outcome, Err(LockError::Lost { reason: LostReason::Gone, .. })),
        "{outcome:?}"
    );
}

/// The in-process store, with renewals that take a second.
#[derive(Debug)]
struct SlowRenewalStore(MemoryBackend);

#[async_trait]
impl LockBackend for SlowRenewalStore {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.0.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        tokio::time::sleep(secs(1)).await;
        self.0.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.0.release(claim).await
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.0.subscribe(invalidations);
    }
}

#[tokio::test(start_paused = true)]
async fn unlock_during_the_verification_of_an_invalidation_reports_a_loss() {
    let store = MemoryBackend::new();
    let ours = Registry::builder(Arc::new(SlowRenewalStore(store.clone()))).build().unwrap();
    let theirs = Registry::builder(Arc::new(store)).build().unwrap();
    // Shorter than the lease, so the `min_hold` alone requires no renewal.
    let options = LockOptions::new().min_hold(secs(20));
    let guard = ours.obtain("k").lock_with(options).await.unwrap();
    assert!(theirs.force_release("k").await.unwrap());
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(guard.is_held(), "the verification is in flight");
    let outcome = guard.unlock().await;
    assert!(
        matches!(outcome, Err(LockError::Lost { reason: LostReason::Gone, .. })),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_next_local_holder_has_a_min_hold_of_its_own() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().min_hold(Duration::from_millis(20));
    let first = ours.obtain("k").lock_with(options.clone()).await.unwrap();
    let lock = ours.obtain("k");
    let second = tokio::spawn(async move { lock.lock_with(options).await });
    tokio::time::sleep(Duration::from_millis(30)).await;
    first.unlock().await.unwrap();
    second.await.unwrap().unwrap().unlock().await.unwrap();
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none(), "free before its min_hold");
}

/// The in-process store with leases of at most 20 s.
#[derive(Debug)]
struct ShortLeaseStore(MemoryBackend);

#[async_trait]
impl LockBackend for ShortLeaseStore {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities().with_leases(Capabilities::LEASE_MIN, secs(20))
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.0.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.0.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.0.release(claim).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_min_hold_longer_than_the_stores_longest_lease_is_kept_to_its_end() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(ShortLeaseStore(store.clone()))).build().unwrap();
    let (ours, theirs) = (open(), open());
    for is_dropped in [false, true] {
        let options = LockOptions::new().min_hold(secs(60)).max_hold(secs(120));
        let began = tokio::time::Instant::now();
        let guard = ours.obtain("k").lock_with(options).await.unwrap();
        if is_dropped {
            drop(guard);
        } else {
            guard.unlock().await.unwrap();
        }
        let next = theirs.obtain("k").lock().await.unwrap();
        let held_for = began.elapsed();
        assert!(held_for >= secs(60) && held_for < secs(62), "free after {held_for:?}");
        next.unlock().await.unwrap();
        ours.idle().await;
    }
}

/// A store that keeps no grants, and counts the releases.
#[derive(Debug)]
struct ReleaseCounter {
    /// The time until the response to an attempt.
    response_time: Duration,
    respond: fn(&Claim, u64) -> Result<Attempt, BackendError>,
    attempts: AtomicU64,
    releases: AtomicU64,
}

#[async_trait]
impl LockBackend for ReleaseCounter {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("counter", GuaranteeClass::Volatile, Reach::Network)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(self.response_time).await;
        (self.respond)(claim, attempt)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        claims.iter().map(|_| Ok(Renewal::Gone)).collect()
    }

    async fn release(&self, _claim: &Claim) -> Result<Release, BackendError> {
        self.releases.fetch_add(1, Ordering::Relaxed);
        Ok(Release::NotHeld)
    }
}

/// Drops a `lock()` after `wait`, and returns the number of releases within twice the lease.
async fn releases_after_a_dropped_lock(
    lease: Duration,
    response_time: Duration,
    wait: Duration,
    respond: fn(&Claim, u64) -> Result<Attempt, BackendError>,
) -> u64 {
    let (attempts, releases) = (AtomicU64::new(0), AtomicU64::new(0));
    let store = Arc::new(ReleaseCounter { response_time, respond, attempts, releases });
    let registry = Registry::builder(Arc::clone(&store) as _).timeout(secs(5)).build().unwrap();
    let lock = registry.obtain("k");
    let locking = lock.lock_with(LockOptions::new().lease(lease));
    assert!(tokio::time::timeout(wait, locking).await.is_err());
    tokio::time::sleep(lease * 2).await;
    assert!(store.attempts.load(Ordering::Relaxed) > 0);
    store.releases.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_is_released_once_if_no_attempt_has_an_unknown_outcome()
 {
    let granted = |claim: &Claim, _| {
        Ok(Attempt::Granted(Grant::new(FencingToken::new(1).unwrap(), claim.lease())))
    };
    // The first response arrives after 3 s. The second attempt has no response before the drop.
    let releases = releases_after_a_dropped_lock(secs(2), secs(3), secs(4), granted).await;
    assert_eq!(releases, 2, "one for each of the two claims");
}

#[tokio::test(start_paused = true)]
async fn a_queued_claim_whose_last_attempt_was_refused_is_released_once() {
    let queued_then_refused = |_: &Claim, attempt| match attempt {
        0 => Ok(Attempt::Busy(Busy::new().with_queue_entry())),
        _ => Err(BackendError::transient("the server is busy").as_refused()),
    };
    // The drop is during the second attempt.
    let (lease, response_time, wait) = (secs(2), millis(500), millis(900));
    let releases = releases_after_a_dropped_lock(lease, response_time, wait, queued_then_refused);
    assert_eq!(releases.await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_long_lease_causes_few_releases_of_grants_that_may_arrive_late() {
    let unknown = |_: &Claim, _| Err(BackendError::transient("the response is lost"));
    let releases = releases_after_a_dropped_lock(secs(3_600), millis(10), millis(100), unknown);
    let releases = releases.await;
    assert!((2..200).contains(&releases), "{releases}");
}

/// Returns the time in which 20,000 waiting callers acquire and release the lock one after another.
/// If `owned`, each has an owner of its own.
async fn time_of_20_000_waiters(owned: bool) -> Duration {
    let (ours, _) = two_processes();
    let lock = ours.obtain("k");
    let first = lock.lock().await.unwrap();
    let mut waiters = Vec::new();
    for _ in 0..20_000 {
        let options = LockOptions::new();
        let options = if owned { options.owner(&Owner::new()) } else { options };
        let waiter = async { lock.lock_with(options).await.unwrap() };
        let mut waiter = Box::pin(tokio::task::unconstrained(waiter));
        assert!(futures_util::poll!(waiter.as_mut()).is_pending());
        waiters.push(waiter);
    }
    let began = std::time::Instant::now();
    first.unlock().await.unwrap();
    for waiter in waiters {
        waiter.await.unlock().await.unwrap();
    }
    began.elapsed()
}

#[tokio::test]
async fn the_time_of_a_grant_does_not_depend_on_the_number_of_waiting_owners() {
    // Compares the shortest times of several rounds, because other processes may slow a round down.
    let mut shortest = [Duration::MAX; 2];
    let is_independent =
        |[without_owner, with_owners]: [Duration; 2]| with_owners < without_owner * 5;
    for round in 0..20 {
        if round >= 5 && is_independent(shortest) {
            break;
        }
        for (time, owned) in shortest.iter_mut().zip([false, true]) {
            *time = time_of_20_000_waiters(owned).await.min(*time);
        }
    }
    let [without_owner, with_owners] = shortest;
    assert!(is_independent(shortest), "{with_owners:?} with owners, {without_owner:?} without");
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_the_hold_and_frees_the_key() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().max_hold(secs(100));
    let guard = ours.obtain("k").lock_with(options).await.unwrap();
    tokio::time::sleep(secs(99)).await;
    assert!(guard.is_held());
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    ours.idle().await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_refused_before_any_io() {
    let (ours, _) = two_processes();
    let lock = ours.obtain("k");
    for options in [
        LockOptions::new().lease(Duration::ZERO),
        LockOptions::new().lease(Duration::from_millis(1)),
        LockOptions::new().lease(secs(100 * 365 * 86_400)),
        LockOptions::new().min_hold(secs(10)).max_hold(secs(5)),
        LockOptions::new().label("x".repeat(2_000)),
    ] {
        let refused = lock.try_lock_with(options).await;
        assert!(matches!(refused, Err(LockError::InvalidOption(_))), "{refused:?}");
    }
    for key in ["", &"k".repeat(4_097)] {
        assert!(matches!(ours.obtain(key).lock().await, Err(LockError::InvalidKey(_))));
    }
}

#[test]
fn a_runtime_without_time_is_refused_when_the_registry_is_built() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let refused = runtime.block_on(async { Registry::in_memory() });
    assert!(matches!(refused, Err(ConfigError::NoRuntime)), "{refused:?}");
    assert!(matches!(Registry::check_runtime(), Err(ConfigError::NoRuntime)));
}

/// The first token of the in-process store is the wall clock in microseconds, so that a restarted
/// process grants larger tokens. A grant may use one token per hand-over. If each grant consumed
/// this maximum instead of the tokens it used, the tokens would grow faster than the clock.
#[tokio::test]
async fn a_grant_uses_up_only_the_tokens_of_its_guards() {
    let store = MemoryBackend::new();
    let open =
        |handoff| Registry::builder(Arc::new(store.clone())).handoff(handoff).build().unwrap();
    let registry = open(RegistryBuilder::HANDOFF_MAX);
    let first = registry.obtain("k").lock().await.unwrap().fencing_token();
    registry.idle().await;
    for key in ["k", "another", "k"] {
        for _ in 0..500 {
            registry.obtain(key).lock().await.unwrap().unlock().await.unwrap();
        }
    }
    let last = registry.obtain("k").lock().await.unwrap().fencing_token();
    assert_eq!(last.get() - first.get(), 1_501, "from {first} to {last}");
}

#[tokio::test]
async fn too_many_hand_overs_are_refused_with_the_limit() {
    let too_many = RegistryBuilder::HANDOFF_MAX + 1;
    let built = Registry::builder(Arc::new(MemoryBackend::new())).handoff(too_many).build();
    let error = built.unwrap_err().to_string();
    for part in ["handoff", &too_many.to_string(), &RegistryBuilder::HANDOFF_MAX.to_string()] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
