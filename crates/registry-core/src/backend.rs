//! The backend SPI: what a lock store must be able to do. Four required calls; everything else has a default.
//!
//! Waiting in line, renewing, hand-over, loss, re-entrancy, retries and clean-up are the engine's work. A backend
//! says how its store grants, renews and releases one claim, and classifies what can go wrong.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::capabilities::Capabilities;
use crate::error::BackendError;
use crate::fencing::FencingToken;
use crate::hints::LossHints;
use crate::key::{InvalidKey, Key};

/// A lock store.
///
/// # Contract
/// This trait is between implementors and the engine; users of locks never call it. Each sentence is a clause of
/// the conformance suite.
///
/// 1. A claim that is already granted is granted again, with the same token. The reply may have been lost.
/// 2. [`release`](Self::release) needs only the claim and may be repeated at will. It never touches another claim's grant.
///    The engine repeats a release that may have overtaken its own acquire until the outcome is known or the lease is over.
/// 3. [`renew`](Self::renew) never brings back a grant that has ended, and never shortens a lease.
/// 4. Only the store's clock expires a grant.
/// 5. Tokens of one key only grow: over clients, expiry, release, restart and failover. A store that cannot promise it
///    says so in [`Capabilities::fencing`].
/// 6. Only the future of [`wait`](Self::wait) is ever dropped before it is ready. All others are polled to their end, unless the
///    runtime itself goes away.
/// 7. A call of [`try_acquire`](Self::try_acquire) sends its request once. A request whose outcome is unknown may still reach the
///    store after the release of a later one, so it is returned as an error: the engine repeats it, and counts it. For a
///    connection that broke while idle, [`BackendError::on_stale_connection`] makes the engine repeat it at once.
///
/// A backend answers in bounded time where it can; the engine stops listening after its operation time-out and then
/// treats the outcome as unknown.
#[async_trait]
pub trait LockBackend: Any + fmt::Debug + Send + Sync {
    /// What this store can do and what it promises.
    fn capabilities(&self) -> Capabilities;

    /// Refuses keys that this store's layout cannot hold, before any I/O.
    ///
    /// # Errors
    /// [`InvalidKey::Layout`] with the reason.
    fn check_key(&self, _key: &Key) -> Result<(), InvalidKey> {
        Ok(())
    }

    /// The part of the store that `claim` lives in. Claims of different shards are never renewed in one call, so
    /// that a dead shard delays no other.
    fn shard(&self, _claim: &Claim) -> u32 {
        0
    }

    /// Tries to make `claim` the holder of its key, without waiting.
    ///
    /// # Errors
    /// Trouble only; a key that somebody else holds is [`Attempt::Busy`]. After an error the outcome counts as unknown
    /// unless [`BackendError::refused`] says that nothing was done. A request of unknown outcome is not repeated here,
    /// see clause 7.
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError>;

    /// Makes each claim's lease end `claim.lease()` from now, or later. Answers in the order of `claims`.
    ///
    /// All claims are of one shard, and at most [`renewals_max`](Self::renewals_max). An error for one claim must not stop the others.
    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>>;

    /// How many claims are renewed in one call at most; at least one. More make fewer calls, and each of them longer, which
    /// holds up whoever else asks the store. A call that has room takes along claims that are due soon. The default is 100.
    fn renewals_max(&self) -> usize {
        100
    }

    /// Ends the grant of `claim`, takes it out of the store's queue, and wakes those who wait.
    ///
    /// Here [`Claim::token_block`] is the number of reserved tokens that were used. The store may reserve the others again;
    /// a store that cannot sustain one token per microsecond need not.
    ///
    /// # Errors
    /// Trouble only; a claim that holds nothing is [`Release::NotHeld`].
    async fn release(&self, claim: &Claim) -> Result<Release, BackendError>;

    /// What [`try_acquire`](Self::try_acquire) would answer, from a store that answers without waiting for anything. Spares
    /// the engine a future.
    fn acquire_at_once(&self, _claim: &Claim) -> Option<Result<Attempt, BackendError>> {
        None
    }

    /// What [`release`](Self::release) would answer, from a store that answers without waiting for anything.
    fn release_at_once(&self, _claim: &Claim) -> Option<Result<Release, BackendError>> {
        None
    }

    /// Returns when the lock that was `busy` may be free. A hint: it may return early or never.
    ///
    /// A change that came after the store answered `busy` and before this call must not be missed: that is what
    /// [`Busy::mark`] is for. The default never returns, so that waiters poll.
    async fn wait(&self, _claim: &Claim, _busy: &Busy) {
        std::future::pending().await
    }

