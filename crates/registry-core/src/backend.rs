//! The trait that a lock store implements: four required methods, and defaults for the rest.
//!
//! A backend grants, renews and releases single claims in its store, and classifies the store's
//! errors. The engine does everything else: local queues, renewal, hand-over, loss notification,
//! re-entry, retries and clean-up.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::capabilities::Capabilities;
use crate::error::BackendError;
use crate::fencing::FencingToken;
use crate::invalidation::Invalidations;
use crate::key::{InvalidKey, Key};

/// A lock store.
///
/// # Contract
/// This trait is the interface between backends and the engine. Applications do not call it. The
/// conformance suite tests each sentence.
///
/// 1. A claim that is already granted is granted again, with the same token. The reply may have
///    been lost.
/// 2. [`release`](Self::release) needs only the claim and may be repeated any number of times. It
///    never affects another claim's grant. If a release may have overtaken its own acquire, the
///    engine repeats it until the outcome is known or the lease is over.
/// 3. [`renew`](Self::renew) never restores a grant that has ended, and never shortens a lease.
/// 4. Only the store's clock expires a grant.
/// 5. The tokens of one key only grow: across clients, expiry, release, restart and failover. A
///    store that cannot promise this declares so in [`Capabilities::fencing`].
/// 6. Only the future of [`wait`](Self::wait) is ever dropped before it is ready. All others are
///    polled until they are ready, unless the runtime itself shuts down.
/// 7. A call of [`try_acquire`](Self::try_acquire) sends its request once. A request with an
///    unknown outcome may reach the store after the release of a later one. Such a request is
///    therefore returned as an error, and the engine repeats and counts it. After a connection that
///    broke while idle, [`BackendError::on_stale_connection`] makes the engine repeat it at once.
///
/// A backend responds in bounded time where it can. After the operation time-out, the engine stops
/// waiting and treats the outcome as unknown.
#[async_trait]
pub trait LockBackend: Any + fmt::Debug + Send + Sync {
    /// Returns the functions and promises of this store.
    fn capabilities(&self) -> Capabilities;

    /// Rejects a key that this store's layout cannot hold, before any I/O.
    ///
    /// # Errors
    /// [`InvalidKey::Layout`] with the reason.
    fn check_key(&self, _key: &Key) -> Result<(), InvalidKey> {
        Ok(())
    }

    /// Returns the shard of the store in which `claim` lives.
    ///
    /// Claims of different shards are never renewed in one call, so that a failed shard delays no
    /// other.
    fn shard(&self, _claim: &Claim) -> u32 {
        0
    }

    /// Tries to acquire the key for `claim`, without waiting for it.
    ///
    /// # Errors
    /// Only for store errors; if another claim holds the key, the result is [`Attempt::Busy`].
    /// After an error, the outcome counts as unknown unless [`BackendError::refused`] is true. The
    /// backend must not repeat a request with an unknown outcome, see clause 7.
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError>;

    /// Extends the lease of each claim to at least `claim.lease()` from now. Returns the results in
    /// the order of `claims`.
    ///
    /// All claims are in one shard, and there are at most [`renewals_max`](Self::renewals_max) of
    /// them. An error for one claim must not affect the others.
    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>>;

    /// Returns the maximum number of claims in one call of [`renew`](Self::renew), at least one.
    /// The default is 100.
    ///
    /// A larger number means fewer but longer calls, and a longer call delays other requests to the
    /// store. A call with free space also renews claims that are due soon.
    fn renewals_max(&self) -> usize {
        100
    }

    /// Ends the grant of `claim`, removes it from the store's queue, and wakes waiters.
    ///
    /// Here [`Claim::token_block`] is the number of reserved tokens that were used. The store may
    /// reserve the others again; a store that cannot sustain one token per microsecond need not.
    ///
    /// # Errors
    /// Only for store errors; if the claim holds nothing, the result is [`Release::NotHeld`].
    async fn release(&self, claim: &Claim) -> Result<Release, BackendError>;

    /// Returns the result of [`try_acquire`](Self::try_acquire), for a store that can respond
    /// without waiting. This saves the engine a future.
    fn acquire_at_once(&self, _claim: &Claim) -> Option<Result<Attempt, BackendError>> {
        None
    }

    /// Returns the result of [`release`](Self::release), for a store that can respond without
    /// waiting.
    fn release_at_once(&self, _claim: &Claim) -> Option<Result<Release, BackendError>> {
        None
    }

    /// Returns when the lock that was `busy` may be free. This is a hint: it may return early or
    /// never.
    ///
    /// It must not miss a change between the `busy` response and this call; [`Busy::mark`] serves
    /// this purpose. The default never returns, so that waiters poll.
    async fn wait(&self, _claim: &Claim, _busy: &Busy) {
        std::future::pending().await
    }

    /// Returns whether a release of the lock that was `busy` would make the running
    /// [`wait`](Self::wait) return. The default, `false`, leaves every poll in place.
    ///
    /// Called while that `wait` runs, at each poll. If true, the engine skips the poll until the
    /// holder's lease ends, or until the wait has doubled, or for 30 s, whichever comes first.
    ///
    /// Return true only if all of this holds: the server has confirmed the subscription, its
    /// connection has responded recently, and no message since the `busy` response can have been
    /// missed. Must not block.
    fn wakes_confirmed(&self, _claim: &Claim, _busy: &Busy) -> bool {
        false
    }

