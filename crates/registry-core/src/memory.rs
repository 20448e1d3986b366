//! The in-process store. Leases, tokens and wake-ups work as in other stores, so that this store
//! can serve as a reference for them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use dashmap::DashMap;
use dashmap::mapref::entry::{Entry, OccupiedEntry};
use dashmap::mapref::multiple::RefMulti;
use tokio::sync::Notify;

use crate::backend::{
    Attempt, Busy, Claim, ClaimId, Grant, Holder, LockAdmin, LockBackend, Release, Renewal,
    WakeCheck,
};
use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::clock::Moment;
use crate::error::{BackendError, BackendErrorKind};
use crate::fencing::FencingToken;
use crate::invalidation::{InvalidationSet, Invalidations};
use crate::key::Key;
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::record::{LockRecord, RecordEntry};
use crate::value::{LockValue, ValueRead, ValueStore, ValueWrite};
use crate::waiting_list::{WaiterStore, WaitingClaim};

/// A lock store in the memory of this process. Clones are the same store.
///
/// Registries over clones of one store compete for locks as separate processes do, which suits
/// tests of code that locks. A released key uses no memory, unless it has a value block.
#[derive(Clone, Default)]
pub struct MemoryBackend(Arc<MemoryState>);

#[derive(Default)]
struct MemoryState {
    records: DashMap<Key, MemoryRecord>,
    /// The largest token that was granted or reserved for any key. The next token is larger, so the
    /// tokens of each key grow.
    last_token: AtomicU64,
    /// The largest token that the holders of a removed [`ExclusiveGrant`] may have used without a
    /// reservation. The next token is larger. This field is separate, because `last_token`
    /// decreases when reserved tokens are returned.
    last_used_token: AtomicU64,
    /// The wall clock at the first grant, in microseconds since 1970.
    first_grant_us: OnceLock<u64>,
    /// The number of grants since expired records were last removed.
    grants_since_sweep: AtomicU64,
    /// The number of grants after which expired records are removed again.
    sweep_after: AtomicU64,
    values: DashMap<Key, LockValue>,
    waiting: DashMap<(Key, ClaimId), RegisteredWait>,
    /// The registries over this store.
    registries: InvalidationSet,
}

enum MemoryRecord {
    /// One exclusive grant, and no claim that waits in the store.
    Exclusive(ExclusiveGrant),
    /// Any number of claims of any mode, granted or waiting.
    Several(SeveralClaims),
}

struct SeveralClaims {
    record: LockRecord,
    /// Notifies the waiters after each change by which a claim may be granted.
    changed: Arc<Notify>,
}

struct ExclusiveGrant {
    claim: ClaimId,
    token: FencingToken,
    /// The number of tokens that its holders may use, including `token`.
    block: u32,
    since: Moment,
    until: Moment,
    label: Option<Arc<str>>,
    /// Notifies the waiters when this record ends. `None` until a claim waits.
    ended: Option<Arc<Notify>>,
}

/// A registered claim that waits.
struct RegisteredWait {
    mode: ClaimMode,
    label: Option<Arc<str>>,
    registered_at: Moment,
    waited_before: Duration,
    until: Moment,
}

impl MemoryBackend {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of records, including expired ones that are not removed yet.
    #[must_use]
    pub fn records(&self) -> usize {
        self.0.records.len()
    }

    pub(crate) fn acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        Ok(match self.0.acquire(claim)? {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_wake_check(Arc::clone(&self.0) as _)),
            granted => granted,
        })
    }

    pub(crate) fn release(&self, claim: &Claim) -> Release {
        self.0.release(claim)
    }
}

