//! Errors, classified by what the caller can do about them. If the lock is held until the deadline,
//! methods whose names begin with `try_` return the value `Ok(None)`. Only methods that must return
//! a guard return an error, [`LockError::WaitElapsed`].

use std::any::Any;
use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::InvalidKey;
use crate::mode::ClaimMode;

/// The reason why a lock operation failed.
///
/// `Display` shows one sentence. For a store error, it is
/// `OPERATION on "KEY" at HOST:PORT failed: CAUSE; HINT`. [`source`](StdError::source) returns the
/// error of the client library, if there is one.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LockError {
    /// The store returned an error or did not respond. [`BackendError::is_retryable`] returns
    /// whether a retry can help.
    #[non_exhaustive]
    Backend {
        /// The operation: `acquire`, `convert`, `extend`, `release`, `inspect`, `list`,
        /// `list waiters`, `break`, `diagnose`, `read the value` or `write the value`.
        operation: &'static str,
        /// The key, or several keys separated by `, `. `*` for an operation on the whole store.
        key: String,
        /// The store error.
        source: BackendError,
    },
    /// The lock was held for the whole wait. Only methods that must return a guard, such as
    /// [`lock_with`](crate::DistributedLock::lock_with), return this. Methods whose names begin
    /// with `try_` return `Ok(None)` instead.
    #[non_exhaustive]
    WaitElapsed {
        /// The key.
        key: String,
        /// The wait of the options.
        wait: Duration,
    },
    /// The lock was lost. Work after the loss was not protected.
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
        /// The reason.
        reason: LostReason,
    },
    /// The key is invalid. Nothing was sent to the store.
    InvalidKey(InvalidKey),
    /// An option has an invalid value. Nothing was sent to the store.
    InvalidOption(InvalidOption),
    /// The store does not support the operation.
    #[non_exhaustive]
    Unsupported {
        /// The missing capability, as [`Capabilities`](crate::Capabilities) names it.
        capability: &'static str,
        /// The store.
        store: &'static str,
    },
    /// The permits already held were acquired with another number of units than this semaphore has.
    #[non_exhaustive]
    UnitsMismatch {
        /// The key.
        key: String,
        /// The units of this semaphore.
        stated: u32,
        /// The units with which the held permits were acquired.
        held: u32,
    },
    /// The mode of a held lock cannot change in this way. Nothing was sent to the store, unless the
    /// owner acquired a shared lock during an upgrade.
    #[non_exhaustive]
    InvalidConversion {
        /// The key.
        key: String,
        /// The mode of the lock.
        from: ClaimMode,
        /// The mode that was requested.
        to: ClaimMode,
        /// The problem, and how to correct it.
        problem: &'static str,
    },
    /// The value block of the key contains other data than the operation expects. Use another key.
    #[non_exhaustive]
    ForeignValue {
        /// The key.
        key: String,
        /// What the operation expects.
        expected: &'static str,
    },
    /// The owner holds the key in a mode that excludes the requested one, so the acquisition would
    /// wait for itself. Nothing was acquired. If the owner acquired the key during the wait,
    /// requests may have been sent before. Their claim is released in the background.
    #[non_exhaustive]
    HeldByOwner {
        /// The key.
        key: String,
        /// The mode in which the owner holds the key.
        held: ClaimMode,
    },
    /// The registry was closed, or the runtime that opened it has shut down.
    Closed,
    /// A blocking call was made inside an async runtime, whose tasks it would block.
    InsideRuntime,
}

