//! The value block of a key: up to 4 KiB in the store that outlive the lock, for state such as the
//! last completed run of a job.
//!
//! The VMS distributed lock manager calls it a lock value block.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;

use crate::backend::Claim;
use crate::clock::{Moment, sleep};
use crate::engine::{Engine, backoff, lost_error};
use crate::error::{BackendError, InvalidOption, LockError, LostReason};
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::key::Key;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;

/// The value block of a key.
///
/// Any client reads it with [`DistributedLock::value`], whether the lock is held or not. Only the
/// holder of the exclusive lock writes it, with [`LockGuard::set_value`]. It survives the release
/// and the expiry of the lock, and it is as durable as the store's
/// [class](crate::Capabilities::class).
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockValue {
    /// The bytes, at most [`MAX_BYTES`](Self::MAX_BYTES).
    pub bytes: Vec<u8>,
    /// The fencing token of the holder that wrote them.
    pub token: FencingToken,
}

impl LockValue {
    /// The maximum number of bytes: 4 KiB.
    pub const MAX_BYTES: usize = 4_096;

    /// Creates a value that the holder with this token wrote.
    #[must_use]
    pub const fn new(bytes: Vec<u8>, token: FencingToken) -> Self {
        Self { bytes, token }
    }

    /// Returns the value as one string of bytes, for stores without columns: the token in decimal
    /// digits, a space, and the bytes. [`decode`](Self::decode) reads it.
    #[must_use]
    pub fn encode(token: FencingToken, bytes: &[u8]) -> Vec<u8> {
        [format!("{token} ").as_bytes(), bytes].concat()
    }

    /// Decodes the output of [`encode`](Self::encode). Returns `None` for other bytes, which
    /// another program wrote.
    #[must_use]
    pub fn decode(stored: &[u8]) -> Option<Self> {
        let mut parts = stored.splitn(2, |byte| *byte == b' ');
        let token = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
        Some(Self::new(parts.next()?.to_vec(), token))
    }
}

impl fmt::Debug for LockValue {
    /// Shows the number of bytes instead of the bytes, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockValue")
            .field("bytes", &format_args!("{} bytes", self.bytes.len()))
            .field("token", &self.token)
            .finish()
    }
}

/// The value blocks of a store, from [`LockBackend::values`](crate::LockBackend::values).
///
/// # Cancel safety
/// No method needs to be cancel safe, as in [`LockBackend`](crate::LockBackend).
#[async_trait]
pub trait ValueStore: Send + Sync {
    /// Reads the value block of `key`, in one request.
    ///
    /// # Errors
    /// [`BackendError`] for a store error.
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError>;

    /// Writes the value block if `claim` holds its key exclusively. The store verifies this in the
    /// same step as the write. `token` is the token of the hold that writes.
    ///
    /// If the stored value has a larger token, returns [`ValueWrite::NotHeld`] too: the write is
    /// late, and belongs to a hold before a local hand-over. A write may be repeated, and then has
    /// the same result.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. The value may have been written nevertheless.
    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError>;
}

/// A store's response to a read of a value block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ValueRead {
    /// The value, if one was ever written.
    pub value: Option<LockValue>,
    /// The time on the store's clock between request and reply. `None` if clients cannot read that
    /// clock.
    pub now: Option<SystemTime>,
}

impl ValueRead {
    /// Creates a response with this value.
    #[must_use]
    pub const fn new(value: Option<LockValue>) -> Self {
        Self { value, now: None }
    }

    /// Sets the time on the store's clock.
    #[must_use]
    pub const fn with_now(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }
}

/// A store's response to a write of a value block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[expect(clippy::exhaustive_enums, reason = "a value is written or it is not")]
pub enum ValueWrite {
    /// The value is stored.
    Written,
    /// The claim does not hold the key, or a later hold has written. The value is unchanged.
    NotHeld,
}

impl Engine {
    /// Reads the value block of `key`. Retries transient errors within the operation time-out.
    pub(crate) async fn read_value(&self, key: &Key) -> Result<ValueRead, LockError> {
        self.require_values()?;
        self.backend.check_key(key)?;
        let deadline = Moment::now().after(self.defaults.operation_timeout);
        for attempt in 0.. {
            let (backend, key) = (Arc::clone(&self.backend), key.clone());
            let name = key.clone();
            let read = Box::pin(async move { values(&*backend)?.value(&key).await });
            match self.query("read the value", name.as_str(), read).await {
                Err(error) if error.is_retryable() => {
                    let pause = backoff(attempt);
                    if Moment::now().after(pause) >= deadline {
                        return Err(error);
                    }
                    sleep(pause).await;
                }
                read => return read,
            }
        }
        Err(LockError::Closed)
    }