impl MemoryState {
    /// Reserves `block` tokens, and returns the first. The next reservation begins after them.
    ///
    /// The tokens start at the microseconds since 1970. A resource that remembers tokens of an
    /// earlier run of the process therefore accepts the tokens of this run. The exception is an
    /// earlier run that took more than a million tokens a second on average. A shared grant
    /// reserves up to 65 tokens. It returns the unused ones only if the store has reserved no later
    /// token.
    fn next_token(&self, block: u32) -> Option<FencingToken> {
        // The clock is read only once, because each later token exceeds the previous one anyway.
        let now = *self.first_grant_us.get_or_init(wall_clock_us);
        let mut last = self.last_token.load(Ordering::Relaxed);
        loop {
            let last_used = self.last_used_token.load(Ordering::Acquire);
            let token = FencingToken::new(last.max(last_used).saturating_add(1).max(now))?;
            let reserved = last_of_block(token, block);
            match self.last_token.compare_exchange_weak(
                last,
                reserved,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(token),
                Err(seen) => last = seen,
            }
        }
    }

    /// Makes the next token larger than the first `used` tokens of a record that ends. The tokens
    /// need no reservation before that, because the key has no other grant until the record ends.
    fn record_used_tokens(&self, record: &ExclusiveGrant, used: u32) {
        if used > 1 {
            let last = last_of_block(record.token, used);
            self.last_used_token.fetch_max(last, Ordering::AcqRel);
        }
    }

    /// As [`next_token`](Self::next_token), with an error if no tokens are left.
    fn reserve_tokens(&self, block: u32) -> Result<FencingToken, BackendError> {
        self.next_token(block).ok_or_else(out_of_tokens)
    }

    /// Makes the reserved tokens that an ended grant did not use available again, unless a later
    /// token was granted or reserved.
    fn return_tokens(&self, entry: &RecordEntry, used: u32) {
        if let Some(token) = entry.token {
            let reserved = last_of_block(token, entry.token_block);
            let used = last_of_block(token, used.min(entry.token_block));
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            _ = self.last_token.compare_exchange(reserved, used, order.0, order.1);
        }
    }

    /// Counts a grant. Removes the expired records once `sweep_after` grants, and at least
    /// [`SWEEP_AFTER_MIN`], have been counted since the last removal.
    fn count_grant_and_sweep(&self, now: Moment) {
        // Counts grants, because counting the records would lock all shards of the map.
        let grants = self.grants_since_sweep.fetch_add(1, Ordering::Relaxed);
        if grants >= self.sweep_after.load(Ordering::Relaxed).max(SWEEP_AFTER_MIN) {
            self.grants_since_sweep.store(0, Ordering::Relaxed);
            let mut ended = Vec::new();
            self.records.retain(|_, record| match record {
                MemoryRecord::Exclusive(grant) => {
                    let is_live = grant.is_live(now);
                    if !is_live {
                        self.record_used_tokens(grant, grant.block);
                        ended.extend(grant.ended.take());
                    }
                    is_live
                }
                MemoryRecord::Several(several) => {
                    if several.record.remove_expired(micros(now)) {
                        ended.push(Arc::clone(&several.changed));
                    }
                    !several.record.is_empty()
                }
            });
            self.sweep_after.store(self.records.len() as u64, Ordering::Relaxed);
            // Notifies after the map is unlocked: a waker may poll its task synchronously, and that
            // task uses the map.
            ended.iter().for_each(|ended| ended.notify_waiters());
        }
    }
}

impl MemoryRecord {
    fn holders(&self, key: &Key, now: Moment) -> Vec<Holder> {
        match self {
            Self::Exclusive(grant) if grant.is_live(now) => vec![grant.holder(key, now)],
            Self::Exclusive(_) => Vec::new(),
            Self::Several(several) => several.record.holders(key, micros(now)),
        }
    }
}

impl SeveralClaims {
    fn new() -> Self {
        Self { record: LockRecord::new(), changed: Arc::default() }
    }
}

impl ExclusiveGrant {
    fn is_live(&self, now: Moment) -> bool {
        now < self.until
    }

    fn holder(&self, key: &Key, now: Moment) -> Holder {
        Holder::new(key.clone())
            .with_label(self.label.as_deref().map(str::to_owned))
            .with_token(Some(self.token))
            .with_times(Some(now.since(self.since)), Some(self.until.since(now)))
    }

