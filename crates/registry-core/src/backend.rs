//! The trait that a lock store implements: thirteen methods, four of them required.
//!
//! A backend grants, renews and releases single claims in its store, and classifies the store's
//! errors. The engine does everything else: local queues, renewal, hand-over, loss notification,
//! re-entry, retries and clean-up. The optional parts are [`LockAdmin`] for operators,
//! [`LockBatch`] for several keys, [`ValueStore`] and [`WaiterStore`].

use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::capabilities::Capabilities;
use crate::error::BackendError;
use crate::fencing::FencingToken;
use crate::invalidation::Invalidations;
use crate::key::{InvalidKey, Key};
use crate::mode::ClaimMode;
use crate::value::ValueStore;
use crate::waiting_list::WaiterStore;

/// A lock store.
///
/// # Contract
/// This trait is the interface between backends and the engine. Applications do not call it. The
/// conformance suite tests all clauses that a client can observe.
///
/// 1. If a granted claim is requested again, it is granted again, with the same token. The response
///    to its first request may have been lost.
/// 2. [`release`](Self::release) needs only the claim and may be repeated any number of times. It
///    never affects another claim's grant. If the release of a claim may have reached the store
///    before its acquire request, the engine repeats the release.
/// 3. [`renew`](Self::renew) never restores a grant that has ended, and never shortens a lease.
/// 4. The store ends a grant when its lease is over, without a request from the engine. If a
///    session holds the grant and outlasts the lease, the backend releases the grant at the end of
///    the lease.
/// 5. Every grant has a token. The tokens of one key only grow: across clients, expiry, release,
///    restart and failover. A store that cannot promise this declares so in
///    [`Capabilities::fencing`].
/// 6. Only the future of [`wait`](Self::wait) is ever dropped before it is ready. All others are
///    polled until they are ready, unless the runtime itself shuts down.
/// 7. A claim is granted only if its [mode](ClaimMode) is compatible with all other live grants of
///    the key, and the units of all permits fit. A claim of a mode that the store does not
///    [declare](Capabilities::supports) is never sent.
/// 8. A call of [`try_acquire`](Self::try_acquire) sends its request at most once. If the outcome
///    is unknown, it returns an error. The engine then repeats the attempt and counts the first
///    one, because that request may still reach the store after the release. If a connection broke
///    while idle, [`BackendError::as_stale_connection`] makes the engine repeat the attempt once
///    without a pause.
///
/// A backend responds in bounded time where it can. After the operation time-out, the engine stops
/// waiting and treats the outcome as unknown.
///
/// # Required methods
/// [`capabilities`](Self::capabilities), [`try_acquire`](Self::try_acquire), [`renew`](Self::renew)
/// and [`release`](Self::release). Each other method has a default that is safe in every store. By
/// default, a store has one shard, accepts every key, lets waiters poll, and lets renewals find
/// losses. It has no [`LockAdmin`], [`LockBatch`], [`ValueStore`] or [`WaiterStore`], and nothing
/// to close. A backend that wraps another one should implement all thirteen: each default hides a
/// method of the wrapped backend. `#[deny(clippy::missing_trait_methods)]` on the `impl` reports a
/// missing method.
///
/// # Cancel safety
/// Only the future of [`wait`](Self::wait) must be cancel safe. The engine polls every other future
/// until it is ready (clause 6).
#[async_trait]
pub trait LockBackend: Any + fmt::Debug + Send + Sync {
    /// Returns the functions and promises of this store.
    ///
    /// A registry reads them when it is built. It reads [`Capabilities::renewal`] again at each
    /// grant and before each round of renewals, so this must be cheap and must not block.
    fn capabilities(&self) -> Capabilities;

    /// Rejects a key that this store's layout cannot hold, before any I/O. The default accepts all
    /// keys.
    ///
    /// # Errors
    /// [`InvalidKey::Layout`] with the reason.
    fn check_key(&self, _key: &Key) -> Result<(), InvalidKey> {
        Ok(())
    }

