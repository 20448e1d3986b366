//! One client of one process: acquires locks with random options, works for shorter or longer than
//! the lease, and releases.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use registry_core::{
    ClaimMode, LockError, LockGuard, LockOptions, LockRegistryExt as _, Owner, Registry,
};
use registry_testkit::history::HoldRecord;
use tokio::time::{sleep, timeout};

use super::trial::{LEASE_MAX, ProcessSlot, TrialProcess, TrialState};

pub(super) struct TrialClient {
    pub(super) number: usize,
    slot: ProcessSlot,
    pub(super) process: TrialProcess,
    pub(super) state: Arc<TrialState>,
    pub(super) rng: fastrand::Rng,
    owner: Owner,
}

impl TrialClient {
    pub(super) fn new(
        number: usize,
        slot: ProcessSlot,
        state: Arc<TrialState>,
        rng: fastrand::Rng,
    ) -> Self {
        let process = slot.current();
        Self { number, slot, process, state, rng, owner: Owner::new() }
    }

    pub(super) async fn run_to_end(mut self) {
        while self.state.grants_left.load(Ordering::Relaxed) > 0 {
            let crash = self.process.crash.clone();
            tokio::select! {
                biased;
                // Drops the futures and guards of the round. Their releases do not reach the store.
                () = crash.wait() => {
                    self.state.trace(self.number, "crashed");
                    self.process = self.slot.current();
                    self.owner = Owner::new();
                }
                () = self.round() => {}
            }
            if self.chance(0.5) {
                sleep(self.ms(0, 50)).await;
            }
        }
    }

    async fn round(&mut self) {
        if self.state.has_all_modes && self.chance(0.1) {
            self.round_of_several_keys().await;
        } else {
            self.one_round().await;
        }
    }

