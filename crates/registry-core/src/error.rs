//! What can go wrong, sorted by what the caller can do about it. "Busy" and "timed out" are answers, not errors.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::InvalidKey;

/// Why a lock operation failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The store is in trouble. [`BackendError::is_retryable`] tells whether trying again can help.
    #[error("{operation} of lock {key:?} failed")]
    #[non_exhaustive]
    Backend {
        /// What was tried: `acquire`, `renew`, `release`, `inspect`, …
        operation: &'static str,
        /// The key.
        key: String,
        /// What the store said.
        source: BackendError,
    },
    /// The lock had been lost. Work done under it since then was not protected.
    #[error("lock {key:?} was lost: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
        /// Why.
        reason: LostReason,
    },
    /// The text cannot be the key of a lock. Nothing was sent to the store.
    #[error("invalid lock key")]
    InvalidKey(#[from] InvalidKey),
    /// An option is out of range. Nothing was sent to the store.
    #[error("invalid lock options")]
    InvalidOption(#[from] InvalidOption),
    /// The store cannot do what was asked.
    #[error("the {store} store has no {capability}")]
    #[non_exhaustive]
    Unsupported {
        /// What it lacks, as [`Capabilities`](crate::Capabilities) names it.
        capability: &'static str,
        /// The store.
        store: &'static str,
    },
    /// The registry was closed, or the runtime that opened it has shut down.
    #[error("the lock registry is closed")]
    Closed,
    /// A blocking call was made on a thread that runs async tasks, where it would block all of them.
    #[error("a blocking lock call was made inside an async runtime; use the async registry there")]
    InsideRuntime,
}

impl LockError {
    /// Whether the same call may succeed if it is simply made again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Backend { source, .. } if source.is_retryable())
    }
}

/// Why a held lock is not held any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out before a renewal was confirmed: the store or the network was in trouble, or this process slept.
    Expired,
    /// The store says that the claim holds nothing any more: it expired there, or somebody broke the lock.
    Gone,
    /// The holder kept it for as long as its `max_hold` allows.
    MaxHold,
    /// The registry was closed while the lock was held.
    Closed,
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease ran out before a renewal was confirmed",
            Self::Gone => "the store says that it is not held any more",
            Self::MaxHold => "it was held for its max_hold",
            Self::Closed => "the registry was closed",
        })
    }
}

/// Which option is out of range, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{option} of {given} {problem}")]
#[non_exhaustive]
pub struct InvalidOption {
    /// The option's name.
    pub option: &'static str,
    /// What was given.
    pub given: String,
    /// What is wrong with it and what to do.
    pub problem: Cow<'static, str>,
}

impl InvalidOption {
    /// Says what is wrong with the `given` value of `option`.
    #[must_use]
    pub fn new(
        option: &'static str,
        given: Duration,
        problem: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { option, given: format!("{given:?}"), problem: problem.into() }
    }

    pub(crate) fn label_too_long(bytes: usize) -> Self {
        let problem = format!("is longer than {} bytes", crate::LockOptions::LABEL_BYTES_MAX);
        Self { option: "label", given: format!("{bytes} bytes"), problem: problem.into() }
    }
}

/// Trouble with a store, sorted by the backend.
///
/// Display names what happened in one fragment without the source's text; walk [`source`](StdError::source) for the rest.
#[derive(Debug, Clone)]
pub struct BackendError {
    kind: BackendErrorKind,
    message: Cow<'static, str>,
    refused: bool,
    stale_connection: bool,
    blocked: bool,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// What kind of trouble a store is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendErrorKind {
    /// It may pass: connection lost, time-out, failover, deadlock, lock wait. The engine retries within the deadline.
    Transient,
    /// The store knows us and says no: wrong password, missing grant, read-only file.
    Denied,
    /// The store is not set up for us: missing table, missing folder, wrong schema version, eviction policy.
    Misconfigured,
    /// The store answered what it should not: corrupt file, wrong type, a reply that cannot be read.
    Protocol,
}