    /// Returns the shard of the store that contains `claim`. The default is one shard.
    ///
    /// Claims of different shards are never renewed in one call, so that a failed shard delays no
    /// other. Must not block.
    fn shard(&self, _claim: &Claim) -> u32 {
        0
    }

    /// Tries to acquire the key for `claim`, without waiting until the key is free.
    ///
    /// If `claim` is a [conversion](Claim::is_conversion), this changes the mode of the grant that
    /// the claim has. A conversion to a stronger mode returns a new token, a conversion to a weaker
    /// one the same token. A conversion never creates a grant: without one, the result is
    /// [`Attempt::Gone`]. A busy upgrade blocks new shared claims. This block ends at most one
    /// lease of the claim after its last attempt. It ends at once if a conversion requests the mode
    /// that the grant already has.
    ///
    /// The engine polls the future once before it sets a timer. A store that responds at its first
    /// poll therefore needs no timer.
    ///
    /// # Errors
    /// Only for store errors; if another claim holds the key, the result is [`Attempt::Busy`].
    /// After an error, the outcome counts as unknown unless [`BackendError::refused`] is true. The
    /// backend must not repeat a request with an unknown outcome, see clause 8.
    ///
    /// # Cancel safety
    /// Need not be cancel safe.
    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError>;

    /// Extends the lease of each claim to at least `claim.lease()` from now. Returns the results in
    /// the order of `claims`.
    ///
    /// All claims are in one shard, and there are at most [`RenewalPolicy::batch_max`] of them.
    ///
    /// # Errors
    /// One result for each claim: an error for one claim must not affect the others. A claim that
    /// holds nothing is not an error, but [`Renewal::Gone`].
    ///
    /// # Cancel safety
    /// Need not be cancel safe.
    ///
    /// [`RenewalPolicy::batch_max`]: crate::RenewalPolicy::batch_max
    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>>;

    /// Ends the grant of `claim`, removes the claim from the store's queue, and wakes waiters.
    ///
    /// Here [`Claim::token_block`] is the number of reserved tokens that may have been used. The
    /// store may reuse the others. It must reuse them if it would otherwise use more than one token
    /// per microsecond.
    ///
    /// # Errors
    /// Only for store errors; if the claim holds nothing, the result is [`Release::NotHeld`].
    ///
    /// # Cancel safety
    /// Need not be cancel safe.
    async fn release(&self, claim: &Claim) -> Result<Release, BackendError>;

    /// Waits until the lock may be free. `busy` is the response to the last attempt. May return
    /// early or never, because the engine also polls. The default never returns.
    ///
    /// In a store that [wakes](Capabilities::wakes) waiters, this call must not miss a change since
    /// the `busy` response. [`Busy::seen_version`] and [`Waiters`](crate::Waiters) serve this
    /// purpose. After a store error, the future returns or stays pending. The next attempt then
    /// returns the error.
    ///
    /// # Cancel safety
    /// Must be cancel safe. The future may be dropped at any time, and another call may follow.
    async fn wait(&self, _claim: &Claim, _busy: &Busy) {
        std::future::pending().await
    }

    /// Receives the handle through which the backend notifies a registry that another client has
    /// changed or removed the record of a key. The holder is then notified of a loss at once
    /// instead of at its next renewal.
    ///
    /// Each registry over this backend calls this once, when it is built and before its first
    /// request. A backend that receives change notifications keeps the handles of all registries in
    /// an [`InvalidationSet`](crate::InvalidationSet), and declares
    /// [`Capabilities::reports_invalidations`]. It does not notify of changes that this client
    /// makes to its own claims.
    ///
    /// Like a wake-up, an invalidation may be superfluous or lost. The next renewal then detects
    /// the loss. A claim that is not renewed is lost at the end of its lease. The default drops the
    /// handle. Must not block.
    fn subscribe(&self, _invalidations: Invalidations) {}

    /// Returns the operations for operators, if the store has any. The default is `None`.
    ///
    /// The result never changes. If it is `None`, [`Capabilities::inspect`] is false.
    fn admin(&self) -> Option<&dyn LockAdmin> {
        None
    }

