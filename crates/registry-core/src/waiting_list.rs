//! The claims that wait for a key, so that operators can list them.
//!
//! A store with a queue lists the claims of its queue. In other stores that can list waiters, the
//! engine registers each claim that waits for longer than a second; see `registration`.
//! [`RegistryBuilder::waiters`](crate::RegistryBuilder::waiters) turns this off.

use std::time::Duration;

use async_trait::async_trait;

use crate::backend::Claim;
use crate::error::BackendError;
use crate::key::Key;
use crate::mode::ClaimMode;

/// A claim that waits for a key, as the store returns it. Times are durations on the store's clock,
/// not dates.
///
/// A registry has at most one waiting claim per key, however many of its callers wait. An upgrade
/// that waits is an additional claim.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct WaitingClaim {
    /// The key.
    pub key: Key,
    /// The mode for which the claim waits.
    pub mode: ClaimMode,
    /// The waiter's label, if the store keeps labels and the waiter set one.
    pub label: Option<String>,
    /// The time since the wait began. The wait of an acquisition begins with the first busy
    /// response.
    pub waited_for: Option<Duration>,
    /// The time until the store removes the claim, unless the waiter renews it.
    pub expires_in: Option<Duration>,
}

impl WaitingClaim {
    /// Creates a claim that waits for the exclusive lock of `key`, without label and times.
    #[must_use]
    pub const fn new(key: Key) -> Self {
        Self { key, mode: ClaimMode::Exclusive, label: None, waited_for: None, expires_in: None }
    }

    /// Sets the mode.
    #[must_use]
    pub const fn with_mode(mut self, mode: ClaimMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the label.
    #[must_use]
    pub fn with_label(mut self, label: Option<String>) -> Self {
        self.label = label;
        self
    }

    /// Sets the time since the wait began, and the time until the claim expires.
    #[must_use]
    pub const fn with_times(
        mut self,
        waited_for: Option<Duration>,
        expires_in: Option<Duration>,
    ) -> Self {
        (self.waited_for, self.expires_in) = (waited_for, expires_in);
        self
    }
}

/// The waiting claims of a store, from [`LockBackend::waiters`](crate::LockBackend::waiters).
///
/// # Cancel safety
/// No method needs to be cancel safe, as in [`LockBackend`](crate::LockBackend).
#[async_trait]
pub trait WaiterStore: Send + Sync {
    /// Registers `claim` as waiting, for at least [`Claim::lease`] from now. `waited_for` is the
    /// time that the claim has already waited. A repeated call extends the registration. A
    /// registration has no effect on grants.
    ///
    /// The engine calls this only if the store has no [queue](crate::Capabilities::fair). The
    /// default does nothing.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. The claim may be registered nevertheless.
    async fn register(&self, _claim: &Claim, _waited_for: Duration) -> Result<(), BackendError> {
        Ok(())
    }

    /// Removes the registration of `claim`, if it exists. The default does nothing.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. The registration then expires.
    async fn unregister(&self, _claim: &Claim) -> Result<(), BackendError> {
        Ok(())
    }

    /// Returns the claims that wait for `key`, in any order. If `key` is `None`, returns the
    /// waiting claims of all keys in this backend's namespace.
    ///
    /// # Errors
    /// [`BackendError`] for a store error.
    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError>;
}
