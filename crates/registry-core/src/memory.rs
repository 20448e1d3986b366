//! The in-process store. Leases, tokens and wake-ups work as in other stores, so that it can serve
//! as their reference.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::Notify;

use crate::backend::{
    Attempt, Busy, Claim, ClaimId, Grant, Holder, LockAdmin, LockBackend, Release, Renewal,
    WakeCheck,
};
use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::clock::Moment;
use crate::error::BackendError;
use crate::fencing::FencingToken;
use crate::invalidation::{InvalidationSet, Invalidations};
use crate::key::Key;
use crate::mutant::{Mutant, mutated};

/// A lock store in the memory of this process. Clones are the same store.
///
/// Registries over clones of one store compete for locks as separate processes do, which suits
/// tests of code that locks. A free key uses no memory.
#[derive(Clone, Default)]
pub struct MemoryBackend(Arc<Records>);

#[derive(Default)]
struct Records {
    held: DashMap<Key, MemoryRecord>,
    /// The largest token of all keys that was granted, or used by a grant that has ended. It grows
    /// over all keys, and therefore for each key.
    last_token: AtomicU64,
    /// Microseconds since 1970 when the first token was granted.
    epoch_us: OnceLock<u64>,
    /// The number of grants since expired records were last removed, and the number that starts the
    /// next removal.
    grants: AtomicU64,
    sweep_after: AtomicU64,
    /// The registries over this store.
    registries: InvalidationSet,
}

struct MemoryRecord {
    claim: ClaimId,
    token: FencingToken,
    /// The number of tokens that its holders may use, including `token`.
    block: u32,
    since: Moment,
    until: Moment,
    label: Option<Arc<str>>,
    /// Notifies the waiters for the end of this record.
    ended: Option<Arc<Notify>>,
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
        self.0.held.len()
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

impl Records {
    /// Returns the token of the next grant.
    ///
    /// The count starts at the microseconds since 1970. A resource that remembers tokens of an
    /// earlier run of the process therefore accepts those of this one. The exception is an earlier
    /// run that granted more than a million locks a second throughout.
    fn next_token(&self) -> Option<FencingToken> {
        // Read once: every later token is larger than the one before in any case.
        let now = *self.epoch_us.get_or_init(epoch_us);
        let mut last = self.last_token.load(Ordering::Relaxed);
        loop {
            let token = last.saturating_add(1).max(now);
            match self.last_token.compare_exchange_weak(
                last,
                token,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return FencingToken::new(token),
                Err(seen) => last = seen,
            }
        }
    }

    /// Makes the next token larger than the first `used` tokens of a record that ends. No
    /// reservation is needed before: until the record ends, its key has no other grant.
    fn cover(&self, record: &MemoryRecord, used: u32) {
        if used > 1 {
            let last = record.token.get().saturating_add(u64::from(used) - 1);
            self.last_token.fetch_max(last, Ordering::AcqRel);
        }
    }

    /// Removes the records of holders that did not release, after a number of grants.
    fn sweep(&self, now: Moment) {
        // Counting the records would lock all shards of the map.
        let grants = self.grants.fetch_add(1, Ordering::Relaxed);
        if grants >= self.sweep_after.load(Ordering::Relaxed).max(SWEEP_AFTER_MIN) {
            self.grants.store(0, Ordering::Relaxed);
            let mut ended = Vec::new();
            self.held.retain(|_, record| {
                let is_live = record.is_live(now);
                if !is_live {
                    self.cover(record, record.block);
                    ended.extend(record.ended.take());
                }
                is_live
            });
            self.sweep_after.store(self.held.len() as u64, Ordering::Relaxed);
            // After the removal: a waker may poll its task synchronously, and that task uses this
            // map.
            ended.iter().for_each(|ended| ended.notify_waiters());
        }
    }
}

impl MemoryRecord {
    fn is_live(&self, now: Moment) -> bool {
        now < self.until
    }