    /// Returns the requests for several keys, if the store has any. The default is `None`: the
    /// engine then sends one request per key. The result never changes.
    fn batch(&self) -> Option<&dyn LockBatch> {
        None
    }

    /// Returns the value blocks of the store, if it has any. The default is `None`.
    ///
    /// The result never changes. If it is `None`, [`Capabilities::values`] is false.
    fn values(&self) -> Option<&dyn ValueStore> {
        None
    }

    /// Returns the operations on waiting claims, if the store can list these claims. The default is
    /// `None`.
    ///
    /// The result never changes. If it is `None`, [`Capabilities::waiters`] is false.
    fn waiters(&self) -> Option<&dyn WaiterStore> {
        None
    }

    /// Closes connections. A registry calls this once when it is closed. By then, all its releases
    /// have a response, or the time limit of the close is over. A registry that is only dropped
    /// does not call it. The default does nothing.
    ///
    /// This returns no error. Claims that remain after a failed close end with their leases.
    ///
    /// # Cancel safety
    /// Need not be cancel safe.
    async fn close(&self) {}
}

/// Requests for the claims of several keys in one step of the store, from [`LockBackend::batch`].
///
/// The claims of one call are in one [shard](LockBackend::shard), and there are at least two. The
/// clauses of [`LockBackend`] apply to each claim. Single requests for the same claims may follow,
/// and the engine renews these claims like all others.
///
/// # Cancel safety
/// No method needs to be cancel safe, as in [`LockBackend`].
#[async_trait]
pub trait LockBatch: Send + Sync {
    /// Tries to acquire the keys of all claims, without waiting until they are free. Grants all
    /// claims, or changes nothing.
    ///
    /// The claims are exclusive, skip the queue, are not conversions, and have different keys. All
    /// have the same lease, label and number of tokens. If some of them are already granted, they
    /// keep their tokens, and the call grants the others.
    ///
    /// # Errors
    /// As for [`LockBackend::try_acquire`]. The outcome of all claims is then unknown, unless
    /// [`BackendError::refused`] is true. One call sends its request at most once (clause 8).
    async fn try_acquire_all(&self, claims: &[Claim]) -> Result<BatchAttempt, BackendError>;

    /// Ends the grants of all claims, as [`LockBackend::release`] does for one. Returns the results
    /// in the order of `claims`. A claim that holds nothing does not affect the others.
    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>>;
}

/// A store's response to an attempt for several keys.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "all claims are granted, one is busy, or neither")]
pub enum BatchAttempt {
    /// All claims hold their keys. Contains the grants in the order of the claims.
    Granted(Vec<Grant>),
    /// The claim with this index must wait. Nothing was changed.
    Busy(usize, Busy),
    /// The store cannot decide these claims in one step. Nothing was changed. The engine sends one
    /// request per claim.
    Declined,
}

/// The operations of a store for operators, from [`LockBackend::admin`].
///
/// The engine calls [`inspect`](Self::inspect), [`list`](Self::list) and
/// [`force_release`](Self::force_release) only if the store declares [`Capabilities::inspect`]. The
/// store must then implement all three. [`diagnose`](Self::diagnose) does not depend on this
/// capability.
///
/// # Cancel safety
/// No method needs to be cancel safe, as in [`LockBackend`].
#[async_trait]
pub trait LockAdmin: Send + Sync {
    /// Returns the holders of `key`, in the order of their tokens. The default returns none.
    ///
    /// # Errors
    /// [`BackendError`] for a store error.
    async fn inspect(&self, _key: &Key) -> Result<Vec<Holder>, BackendError> {
        Ok(Vec::new())
    }