impl BackendError {
    /// Trouble of this `kind`.
    #[must_use]
    pub fn new(kind: BackendErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            refused: false,
            stale_connection: false,
            blocked: false,
            source: None,
        }
    }

    /// Trouble that may pass.
    #[must_use]
    pub fn transient(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(BackendErrorKind::Transient, message)
    }

    /// Adds what the client library said. Its text must hold no secret.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Says that the store is known to have done nothing, so that no clean-up is needed.
    #[must_use]
    pub fn as_refused(mut self) -> Self {
        self.refused = true;
        self
    }

    /// Takes [`as_refused`](Self::as_refused) back: an earlier try of the same request may have got through, so the outcome is unknown.
    #[must_use]
    pub fn as_unknown(mut self) -> Self {
        self.refused = false;
        self
    }

    /// Marks a request that failed because its connection had broken while idle. A new connection probably works, so the
    /// engine repeats an attempt with this mark once, at once, even after its deadline. It counts the first request as a
    /// stray attempt unless the error is [`refused`](Self::refused).
    #[must_use]
    pub fn on_stale_connection(mut self) -> Self {
        self.stale_connection = true;
        self
    }

    /// Marks a refused release that an open transaction of the caller blocks. [`unlock`](crate::LockGuard::unlock) returns the
    /// error at once, because its caller may be the one to end the transaction. The background repeats the release.
    #[must_use]
    pub fn as_blocked(mut self) -> Self {
        self.blocked = true;
        self.as_refused()
    }

    /// What kind of trouble it is.
    #[must_use]
    pub fn kind(&self) -> BackendErrorKind {
        self.kind
    }

    /// Whether trying again can help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind == BackendErrorKind::Transient
    }

    /// Whether the connection had broken while idle; see [`on_stale_connection`](Self::on_stale_connection).
    #[must_use]
    pub fn is_stale_connection(&self) -> bool {
        self.stale_connection
    }

    /// Whether the store is known to have done nothing. Otherwise the outcome is unknown.
    #[must_use]
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// Whether an open transaction of the caller blocks the operation.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for BackendError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// Why a registry could not be set up.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value or a combination of values is wrong. The message says what to do.
    #[error("{0}")]
    Invalid(String),
    /// There is no option, variable, URL scheme or layout of this name.
    #[error("unknown {what} {given:?} in {place}{}: {known}", suggestion(nearest.as_deref()))]
    #[non_exhaustive]
    Unknown {
        /// What kind of name it is: `option`, `variable`, `scheme`, `layout`.
        what: &'static str,
        /// The name that was given.
        given: String,
        /// Where it stands.
        place: String,
        /// The known name that is most like it, if one is similar enough to be meant.
        nearest: Option<String>,
        /// All known names.
        known: String,
    },
    /// The store exists, but this program was built without it.
    #[error("the {scheme} store is not built in: {remedy}")]
    #[non_exhaustive]
    NotBuiltIn {
        /// The scheme of its URLs.
        scheme: &'static str,
        /// The Cargo feature of `lock-registry` that brings it.
        feature: &'static str,
        /// What to write into `Cargo.toml`.
        remedy: String,
    },
    /// The store could not be opened.
    #[error("cannot open the {store} store{}", at(address))]
    #[non_exhaustive]
    Open {
        /// The store.
        store: &'static str,
        /// Its servers as `HOST:PORT,HOST:PORT`, or its path; empty if it has none. Free of secrets.
        address: String,
        /// What went wrong.
        source: BackendError,
    },
    /// A registry needs a tokio runtime with time enabled to live in.
    #[error("a lock registry must be opened inside a tokio runtime that has time enabled")]
    NoRuntime,
}

impl ConfigError {
    /// Creates [`ConfigError::Unknown`] for `given`, which is no name of a `what`. None of the arguments may hold a secret.
    #[must_use]
    pub fn unknown(
        what: &'static str,
        given: impl Into<String>,
        place: impl Into<String>,
        nearest: Option<&str>,
        known: impl Into<String>,
    ) -> Self {
        Self::Unknown {
            what,
            given: given.into(),
            place: place.into(),
            nearest: nearest.map(str::to_owned),
            known: known.into(),
        }
    }

    /// Says that a store is missing from this program, and how to bring it in.
    #[must_use]
    pub fn not_built_in(
        scheme: &'static str,
        feature: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self::NotBuiltIn { scheme, feature, remedy: remedy.into() }
    }

    /// Creates [`ConfigError::Open`] for the store at `address`, which must hold no secret.
    #[must_use]
    pub fn open(store: &'static str, address: impl Into<String>, source: BackendError) -> Self {
        Self::Open { store, address: address.into(), source }
    }
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or_else(
        || "; known are".to_owned(),
        |nearest| format!(": did you mean {nearest:?}? Known are"),
    )
}

fn at(address: &str) -> String {
    if address.is_empty() { String::new() } else { format!(" at {address}") }
}