impl LockError {
    /// Returns whether the call may succeed if you repeat it.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Backend { source, .. } => source.is_retryable(),
            Self::WaitElapsed { .. } => true,
            _ => false,
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend { operation, key, source } => {
                write!(f, "{operation} on {key:?}")?;
                if let Some(address) = source.address() {
                    write!(f, " at {address}")?;
                }
                write!(f, " failed: {}", source.message())
            }
            Self::WaitElapsed { key, wait } => write!(
                f,
                "acquire on {key:?} failed: another client held the lock for the whole wait of {wait:?}; wait longer, or use \
                 `try_lock_with`"
            ),
            Self::Lost { key, reason } => {
                write!(f, "lock {key:?} was lost: {reason}; acquire it again")
            },
            Self::InvalidKey(invalid) => write!(f, "invalid lock key: {invalid}"),
            Self::InvalidOption(invalid) => write!(f, "invalid lock option: {invalid}"),
            Self::Unsupported { capability, store } => write!(
                f,
                "the {store} store does not support `{capability}`; check `capabilities()` first, or use another store"
            ),
            Self::UnitsMismatch { key, stated, held } => write!(
                f,
                "acquire on {key:?} failed: this semaphore has {stated} units, but the held permits state {held}; use the same number, or resize the semaphore"
            ),
            Self::ForeignValue { key, expected } => write!(
                f,
                "the value block of {key:?} is not {expected}; use another key"
            ),
            Self::InvalidConversion { key, from, to, problem } => {
                write!(f, "convert on {key:?} from {from} to {to} failed: {problem}")
            }
            Self::HeldByOwner { key, held } => write!(
                f,
                "acquire on {key:?} failed: this owner already holds the lock ({held}) and would wait for itself; release that guard first, or acquire the lock as upgradable from the start"
            ),
            Self::Closed => f.write_str("the lock registry is closed; open another one"),
            Self::InsideRuntime => f.write_str(
                "a blocking lock call was made inside an async runtime; use the async registry there",
            ),
        }
    }
}

impl StdError for LockError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            // The text of `source` itself is part of this error's text.
            Self::Backend { source, .. } => source.source(),
            _ => None,
        }
    }
}

impl From<InvalidKey> for LockError {
    fn from(invalid: InvalidKey) -> Self {
        Self::InvalidKey(invalid)
    }
}

impl From<InvalidOption> for LockError {
    fn from(invalid: InvalidOption) -> Self {
        Self::InvalidOption(invalid)
    }
}

/// Why a lock was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out before a renewal was confirmed: the store or the network failed, this
    /// process was suspended, or [`auto_renew`](crate::LockOptions::auto_renew) is off.
    Expired,
    /// The store reports that the claim does not hold the key any more: it expired there, a client
    /// forced its release, or the store lost its data.
    Gone,
    /// The lock was held for its `max_hold`.
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

impl StdError for LostReason {}

/// An option with an invalid value, and how to correct it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{option} of {given} {problem}")]
#[non_exhaustive]
pub struct InvalidOption {
    /// The option's name.
    pub option: &'static str,
    /// The value that was given.
    pub given: String,
    /// The problem, and how to correct it.
    pub problem: Cow<'static, str>,
}

impl InvalidOption {
    /// Creates the error for the `given` value of `option`.
    #[must_use]
    pub fn new(
        option: &'static str,
        given: Duration,
        problem: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { option, given: format!("{given:?}"), problem: problem.into() }
    }

    pub(crate) fn label_too_long(bytes: usize) -> Self {
        let problem =
            format!("is longer than {} bytes; shorten it", crate::LockOptions::LABEL_BYTES_MAX);
        Self { option: "label", given: format!("{bytes} bytes"), problem: problem.into() }
    }

    pub(crate) fn value_too_long(bytes: usize, max: usize) -> Self {
        let problem =
            format!("is longer than {max} bytes; store the data elsewhere and a reference here");
        Self { option: "value", given: format!("{bytes} bytes"), problem: problem.into() }
    }

    pub(crate) fn mode_cannot_write(mode: ClaimMode) -> Self {
        let problem =
            "does not allow writing the value; acquire the lock with `lock`, or upgrade it";
        Self { option: "mode", given: mode.name().to_owned(), problem: problem.into() }
    }

    pub(crate) fn data_too_long(bytes: usize, max: usize) -> Self {
        let problem =
            format!("is longer than {max} bytes; store the data elsewhere and a reference here");
        Self { option: "data", given: format!("{bytes} bytes"), problem: problem.into() }
    }

    pub(crate) fn tick_name(name: &str, max: usize) -> Self {
        let problem = format!("is not 1 to {max} bytes without a line break; use another name");
        let given = format!("{:?}", name.chars().take(80).collect::<String>());
        Self { option: "tick", given, problem: problem.into() }
    }

    pub(crate) fn no_keys() -> Self {
        let problem = "is too few; name at least one key".into();
        Self { option: "keys", given: "0".to_owned(), problem }
    }