    /// Returns the holders of all locked keys in this backend's namespace, in any order. The
    /// default returns none.
    ///
    /// # Errors
    /// [`BackendError`] for a store error.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        Ok(Vec::new())
    }

    /// Ends all grants of `key`, whichever clients hold them, and wakes waiters. The engine then
    /// verifies the claims of all registries over this backend object. Other holders are notified
    /// at their next renewal, or at once if the store [reports losses](LockBackend::subscribe). The
    /// default releases nothing.
    ///
    /// # Errors
    /// [`BackendError`] for a store error. The key may be free nevertheless.
    async fn force_release(&self, _key: &Key) -> Result<Release, BackendError> {
        Ok(Release::NotHeld)
    }

    /// Checks the store for present problems and for problems to expect soon. The list may also
    /// contain notes that need no action. The default returns none.
    ///
    /// # Errors
    /// [`BackendError`] for a store error, for example if the store cannot be reached.
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        Ok(Vec::new())
    }
}

/// One acquisition of a key, as the store records it.
///
/// Each claim has a new random id, by which the store identifies the holder. A repeated request of
/// a claim is therefore recognised as the same acquisition, and a stale holder can change nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Claim {
    key: Key,
    id: ClaimId,
    lease: Duration,
    mode: ClaimMode,
    queueing: Queueing,
    conversion: bool,
    token_before_conversion: Option<FencingToken>,
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
            queueing: Queueing::Skip,
            conversion: false,
            token_before_conversion: None,
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

    /// Returns the same claim with this id, for example one that a store has recorded.
    #[must_use]
    pub fn with_id(mut self, id: ClaimId) -> Self {
        self.id = id;
        self
    }

    /// Returns the same claim with this mode.
    #[must_use]
    pub fn with_mode(mut self, mode: ClaimMode) -> Self {
        self.mode = mode;
        self
    }

    /// Returns a request that changes the mode of this claim's grant to `mode`.
    #[must_use]
    pub fn converted_to(mut self, mode: ClaimMode) -> Self {
        self.mode = mode;
        self.conversion = true;
        self
    }

    /// Returns the same conversion, restricted to the grant whose first token is `token`. A grant
    /// that was upgraded after the conversion was sent has another token.
    #[must_use]
    pub fn restricted_to_grant(mut self, token: FencingToken) -> Self {
        self.token_before_conversion = Some(token);
        self
    }

    /// Returns the same claim with this [`Queueing`].
    #[must_use]
    pub fn with_queueing(mut self, queueing: Queueing) -> Self {
        self.queueing = queueing;
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

    /// Returns the id by which the store identifies the holder.
    #[must_use]
    pub fn id(&self) -> ClaimId {
        self.id
    }

    /// Returns the length of the lease that a grant or renewal requests, on the store's clock.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Returns the mode: which other claims may hold the key at the same time.
    #[must_use]
    pub fn mode(&self) -> ClaimMode {
        self.mode
    }

    /// Returns whether the claim changes the mode of a grant that it has, instead of requesting a
    /// new grant. See [`LockBackend::try_acquire`].
    #[must_use]
    pub fn is_conversion(&self) -> bool {
        self.conversion
    }

    /// Returns the first token of the grant to which the conversion is
    /// [restricted](Self::restricted_to_grant). A store changes nothing if the grant has neither
    /// this token nor the requested mode. Otherwise, a late request could weaken a grant that was
    /// upgraded since.
    #[must_use]
    pub fn token_before_conversion(&self) -> Option<FencingToken> {
        self.token_before_conversion
    }

    /// Returns the same claim, which records whether a fenced write was begun under it.
    #[must_use]
    pub(crate) fn with_fenced(mut self, fenced: bool) -> Self {
        self.fenced = fenced;
        self
    }

    /// Returns whether a fenced write was begun under the claim and may still be open. Also true
    /// after a conversion of the claim was dropped or has failed. If an open write blocks the
    /// release, the backend waits only briefly and returns a
    /// [blocked](BackendError::as_blocked) error.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Returns whether and when the claim joins the store's queue while the key is held. A store
    /// that cannot queue claims ignores this.
    #[must_use]
    pub fn queueing(&self) -> Queueing {
        self.queueing
    }

    /// Returns whether the claim [joins](Queueing::Join) the store's queue.
    #[must_use]
    pub fn joins_queue(&self) -> bool {
        self.queueing == Queueing::Join
    }

    /// Returns the number of tokens that a grant reserves, from the granted token on. In a
    /// [release](LockBackend::release), this is the number of tokens that may have been used. The
    /// next grant's token must be larger than all reserved tokens, except those that a release
    /// stated as unused.
    #[must_use]
    pub fn token_block(&self) -> u32 {
        self.token_block
    }

    /// Returns the label that is shown next to the key, for example the holder's name or purpose.
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
    /// assert_eq!("0123456789abcdef0011223344556677".parse(), Ok(id));
    /// assert!("123".parse::<ClaimId>().is_err());
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

/// Parses the 32 hexadecimal digits that `Display` writes.
impl FromStr for ClaimId {
    type Err = InvalidClaimId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(InvalidClaimId);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| InvalidClaimId)
    }
}