    async fn one_round(&mut self) {
        let number = self.rng.usize(0..self.state.keys);
        let key = number.to_string();
        let mode = if self.state.has_all_modes {
            self.requested_mode(number)
        } else {
            ClaimMode::Exclusive
        };
        let lease = Duration::from_millis(self.rng.u64(500..=LEASE_MAX.as_millis() as u64));
        let renews = self.chance(0.8);
        let with_owner = self.chance(0.2);
        let mut options = LockOptions::new().lease(lease).auto_renew(renews);
        if with_owner {
            options = options.owner(&self.owner);
        }
        let mut has_min_hold = false;
        if self.chance(0.1) {
            options = options.max_hold(self.ms(500, 3_000));
        } else if self.chance(0.1) {
            options = options.min_hold(self.ms(1, 400));
            has_min_hold = true;
        }
        match self.rng.u8(0..10) {
            0..5 => {}
            5..7 => options = options.wait(Duration::ZERO),
            _ => options = options.wait(self.ms(1, 2_000)),
        }
        if self.state.has_all_modes && self.chance(0.2) {
            options = options.fair(true);
        }
        let uses_defaults = self.chance(0.5);
        let acquire_record = self.state.recorder.acquire_as(self.number as u32, key.as_str(), mode);
        // Half of the acquisitions use the default options, so that claims can be handed over
        // between them.
        let attempt_options = if uses_defaults { LockOptions::new() } else { options.clone() };
        let attempt = acquire(self.process.registry.clone(), key.clone(), mode, attempt_options);
        let Some(result) = self.sometimes_dropped(attempt).await else {
            self.state.trace(self.number, "acquisition dropped");
            return;
        };
        let guard = match result {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                acquire_record.busy();
                return self.state.trace(self.number, "busy");
            }
            Err(LockError::Backend { source, .. }) if source.is_retryable() => {
                acquire_record.failed();
                return self.state.trace(self.number, "failed");
            }
            Err(error) => panic!("an error that nothing caused: {error:?}"),
        };
        self.state
            .grants_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .ok();
        let hold_record = acquire_record.granted(Some(guard.fencing_token()), || guard.valid_for());
        let guard = Arc::new(guard);
        if guard.is_held() {
            self.process.checking_backend.record_hold(guard.claim());
        }
        self.state.granted(&guard);
        self.state.trace(self.number, "granted");
        self.work(&guard, &hold_record, lease).await;
        if with_owner && !uses_defaults {
            self.reenter_as_owner(&guard, options).await;
        }
        let Some((guard, hold_record)) = self.convert(guard, hold_record, lease).await else {
            return;
        };
        let guard = Arc::into_inner(guard).expect("only weak references remain");
        self.release(guard, hold_record, has_min_hold && !uses_defaults).await;
    }

    pub(super) async fn work(
        &mut self,
        guard: &LockGuard,
        hold_record: &HoldRecord,
        lease: Duration,
    ) {
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
                    let renewal = guard.extend(lease * 2);
                    let _ = self.sometimes_dropped(renewal).await;
                }
                _ => drop(guard.reenter()),
            }
            self.check_guard(guard, hold_record);
            self.state.write(self.number, guard);
        }
    }

    /// Checks that the properties of a guard are consistent. I3.
    pub(super) fn check_guard(&self, guard: &LockGuard, hold_record: &HoldRecord) {
        if guard.is_held() {
            assert!(!guard.valid_for().is_zero() || !guard.is_held());
            assert_eq!(guard.lost().now_or_never(), None, "I3: lost, but `is_held` is true");
            hold_record.valid_for(|| guard.valid_for());
        } else {
            assert!(guard.lost().now_or_never().is_some(), "I3: not held, but `lost` is pending");
            assert!(guard.reenter().is_err(), "I3: a lost lock was entered again");
        }
    }

    /// Checks that the owner of a held lock re-enters it at once, without the store.
    async fn reenter_as_owner(&mut self, outer: &LockGuard, options: LockOptions) {
        // An owner cannot re-enter a permit: each acquisition takes its own units.
        if !outer.is_held() || outer.mode().units() > 0 {
            return;
        }
        let options = options.wait(Duration::ZERO);
        let (registry, key) = (self.process.registry.clone(), outer.key().to_owned());
        match acquire(registry, key, outer.mode(), options).now_or_never() {
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

    async fn release(&mut self, guard: LockGuard, hold_record: HoldRecord, has_min_hold: bool) {
        self.check_guard(&guard, &hold_record);
        let was_held = guard.is_held();
        if !was_held {
            self.state.lost.fetch_add(1, Ordering::Relaxed);
            hold_record.lost();
        }
        let release_record = hold_record.release();
        if self.chance(0.25) {
            self.state.trace(self.number, "guard dropped");
            return drop(guard);
        }
        let (key, token) = (guard.key().to_owned(), guard.fencing_token());
        let unlock = guard.unlock();
        match self.sometimes_dropped(unlock).await {
            None => self.state.trace(self.number, "release dropped"),
            Some(Ok(())) => {
                assert!(was_held, "I4: the release of a lost lock returned `Ok`");
                release_record.freed();
                if !has_min_hold {
                    self.state.check_released(&key, token).await;
                }
                self.state.trace(self.number, "released");
            }
            Some(Err(LockError::Lost { .. })) => {
                release_record.not_held();
                self.state.trace(self.number, "was lost");
            }
            Some(Err(LockError::Backend { .. })) => {
                release_record.failed();
                self.state.trace(self.number, "release unknown");
            }
            Some(Err(error)) => panic!("an error that nothing caused: {error:?}"),
        }
    }

    /// Runs `work`, but sometimes drops it before it completes.
    pub(super) async fn sometimes_dropped<F: Future>(&mut self, work: F) -> Option<F::Output> {
        if !self.chance(0.15) {
            return Some(work.await);
        }
        let done = timeout(self.ms(0, 300), work).await.ok();
        if done.is_none() {
            self.state.dropped.fetch_add(1, Ordering::Relaxed);
        }
        done
    }

    pub(super) fn chance(&mut self, probability: f64) -> bool {
        self.rng.f64() < probability
    }

    pub(super) fn ms(&mut self, min: u64, max: u64) -> Duration {
        Duration::from_millis(self.rng.u64(min..=max))
    }
}

/// Locks `key` in `mode`. Returns `None` if it was held until the end of the wait.
async fn acquire(
    registry: Registry,
    key: String,
    mode: ClaimMode,
    options: LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    let lock = registry.obtain(&key);
    let acquired = match mode {
        ClaimMode::Shared => lock.read_with(options).await,
        ClaimMode::Upgradable => lock.upgradable_with(options).await,
        ClaimMode::Permits { take, of } => {
            registry.semaphore(&key, of).acquire_with(take, options).await
        }
        _ => lock.lock_with(options).await,
    };
    match acquired {
        Err(LockError::WaitElapsed { .. }) => Ok(None),
        acquired => acquired.map(Some),
    }
}
