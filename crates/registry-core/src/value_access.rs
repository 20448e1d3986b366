//! Reading and writing the [value block](LockValue) of a key through locks and guards.

use std::sync::Arc;

use crate::backend::LockBackend;
use crate::clock::{Moment, sleep};
use crate::engine::{Engine, backoff, lost_error};
use crate::error::{BackendError, BackendErrorKind, InvalidOption, LockError, LostReason};
use crate::guard::LockGuard;
use crate::key::Key;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;
use crate::release::{PendingRelease, release_in_background};
use crate::value::{LockValue, ValueRead, ValueStore, ValueWrite};

impl Engine {
    /// Reads the value block of `key`. Retries transient errors, but begins no retry after the
    /// operation time-out.
    pub(crate) async fn read_value(&self, key: &Key) -> Result<ValueRead, LockError> {
        self.check_open()?;
        self.require_values()?;
        self.backend.check_key(key)?;
        let deadline = Moment::now().after(self.defaults.operation_timeout);
        let mut attempt = 0;
        loop {
            let (backend, owned_key) = (Arc::clone(&self.backend), key.clone());
            let read = Box::pin(async move { values(&*backend)?.value(&owned_key).await });
            let pause = backoff(attempt);
            match self.query("read the value", key.as_str(), read).await {
                Err(error) if error.is_retryable() && Moment::now().after(pause) < deadline => {
                    sleep(pause).await;
                    attempt += 1;
                }
                read => return read,
            }
        }
    }

    fn require_values(&self) -> Result<(), LockError> {
        if self.capabilities.values && self.backend.values().is_some() {
            return Ok(());
        }
        Err(LockError::Unsupported { capability: "values", store: self.capabilities.store })
    }
}

/// Returns the value store of a backend whose capabilities declare value blocks.
fn values(backend: &dyn LockBackend) -> Result<&dyn ValueStore, BackendError> {
    backend.values().ok_or_else(|| {
        let message =
            "the backend declares value blocks, but `values` returns `None`; report this bug";
        BackendError::new(BackendErrorKind::Protocol, message).as_refused()
    })
}

impl DistributedLock {
    /// Returns the value block of this key, or `None` if none was ever written. Does not acquire
    /// the lock.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store has no [value blocks](crate::Capabilities::values);
    /// [`LockError::Backend`]; [`LockError::InvalidKey`]; [`LockError::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn value(&self) -> Result<Option<LockValue>, LockError> {
        Ok(self.read_value().await?.value)
    }

    /// As [`value`](Self::value), but also returns the time on the store's clock.
    pub(crate) async fn read_value(&self) -> Result<ValueRead, LockError> {
        let local_lock = self.local_lock()?;
        local_lock.engine().read_value(local_lock.key()).await
    }
}

impl LockGuard {
    /// Returns the value block of the key, or `None` if none was ever written.
    ///
    /// # Errors
    /// As [`DistributedLock::value`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn value(&self) -> Result<Option<LockValue>, LockError> {
        Ok(self.read_value().await?.value)
    }

    /// As [`value`](Self::value), but also returns the time on the store's clock.
    pub(crate) async fn read_value(&self) -> Result<ValueRead, LockError> {
        let grant = self.hold().grant();
        grant.engine().read_value(grant.claim().key()).await
    }

    /// Writes the value block of the key. The store verifies in the same step that this guard holds
    /// the key, so a holder that has lost its lock writes nothing.
    ///
    /// After this call, the claim is not handed over to a local caller. The end of the hold
    /// releases the claim in the store, so that a late write cannot take effect during the next
    /// hold.
    ///
    /// # Errors
    /// [`LockError::InvalidOption`], before any I/O, for more than [`LockValue::BYTES_MAX`] bytes
    /// or a guard that is not exclusive. [`LockError::Unsupported`] if the store has no [value
    /// blocks](crate::Capabilities::values). [`LockError::Lost`] if the lock is not held any more.
    /// [`LockError::Backend`] if the store did not confirm the write. Such a write may still take
    /// effect while the lock is held, even after a later write of this guard. The call may be
    /// repeated.
    ///
    /// # Cancel safety
    /// If the future is dropped, the value may or may not be written, but not after the store has
    /// ended the claim.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistry, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let lock = registry.obtain("import");
    /// let guard = lock.lock().await?;
    /// guard.set_value("row 1200").await?;
    /// guard.unlock().await?;
    /// assert_eq!(lock.value().await?.map(|value| value.bytes), Some(b"row 1200".to_vec()));
    /// # Ok(()) }
    /// ```
    pub async fn set_value(&self, value: impl Into<Vec<u8>>) -> Result<(), LockError> {
        let value = value.into();
        let engine = self.hold().grant().engine();
        engine.require_values()?;
        if value.len() > LockValue::BYTES_MAX {
            return Err(InvalidOption::value_too_long(value.len(), LockValue::BYTES_MAX).into());
        }
        if self.mode() != ClaimMode::Exclusive {
            return Err(InvalidOption::mode_cannot_write(self.mode()).into());
        }
        let claim = self.claim_for_fence()?.clone();
        let (backend, token) = (Arc::clone(&engine.backend), self.fencing_token());
        let write =
            Box::pin(async move { values(&*backend)?.set_value(&claim, token, &value).await });
        match engine.query("write the value", self.key(), write).await? {
            ValueWrite::Written => Ok(()),
            ValueWrite::NotHeld => {
                let grant = self.hold().grant();
                // If the stored value has a larger token, the store still has the claim. The
                // release is submitted before the loss: `close` waits first for active grants, then
                // for jobs.
                release_in_background(PendingRelease {
                    lease: grant.longest_lease(),
                    ..PendingRelease::new(Arc::clone(engine), grant.claim_to_release())
                });
                _ = grant.lose(LostReason::Gone);
                let reason = grant.loss().unwrap_or(LostReason::Gone);
                Err(lost_error(grant.claim().key(), reason))
            }
        }
    }

    /// As [`set_value`](Self::set_value). Repeats a write that the store did not confirm, while the
    /// lock is held and for at most the length of a lease. Returns whether it repeated the write.
    /// If so, the store may still execute an earlier request.
    pub(crate) async fn set_value_while_held(&self, value: Vec<u8>) -> Result<bool, LockError> {
        let deadline = Moment::now().after(self.hold().grant().lease_length());
        let mut attempt = 0;
        loop {
            match self.set_value(value.clone()).await {
                Err(error)
                    if error.is_retryable() && self.is_held() && Moment::now() < deadline =>
                {
                    sleep(backoff(attempt)).await;
                    attempt += 1;
                }
                written => return written.map(|()| attempt > 0),
            }
        }
    }
}
