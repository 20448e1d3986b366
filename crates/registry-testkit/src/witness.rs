//! Locks with a recorder: guards of the engine whose operations are recorded in a history.

use std::fmt;
use std::ops::Deref;

use registry_core::{DistributedLock, LockError, LockGuard, LockOptions};

use crate::history::{Holding, Recorder};

/// Acquires locks for one client and records the operations.
#[derive(Debug, Clone)]
pub struct Witness {
    recorder: Recorder,
    client: u32,
}

impl Witness {
    /// Creates a witness that records the operations of `client`. The recorder must use the clock
    /// that the engine uses: tokio's clock in simulations, otherwise the host's clock.
    #[must_use]
    pub fn new(recorder: &Recorder, client: u32) -> Self {
        Self { recorder: recorder.clone(), client }
    }

    /// Acquires `lock` as [`DistributedLock::lock_with`] does. Not for an owner that already holds
    /// the lock: a re-entry is not a separate grant.
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
    ) -> Result<Option<WitnessedGuard>, LockError> {
        let asking = self.recorder.acquire(self.client, lock.key());
        match lock.lock_with(options).await {
            Ok(Some(guard)) => {
                let holding = asking.granted(guard.fencing_token(), || guard.valid_for());
                Ok(Some(WitnessedGuard { watched: Some((guard, holding)) }))
            }
            Ok(None) => {
                asking.busy();
                Ok(None)
            }
            Err(error) => {
                asking.failed();
                Err(error)
            }
        }
    }
}

/// A guard whose operations are recorded. It dereferences to the inner guard, but has its own
/// `unlock`.
#[must_use = "the lock is let go as soon as the guard is dropped"]
pub struct WitnessedGuard {
    /// `None` only while a consuming method or `Drop` runs.
    watched: Option<(LockGuard, Holding)>,
}

impl WitnessedGuard {
    /// Records how long the guard is valid, or that it is lost. A release records this as well.
    /// Call this method where earlier renewals should count, or where a loss is noticed.
    pub fn note(&self) {
        let (guard, holding) = self.watched();
        note(guard, holding);
    }

    /// Releases the lock as [`LockGuard::unlock`] does. Do not use it while guards of a re-entry
    /// remain or a `min_hold` has not passed: both keep the lock longer than the record states.
    ///
    /// # Errors
    /// Returns the errors of the guard.
    ///
    /// # Cancel safety
    /// As the guard's. A dropped release is recorded as unknown.
    pub async fn unlock(mut self) -> Result<(), LockError> {
        let Some((guard, holding)) = self.watched.take() else { return Ok(()) };
        note(&guard, &holding);
        let releasing = holding.release();
        let outcome = guard.unlock().await;
        match &outcome {
            Ok(()) => releasing.freed(),
            Err(LockError::Lost { .. }) => releasing.not_held(),
            Err(_) => releasing.failed(),
        }
        outcome
    }

    fn watched(&self) -> &(LockGuard, Holding) {
        self.watched.as_ref().expect("a guard has its hold until it is consumed")
    }
}

fn note(guard: &LockGuard, holding: &Holding) {
    if guard.is_held() {
        holding.valid_for(|| guard.valid_for());
    } else {
        holding.lost();
    }
}

impl Deref for WitnessedGuard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.watched().0
    }
}

impl Drop for WitnessedGuard {
    fn drop(&mut self) {
        let Some((guard, holding)) = self.watched.take() else { return };
        note(&guard, &holding);
        // Recorded before the guard is dropped, because the next holder may acquire the lock
        // immediately. The outcome stays unknown.
        drop(holding.release());
        drop(guard);
    }
}

impl fmt::Debug for WitnessedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WitnessedGuard").field(&self.watched).finish()
    }
}