    /// Returns the same grant as an entry of a record.
    fn to_entry(&self, key: &Key) -> RecordEntry {
        let claim = Claim::new(key.clone(), Duration::ZERO)
            .with_id(self.claim)
            .with_label(self.label.clone())
            .with_token_block(self.block);
        LockRecord::granted_entry(&claim, self.token, micros(self.since), micros(self.until))
    }
}

impl Drop for ExclusiveGrant {
    fn drop(&mut self) {
        if let Some(ended) = &self.ended {
            ended.notify_waiters();
        }
    }
}

#[async_trait]
impl LockBackend for MemoryBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("memory", GuaranteeClass::Durable, Reach::Process)
            .with_fencing()
            .with_shared()
            .with_upgradable()
            .with_permits()
            .with_values()
            .with_waiters()
            .with_fair_on_request()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.acquire(claim)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let now = Moment::now();
        let renew = |claim: &Claim| match self.0.records.get_mut(claim.key()) {
            Some(mut record) => match &mut *record {
                MemoryRecord::Exclusive(grant)
                    if grant.claim == claim.id() && grant.is_live(now) =>
                {
                    grant.until = grant.until.max(now.after(claim.lease()));
                    Renewal::Renewed(grant.until.since(now))
                }
                MemoryRecord::Exclusive(_) => Renewal::Gone,
                MemoryRecord::Several(several) => several.record.renew(claim, micros(now)),
            },
            None if mutated(Mutant::RenewAfterRelease) => match self.0.grant(claim, now) {
                Ok(grant) => {
                    self.0.records.insert(claim.key().clone(), MemoryRecord::Exclusive(grant));
                    Renewal::Renewed(claim.lease())
                }
                Err(_) => Renewal::Gone,
            },
            None => Renewal::Gone,
        };
        claims.iter().map(|claim| Ok(renew(claim))).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        Ok(self.release(claim))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        loop {
            // The waiter subscribes while the record is locked, so that it misses no change.
            let (changed, is_exclusive) = match self.0.records.get_mut(claim.key()).as_deref_mut() {
                Some(MemoryRecord::Exclusive(grant))
                    if grant.token.get() == busy.seen_version && grant.is_live(Moment::now()) =>
                {
                    let ended = grant.ended.get_or_insert_with(Arc::default);
                    (Arc::clone(ended).notified_owned(), true)
                }
                Some(MemoryRecord::Several(several))
                    if several.record.is_busy(claim, micros(Moment::now())) =>
                {
                    (Arc::clone(&several.changed).notified_owned(), false)
                }
                _ => return,
            };
            changed.await;
            if is_exclusive {
                return;
            }
        }
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.0.registries.subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        Some(self)
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        Some(self)
    }
}

#[async_trait]
impl WaiterStore for MemoryBackend {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let now = Moment::now();
        let wait = RegisteredWait {
            mode: claim.mode(),
            label: claim.label().map(Arc::from),
            registered_at: now,
            waited_before: waited_for,
            until: now.after(claim.lease()),
        };
        self.0.waiting.retain(|_, wait| now < wait.until);
        self.0.waiting.insert((claim.key().clone(), claim.id()), wait);
        Ok(())
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        self.0.waiting.remove(&(claim.key().clone(), claim.id()));
        Ok(())
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let now = Moment::now();
        let registered = self
            .0
            .waiting
            .iter()
            .filter(|wait| now < wait.until && key.is_none_or(|key| *key == wait.key().0));
        Ok(registered
            .map(|wait| {
                let waited_for = wait.waited_before + now.since(wait.registered_at);
                WaitingClaim::new(wait.key().0.clone())
                    .with_mode(wait.mode)
                    .with_label(wait.label.as_deref().map(str::to_owned))
                    .with_times(Some(waited_for), Some(wait.until.since(now)))
            })
            .collect())
    }
}

