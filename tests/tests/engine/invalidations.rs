//! Tests invalidations of held locks. An invalidation causes a verification at once, at a limited
//! rate, and nothing else.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, Holder, Invalidations, Key, LockAdmin, LockBackend,
    LockError, LockOptions, LockRegistryExt as _, LostReason, MemoryBackend, Registry, Release,
    Renewal,
};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

/// A store whose invalidations the test sends. The test can delay its responses or turn them into
/// errors.
#[derive(Debug)]
struct Store {
    inner: MemoryBackend,
    invalidations: Mutex<Vec<Invalidations>>,
    /// The requested leases of each call of `renew`.
    renewals: Mutex<Vec<Vec<Duration>>>,
    /// The store executes a renewal, and its response then waits for a permit.
    renew_responses: Semaphore,
    /// The store executes an attempt, and its response then waits for a permit.
    acquire_responses: Semaphore,
    renewals_fail: AtomicBool,
    /// Renewals get no response.
    renewals_hang: AtomicBool,
    /// The number of calls of `renew` that have no response yet.
    in_flight: AtomicU32,
}

impl Store {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryBackend::new(),
            invalidations: Mutex::default(),
            renewals: Mutex::default(),
            renew_responses: Semaphore::new(Semaphore::MAX_PERMITS),
            acquire_responses: Semaphore::new(Semaphore::MAX_PERMITS),
            renewals_fail: false.into(),
            renewals_hang: false.into(),
            in_flight: 0.into(),
        })
    }

    fn registry(self: &Arc<Self>) -> Registry {
        Registry::builder(Arc::clone(self) as _).build().unwrap()
    }

    fn invalidations(&self) -> Invalidations {
        self.invalidations.lock().unwrap().last().unwrap().clone()
    }

    fn invalidate(&self, name: &str) {
        self.invalidations().notify(&key(name));
    }

    /// Forces a release without an invalidation.
    async fn force_release(&self, name: &str) {
        assert_eq!(self.inner.force_release(&key(name)).await.unwrap(), Release::Freed);
    }

    async fn holder(&self, name: &str) -> Holder {
        self.inner.inspect(&key(name)).await.unwrap().remove(0)
    }

    fn renewals(&self) -> usize {
        self.renewals.lock().unwrap().len()
    }

    /// Delays all responses from here on.
    fn delay_responses(responses: &Semaphore) {
        responses.forget_permits(Semaphore::MAX_PERMITS);
    }

    async fn wait_for_permit(responses: &Semaphore) {
        responses.acquire().await.unwrap().forget();
        // Returns the permit if responses are not delayed.
        if responses.available_permits() > 1_000 {
            responses.add_permits(1);
        }
    }
}