    pub(crate) fn units(take: u32, of: u32) -> Self {
        if of == 0 {
            let problem = "is too few; use a semaphore with at least 1 unit".into();
            return Self { option: "units", given: "0".to_owned(), problem };
        }
        let problem = format!(
            "is not between 1 and the {of} units of the semaphore; take a number in this range, or add units"
        );
        Self { option: "take", given: take.to_string(), problem: problem.into() }
    }

    pub(crate) fn fair_unsupported(store: &str) -> Self {
        let problem = format!("is not supported by the {store} store; use another store");
        Self { option: "fair", given: "true".to_owned(), problem: problem.into() }
    }
}

/// A store error, classified by the backend.
///
/// `Display` shows `ADDRESS: MESSAGE`, or the message alone if the address is unknown. It omits the
/// text of the [source](StdError::source).
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BackendError(Box<BackendErrorParts>);

/// Boxed, so that the results of the engine are small.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct BackendErrorParts {
    kind: BackendErrorKind,
    message: Cow<'static, str>,
    address: Option<Arc<str>>,
    refused: bool,
    stale_connection: bool,
    blocked: bool,
    /// Another key of the same batch was busy.
    #[cfg_attr(feature = "serde", serde(skip))]
    other_key_busy: bool,
    #[cfg_attr(feature = "serde", serde(skip))]
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The class of a store error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum BackendErrorKind {
    /// May resolve itself: lost connection, time-out, failover, deadlock, lock wait. The engine
    /// retries an acquisition until its deadline. Without a deadline, it retries for the length of
    /// a lease.
    Transient,
    /// The store rejects this client: wrong password, missing privilege, read-only file.
    Denied,
    /// The store is not set up for this client: missing table, missing folder, wrong schema
    /// version, eviction policy.
    Misconfigured,
    /// The store's response is invalid: corrupt file, wrong type, unreadable response.
    Protocol,
}

impl BackendError {
    /// Creates an error of this `kind`.
    #[must_use]
    pub fn new(kind: BackendErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(BackendErrorParts {
            kind,
            message: message.into(),
            address: None,
            refused: false,
            stale_connection: false,
            blocked: false,
            other_key_busy: false,
            source: None,
        }))
    }

    /// Creates an error of kind [`Transient`](BackendErrorKind::Transient).
    #[must_use]
    pub fn transient(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(BackendErrorKind::Transient, message)
    }

    /// Adds the address of the server that caused the error. An error that already has an address
    /// keeps it, because that address was added closer to the cause.
    ///
    /// An address is `HOST:PORT`, several of these separated by commas, or the path of a socket or
    /// file. It must contain no user, password or query.
    #[must_use]
    pub fn with_address(mut self, address: impl Into<Arc<str>>) -> Self {
        let address = address.into();
        if self.0.address.is_none() && !address.is_empty() {
            self.0.address = Some(address);
        }
        self
    }

    /// Adds the error of the client library. Its text must contain no secret.
    ///
    /// If `source` is a `BackendError`, its address moves to this error, so that it is printed
    /// once. If this error has another address, both errors keep theirs.
    #[must_use]
    pub fn with_source(mut self, mut source: impl StdError + Send + Sync + 'static) -> Self {
        if let Some(inner) = (&mut source as &mut dyn Any).downcast_mut::<Self>()
            && (self.0.address.is_none() || self.0.address == inner.0.address)
        {
            self.0.address = inner.0.address.take();
        }
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Marks the error as refused: the store is known to have done nothing, so no clean-up is
    /// needed.
    #[must_use]
    pub fn as_refused(mut self) -> Self {
        self.0.refused = true;
        self
    }

    /// Reverts [`as_refused`](Self::as_refused). For a repeated request whose first attempt may
    /// have reached the store.
    #[must_use]
    pub fn as_unknown(mut self) -> Self {
        self.0.refused = false;
        self
    }

    /// Marks the error of a request that failed because its connection had broken while idle.
    ///
    /// A new connection probably works, so the engine repeats the attempt once, without a pause and
    /// even after its deadline. Unless the error is [`refused`](Self::refused), the first request
    /// counts as an attempt with an unknown outcome.
    #[must_use]
    pub fn as_stale_connection(mut self) -> Self {
        self.0.stale_connection = true;
        self
    }

    /// Marks a release as refused because an open transaction of the caller blocks it.
    ///
    /// [`unlock`](crate::LockGuard::unlock) returns the error at once, so that the caller can end
    /// the transaction. The background releaser repeats the release.
    #[must_use]
    pub fn as_blocked(mut self) -> Self {
        self.0.blocked = true;
        self.as_refused()
    }

    /// Returns the class of the error.
    #[must_use]
    pub fn kind(&self) -> BackendErrorKind {
        self.0.kind
    }

    /// Returns the text without the address.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the address of the server that caused the error, if known. Contains no secret.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.0.address.as_deref()
    }

    /// Creates the error of a claim for which the backend's `renew` returned no result.
    pub(crate) fn missing_renewal() -> Self {
        Self::new(
            BackendErrorKind::Protocol,
            "the store's response to a renewal lacks this claim; report this bug of the backend",
        )
    }

    /// Creates the error of a claim for which a batch has no result.
    pub(crate) fn missing_in_batch() -> Self {
        Self::new(
            BackendErrorKind::Protocol,
            "the store's response to a batch lacks this claim; report this bug of the backend",
        )
    }

    /// Creates the response for a claim that was not granted because another key of its batch was
    /// busy. The engine does not return it to callers.
    pub(crate) fn other_key_busy() -> Self {
        let mut error = Self::transient("another key was busy").as_refused();
        error.0.other_key_busy = true;
        error
    }

    pub(crate) fn is_other_key_busy(&self) -> bool {
        self.0.other_key_busy
    }

    /// Returns whether a retry can help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.kind == BackendErrorKind::Transient
    }

    /// Returns whether the connection had broken while idle; see
    /// [`as_stale_connection`](Self::as_stale_connection).
    #[must_use]
    pub fn is_stale_connection(&self) -> bool {
        self.0.stale_connection
    }

    /// Returns whether the store is known to have done nothing. Otherwise the outcome is unknown.
    #[must_use]
    pub fn refused(&self) -> bool {
        self.0.refused
    }

    /// Returns whether an open transaction of the caller blocks the operation.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.0.blocked
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = &self.0.address {
            write!(f, "{address}: ")?;
        }
        f.write_str(&self.0.message)
    }
}