#[async_trait]
impl ValueStore for MemoryBackend {
    #[expect(
        clippy::disallowed_methods,
        reason = "job schedules use the wall clock; no lease depends on it"
    )]
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let value = self.0.values.get(key).map(|value| value.clone());
        Ok(ValueRead::new(value).with_now(std::time::SystemTime::now()))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let now = Moment::now();
        // The record stays locked until the value is written.
        let record = self.0.records.get(claim.key());
        let is_held = record.as_ref().is_some_and(|record| match &**record {
            MemoryRecord::Exclusive(grant) => grant.claim == claim.id() && grant.is_live(now),
            MemoryRecord::Several(several) => {
                several.record.is_held_exclusively(claim, micros(now))
            }
        });
        if !is_held {
            return Ok(ValueWrite::NotHeld);
        }
        Ok(match self.0.values.entry(claim.key().clone()) {
            Entry::Occupied(stored) if stored.get().token > token => ValueWrite::NotHeld,
            entry => {
                entry.insert(LockValue::new(value.to_vec(), token));
                ValueWrite::Written
            }
        })
    }
}

#[async_trait]
impl LockAdmin for MemoryBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let now = Moment::now();
        Ok(self.0.records.get(key).map(|record| record.holders(key, now)).unwrap_or_default())
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let now = Moment::now();
        let holders = |entry: RefMulti<'_, Key, MemoryRecord>| entry.holders(entry.key(), now);
        Ok(self.0.records.iter().flat_map(holders).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let now = Moment::now();
        let released = match self.0.records.entry(key.clone()) {
            Entry::Vacant(_) => Release::NotHeld,
            Entry::Occupied(mut entry) => match entry.get_mut() {
                MemoryRecord::Exclusive(grant) => {
                    self.0.record_used_tokens(grant, grant.block);
                    let is_live = grant.is_live(now);
                    drop(entry.remove());
                    if is_live { Release::Freed } else { Release::NotHeld }
                }
                MemoryRecord::Several(several) => {
                    let released = several.record.force_release(micros(now));
                    MemoryState::after_change(entry);
                    released
                }
            },
        };
        if released == Release::Freed {
            self.0.registries.notify(key);
        }
        Ok(released)
    }
}

impl WakeCheck for MemoryState {
    fn confirms_wake_ups(&self, claim: &Claim, busy: &Busy) -> bool {
        // The end of the record notifies the waiter. The expiry of the lease does not, but the
        // engine polls at that time.
        self.records.get(claim.key()).is_some_and(|record| match &*record {
            MemoryRecord::Exclusive(grant) => {
                grant.token.get() == busy.seen_version && grant.ended.is_some()
            }
            // One of several grants may expire before the last one, without a notification.
            MemoryRecord::Several(_) => false,
        })
    }
}

