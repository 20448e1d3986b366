//! The value block of a key: up to 4 KiB of data that the store keeps after the release. An example
//! is the last completed run of a job.
//!
//! VMS calls this data a lock value block.

use std::fmt;
use std::time::SystemTime;

use async_trait::async_trait;

use crate::backend::Claim;
use crate::error::BackendError;
use crate::fencing::FencingToken;
use crate::key::Key;

/// The value block of a key.
///
/// Any client reads it with [`DistributedLock::value`](crate::DistributedLock::value), whether the
/// lock is held or not. Only the holder of the exclusive lock writes it, with
/// [`LockGuard::set_value`](crate::LockGuard::set_value). It survives the release and the expiry of
/// the lock, and it is as durable as the store's [class](crate::Capabilities::class).
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockValue {
    /// The bytes, at most [`BYTES_MAX`](Self::BYTES_MAX).
    pub bytes: Vec<u8>,
    /// The fencing token of the holder that wrote them.
    pub token: FencingToken,
}

impl LockValue {
    /// The maximum number of bytes: 4 KiB.
    pub const BYTES_MAX: usize = 4_096;

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
    /// Also returns [`ValueWrite::NotHeld`] if the stored value has a larger token, because the
    /// write is then late. Repeating the last write stores the same value again.
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
    /// The time on the store's clock between request and response. `None` if clients cannot read
    /// that clock.
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
    /// The claim does not hold the key exclusively, or the stored value has a larger token. The
    /// value is unchanged.
    NotHeld,
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