impl StdError for BackendError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// Why a registry could not be opened.
///
/// `Display` shows one sentence. For a store that could not be opened, it is
/// `opening the STORE store at HOST:PORT failed: CAUSE; HINT`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value or a combination of values is invalid. The message says how to correct it.
    Invalid(String),
    /// No option, variable or URL scheme has this name.
    #[non_exhaustive]
    Unknown {
        /// The kind of the name: `option`, `variable` or `scheme`.
        what: &'static str,
        /// The name that was given.
        given: String,
        /// Where the name was given, for example `the store URL`.
        place: String,
        /// The most similar known name, if one is similar enough.
        nearest: Option<String>,
        /// All known names.
        known: String,
    },
    /// The store exists, but this program was built without it.
    #[non_exhaustive]
    NotBuiltIn {
        /// The scheme of its URLs.
        scheme: &'static str,
        /// The Cargo feature of `lock-registry` that adds it.
        feature: &'static str,
        /// The change to `Cargo.toml`.
        remedy: String,
    },
    /// The store could not be opened.
    #[non_exhaustive]
    Open {
        /// The store.
        store: &'static str,
        /// Its servers as `HOST:PORT,HOST:PORT`, or its path; empty if it has none. Contains no
        /// secret.
        address: String,
        /// The store error.
        source: BackendError,
    },
    /// The caller is not inside a tokio runtime with time enabled. A registry needs one for its
    /// background tasks.
    NoRuntime,
}

impl ConfigError {
    /// Creates [`ConfigError::Unknown`]: no `what`, such as an option or a scheme, is named
    /// `given`. The arguments must contain no secret.
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

    /// Creates [`ConfigError::NotBuiltIn`] for a store that this program was built without.
    #[must_use]
    pub fn not_built_in(
        scheme: &'static str,
        feature: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self::NotBuiltIn { scheme, feature, remedy: remedy.into() }
    }

