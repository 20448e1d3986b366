//! Clients and guards that record their operations in a history.

use std::fmt;
use std::ops::Deref;

use registry_core::{
    ClaimMode, DistributedLock, LockError, LockGuard, LockOptions, LockRegistry,
    LockRegistryExt as _, MultiGuard,
};

use crate::history::{AcquireRecord, HoldRecord, Recorder, ReleaseRecord};

/// Acquires locks for one client and records the operations.
#[derive(Debug, Clone)]
pub struct RecordingClient {
    recorder: Recorder,
    client: u32,
}

impl RecordingClient {
    /// Creates a client that records its operations under the number `client`. The recorder must
    /// use the clock that the engine uses: tokio's clock in simulations, otherwise the host's
    /// clock.
    #[must_use]
    pub fn new(recorder: &Recorder, client: u32) -> Self {
        Self { recorder: recorder.clone(), client }
    }

    /// Acquires `lock` as [`DistributedLock::lock_with`] does, but returns `Ok(None)` if the lock
    /// was held until the end of the wait. Not for an owner that already holds the lock: a re-entry
    /// is not a separate grant.
    ///
    /// # Errors
    /// Returns the errors of the lock. They are recorded as an unknown outcome, because the store
    /// may have granted the lock.
    ///
    /// # Cancel safety
    /// As the lock's. A dropped acquisition is recorded as unknown.
    pub async fn lock_with(
        &self,
        lock: &DistributedLock,
        options: LockOptions,
    ) -> Result<Option<RecordedGuard>, LockError> {
        let acquire_record = self.recorder.acquire(self.client, lock.key());
        record_answer(acquire_record, lock.lock_with(options).await)
    }

    /// Acquires the lock of `key` in a mode. Otherwise as [`lock_with`](Self::lock_with).
    ///
    /// # Errors
    /// As [`lock_with`](Self::lock_with).
    ///
    /// # Cancel safety
    /// As [`lock_with`](Self::lock_with).
    pub async fn acquire(
        &self,
        registry: &dyn LockRegistry,
        key: &str,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<Option<RecordedGuard>, LockError> {
        let acquire_record = self.recorder.acquire_as(self.client, key, mode);
        let lock = registry.obtain(key);
        let acquired = match mode {
            ClaimMode::Shared => lock.read_with(options).await,
            ClaimMode::Upgradable => lock.upgradable_with(options).await,
            ClaimMode::Permits { take, of } => {
                registry.semaphore(key, of).acquire_with(take, options).await
            }
            _ => lock.lock_with(options).await,
        };
        record_answer(acquire_record, acquired)
    }

    /// Acquires the locks of all `keys` together, without a limit to the wait.
    ///
    /// # Errors
    /// As [`lock_with`](Self::lock_with).
    ///
    /// # Cancel safety
    /// As [`lock_with`](Self::lock_with).
    pub async fn lock_all(
        &self,
        registry: &dyn LockRegistry,
        keys: &[String],
    ) -> Result<RecordedMultiGuard, LockError> {
        let lock = registry.obtain_all(keys);
        let acquire_records: Vec<_> =
            lock.keys().map(|key| self.recorder.acquire(self.client, key)).collect();
        let guard = lock.lock().await?;
        // The records and the guards are both sorted by key.
        let hold_records =
            acquire_records.into_iter().zip(guard.guards()).map(|(record, guard)| {
                record.granted(Some(guard.fencing_token()), || guard.valid_for())
            });
        Ok(RecordedMultiGuard { hold_records: hold_records.collect(), guard })
    }
}

/// The recorded guard of several keys.
#[derive(Debug)]
pub struct RecordedMultiGuard {
    hold_records: Vec<HoldRecord>,
    guard: MultiGuard,
}

impl RecordedMultiGuard {
    /// Releases all locks. An error leaves all outcomes unknown.
    ///
    /// # Errors
    /// As [`MultiGuard::unlock`].
    ///
    /// # Cancel safety
    /// As [`MultiGuard::unlock`]. A dropped release is recorded as unknown.
    pub async fn unlock(self) -> Result<(), LockError> {
        let release_records: Vec<_> =
            self.hold_records.into_iter().map(HoldRecord::release).collect();
        self.guard.unlock().await?;
        release_records.into_iter().for_each(ReleaseRecord::freed);
        Ok(())
    }
}

fn record_answer(
    acquire_record: AcquireRecord,
    acquired: Result<LockGuard, LockError>,
) -> Result<Option<RecordedGuard>, LockError> {
    match acquired {
        Ok(guard) => {
            let token = Some(guard.fencing_token());
            let hold_record = acquire_record.granted(token, || guard.valid_for());
            Ok(Some(RecordedGuard { recorded: Some((guard, hold_record)) }))
        }
        Err(LockError::WaitElapsed { .. }) => {
            acquire_record.busy();
            Ok(None)
        }
        Err(error) => {
            acquire_record.failed();
            Err(error)
        }
    }
}

/// A guard whose operations are recorded. It dereferences to the inner guard, but has its own
/// `unlock` and `upgrade`. Dropping it records a release with an unknown outcome.
#[must_use = "dropping the guard releases the lock"]
pub struct RecordedGuard {
    /// `None` only while a consuming method or `Drop` runs.
    recorded: Option<(LockGuard, HoldRecord)>,
}

impl RecordedGuard {
    /// Records how long the guard is valid, or that it is lost. A release records this as well.
    /// Call this method where earlier renewals should count, or where a loss is noticed.
    pub fn record_state(&self) {
        let (guard, hold_record) = self.recorded();
        record_state(guard, hold_record);
    }

