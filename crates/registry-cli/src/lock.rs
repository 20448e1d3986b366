//! The lock that `run` and `hold` acquire: one key in a mode, or several keys.

use std::future::Future;
use std::time::Duration;

use lock_registry::modes::{ClaimMode, MultiGuard, MultiLock};
use lock_registry::once::{Tick, Ticks};
use lock_registry::{
    DistributedLock, FencingToken, Key, LockError, LockGuard, LockOptions, LockRegistryExt as _,
    LostReason, Registry,
};

use crate::args::{self, AcquireArgs};
use crate::exit::CliError;

/// The keys and the mode of a lock, before any access to the store.
#[derive(Debug)]
pub(crate) struct LockRequest {
    key: Key,
    others: Vec<Key>,
    mode: ClaimMode,
}

/// The lock of a [`LockRequest`] in an open registry. It is not acquired yet.
#[derive(Debug)]
pub(crate) enum RequestedLock {
    Single(DistributedLock, ClaimMode),
    Several(MultiLock),
}

impl LockRequest {
    pub(crate) fn from_args(key: Key, args: &AcquireArgs) -> Result<Self, CliError> {
        let others = args.also.iter().map(args::parse_key).collect::<Result<_, _>>()?;
        let mode = match args.permits {
            Some(of) => ClaimMode::Permits { take: args.take, of },
            None if args.shared => ClaimMode::Shared,
            None => ClaimMode::Exclusive,
        };
        Ok(Self { key, others, mode })
    }

    pub(crate) fn key(&self) -> &str {
        self.key.as_str()
    }

    pub(crate) fn obtain(&self, registry: &Registry) -> RequestedLock {
        if self.others.is_empty() {
            return RequestedLock::Single(registry.obtain(self.key()), self.mode);
        }
        let keys = std::iter::once(&self.key).chain(&self.others);
        RequestedLock::Several(registry.obtain_all(keys.map(Key::as_str)))
    }
}

impl RequestedLock {
    /// Acquires the lock. `key` is the argument KEY, which [`HeldLock::key`] returns.
    pub(crate) async fn lock(
        &self,
        key: &str,
        options: LockOptions,
    ) -> Result<HeldLock, LockError> {
        let guards = match self {
            Self::Single(lock, mode) => lock.acquire(*mode, options).await?.into(),
            Self::Several(lock) => lock.lock_with(options).await?,
        };
        Ok(HeldLock { key: key.to_owned(), guards })
    }
}

/// A held lock.
#[derive(Debug)]
pub(crate) struct HeldLock {
    key: String,
    guards: MultiGuard,
}

impl HeldLock {
    /// Creates a held lock from the guard of one key.
    pub(crate) fn single(guard: LockGuard) -> Self {
        Self { key: guard.key().to_owned(), guards: guard.into() }
    }

    /// Writes the value block of the key.
    pub(crate) async fn set_value(&self, value: Vec<u8>) -> Result<(), LockError> {
        match self.guards.guards() {
            [guard, ..] => guard.set_value(value).await,
            [] => Ok(()),
        }
    }

    /// Records that `tick` is done.
    pub(crate) async fn complete(&self, ticks: &mut Ticks, tick: &Tick) -> Result<(), LockError> {
        match self.guards.guards() {
            [guard, ..] => ticks.complete(guard, tick).await,
            [] => Ok(()),
        }
    }

    /// Returns the argument KEY or ROLE of the command line.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Returns the fencing token of [`key`](Self::key).
    pub(crate) fn fencing_token(&self) -> Option<FencingToken> {
        let guard = self.guards.guards().iter().find(|guard| guard.key() == self.key);
        guard.map(LockGuard::fencing_token)
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.guards.valid_for()
    }

    pub(crate) fn is_held(&self) -> bool {
        self.guards.is_held()
    }

    /// Waits until a key is lost, and returns the key and the reason.
    pub(crate) fn lost(
        &self,
    ) -> impl Future<Output = (String, LostReason)> + Send + 'static + use<> {
        self.guards.lost()
    }

    /// Returns [`LockError::Lost`] if a key is lost.
    pub(crate) async fn check(&self) -> Result<(), LockError> {
        self.guards.protect(std::future::ready(())).await
    }

    pub(crate) async fn unlock(self) -> Result<(), LockError> {
        self.guards.unlock().await
    }
}