impl MemoryState {
    fn acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let now = Moment::now_coarse();
        let is_plain_exclusive = claim.mode() == ClaimMode::Exclusive && !claim.is_conversion();
        let (attempt, replaced) = match self.records.entry(claim.key().clone()) {
            Entry::Occupied(mut entry) => match entry.get_mut() {
                MemoryRecord::Exclusive(grant) if grant.is_live(now) => {
                    if grant.claim == claim.id() && !claim.is_conversion() {
                        let left = grant.until.since(now);
                        return Ok(Attempt::Granted(Grant::new(grant.token, left)));
                    }
                    if grant.claim != claim.id() && claim.is_conversion() {
                        return Ok(Attempt::Gone);
                    }
                    if grant.claim != claim.id() && !claim.joins_queue() {
                        let busy = Busy::new()
                            .with_retry_after(grant.until.since(now))
                            .with_holder(grant.holder(claim.key(), now))
                            .with_seen_version(grant.token.get());
                        return Ok(Attempt::Busy(busy));
                    }
                    self.record_used_tokens(grant, grant.block);
                    let mut several = SeveralClaims::new();
                    several.record.insert(grant.to_entry(claim.key()));
                    let replaced = entry.insert(MemoryRecord::Several(several));
                    (self.acquire_among_several(entry, claim, now)?, Some(replaced))
                }
                MemoryRecord::Exclusive(grant) if is_plain_exclusive => {
                    self.record_used_tokens(grant, grant.block);
                    let grant = self.grant(claim, now)?;
                    let granted = Attempt::Granted(Grant::new(grant.token, claim.lease()));
                    (granted, Some(entry.insert(MemoryRecord::Exclusive(grant))))
                }
                MemoryRecord::Exclusive(grant) => {
                    self.record_used_tokens(grant, grant.block);
                    let several = MemoryRecord::Several(SeveralClaims::new());
                    let replaced = entry.insert(several);
                    (self.acquire_among_several(entry, claim, now)?, Some(replaced))
                }
                MemoryRecord::Several(_) => (self.acquire_among_several(entry, claim, now)?, None),
            },
            Entry::Vacant(entry) if is_plain_exclusive => {
                let grant = self.grant(claim, now)?;
                let granted = Attempt::Granted(Grant::new(grant.token, claim.lease()));
                entry.insert(MemoryRecord::Exclusive(grant));
                (granted, None)
            }
            Entry::Vacant(entry) => {
                let entry = entry.insert_entry(MemoryRecord::Several(SeveralClaims::new()));
                (self.acquire_among_several(entry, claim, now)?, None)
            }
        };
        // Dropped after the map is unlocked: the drop wakes waiters, a waker may poll its task
        // synchronously, and that task uses the map.
        drop(replaced);
        if matches!(attempt, Attempt::Granted(_)) {
            self.count_grant_and_sweep(now);
        }
        Ok(attempt)
    }

    /// Decides an attempt for a key with several claims.
    fn acquire_among_several(
        &self,
        mut entry: OccupiedEntry<'_, Key, MemoryRecord>,
        claim: &Claim,
        now: Moment,
    ) -> Result<Attempt, BackendError> {
        let MemoryRecord::Several(several) = entry.get_mut() else { return Ok(Attempt::Gone) };
        let reserve = || self.reserve_tokens(claim.token_block());
        // A claim that waits for permits blocks the permits behind it even if enough units are
        // free. In other modes, the grant of a queued claim blocks the same claims as before.
        let waits_for_permits = |record: &LockRecord| {
            let is_ours = |entry: &RecordEntry| entry.id == claim.id() && !entry.is_granted();
            claim.mode().units() > 0 && record.entries().iter().any(is_ours)
        };
        let was_waiting = waits_for_permits(&several.record);
        let attempt = several.record.acquire(claim, micros(now), reserve);
        let has_left_queue = was_waiting && !waits_for_permits(&several.record);
        // A conversion to a weaker mode may let the store grant other claims.
        let is_converted = claim.is_conversion() && matches!(attempt, Ok(Attempt::Granted(_)));
        if is_converted || has_left_queue || several.record.is_empty() {
            Self::after_change(entry);
        }
        attempt
    }

    /// Notifies the waiters of a key with several claims, and removes its record if it is empty.
    fn after_change(entry: OccupiedEntry<'_, Key, MemoryRecord>) {
        let MemoryRecord::Several(several) = entry.get() else { return };
        let changed = Arc::clone(&several.changed);
        if several.record.is_empty() {
            drop(entry.remove())
        } else {
            drop(entry)
        }
        // Notifies after the map is unlocked: a waker may poll its task synchronously, and that
        // task uses the map.
        changed.notify_waiters();
    }

    fn release(&self, claim: &Claim) -> Release {
        // `now_coarse` does not suffice: the result reports whether the lease had ended.
        let now = Moment::now();
        let ours = |grant: &ExclusiveGrant| {
            grant.claim == claim.id() || mutated(Mutant::ReleaseByOtherClaim)
        };
        // An expired record of this claim is removed too, but the result is then `NotHeld`.
        let must_remove = |record: &MemoryRecord| match record {
            MemoryRecord::Exclusive(grant) if ours(grant) => {
                // Recorded before the key is free, so that its next grant has a larger token.
                self.record_used_tokens(grant, claim.token_block().min(grant.block));
                true
            }
            _ => false,
        };
        match self.records.remove_if(claim.key(), |_, record| must_remove(record)) {
            Some((_, MemoryRecord::Exclusive(grant))) if grant.is_live(now) => Release::Freed,
            Some(_) => Release::NotHeld,
            None => self.release_among_several(claim, now),
        }
    }

    /// Releases a claim of a key with several claims.
    fn release_among_several(&self, claim: &Claim, now: Moment) -> Release {
        let Entry::Occupied(mut occupied) = self.records.entry(claim.key().clone()) else {
            return Release::NotHeld;
        };
        let MemoryRecord::Several(several) = occupied.get_mut() else { return Release::NotHeld };
        let entry = several.record.release(claim);
        if let Some(entry) = &entry {
            self.return_tokens(entry, claim.token_block());
        }
        Self::after_change(occupied);
        LockRecord::release_response(entry.as_ref(), micros(now))
    }

    fn grant(&self, claim: &Claim, now: Moment) -> Result<ExclusiveGrant, BackendError> {
        Ok(ExclusiveGrant {
            claim: claim.id(),
            token: self.next_token(1).ok_or_else(out_of_tokens)?,
            block: claim.token_block(),
            since: now,
            until: now.after(claim.lease()),
            label: claim.label().map(Arc::from),
            ended: None,
        })
    }
}