    /// Returns whether a release of the lock that was `busy` would make the running [`wait`](Self::wait) return.
    ///
    /// Called while that `wait` runs, at each poll. If true, the engine skips the poll until the holder's lease ends, or until
    /// the wait has doubled, or for 30 s, whichever comes first. Return true only if the server has confirmed the subscription,
    /// has answered lately on its connection, and no message since the `busy` answer can have been missed. Must not block.
    /// The default, `false`, leaves every poll in place.
    fn wakes_confirmed(&self, _claim: &Claim, _busy: &Busy) -> bool {
        false
    }

    /// Takes the handle by which this store tells a registry that somebody else has changed or removed the record of a key, so that
    /// its holder learns of a loss at once and not at its next renewal.
    ///
    /// Called once by each registry over this backend, when it is built and before it asks for anything. A store that hears of
    /// changes by itself keeps the handle as long as it is [live](LossHints::is_live), beside those of other registries, and says so in
    /// [`Capabilities::tells_losses`]. What this client does for its own claims is no change by somebody else. Like a wake-up a
    /// hint may come for nothing or be missing: the next renewal finds the loss in any case. The default drops the handle.
    fn tell_losses(&self, _hints: LossHints) {}

    /// How long after its grant a claim is looked after for the first time, if it is still held by then. A look is a renewal before
    /// its time.
    ///
    /// For a store that [tells](Self::tell_losses) of changes to what it was asked about and takes a renewal for such a question,
    /// but not an acquisition, so that locks that are held for a moment cost it nothing more. Asked at each grant. The
    /// default, `None`, leaves it at renewals.
    fn first_look(&self) -> Option<Duration> {
        None
    }

    /// Whether renewing one claim of a shard costs as much as renewing them all. Then all of them are renewed whenever one is due, unless they
    /// have been a moment ago; so soon they are all due at the same time. The default is no.
    fn renews_together(&self) -> bool {
        false
    }

    /// Tells who holds `key`, if anybody.
    ///
    /// # Errors
    /// [`BackendError`] for trouble. Never called unless [`Capabilities::inspect`] is true; the default answers `None`.
    async fn inspect(&self, _key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(None)
    }

    /// Tells the holders of all keys that are held in this backend's namespace, in no particular order.
    ///
    /// # Errors
    /// [`BackendError`] for trouble. Never called unless [`Capabilities::inspect`] is true.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        Ok(Vec::new())
    }

    /// Ends the grant of whoever holds `key`, and wakes those who wait. The holder learns of it at its next renewal, or
    /// at once where the store [tells losses](Self::tell_losses).
    ///
    /// # Errors
    /// [`BackendError`] for trouble. Never called unless [`Capabilities::inspect`] is true.
    async fn force_release(&self, _key: &Key) -> Result<Release, BackendError> {
        Ok(Release::NotHeld)
    }

    /// Looks for what is set up wrong, or soon will be. An empty list means that all is well.
    ///
    /// # Errors
    /// [`BackendError`] when the store cannot be reached at all.
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        Ok(Vec::new())
    }

    /// Closes connections. Called once by each registry that is closed, after the last release that was answered in time; not by
    /// one that is merely dropped.
    async fn close(&self) {}
}

/// One acquisition's right to a key, as the store sees it. A fresh random id per acquisition **is** the stored owner,
/// so that a repeated acquire is the same acquire and a stale holder is powerless.
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
    /// A claim with a fresh id, for exclusive use, that does not queue in the store and takes a single token.
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

    /// The same claim with this label.
    #[must_use]
    pub fn with_label(mut self, label: Option<Arc<str>>) -> Self {
        self.label = label;
        self
    }

    /// The same claim with this lease.
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The same claim with this id; for stores whose records must be made by hand in tests.
    #[must_use]
    pub fn with_id(mut self, id: ClaimId) -> Self {
        self.id = id;
        self
    }

    /// The same claim, staying in the store's queue while the store is busy (or not).
    #[must_use]
    pub fn with_queue(mut self, queue: bool) -> Self {
        self.queue = queue;
        self
    }

    /// The same claim, reserving this many tokens (at least one).
    #[must_use]
    pub fn with_token_block(mut self, tokens: u32) -> Self {
        self.token_block = tokens.max(1);
        self
    }

    /// The key that is claimed.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The id that the store records as the owner.
    #[must_use]
    pub fn id(&self) -> ClaimId {
        self.id
    }

    /// How long a grant or a renewal is to last, on the store's clock.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Whether others may hold the key at the same time.
    #[must_use]
    pub fn mode(&self) -> ClaimMode {
        self.mode
    }

    /// The same claim, with the note that a fenced write was begun under it (or not).
    #[must_use]
    pub fn with_fenced(mut self, fenced: bool) -> Self {
        self.fenced = fenced;
        self
    }

    /// Whether a fenced write was begun under the claim, which may still be open. A hint for a release that the open write
    /// would block: such a release fails at once with a [blocked](BackendError::as_blocked) error instead of waiting.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Whether the claim stays in the store's queue when the store is busy. Ignored by stores that do not queue.
    #[must_use]
    pub fn queue(&self) -> bool {
        self.queue
    }

    /// How many tokens a grant reserves: the granted token is the first, the next grant's must be larger than the last.
    /// At a [release](LockBackend::release), how many of them were used.
    #[must_use]
    pub fn token_block(&self) -> u32 {
        self.token_block
    }

    /// What people see beside the key: who, or what for.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }
}