    /// Creates [`ConfigError::Open`] for the store at `address`, which must contain no secret.
    #[must_use]
    pub fn open(store: &'static str, address: impl Into<String>, source: BackendError) -> Self {
        Self::Open { store, address: address.into(), source }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(message) => f.write_str(message),
            Self::Unknown { what, given, place, nearest, known } => {
                write!(f, "unknown {what} {given:?} in {place}")?;
                match nearest {
                    Some(nearest) => write!(f, ": did you mean {nearest:?}? Known names: {known}"),
                    None => write!(f, "; known names: {known}"),
                }
            }
            Self::NotBuiltIn { scheme, remedy, .. } => {
                write!(f, "the {scheme} store is not built in: {remedy}")
            }
            Self::Open { store, address, source } => {
                write!(f, "opening the {store} store")?;
                // One server of several may have caused the error.
                let address = source.address().unwrap_or(address);
                if !address.is_empty() {
                    write!(f, " at {address}")?;
                }
                write!(f, " failed: {}", source.message())
            }
            Self::NoRuntime => f.write_str(
                "a lock registry must be opened inside a tokio runtime that has time enabled; \
                 use `#[tokio::main]` or `Builder::enable_all`",
            ),
        }
    }
}

impl StdError for ConfigError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            // The text of `source` itself is part of this error's text.
            Self::Open { source, .. } => source.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection_refused() -> BackendError {
        BackendError::transient("redis: the connection was refused; start the server")
    }

    #[test]
    fn an_error_names_operation_key_and_address() {
        let at = |error: BackendError| error.with_address("db.example:6379");
        let lock_error = |operation, key: &str, source| LockError::Backend {
            operation,
            key: key.to_owned(),
            source,
        };
        let io = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for (error, text) in [
            (
                lock_error("acquire", "orders/42", at(connection_refused())),
                r#"acquire on "orders/42" at db.example:6379 failed: redis: the connection was refused; start the server"#,
            ),
            (
                lock_error("release", "a\nb", connection_refused()),
                r#"release on "a\nb" failed: redis: the connection was refused; start the server"#,
            ),
            (
                lock_error("acquire", "a", at(connection_refused()).with_source(io())),
                r#"acquire on "a" at db.example:6379 failed: redis: the connection was refused; start the server"#,
            ),
            (
                lock_error("acquire", "a", at(connection_refused()).with_address("a,b")),
                r#"acquire on "a" at db.example:6379 failed: redis: the connection was refused; start the server"#,
            ),
            (
                lock_error(
                    "release",
                    "a",
                    BackendError::transient("postgres: a transaction is open; end it first")
                        .with_source(at(connection_refused())),
                ),
                r#"release on "a" at db.example:6379 failed: postgres: a transaction is open; end it first"#,
            ),
            (
                LockError::InvalidKey(InvalidKey::Empty),
                "invalid lock key: a lock key must not be empty; pass a name",
            ),
        ] {
            assert_eq!(error.to_string(), text);
            let causes = std::iter::successors(error.source(), |cause| (*cause).source());
            for cause in causes {
                assert!(!cause.to_string().contains("db.example"), "{cause}");
            }
        }
    }

    #[test]
    fn an_open_error_names_the_server_that_caused_it() {
        let open = |source| ConfigError::open("redis", "a:1,b:2", source).to_string();
        let cause = "failed: redis: the connection was refused; start the server";
        assert_eq!(
            open(connection_refused()),
            format!("opening the redis store at a:1,b:2 {cause}")
        );
        assert_eq!(
            open(connection_refused().with_address("b:2")),
            format!("opening the redis store at b:2 {cause}")
        );
        assert_eq!(
            ConfigError::open("redis", "", connection_refused()).to_string(),
            format!("opening the redis store {cause}")
        );
    }

    #[test]
    fn a_store_error_shows_its_address_once() {
        assert_eq!(connection_refused().with_address("").address(), None);
        let inner = connection_refused().with_address("b:2");
        let same = BackendError::transient("no majority").with_address("b:2").with_source(inner);
        assert_eq!(same.to_string(), "b:2: no majority");
        assert_eq!(same.source().unwrap().to_string(), connection_refused().to_string());
        let inner = connection_refused().with_address("b:2");
        let list = BackendError::transient("no majority").with_address("a:1,b:2");
        let list = list.with_source(inner);
        assert_eq!(list.to_string(), "a:1,b:2: no majority");
        assert_eq!(list.source().unwrap().to_string(), format!("b:2: {}", connection_refused()));
    }
}