#[async_trait]
impl LockBackend for Store {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let answer = self.inner.try_acquire(claim).await;
        Self::wait_for_permit(&self.acquire_responses).await;
        answer
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.renewals.lock().unwrap().push(claims.iter().map(Claim::lease).collect());
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        if self.renewals_hang.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let responses = self.inner.renew(claims).await;
        Self::wait_for_permit(&self.renew_responses).await;
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.renewals_fail.load(Ordering::Relaxed) {
            return claims.iter().map(|_| Err(BackendError::transient("no connection"))).collect();
        }
        responses
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }

    fn subscribe(&self, invalidations: Invalidations) {
        assert!(invalidations.is_live());
        self.invalidations.lock().unwrap().push(invalidations);
    }
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn without_renewal() -> LockOptions {
    LockOptions::new().auto_renew(false)
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_notifies_the_holder_of_a_loss_at_once() {
    let store = Store::new();
    let guard = store.registry().obtain("k").lock().await.unwrap();
    store.force_release("k").await;
    let released_at = Instant::now();
    store.invalidate("k");
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert_eq!(released_at.elapsed(), Duration::ZERO);
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert_eq!(store.renewals(), 1);
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_not_acquired_with_one_that_is_lost_already() {
    let store = Store::new();
    let other = Registry::builder(Arc::new(store.inner.clone())).build().unwrap();
    let held = other.obtain("a").lock().await.unwrap();
    let registry = store.registry();
    let lock = registry.obtain_all(["a", "b"]);
    let locking = tokio::spawn(async move { lock.lock().await });
    // The task waits for `a`, which is held.
    sleep(ms(1)).await;
    Store::delay_responses(&store.acquire_responses);
    held.unlock().await.unwrap();
    // Longer than the poll interval.
    sleep(ms(1_000)).await;
    store.acquire_responses.add_permits(1);
    // The task holds `a`, and has no response for `b` yet.
    sleep(ms(1)).await;
    store.holder("b").await;
    store.force_release("a").await;
    store.invalidate("a");
    sleep(ms(20)).await;
    store.acquire_responses.add_permits(Semaphore::MAX_PERMITS);
    let guard = locking.await.unwrap().unwrap();
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_superfluous_invalidation_costs_one_renewal_and_nothing_else() {
    let store = Store::new();
    let registry = store.registry();
    let guard = registry.obtain("k").lock().await.unwrap();
    store.invalidate("k");
    store.invalidate("not held");
    sleep(ms(1)).await;
    assert!(guard.is_held());
    assert_eq!(store.renewals(), 1);
    assert_eq!(registry.local_locks(), 1);
    // The next renewal is a third of the lease after the verification, as after any renewal.
    sleep(ms(9_900)).await;
    assert_eq!(store.renewals(), 1);
    sleep(ms(200)).await;
    assert_eq!(store.renewals(), 2);
    guard.unlock().await.unwrap();
    store.invalidate("k");
    store.invalidations().notify_all();
    sleep(ms(60_000)).await;
    assert_eq!(store.renewals(), 2, "nothing is held");
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_during_a_renewal_causes_a_further_verification() {
    let store = Store::new();
    let guard = store.registry().obtain("k").lock().await.unwrap();
    Store::delay_responses(&store.renew_responses);
    store.invalidate("k");
    sleep(ms(5)).await;
    assert_eq!(store.in_flight.load(Ordering::Relaxed), 1);
    // After the store has executed the renewal in flight.
    store.force_release("k").await;
    for _ in 0..1_000 {
        store.invalidate("k");
        sleep(ms(1)).await;
        assert_eq!(store.renewals(), 1, "one at a time");
    }
    assert!(guard.is_held(), "the loss cannot be known yet");
    store.renew_responses.add_permits(2);
    assert_eq!(timeout(ms(20), guard.lost()).await, Ok(LostReason::Gone));
    assert_eq!(store.renewals(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_verification_does_not_extend_a_lease_that_is_not_renewed() {
    let store = Store::new();
    let registry = store.registry();
    let guard = registry.obtain("k").lock_with(without_renewal()).await.unwrap();
    let (granted_at, until) = (Instant::now(), guard.valid_until());
    let ends = granted_at + ms(30_000);
    for _ in 0..98 {
        store.invalidate("k");
        sleep(ms(300)).await;
        assert_eq!(Instant::now() + store.holder("k").await.lease_left.unwrap(), ends);
        assert_eq!(guard.valid_until(), until);
    }
    assert_eq!(store.renewals(), 98);
    // This close to the end, a verification would extend the lease.
    sleep(ms(200)).await;
    store.invalidate("k");
    sleep(ms(1)).await;
    assert_eq!(store.renewals(), 98);
    assert_eq!(guard.lost().await, LostReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_notifies_the_holder_of_a_fixed_lease_of_a_loss() {
    let store = Store::new();
    let guard = store.registry().obtain("k").lock_with(without_renewal()).await.unwrap();
    store.force_release("k").await;
    store.invalidate("k");
    assert_eq!(timeout(ms(1), guard.lost()).await, Ok(LostReason::Gone));
}

#[tokio::test(start_paused = true)]
async fn a_verification_does_not_change_max_hold() {
    let store = Store::new();
    let options = LockOptions::new().max_hold(ms(10_000));
    let guard = store.registry().obtain("k").lock_with(options).await.unwrap();
    let (granted_at, until) = (Instant::now(), guard.valid_until());
    for _ in 0..9 {
        sleep(ms(1_000)).await;
        store.invalidate("k");
    }
    assert_eq!(guard.valid_until(), until);
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    assert_eq!(granted_at.elapsed(), ms(10_000));
    let requested = store.renewals.lock().unwrap().concat();
    assert_eq!(requested, vec![Capabilities::LEASE_MIN; 9]);
}

#[tokio::test(start_paused = true)]
async fn continuous_invalidations_cause_few_renewals() {
    let store = Store::new();
    let registry = store.registry();
    let guards = [
        registry.obtain("k").lock().await.unwrap(),
        registry.obtain("fixed").lock_with(without_renewal()).await.unwrap(),
    ];
    for _ in 0..10_000 {
        store.invalidate("k");
        store.invalidate("fixed");
        store.invalidations().notify_all();
        sleep(ms(1)).await;
    }
    assert!((10..40).contains(&store.renewals()), "{} renewals", store.renewals());
    assert!(guards.iter().all(registry_core::LockGuard::is_held));
    // After a quiet interval, an invalidation is verified at once again.
    sleep(ms(2_000)).await;
    let before = store.renewals();
    store.force_release("k").await;
    store.invalidate("k");
    assert_eq!(timeout(ms(1), guards[0].lost()).await, Ok(LostReason::Gone));
    assert_eq!(store.renewals(), before + 1);
}

/// A store that reports our own renewals as changes must not cause an endless loop.
#[tokio::test(start_paused = true)]
async fn a_store_that_reports_our_own_renewals_causes_few_renewals() {
    #[derive(Debug)]
    struct EchoingStore(Arc<Store>);

    #[async_trait]
    impl LockBackend for EchoingStore {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
            self.0.try_acquire(claim).await
        }

        async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
            claims.iter().for_each(|claim| self.0.invalidations().notify(claim.key()));
            self.0.renew(claims).await
        }

        async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
            self.0.release(claim).await
        }

        fn subscribe(&self, invalidations: Invalidations) {
            self.0.subscribe(invalidations);
        }
    }

    let store = Store::new();
    let registry = Registry::builder(Arc::new(EchoingStore(Arc::clone(&store)))).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    sleep(ms(60_000)).await;
    assert!((40..100).contains(&store.renewals()), "{} renewals", store.renewals());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_receives_few_verifications() {
    let store = Store::new();
    let registry = store.registry();
    let guard = registry.obtain("k").lock().await.unwrap();
    let fixed = registry.obtain("fixed").lock_with(without_renewal()).await.unwrap();
    store.renewals_fail.store(true, Ordering::Relaxed);
    for _ in 0..8_000 {
        store.invalidations().notify_all();
        sleep(ms(1)).await;
    }
    // Each of the two claims is verified once per 0.5 s to 1 s.
    assert!((14..=34).contains(&store.renewals()), "{} renewals", store.renewals());
    assert!(guard.is_held() && fixed.is_held(), "a failed verification is not a loss");
    // A failed verification is retried when the store is back, without another invalidation.
    store.force_release("fixed").await;
    store.renewals_fail.store(false, Ordering::Relaxed);
    assert_eq!(timeout(ms(1_001), fixed.lost()).await, Ok(LostReason::Gone));
    assert!(guard.is_held());
}

/// Verifications without a response do not count toward the limit of four unanswered renewals.
#[tokio::test(start_paused = true)]
async fn verifications_without_a_response_lose_no_lock() {
    for invalidated in [false, true] {
        let store = Store::new();
        let guard = store.registry().obtain("k").lock().await.unwrap();
        store.renewals_hang.store(true, Ordering::Relaxed);
        if invalidated {
            store.invalidate("k");
        }
        sleep(ms(20_500)).await;
        let unanswered = store.renewals();
        assert_eq!(unanswered, if invalidated { 4 + 3 } else { 4 });
        store.renewals_hang.store(false, Ordering::Relaxed);
        sleep(ms(60_000)).await;
        assert_eq!(guard.is_held(), invalidated, "invalidated: {invalidated}");
    }
}

/// Verifications have a limit of their own: four in a row without a response.
#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_respond_receives_a_bounded_number_of_verifications() {
    let store = Store::new();
    let guard = store.registry().obtain("k").lock_with(without_renewal()).await.unwrap();
    store.renewals_hang.store(true, Ordering::Relaxed);
    while guard.is_held() {
        store.invalidate("k");
        sleep(ms(100)).await;
    }
    assert_eq!(store.renewals(), 4);
    assert_eq!(guard.lost().await, LostReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_of_all_keys_is_verified_in_one_call() {
    let store = Store::new();
    let registry = store.registry();
    let mut guards = Vec::new();
    for n in 0..50 {
        guards.push(registry.obtain(&format!("k{n}")).lock().await.unwrap());
        sleep(ms(1)).await;
    }
    store.force_release("k7").await;
    store.force_release("k31").await;
    store.invalidations().notify_all();
    sleep(ms(1)).await;
    let lost: Vec<_> = guards.iter().filter(|guard| !guard.is_held()).map(|g| g.key()).collect();
    assert_eq!(lost, ["k7", "k31"]);
    assert_eq!(store.renewals(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_during_an_acquisition_is_verified_after_the_grant() {
    for all in [false, true] {
        let store = Store::new();
        let registry = store.registry();
        Store::delay_responses(&store.acquire_responses);
        // This invalidation arrives before the request, so the grant is not suspect.
        store.invalidate("k");
        let lock = registry.obtain("k");
        let granted = tokio::spawn(async move { lock.lock().await.unwrap() });
        sleep(ms(1)).await;
        store.force_release("k").await;
        if all {
            store.invalidations().notify_all();
        } else {
            store.invalidate("k");
        }
        sleep(ms(1)).await;
        store.acquire_responses.add_permits(1);
        let guard = granted.await.unwrap();
        assert_eq!(timeout(ms(1), guard.lost()).await, Ok(LostReason::Gone), "all: {all}");
        assert_eq!(store.renewals(), 1);
        // The next grant needs no verification.
        store.acquire_responses.add_permits(1);
        let next = registry.obtain("k").lock().await.unwrap();
        sleep(ms(1_000)).await;
        assert!(next.is_held());
        assert_eq!(store.renewals(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_suspect_lock_is_not_handed_over() {
    let store = Store::new();
    let registry = store.registry();
    let first = registry.obtain("k").lock().await.unwrap();
    let token = first.fencing_token();
    let second = tokio::spawn({
        let lock = registry.obtain("k");
        async move { lock.lock().await.unwrap() }
    });
    Store::delay_responses(&store.renew_responses);
    store.force_release("k").await;
    store.invalidate("k");
    sleep(ms(1)).await;
    assert!(matches!(first.unlock().await, Err(LockError::Lost { .. })));
    let second = second.await.unwrap();
    assert!(second.fencing_token() > token.checked_add(1).unwrap(), "not handed over");
    store.renew_responses.add_permits(1);
    sleep(ms(10)).await;
    assert!(second.is_held(), "the late response concerns the previous claim");
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_during_a_release_has_no_effect() {
    let store = Store::new();
    let registry = store.registry();
    for _ in 0..100 {
        let guard = registry.obtain("k").lock().await.unwrap();
        store.invalidate("k");
        guard.unlock().await.unwrap();
        store.invalidate("k");
    }
    registry.idle().await;
    sleep(ms(1)).await;
    assert_eq!((registry.held(), registry.local_locks(), store.inner.records()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_closed_registry_ignores_invalidations() {
    let store = Store::new();
    let registry = store.registry();
    let guard = registry.obtain("k").lock().await.unwrap();
    let invalidations = store.invalidations();
    assert!(invalidations.is_live());
    let other = invalidations.clone();
    let report = registry.close(ms(10)).await;
    assert_eq!(report.lost, 1);
    assert!(!invalidations.is_live() && !other.is_live());
    invalidations.notify(&key("k"));
    other.notify_all();
    sleep(ms(60_000)).await;
    assert_eq!(store.renewals(), 0);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_handle_keeps_no_registry_alive() {
    let store = Store::new();
    let registry = store.registry();
    let invalidations = store.invalidations();
    let guard = registry.obtain("k").lock().await.unwrap();
    drop(registry);
    store.force_release("k").await;
    invalidations.notify_all();
    assert_eq!(guard.lost().await, LostReason::Gone, "a guard keeps its registry alive");
    drop(guard);
    sleep(ms(1)).await;
    assert!(!invalidations.is_live());
    invalidations.notify(&key("k"));
    assert_eq!(Arc::strong_count(&store), 1);
}

#[test]
fn a_registry_whose_runtime_is_gone_ignores_invalidations() {
    let store = Store::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let registry = {
        let _inside = runtime.enter();
        store.registry()
    };
    let invalidations = store.invalidations();
    assert!(invalidations.is_live());
    let _guard = runtime.block_on(registry.obtain("k").lock()).unwrap();
    drop(runtime);
    assert!(!invalidations.is_live());
    invalidations.notify(&key("k"));
    invalidations.notify_all();
}

/// On real time and real threads, invalidations arrive faster than the lease renewer handles them.
#[test]
fn invalidations_from_another_thread_without_a_runtime_do_not_block() {
    let store = Store::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let done = Arc::new(AtomicBool::new(false));
    runtime.block_on(async {
        let registry = store.registry();
        let guard = registry.obtain("k").lock().await.unwrap();
        let invalidations = store.invalidations();
        let thread = std::thread::spawn({
            let done = Arc::clone(&done);
            move || {
                while !done.load(Ordering::Relaxed) {
                    invalidations.notify(&key("k"));
                    invalidations.notify_all();
                }
                invalidations.is_live()
            }
        });
        // Other tasks of the runtime continue, although its only thread also runs the renewer.
        for n in 0..200 {
            registry.obtain(&format!("other{n}")).lock().await.unwrap().unlock().await.unwrap();
            sleep(ms(1)).await;
        }
        assert!(guard.is_held());
        store.force_release("k").await;
        let lost = timeout(Duration::from_secs(20), guard.lost()).await;
        done.store(true, Ordering::Relaxed);
        assert_eq!(lost, Ok(LostReason::Gone));
        assert!(thread.join().unwrap());
    });
}

#[tokio::test(start_paused = true)]
async fn the_in_process_store_reports_forced_releases() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    let (ours, theirs) = (open(), open());
    let guard = ours.obtain("k").lock().await.unwrap();
    let lost = guard.lost();
    assert!(theirs.force_release("k").await.unwrap());
    assert_eq!(timeout(ms(1), lost).await, Ok(LostReason::Gone));
    assert!(ours.capabilities().reports_invalidations);
}