    /// Receives the handle that notifies a registry when another client has changed or removed the
    /// record of a key. The holder then learns of a loss at once instead of at its next renewal.
    ///
    /// Each registry over this backend calls this once, when it is built and before its first
    /// request. A store that receives change notifications keeps the handle as long as it is
    /// [live](Invalidations::is_live), in addition to those of other registries. It declares this
    /// in [`Capabilities::reports_invalidations`].
    ///
    /// A change that this client makes to its own claims is not a change by another client. Like a
    /// wake-up, a hint may be unfounded or missing: the next renewal detects the loss in any case.
    /// The default drops the handle.
    fn subscribe_invalidations(&self, _hints: Invalidations) {}

    /// Returns how long after its grant a claim that is still held is verified for the first time.
    /// A verification is an early renewal.
    ///
    /// For a store that [reports](Self::subscribe_invalidations) changes only to records that this
    /// client has read, if a renewal counts as a read and an acquisition does not. The delay keeps
    /// this free for locks that are held only briefly. Called at each grant. The default, `None`,
    /// adds no verification to the renewals.
    fn verify_after(&self) -> Option<Duration> {
        None
    }

    /// Returns whether renewing one claim of a shard costs as much as renewing all of them. The
    /// default is false.
    ///
    /// If true, all of them are renewed whenever one is due, except those renewed within the last
    /// twelfth of their lease. All of them are therefore soon due at the same time.
    fn renews_together(&self) -> bool {
        false
    }

    /// Returns the holder of `key`, if there is one.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. Called only if [`Capabilities::inspect`] is true; the
    /// default returns `None`.
    async fn inspect(&self, _key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(None)
    }

    /// Returns the holders of all locked keys in this backend's namespace, in any order.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. Called only if [`Capabilities::inspect`] is true.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        Ok(Vec::new())
    }

    /// Ends the grant of `key`, whichever client holds it, and wakes waiters. The holder is
    /// notified at its next renewal, or at once if the store [reports
    /// losses](Self::subscribe_invalidations).
    ///
    /// # Errors
    /// [`BackendError`] for a store error. Called only if [`Capabilities::inspect`] is true.
    async fn force_release(&self, _key: &Key) -> Result<Release, BackendError> {
        Ok(Release::NotHeld)
    }

    /// Checks the store for problems, present or soon to come. An empty list means that none was
    /// found.
    ///
    /// # Errors
    /// [`BackendError`] if the store cannot be reached.
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        Ok(Vec::new())
    }

    /// Closes connections. Each registry that is closed calls this once, after the last release
    /// that was answered in time. A registry that is only dropped does not call it.
    async fn close(&self) {}
}

/// The right of one acquisition to a key, as the store records it.
///
/// Each acquisition has a new random id, and this id **is** the owner that the store records. A
/// repeated acquire is therefore the same acquire, and a stale holder can change nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    key: Key,
    id: ClaimId,
    lease: Duration,
    mode: ClaimMode,
    queue: bool,
    fenced: bool,
    token_block: u32,
    label: Option<Arc<str>>,
}

impl Claim {
    /// Creates an exclusive claim with a new id that does not queue in the store and reserves one
    /// token.
    #[must_use]
    pub fn new(key: Key, lease: Duration) -> Self {
        Self {
            key,
            id: ClaimId::random(),
            lease,
            mode: ClaimMode::Exclusive,
            queue: false,
            fenced: false,
            token_block: 1,
            label: None,
        }
    }

    /// Returns the same claim with this label.
    #[must_use]
    pub fn with_label(mut self, label: Option<Arc<str>>) -> Self {
        self.label = label;
        self
    }

    /// Returns the same claim with this lease.
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Returns the same claim with this id. For tests that create a store's records manually.
    #[must_use]
    pub fn with_id(mut self, id: ClaimId) -> Self {
        self.id = id;
        self
    }

    /// Returns the same claim, which stays in the store's queue while the key is held if `queue` is
    /// true.
    #[must_use]
    pub fn with_queue(mut self, queue: bool) -> Self {
        self.queue = queue;
        self
    }

    /// Returns the same claim, which reserves this number of tokens (at least one).
    #[must_use]
    pub fn with_token_block(mut self, tokens: u32) -> Self {
        self.token_block = tokens.max(1);
        self
    }

    /// Returns the key that is claimed.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the id that the store records as the owner.
    #[must_use]
    pub fn id(&self) -> ClaimId {
        self.id
    }

    /// Returns the length of a grant or renewal, on the store's clock.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Returns whether other claims may hold the key at the same time.
    #[must_use]
    pub fn mode(&self) -> ClaimMode {
        self.mode
    }

    /// Returns the same claim, which records whether a fenced write was begun under it.
    #[must_use]
    pub fn with_fenced(mut self, fenced: bool) -> Self {
        self.fenced = fenced;
        self
    }