    /// Releases the lock as [`LockGuard::unlock`] does. Do not use it while guards of a re-entry
    /// remain or a `min_hold` has not passed: both keep the lock longer than the record states.
    ///
    /// # Cancel safety
    /// As the guard's. A dropped release is recorded as unknown.
    pub async fn unlock(mut self) -> Result<(), LockError> {
        let Some((guard, hold_record)) = self.recorded.take() else { return Ok(()) };
        record_state(&guard, &hold_record);
        let release_record = hold_record.release();
        let outcome = guard.unlock().await;
        match &outcome {
            Ok(()) => release_record.freed(),
            Err(LockError::Lost { .. }) => release_record.not_held(),
            Err(_) => release_record.failed(),
        }
        outcome
    }

    /// Makes an upgradable lock exclusive as [`LockGuard::upgrade`] does. Returns `Some` unless it
    /// fails.
    ///
    /// # Errors
    /// As [`LockGuard::upgrade`]. The upgrade is then recorded as an unknown outcome.
    ///
    /// # Cancel safety
    /// As the guard's. A dropped upgrade is recorded as unknown.
    pub async fn upgrade(mut self) -> Result<Option<Self>, LockError> {
        let Some((guard, hold_record)) = self.recorded.take() else { return Ok(None) };
        let convert_record = hold_record.convert(ClaimMode::Exclusive);
        match guard.upgrade().await {
            Ok(guard) => {
                let token = Some(guard.fencing_token());
                let hold_record = convert_record.granted(token, || guard.valid_for());
                Ok(Some(Self { recorded: Some((guard, hold_record)) }))
            }
            Err(error) => {
                convert_record.failed();
                Err(error)
            }
        }
    }

    fn recorded(&self) -> &(LockGuard, HoldRecord) {
        self.recorded.as_ref().expect("a guard has its record until it is consumed")
    }
}

fn record_state(guard: &LockGuard, hold_record: &HoldRecord) {
    if guard.is_held() {
        hold_record.valid_for(|| guard.valid_for());
    } else {
        hold_record.lost();
    }
}

impl Deref for RecordedGuard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.recorded().0
    }
}

impl Drop for RecordedGuard {
    fn drop(&mut self) {
        let Some((guard, hold_record)) = self.recorded.take() else { return };
        record_state(&guard, &hold_record);
        // Recorded before the guard is dropped, because the next holder may acquire the lock
        // immediately. The outcome stays unknown.
        drop(hold_record.release());
        drop(guard);
    }
}

impl fmt::Debug for RecordedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RecordedGuard").field(&self.recorded).finish()
    }
}