/// The error for a text that is not a claim id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a claim id; a claim id has 32 hexadecimal digits")]
#[non_exhaustive]
pub struct InvalidClaimId;

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

#[cfg(feature = "serde")]
impl serde::Serialize for ClaimId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for ClaimId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Whether a claim that is not granted stays in the store's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Queueing {
    /// The claim keeps a place in the queue until it is granted or released. In a store that is not
    /// [fair](Capabilities::fair) by itself, the place expires if the claim does not repeat its
    /// attempt within its lease.
    Join,
    /// Only an exclusive claim keeps a place, and only where shared claims or permits could
    /// overtake it without end.
    ExclusiveIntent,
    /// A busy claim leaves no record in the store.
    Skip,
}

/// A store's response to an acquisition attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[expect(clippy::exhaustive_enums, reason = "a claim is granted, must wait, or has ended")]
pub enum Attempt {
    /// The claim holds the key.
    Granted(Grant),
    /// Other claims hold the key, or are before this claim in the queue.
    Busy(Busy),
    /// The claim is a [conversion](Claim::is_conversion), and its grant has ended. Also the
    /// response to a conversion that is [restricted](Claim::restricted_to_grant) to an earlier
    /// grant.
    Gone,
}

/// A grant by the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Grant {
    /// The first of the reserved tokens.
    pub token: FencingToken,
    /// The length of the lease, counted from a time between request and response.
    pub lease: Duration,
}

impl Grant {
    /// Creates a grant with this token that lasts `lease`.
    #[must_use]
    pub const fn new(token: FencingToken, lease: Duration) -> Self {
        Self { token, lease }
    }
}

/// A store's response to a claim that must wait.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Busy {
    /// The remaining time of the holder's lease. The engine sends the next attempt shortly after
    /// the end of this time, or earlier. `None` if the store does not report this time.
    pub retry_after: Option<Duration>,
    /// A holder, if the store reported one in the same response.
    pub holder: Option<Holder>,
    /// The claim has an entry in the store's queue, which a release must remove.
    pub is_queued: bool,
    /// The number of units that the held permits state, if the claim states another number.
    pub units_in_store: Option<u32>,
    /// Identifies the state of the key at the time of the attempt, in a format of the backend: a
    /// version of the record, or the number of a notification. [`LockBackend::wait`] compares it to
    /// detect later changes.
    pub seen_version: u64,
    #[cfg_attr(feature = "serde", serde(skip))]
    wake_check: WakeCheckRef,
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

    /// Sets that the claim has an entry in the store's queue.
    #[must_use]
    pub fn with_queue_entry(mut self) -> Self {
        self.is_queued = true;
        self
    }

    /// Sets the number of units that the held permits state.
    #[must_use]
    pub fn with_units_in_store(mut self, units: u32) -> Self {
        self.units_in_store = Some(units);
        self
    }

    /// Sets the version of the record that the backend read, for [`LockBackend::wait`].
    #[must_use]
    pub fn with_seen_version(mut self, seen_version: u64) -> Self {
        self.seen_version = seen_version;
        self
    }

    /// Sets the check whether wake-ups arrive. With this check, the engine polls less often. The
    /// default is no check. A backend that wraps another one and does not forward
    /// [`wait`](LockBackend::wait) must [remove](Self::without_wake_check) it.
    #[must_use]
    pub fn with_wake_check(mut self, check: Arc<dyn WakeCheck>) -> Self {
        self.wake_check = WakeCheckRef(Some(check));
        self
    }

    /// Removes the check whether wake-ups arrive. For a backend that wraps another one and may lose
    /// or delay wake-ups.
    #[must_use]
    pub fn without_wake_check(mut self) -> Self {
        self.wake_check = WakeCheckRef(None);
        self
    }

    /// Returns the result of the [`WakeCheck`], or false without one.
    #[must_use]
    pub fn confirms_wake_ups(&self, claim: &Claim) -> bool {
        self.wake_check.0.as_ref().is_some_and(|check| check.confirms_wake_ups(claim, self))
    }
}