    /// Returns whether a fenced write was begun under the claim; it may still be open. A hint for a
    /// release that the open write would block: such a release fails at once with a
    /// [blocked](BackendError::as_blocked) error instead of waiting.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Returns whether the claim stays in the store's queue while the key is held. Stores without a
    /// queue ignore this.
    #[must_use]
    pub fn queue(&self) -> bool {
        self.queue
    }

    /// Returns the number of tokens that a grant reserves. The granted token is the first of them;
    /// the next grant's token must be larger than the last. At a [release](LockBackend::release),
    /// the number of tokens used.
    #[must_use]
    pub fn token_block(&self) -> u32 {
        self.token_block
    }

    /// Returns the label that people see next to the key, for example the holder's name or purpose.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }
}

/// The identity of one claim: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId(u128);

impl ClaimId {
    /// Returns a new id from a cryptographically secure generator that the operating system seeds.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Returns the id with these bits.
    ///
    /// ```
    /// # use registry_core::ClaimId;
    /// let id = ClaimId::from_bits(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
    /// assert_eq!(id.to_string(), "0123456789abcdef0011223344556677");
    /// ```
    #[must_use]
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// Returns the bits as bytes, in the order in which stores record them.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

/// Formats the id as 32 lower-case hexadecimal digits.
impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Whether a key can have other holders at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClaimMode {
    /// One holder.
    Exclusive,
}

/// A store's response to an acquisition attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a claim holds the key or another claim does")]
pub enum Attempt {
    /// The claim holds the key.
    Granted(Grant),
    /// Another claim holds the key.
    Busy(Busy),
}

/// A grant by the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The first of the reserved tokens. `None` if the store does not fence.
    pub token: Option<FencingToken>,
    /// The remaining time of the grant, counted from an instant between request and reply.
    pub lease: Duration,
}

impl Grant {
    /// Creates a grant that lasts `lease`.
    #[must_use]
    pub const fn new(token: Option<FencingToken>, lease: Duration) -> Self {
        Self { token, lease }
    }
}

/// A store's response for a key that another claim holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Busy {
    /// When another attempt makes sense even without a wake-up: the remaining time of the holder's
    /// lease. `None` if the store does not report it.
    pub retry_after: Option<Duration>,
    /// The holder, if the store reported it in the same reply.
    pub holder: Option<Holder>,
    /// The version of the record that the backend saw, in a format of its own.
    /// [`LockBackend::wait`] compares it to detect later changes.
    pub mark: u64,
}

impl Busy {
    /// Creates a response that says only that the key is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the remaining time of the holder's lease.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    /// Sets the holder.
    #[must_use]
    pub fn with_holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }

    /// Sets the mark for [`LockBackend::wait`].
    #[must_use]
    pub fn with_mark(mut self, mark: u64) -> Self {
        self.mark = mark;
        self
    }
}

/// A store's response to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a grant lasts longer or has ended")]
pub enum Renewal {
    /// The grant lasts at least this long from now.
    Renewed(Duration),
    /// The claim holds nothing any more.
    Gone,
}

/// A store's response to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a release frees or it does not")]
pub enum Release {
    /// The grant existed and has ended.
    Freed,
    /// The claim held nothing.
    NotHeld,
}

/// The holder of a key, as the store reports it. Times are durations on the store's clock, not
/// wall-clock dates.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Holder {
    /// The key.
    pub key: Key,
    /// The holder's label, if the store keeps labels and the holder set one.
    pub label: Option<String>,
    /// The first token of the grant. After a local hand-over, the holder's own token is slightly
    /// larger.
    pub token: Option<FencingToken>,
    /// The time since the grant.
    pub held_for: Option<Duration>,
    /// The remaining time of the lease, without a further renewal.
    pub lease_left: Option<Duration>,
}

impl Holder {
    /// Creates a holder of which only the key is known.
    #[must_use]
    pub const fn new(key: Key) -> Self {
        Self { key, label: None, token: None, held_for: None, lease_left: None }
    }

    /// Sets the label.
    #[must_use]
    pub fn with_label(mut self, label: Option<String>) -> Self {
        self.label = label;
        self
    }

    /// Sets the token.
    #[must_use]
    pub fn with_token(mut self, token: Option<FencingToken>) -> Self {
        self.token = token;
        self
    }

    /// Sets the time since the grant and the remaining time of the lease.
    #[must_use]
    pub fn with_times(mut self, held_for: Option<Duration>, lease_left: Option<Duration>) -> Self {
        self.held_for = held_for;
        self.lease_left = lease_left;
        self
    }
}

/// A problem or a note that [`LockBackend::diagnose`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The problem, and how to correct it.
    pub message: String,
}

impl Finding {
    /// Creates a finding that needs no action.
    #[must_use]
    pub fn note(message: impl Into<String>) -> Self {
        Self { severity: Severity::Note, message: message.into() }
    }

    /// Creates a finding that weakens the store's promises.
    #[must_use]
    pub fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, message: message.into() }
    }
}

/// The severity of a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// Information that needs no action.
    Note,
    /// The store's promises are weakened.
    Warning,
}