    fn holder(&self, key: &Key, now: Moment) -> Holder {
        Holder::new(key.clone())
            .with_label(self.label.as_deref().map(str::to_owned))
            .with_token(Some(self.token))
            .with_times(Some(now.since(self.since)), Some(self.until.since(now)))
    }
}

impl Drop for MemoryRecord {
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
        let renew = |claim: &Claim| match self.0.held.get_mut(claim.key()) {
            Some(mut record) if record.claim == claim.id() && record.is_live(now) => {
                record.until = record.until.max(now.after(claim.lease()));
                Renewal::Renewed(record.until.since(now))
            }
            None if mutated(Mutant::RenewAfterRelease) => match self.0.record(claim, now) {
                Ok(record) => {
                    self.0.held.insert(claim.key().clone(), record);
                    Renewal::Renewed(claim.lease())
                }
                Err(_) => Renewal::Gone,
            },
            _ => Renewal::Gone,
        };
        claims.iter().map(|claim| Ok(renew(claim))).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        Ok(self.release(claim))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let ended = match self.0.held.get_mut(claim.key()) {
            Some(mut record)
                if record.token.get() == busy.mark && record.is_live(Moment::now()) =>
            {
                let ended = record.ended.get_or_insert_with(Arc::default);
                // Listening starts while the record is locked, so that the end of the record cannot
                // be missed.
                Arc::clone(ended).notified_owned()
            }
            _ => return,
        };
        ended.await;
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.0.registries.subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

#[async_trait]
impl LockAdmin for MemoryBackend {
    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let now = Moment::now();
        let record = self.0.held.get(key);
        Ok(record.filter(|record| record.is_live(now)).map(|record| record.holder(key, now)))
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let now = Moment::now();
        let live = self.0.held.iter().filter(|entry| entry.value().is_live(now));
        Ok(live.map(|entry| entry.value().holder(entry.key(), now)).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let now = Moment::now();
        let ended = self.0.held.remove_if(key, |_, record| {
            self.0.cover(record, record.block);
            true
        });
        Ok(match ended {
            Some((_, record)) if record.is_live(now) => {
                self.0.registries.notify(key);
                Release::Freed
            }
            _ => Release::NotHeld,
        })
    }
}

impl WakeCheck for Records {
    fn wakes_confirmed(&self, claim: &Claim, busy: &Busy) -> bool {
        // The end of the record notifies the waiter. Its expiry does not, but the engine polls at
        // the end of the lease.
        let record = self.held.get(claim.key());
        record.is_some_and(|record| record.token.get() == busy.mark && record.ended.is_some())
    }
}

impl Records {
    fn acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let now = Moment::now_coarse();
        let (granted, ended) = match self.held.entry(claim.key().clone()) {
            Entry::Occupied(mut entry) => {
                let record = entry.get();
                if record.is_live(now) {
                    if record.claim == claim.id() {
                        return Ok(Attempt::Granted(Grant::new(
                            record.token,
                            record.until.since(now),
                        )));
                    }
                    let busy = Busy::new()
                        .with_retry_after(record.until.since(now))
                        .with_holder(record.holder(claim.key(), now))
                        .with_mark(record.token.get());
                    return Ok(Attempt::Busy(busy));
                }
                self.cover(record, record.block);
                let record = self.record(claim, now)?;
                (record.token, Some(entry.insert(record)))
            }
            Entry::Vacant(entry) => {
                let record = self.record(claim, now)?;
                let token = record.token;
                entry.insert(record);
                (token, None)
            }
        };
        // After the map's lock is released: the drop wakes waiters, and a waker may poll its task
        // synchronously, which uses this map.
        drop(ended);
        self.sweep(now);
        Ok(Attempt::Granted(Grant::new(granted, claim.lease())))
    }

    fn release(&self, claim: &Claim) -> Release {
        // Exact, because the result is the evidence whether its lease had ended.
        let now = Moment::now();
        let ours = |record: &MemoryRecord| {
            record.claim == claim.id() || mutated(Mutant::ReleaseWithoutOwner)
        };
        // An expired record of this claim is removed too, but it had ended before.
        let end = |record: &MemoryRecord| {
            let ours = ours(record);
            if ours {
                // Before the key is free, so that its next grant has a larger token.
                self.cover(record, claim.token_block().min(record.block));
            }
            ours
        };
        match self.held.remove_if(claim.key(), |_, record| end(record)) {
            Some((_, record)) if record.is_live(now) => Release::Freed,
            _ => Release::NotHeld,
        }
    }

    fn record(&self, claim: &Claim, now: Moment) -> Result<MemoryRecord, BackendError> {
        let token = self.next_token().ok_or_else(|| {
            BackendError::new(
                crate::BackendErrorKind::Protocol,
                "the memory store has run out of fencing tokens; open a new store",
            )
        })?;
        Ok(MemoryRecord {
            claim: claim.id(),
            token,
            block: claim.token_block(),
            since: now,
            until: now.after(claim.lease()),
            label: claim.label().map(Arc::from),
            ended: None,
        })
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").field("records", &self.records()).finish()
    }
}

/// Returns microseconds since 1970 on the wall clock. A jump of that clock does no harm, because
/// each token is also larger than the last one.
#[expect(
    clippy::disallowed_methods,
    reason = "a number to start tokens from, not a time that anything ends at"
)]
fn epoch_us() -> u64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    u64::try_from(since.as_micros()).unwrap_or(0)
}

const SWEEP_AFTER_MIN: u64 = 1_024;