/// Checks whether a store's wake-ups arrive. For backends that can detect this.
///
/// A backend implements this for the shared state of its waiters, and adds an `Arc` of it to each
/// [`Busy`] response with [`Busy::with_wake_check`].
pub trait WakeCheck: Send + Sync {
    /// Returns whether a release of the lock that was `busy` would make the running
    /// [`wait`](LockBackend::wait) of `claim` return.
    ///
    /// The engine calls this at each poll interval while that `wait` runs. If the result is true,
    /// it skips the poll. It polls again at the deadline, when the holder's lease ends, or when the
    /// claim must repeat its attempt to keep its place in the queue. It also polls when the wait
    /// has about doubled, and with the default poll interval after 38 s at the latest.
    ///
    /// Return true only if the server has confirmed the subscription and its connection has
    /// responded recently. Return false if a message since the `busy` response may have been lost.
    /// Must not block.
    fn confirms_wake_ups(&self, claim: &Claim, busy: &Busy) -> bool;
}

/// The check of a [`Busy`] response.
#[derive(Clone, Default)]
struct WakeCheckRef(Option<Arc<dyn WakeCheck>>);

impl fmt::Debug for WakeCheckRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Some(_)" } else { "None" })
    }
}

/// Two checks are equal if they are the same object.
impl PartialEq for WakeCheckRef {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    }
}

impl Eq for WakeCheckRef {}

/// A store's response to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[expect(clippy::exhaustive_enums, reason = "a grant is renewed or has ended")]
pub enum Renewal {
    /// The lease lasts at least this long, counted from a time between request and response.
    Renewed(Duration),
    /// The claim does not hold the key any more.
    Gone,
}

/// A store's response to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[expect(clippy::exhaustive_enums, reason = "a release frees or it does not")]
pub enum Release {
    /// The grant existed and has ended.
    Freed,
    /// The claim did not hold the key.
    NotHeld,
}

/// The holder of a key, as the store reports it. Times are durations on the store's clock, not
/// wall-clock dates.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Holder {
    /// The key.
    pub key: Key,
    /// The mode of the grant.
    pub mode: ClaimMode,
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
    /// Creates an exclusive holder of which only the key is known.
    #[must_use]
    pub const fn new(key: Key) -> Self {
        Self {
            key,
            mode: ClaimMode::Exclusive,
            label: None,
            token: None,
            held_for: None,
            lease_left: None,
        }
    }

    /// Sets the mode.
    #[must_use]
    pub fn with_mode(mut self, mode: ClaimMode) -> Self {
        self.mode = mode;
        self
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

/// A problem or a note that [`LockAdmin::diagnose`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The note, or the problem and how to correct it.
    pub message: String,
}

impl Finding {
    /// Creates a finding that needs no action.
    #[must_use]
    pub fn note(message: impl Into<String>) -> Self {
        Self { severity: Severity::Note, message: message.into() }
    }

    /// Creates a finding about a problem that weakens the store's promises.
    #[must_use]
    pub fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, message: message.into() }
    }
}

/// The severity of a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// Information that needs no action.
    Note,
    /// The store's promises are weakened.
    Warning,
}