/// The identity of one claim: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId(u128);

impl ClaimId {
    /// A fresh id, from a cryptographically secure generator that is seeded by the operating system.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// An id of given bits.
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

    /// The bits, as stores keep them.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

/// 32 lower-case hexadecimal digits.
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

/// Whether a claim tolerates others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClaimMode {
    /// One holder.
    Exclusive,
}

/// What a store answers to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a claim holds the key or somebody else does")]
pub enum Attempt {
    /// The claim holds the key.
    Granted(Grant),
    /// Somebody else holds the key.
    Busy(Busy),
}

/// A grant, as the store made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The first of the reserved tokens; `None` from a store that does not fence.
    pub token: Option<FencingToken>,
    /// How long the grant still lasts, counted from some moment between request and reply.
    pub lease: Duration,
}

impl Grant {
    /// A grant that lasts `lease`.
    #[must_use]
    pub const fn new(token: Option<FencingToken>, lease: Duration) -> Self {
        Self { token, lease }
    }
}

/// What a store tells of a key that somebody else holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Busy {
    /// When another attempt makes sense even without a wake-up: the time that the holder's lease still has.
    /// `None` when the store does not tell.
    pub retry_after: Option<Duration>,
    /// Who holds the key, if the store told it in the same reply.
    pub holder: Option<Holder>,
    /// The store's own note of what it saw, for [`LockBackend::wait`] to find out what has changed since.
    pub mark: u64,
}

impl Busy {
    /// Says only that the key is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the time that the holder's lease still has.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    /// Adds who holds the key.
    #[must_use]
    pub fn with_holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }

    /// Adds the note for [`LockBackend::wait`].
    #[must_use]
    pub fn with_mark(mut self, mark: u64) -> Self {
        self.mark = mark;
        self
    }
}

/// What a store answers to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a grant lasts longer or has ended")]
pub enum Renewal {
    /// The grant lasts this long from now, at least.
    Renewed(Duration),
    /// The claim holds nothing any more.
    Gone,
}

/// What a store answers to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a release frees or it does not")]
pub enum Release {
    /// The grant was there and has ended.
    Freed,
    /// The claim held nothing.
    NotHeld,
}

/// Who holds a key, as the store tells it. Times are spans on the store's clock, not wall-clock dates.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Holder {
    /// The key.
    pub key: Key,
    /// The holder's label, if the store keeps labels and the holder gave one.
    pub label: Option<String>,
    /// The first token of the grant; after a local hand-over the holder's own token is a little larger.
    pub token: Option<FencingToken>,
    /// How long the grant has lasted.
    pub held_for: Option<Duration>,
    /// How long it still lasts unless it is renewed.
    pub lease_left: Option<Duration>,
}

impl Holder {
    /// A holder of which nothing is known but the key.
    #[must_use]
    pub const fn new(key: Key) -> Self {
        Self { key, label: None, token: None, held_for: None, lease_left: None }
    }

    /// Adds the label.
    #[must_use]
    pub fn with_label(mut self, label: Option<String>) -> Self {
        self.label = label;
        self
    }

    /// Adds the token.
    #[must_use]
    pub fn with_token(mut self, token: Option<FencingToken>) -> Self {
        self.token = token;
        self
    }

    /// Adds how long the grant has lasted and how long it still lasts.
    #[must_use]
    pub fn with_times(mut self, held_for: Option<Duration>, lease_left: Option<Duration>) -> Self {
        self.held_for = held_for;
        self.lease_left = lease_left;
        self
    }
}

/// Something that [`LockBackend::diagnose`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was found, and what to do about it.
    pub message: String,
}

impl Finding {
    /// A finding that needs no action.
    #[must_use]
    pub fn note(message: impl Into<String>) -> Self {
        Self { severity: Severity::Note, message: message.into() }
    }

    /// A finding that weakens what the store promises.
    #[must_use]
    pub fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, message: message.into() }
    }
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// Good to know.
    Note,
    /// Weakens what the store promises.
    Warning,
}
