//! Tests when a process sends attempts to the store, on paused time. A waiter with confirmed
//! wake-ups sends few, but the interval between them has a limit. After the release of a contended
//! lock, a process pauses before its next `lock()`.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Holder, LockBackend,
    LockOptions, MemoryBackend, Reach, Registry, Release, Renewal, WakeCheck,
};
use tokio::time::Instant;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The in-process store, with a count of attempts and configurable wake-ups.
#[derive(Debug, Default)]
struct Store {
    inner: MemoryBackend,
    attempts: AtomicU64,
    /// No wait ends by a wake-up.
    loses_wakes: bool,
    /// Each wait ends at once, and each busy response has another holder's token.
    wakes_always: bool,
    wake_check: Arc<FixedWakeCheck>,
    /// Other processes can reach the store.
    is_shared: bool,
}

/// Whether wake-ups are confirmed.
#[derive(Debug, Default)]
struct FixedWakeCheck(AtomicBool);

impl WakeCheck for FixedWakeCheck {
    fn confirms_wake_ups(&self, _claim: &Claim, _busy: &Busy) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Store {
    fn new(confirms_wake_ups: bool) -> Self {
        let wake_check = Arc::new(FixedWakeCheck(confirms_wake_ups.into()));
        Self { wake_check, ..Self::default() }
    }

    fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl LockBackend for Store {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        if self.is_shared {
            capabilities.reach = Reach::Network;
        }
        capabilities
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        assert!(attempt < 100_000, "the waiter sends attempts without a pause");
        match self.inner.try_acquire(claim).await? {
            Attempt::Busy(mut busy) => {
                if self.wakes_always {
                    let holder = Holder::new(claim.key().clone());
                    busy = busy.with_holder(holder.with_token(FencingToken::new(attempt)));
                }
                Ok(Attempt::Busy(busy.with_wake_check(Arc::clone(&self.wake_check) as _)))
            }
            granted => Ok(granted),
        }
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        if self.loses_wakes {
            std::future::pending::<()>().await;
        }
        if !self.wakes_always {
            self.inner.wait(claim, busy).await;
        }
    }
}

/// Acquires `k` in one registry and starts a task that waits for it in another. Returns the guard,
/// the task, and the store, which counts the waiter's attempts.
async fn start_waiter(
    store: Store,
) -> (registry_core::LockGuard, tokio::task::JoinHandle<registry_core::LockGuard>, Arc<Store>) {
    let holder = Registry::builder(Arc::new(store.inner.clone())).build().unwrap();
    let guard = holder.obtain("k").lock().await.unwrap();
    let store = Arc::new(store);
    let waiter = Registry::builder(Arc::clone(&store) as _).build().unwrap();
    let lock = waiter.obtain("k");
    let waiting = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    (guard, waiting, store)
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_wake_ups_are_confirmed_polls_rarely() {
    let (guard, waiting, store) = start_waiter(Store::new(true)).await;
    tokio::time::sleep(secs(600)).await;
    let attempts = store.attempts();
    assert!(attempts <= 45, "{attempts} attempts in ten minutes");
    let freed_at = Instant::now();
    guard.unlock().await.unwrap();
    drop(waiting.await.unwrap());
    assert_eq!(freed_at.elapsed(), Duration::ZERO, "a wake-up still ends the wait at once");
}

#[tokio::test(start_paused = true)]
async fn a_lost_wake_up_that_was_confirmed_at_most_doubles_the_wait() {
    for held_for in [Duration::from_millis(100), secs(2), secs(7)] {
        let store = Store { loses_wakes: true, ..Store::new(true) };
        let (guard, waiting, _store) = start_waiter(store).await;
        tokio::time::sleep(held_for).await;
        let freed_at = Instant::now();
        guard.unlock().await.unwrap();
        drop(waiting.await.unwrap());
        let late = freed_at.elapsed();
        let bound = held_for.mul_f64(1.25) + Duration::from_millis(400);
        assert!(late <= bound, "{late:?} late after a wait of {held_for:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_wake_ups_stop_being_confirmed_polls_again_at_once() {
    let store = Store { loses_wakes: true, ..Store::new(true) };
    let (guard, waiting, store) = start_waiter(store).await;
    tokio::time::sleep(secs(60)).await;
    store.wake_check.0.store(false, Ordering::Relaxed);
    let freed_at = Instant::now();
    guard.unlock().await.unwrap();
    drop(waiting.await.unwrap());
    assert!(freed_at.elapsed() <= Duration::from_millis(320), "{:?} late", freed_at.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_dead_holders_lock_is_acquired_at_the_end_of_its_lease_although_wake_ups_are_confirmed() {
    let store = Store::new(true);
    let dead = Claim::new(registry_core::Key::new("k").unwrap(), secs(30));
    store.inner.try_acquire(&dead).await.unwrap();
    let waiter = Registry::builder(Arc::new(store)).build().unwrap();
    let began = Instant::now();
    drop(waiter.obtain("k").lock().await.unwrap());
    let waited = began.elapsed();
    assert!(waited >= secs(30) && waited < Duration::from_millis(30_500), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_wakes_without_end_causes_a_bounded_number_of_attempts() {
    let store = Store { wakes_always: true, ..Store::new(false) };
    let (guard, waiting, store) = start_waiter(store).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let attempts = store.attempts();
    assert!(attempts <= 2_000, "{attempts} attempts in 1.5 s");
    guard.unlock().await.unwrap();
    drop(waiting.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_met_although_wake_ups_are_confirmed() {
    let store = Store::new(true);
    let holder = Registry::builder(Arc::new(store.inner.clone())).build().unwrap();
    let _guard = holder.obtain("k").lock().await.unwrap();
    let waiter = Registry::builder(Arc::new(store)).build().unwrap();
    let began = Instant::now();
    let wait = LockOptions::new().wait(Duration::from_millis(3_333));
    assert!(waiter.obtain("k").try_lock_with(wait).await.unwrap().is_none());
    assert_eq!(began.elapsed(), Duration::from_millis(3_333));
}

/// Returns a registry that had to wait for another holder of `k`, and its store. `k` is free.
async fn registry_after_contention() -> (Registry, Arc<Store>) {
    let store = Arc::new(Store { is_shared: true, ..Store::new(true) });
    let theirs = Registry::builder(Arc::new(store.inner.clone())).build().unwrap();
    let ours = Registry::builder(Arc::clone(&store) as _).build().unwrap();
    let guard = theirs.obtain("k").lock().await.unwrap();
    let lock = ours.obtain("k");
    let waiting = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unlock().await.unwrap();
    (ours, store)
}

#[tokio::test(start_paused = true)]
async fn after_contention_a_process_pauses_before_lock_but_not_before_try_lock() {
    let (ours, _store) = registry_after_contention().await;
    let lock = ours.obtain("k");
    let began = Instant::now();
    let guard = lock.lock().await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_millis(2));
    tokio::time::sleep(Duration::from_millis(40)).await;
    guard.unlock().await.unwrap();

    let began = Instant::now();
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    guard.unlock().await.unwrap();
    let guard = lock.try_lock_for(Duration::from_millis(1)).await.unwrap().unwrap();
    assert_eq!(began.elapsed(), Duration::ZERO);
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_contended_claim_is_handed_over_for_twenty_milliseconds() {
    let (ours, store) = registry_after_contention().await;
    let before = store.attempts();
    let callers = (0..4).map(|_| {
        let lock = ours.obtain("k");
        tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            tokio::time::sleep(Duration::from_millis(11)).await;
            guard.unlock().await.unwrap();
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    assert_eq!(store.attempts() - before, 2, "two callers share a claim");
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_pause() {
    let (ours, _store) = registry_after_contention().await;
    let lock = ours.obtain("k");
    let pausing = tokio::spawn(async move { lock.lock().await });
    tokio::task::yield_now().await;
    let began = Instant::now();
    assert!(ours.close(secs(10)).await.is_clean());
    assert!(began.elapsed() < Duration::from_millis(2), "{:?}", began.elapsed());
    assert!(pausing.await.unwrap().is_err());
}