fn out_of_tokens() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "the memory store has run out of fencing tokens; open a new store",
    )
}

/// Returns the last of `count` consecutive tokens from `first` on.
fn last_of_block(first: FencingToken, count: u32) -> u64 {
    first.get().saturating_add(u64::from(count.max(1)) - 1)
}

/// Returns a time in microseconds. The offset keeps times before the clock's origin from being
/// negative.
fn micros(time: Moment) -> u64 {
    const OFFSET: i64 = 1 << 53;
    u64::try_from(time.to_bits().div_euclid(1_000) + OFFSET).unwrap_or(0)
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").field("records", &self.records()).finish()
    }
}

/// Returns the wall clock in microseconds since 1970. A jump of this clock does no harm, because
/// each token is also larger than the previous one.
#[expect(
    clippy::disallowed_methods,
    reason = "the first token is derived from it; no lease depends on it"
)]
fn wall_clock_us() -> u64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    u64::try_from(since.as_micros()).unwrap_or(0)
}

/// The minimum number of grants between two removals of expired records.
const SWEEP_AFTER_MIN: u64 = 1_024;

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::backend::Queueing;

    #[tokio::test(start_paused = true)]
    async fn the_grant_of_queued_permits_wakes_the_claims_behind_it() {
        let store = MemoryBackend::new();
        let key = Key::new("k").unwrap();
        let claim = |take| {
            Claim::new(key.clone(), Duration::from_secs(10))
                .with_mode(ClaimMode::Permits { take, of: 2 })
                .with_queueing(Queueing::Join)
        };
        let (both, first, second) = (claim(2), claim(1), claim(1));
        assert!(matches!(store.acquire(&both), Ok(Attempt::Granted(_))));
        assert!(matches!(store.acquire(&first), Ok(Attempt::Busy(_))));
        assert!(matches!(store.acquire(&second), Ok(Attempt::Busy(_))));
        assert_eq!(store.release(&both), Release::Freed);
        let Ok(Attempt::Busy(busy)) = store.acquire(&second) else {
            panic!("the first claim is ahead in the queue")
        };
        let mut wait = store.wait(&second, &busy);
        let mut context = Context::from_waker(Waker::noop());
        assert!(wait.as_mut().poll(&mut context).is_pending());
        assert!(matches!(store.acquire(&first), Ok(Attempt::Granted(_))));
        assert!(wait.as_mut().poll(&mut context).is_ready());
    }
}