    fn require_values(&self) -> Result<(), LockError> {
        if self.capabilities.values && self.backend.values().is_some() {
            return Ok(());
        }
        Err(LockError::Unsupported { capability: "values", store: self.capabilities.store })
    }
}

/// Returns the value blocks of a backend that declares them.
fn values(backend: &dyn crate::LockBackend) -> Result<&dyn ValueStore, BackendError> {
    backend.values().ok_or_else(|| {
        let message =
            "the backend declares value blocks, but `values` returns `None`; report this bug";
        BackendError::new(crate::BackendErrorKind::Protocol, message).as_refused()
    })
}

impl DistributedLock {
    /// Returns the value block of this key, or `None` if none was ever written. Does not acquire
    /// the lock.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store has no [value blocks](crate::Capabilities::values);
    /// [`LockError::Backend`]; [`LockError::InvalidKey`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn value(&self) -> Result<Option<LockValue>, LockError> {
        Ok(self.read_value().await?.value)
    }

    /// As [`value`](Self::value), with the store's clock.
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

    /// As [`value`](Self::value), with the store's clock.
    pub(crate) async fn read_value(&self) -> Result<ValueRead, LockError> {
        let grant = self.hold().grant();
        grant.engine().read_value(grant.claim().key()).await
    }

    /// Writes the value block of the key. The store verifies in the same step that this guard holds
    /// the key, so a holder that has lost its lock writes nothing.
    ///
    /// After this call, the lock is released in the store instead of being handed over to a local
    /// caller: a late write must not take effect during the next hold.
    ///
    /// # Errors
    /// [`LockError::InvalidOption`], before any I/O, for more than [`LockValue::MAX_BYTES`] bytes
    /// or a guard that is not exclusive. [`LockError::Unsupported`] if the store has no [value
    /// blocks](crate::Capabilities::values). [`LockError::Lost`] if the lock is not held any more.
    /// [`LockError::Backend`] if the store did not confirm the write. The write may take effect
    /// while the lock is held. The call may be repeated.
    ///
    /// # Cancel safety
    /// If the future is dropped, the value may or may not be written, but not after the end of this
    /// hold.
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
        if value.len() > LockValue::MAX_BYTES {
            return Err(InvalidOption::value_too_long(value.len()).into());
        }
        if self.mode() != ClaimMode::Exclusive {
            return Err(InvalidOption::value_of_mode(self.mode()).into());
        }
        let claim = self.claim_for_fence()?.clone();
        let (backend, token) = (Arc::clone(&engine.backend), self.fencing_token());
        let write =
            Box::pin(async move { values(&*backend)?.set_value(&claim, token, &value).await });
        match engine.query("write the value", self.key(), write).await? {
            ValueWrite::Written => Ok(()),
            ValueWrite::NotHeld => {
                let grant = self.hold().grant();
                _ = grant.lose(LostReason::Gone);
                let reason = grant.loss().unwrap_or(LostReason::Gone);
                Err(lost_error(grant.claim().key(), reason))
            }
        }
    }

    /// As [`set_value`](Self::set_value). Repeats a write that the store did not confirm while the
    /// lock is held.
    pub(crate) async fn set_value_while_held(&self, value: Vec<u8>) -> Result<(), LockError> {
        for attempt in 0.. {
            match self.set_value(value.clone()).await {
                Err(error) if error.is_retryable() && self.is_held() => {
                    sleep(backoff(attempt)).await;
                }
                written => return written,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_value_is_decoded_and_that_of_another_program_is_not() {
        let token = FencingToken::new(17).unwrap();
        for bytes in [&b"a b"[..], b"", b"\0\xff "] {
            let value = LockValue::decode(&LockValue::encode(token, bytes));
            assert_eq!(value, Some(LockValue::new(bytes.to_vec(), token)));
        }
        for stored in [&b""[..], b"17", b"x y", b"\xff y", b" y"] {
            assert_eq!(LockValue::decode(stored), None, "{stored:?}");
        }
    }

    #[test]
    fn debug_output_does_not_contain_the_bytes() {
        let value = LockValue::new(b"secret".to_vec(), FencingToken::new(1).unwrap());
        let debug = format!("{value:?}");
        assert!(!debug.contains("secret") && debug.contains("6 bytes"), "{debug}");
    }
}
