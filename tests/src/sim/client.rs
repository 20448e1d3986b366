//! One client of one process: acquires locks in every possible way, works correctly or incorrectly,
//! and releases.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use registry_core::{LockError, LockGuard, LockOptions, LockRegistry as _, Owner};
use registry_testkit::history::Holding;
use tokio::time::{sleep, timeout};

use super::world::{LEASE_MAX, Process, Shared};

pub(super) struct Client {
    number: usize,
    process: Process,
    shared: Arc<Shared>,
    rng: fastrand::Rng,
    owner: Owner,
}

impl Client {
    pub(super) fn new(
        number: usize,
        process: Process,
        shared: Arc<Shared>,
        rng: fastrand::Rng,
    ) -> Self {
        Self { number, process, shared, rng, owner: Owner::new() }
    }

    pub(super) async fn live(mut self) {
        while self.shared.grants_left.load(Ordering::Relaxed) > 0 {
            self.one_round().await;
            if self.chance(0.5) {
                sleep(self.ms(0, 50)).await;
            }
        }
    }

    async fn one_round(&mut self) {
        let key = self.rng.usize(0..self.shared.keys).to_string();
        let lock = self.process.registry.obtain(&key);
        let lease = Duration::from_millis(self.rng.u64(500..=LEASE_MAX.as_millis() as u64));
        let renews = self.chance(0.8);
        let with_owner = self.chance(0.2);
        let mut options = LockOptions::new().lease(lease).renew(renews);
        if with_owner {
            options = options.owner(&self.owner);
        }
        let mut kept = false;
        if self.chance(0.1) {
            options = options.max_hold(self.ms(500, 3_000));
        } else if self.chance(0.1) {
            options = options.min_hold(self.ms(1, 400));
            kept = true;
        }
        match self.rng.u8(0..10) {
            0..5 => {}
            5..7 => options = options.wait(Duration::ZERO),
            _ => options = options.wait(self.ms(1, 2_000)),
        }
        let plain = self.chance(0.5);
        let acquiring = self.shared.recorder.acquire(self.number as u32, key.as_str());
        let attempt = async {
            // Half of the callers use the default options, so that claims can be handed over
            // between them.
            if plain { lock.lock().await.map(Some) } else { lock.lock_with(options.clone()).await }
        };
        let Some(answer) = self.maybe_dropped(attempt).await else {
            self.shared.trace(self.number, "acquisition dropped");
            return;
        };
        let guard = match answer {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                acquiring.busy();
                return self.shared.trace(self.number, "busy");
            }
            Err(LockError::Backend { source, .. }) if source.is_retryable() => {
                acquiring.failed();
                return self.shared.trace(self.number, "failed");
            }
            Err(error) => panic!("an error that nothing caused: {error:?}"),
        };
        self.shared
            .grants_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .ok();
        let holding = acquiring.granted(guard.fencing_token(), || guard.valid_for());
        let guard = Arc::new(guard);
        if guard.is_held() {
            self.process.probe.holds(guard.claim());
        }
        self.shared.granted(&guard);
        self.shared.trace(self.number, "granted");
        self.work(&guard, &holding, lease).await;
        if with_owner && !plain {
            self.enter_again(&guard, &lock, options).await;
        }
        let guard = Arc::into_inner(guard).expect("only the world's weak references are left");
        self.let_go(guard, holding, kept && !plain).await;
    }

    async fn work(&mut self, guard: &LockGuard, holding: &Holding, lease: Duration) {
        for _ in 0..self.rng.u8(0..4) {
            match self.rng.u8(0..20) {
                0..12 => sleep(self.ms(0, 20)).await,
                12..15 => sleep(lease.mul_f64(self.rng.f64())).await,
                15 => sleep(lease.mul_f64(1.0 + self.rng.f64())).await,
                16 => {
                    let limit = self.ms(1, 2_000);
                    let _ = timeout(limit, guard.lost()).await;
                }
                17 => {
                    let limit = self.ms(1, 1_000);
                    let _ = guard.protect(sleep(limit)).await;
                }
                18 => {
                    let renewal = guard.renew(lease * 2);
                    let _ = self.maybe_dropped(renewal).await;
                }
                _ => drop(guard.reenter()),
            }
            self.observe(guard, holding);
            self.shared.write(self.number, guard);
        }
    }

    /// Checks that the properties of a guard are consistent. I3.
    fn observe(&self, guard: &LockGuard, holding: &Holding) {
        if guard.is_held() {
            assert!(!guard.valid_for().is_zero() || !guard.is_held());
            assert_eq!(guard.lost().now_or_never(), None, "I3: lost, but says that it is held");
            holding.valid_for(|| guard.valid_for());
        } else {
            assert!(guard.lost().now_or_never().is_some(), "I3: not held, but nobody is told");
            assert!(guard.reenter().is_err(), "I3: a lost lock was entered again");
        }
    }

    /// Re-enters a held lock as its owner: at once, and without the store.
    async fn enter_again(
        &mut self,
        outer: &LockGuard,
        lock: &registry_core::DistributedLock,
        options: LockOptions,
    ) {
        if !outer.is_held() {
            return;
        }
        let options = options.wait(Duration::ZERO);
        match lock.lock_with(options).now_or_never() {
            Some(Ok(Some(inner))) => {
                assert_eq!(
                    inner.fencing_token(),
                    outer.fencing_token(),
                    "re-entry has the same token"
                );
                drop(inner);
            }
            other => panic!("the owner of a held lock could not enter again: {other:?}"),
        }
    }

    async fn let_go(&mut self, guard: LockGuard, holding: Holding, kept: bool) {
        self.observe(&guard, &holding);
        let was_held = guard.is_held();
        if !was_held {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
            holding.lost();
        }
        let releasing = holding.release();
        if self.chance(0.25) {
            self.shared.trace(self.number, "guard dropped");
            return drop(guard);
        }
        let (key, token) = (guard.key().to_owned(), guard.fencing_token());
        let unlock = guard.unlock();
        match self.maybe_dropped(unlock).await {
            None => self.shared.trace(self.number, "release dropped"),
            Some(Ok(())) => {
                assert!(was_held, "I4: letting go of a lost lock was called a success");
                releasing.freed();
                if !kept {
                    self.shared.let_go(&key, token).await;
                }
                self.shared.trace(self.number, "released");
            }
            Some(Err(LockError::Lost { .. })) => {
                releasing.not_held();
                self.shared.trace(self.number, "was lost");
            }
            Some(Err(LockError::Backend { .. })) => {
                releasing.failed();
                self.shared.trace(self.number, "release unknown");
            }
            Some(Err(error)) => panic!("an error that nothing caused: {error:?}"),
        }
    }

    /// Runs `work`, but sometimes drops it before it completes.
    async fn maybe_dropped<F: Future>(&mut self, work: F) -> Option<F::Output> {
        if !self.chance(0.15) {
            return Some(work.await);
        }
        let done = timeout(self.ms(0, 300), work).await.ok();
        if done.is_none() {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
        done
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.rng.f64() < probability
    }

    fn ms(&mut self, min: u64, max: u64) -> Duration {
        Duration::from_millis(self.rng.u64(min..=max))
    }
}
