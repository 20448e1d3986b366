//! Locks that write down what happens to them: real guards of the engine with a recorder at their side.

use std::fmt;
use std::ops::Deref;

use registry_core::{DistributedLock, LockError, LockGuard, LockOptions};

use crate::history::{Holding, Recorder};

/// Takes locks for one client, and records it.
#[derive(Debug, Clone)]
pub struct Witness {
    recorder: Recorder,
    client: u32,
}

impl Witness {
    /// Records what `client` does. The recorder's clock must be the one that the engine lives by: tokio's in
    /// simulations, the host's otherwise.
    #[must_use]
    pub fn new(recorder: &Recorder, client: u32) -> Self {
        Self { recorder: recorder.clone(), client }
    }

    /// Takes `lock` as [`DistributedLock::lock_with`] does. Not for an owner that has the lock already: entering again is no
    /// grant of its own.
    ///
    /// # Errors
    /// Those of the lock. They are recorded as an unknown outcome: the store may have granted it all the same.
    ///
    /// # Cancel safety
    /// As that of the lock; a dropped acquisition is recorded as unknown.
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

/// A guard whose fate is recorded. It is used like the guard that it holds, except for letting go.
#[must_use = "the lock is let go as soon as the guard is dropped"]
pub struct WitnessedGuard {
    /// Taken out only by whoever consumes the guard.
    watched: Option<(LockGuard, Holding)>,
}

impl WitnessedGuard {
    /// Records how long the guard is valid, or that it is lost. Letting go does it as well; call it where renewals should
    /// count before, or where a loss is noticed.
    pub fn note(&self) {
        let (guard, holding) = self.watched();
        note(guard, holding);
    }

    /// Lets go as [`LockGuard::unlock`] does. Not with guards of a re-entry left or a `min_hold` that is not over: both keep the
    /// lock for longer than is recorded.
    ///
    /// # Errors
    /// Those of the guard.
    ///
    /// # Cancel safety
    /// As that of the guard; a dropped release is recorded as unknown.
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
        // Recorded before the guard goes: its successor may come at once. The outcome stays unknown.
        drop(holding.release());
        drop(guard);
    }
}

impl fmt::Debug for WitnessedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WitnessedGuard").field(&self.watched).finish()
    }
}
