//! A small store of all modes that has at most one bug. The module `broken_modes` shows that the
//! suite detects each bug. [`LockRecord`] decides about each request; a bug changes the request,
//! the record or the response.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clock, Harness, Store};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimMode, FencingToken, Grant,
    GuaranteeClass, Holder, InvalidationSet, Invalidations, Key, LockAdmin, LockBackend,
    LockRecord, Queueing, Reach, RecordEntry, Release, Renewal,
};
use tokio::sync::watch;
use tokio::time::Instant;

/// The bug of the store. A place is the position of a waiting claim in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModeBug {
    None,
    ReadersOvertakeWriters,
    PlacesNeverLapse,
    PlacesLapseAtOnce,
    PlacesOutliveReleases,
    AllClaimsQueue,
    NoClaimQueues,
    ReleaseEndsAll,
    RenewalExtendsAll,
    ClaimsExpireTogether,
    ReadersShareTokens,
    TokensIgnoreBlocks,
    ForcedReleaseEndsFirst,
    ForcedReleaseClearsQueue,
    InspectReturnsFirst,
    InspectReturnsWaiters,
    InspectForgetsModes,
    SharedIsExclusive,
    WritersJoinReaders,
    ManyUpgradable,
    UpgradeIgnoresReaders,
    UpgradeBlocksNone,
    UpgradeNeverLapses,
    UpgradeKeepsToken,
    RepeatedUpgradeHasNewToken,
    DowngradeChangesToken,
    ConversionGrants,
    ConversionKeepsLease,
    LateConversionWeakens,
    UnitsAreNotSummed,
    UnitsOffByOne,
    UnitsMismatchIsBusy,
    UnitsMismatchIsAccepted,
    RepeatedAttemptsMoveBack,
    SkippingClaimsOvertake,
    PermitsOvertake,
    WakesOnlyWhenFree,
    ConversionsWakeNone,
}

#[derive(Debug)]
pub(crate) struct TinyModes(pub(crate) ModeBug);

#[async_trait]
impl Harness for TinyModes {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        Box::new(ModesStore(Arc::new(ModesBackend {
            bug: self.0,
            started_at: Instant::now(),
            records: Mutex::default(),
            last_token: Mutex::new(0),
            changes: watch::Sender::new(0),
            registries: InvalidationSet::default(),
        })))
    }
}

#[derive(Debug)]
struct ModesStore(Arc<ModesBackend>);

#[async_trait]
impl Store for ModesStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        Arc::<ModesBackend>::clone(&self.0)
    }
}

#[derive(Debug)]
struct ModesBackend {
    bug: ModeBug,
    started_at: Instant,
    records: Mutex<HashMap<Key, LockRecord>>,
    last_token: Mutex<u64>,
    changes: watch::Sender<u64>,
    registries: InvalidationSet,
}

impl ModesBackend {
    fn now(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_micros()).unwrap() + 1
    }

    fn has(&self, bug: ModeBug) -> bool {
        self.bug == bug
    }

    fn next_token(&self, block: u32) -> FencingToken {
        let mut last = self.last_token.lock().unwrap();
        let first = *last + 1;
        *last =
            if self.has(ModeBug::TokensIgnoreBlocks) { first } else { *last + u64::from(block) };
        FencingToken::new(first).unwrap()
    }

    /// Returns the request that the store executes instead of `claim`.
    fn requested(&self, claim: &Claim, record: &LockRecord) -> Claim {
        let claim = claim.clone();
        let units_in_store = record.entries().iter().find_map(|entry| match entry.mode {
            ClaimMode::Permits { of, .. } if entry.is_granted() => Some(of),
            _ => None,
        });
        match (self.bug, claim.mode()) {
            (ModeBug::AllClaimsQueue, _) => claim.with_queueing(Queueing::Join),
            (ModeBug::NoClaimQueues, _) => claim.with_queueing(Queueing::Skip),
            (ModeBug::SharedIsExclusive, ClaimMode::Shared) => {
                claim.with_mode(ClaimMode::Exclusive)
            }
            (ModeBug::ManyUpgradable, ClaimMode::Upgradable) => claim.with_mode(ClaimMode::Shared),
            (ModeBug::UnitsOffByOne, ClaimMode::Permits { take, of }) => {
                claim.with_mode(ClaimMode::Permits { take, of: of + 1 })
            }
            (ModeBug::UnitsMismatchIsAccepted, ClaimMode::Permits { take, of }) => {
                claim.with_mode(ClaimMode::Permits { take, of: units_in_store.unwrap_or(of) })
            }
            (ModeBug::LateConversionWeakens, mode) if claim.is_conversion() => {
                Claim::new(claim.key().clone(), claim.lease())
                    .with_id(claim.id())
                    .with_token_block(claim.token_block())
                    .converted_to(mode)
            }
            (ModeBug::ConversionKeepsLease, _) if claim.is_conversion() => {
                claim.with_lease(Duration::ZERO)
            }
            _ => claim,
        }
    }

    /// Returns whether the bug hides `entry` from the decision about `claim`.
    fn is_hidden(&self, claim: &Claim, entry: &RecordEntry) -> bool {
        let is_other = entry.id != claim.id();
        let is_waiting = is_other && !entry.is_granted();
        match self.bug {
            ModeBug::ReadersOvertakeWriters => is_waiting && claim.mode() == ClaimMode::Shared,
            ModeBug::SkippingClaimsOvertake => is_waiting && claim.queueing() == Queueing::Skip,
            ModeBug::PermitsOvertake => is_waiting && claim.mode().units() > 0,
            ModeBug::WritersJoinReaders => {
                is_other
                    && entry.is_granted()
                    && entry.mode == ClaimMode::Shared
                    && claim.mode() == ClaimMode::Exclusive
                    && !claim.is_conversion()
            }
            ModeBug::UpgradeIgnoresReaders => is_other && claim.is_conversion(),
            ModeBug::UnitsAreNotSummed => {
                is_other
                    && entry.is_granted()
                    && claim.mode().units() > 0
                    && entry.mode.units() > 0
                    && entry.mode.is_compatible(claim.mode())
            }
            _ => false,
        }
    }

    fn acquire(&self, record: &mut LockRecord, claim: &Claim) -> Attempt {
        let (claim, now) = (self.requested(claim, record), self.now());
        let before = record.clone();
        let own = |record: &LockRecord| {
            record.entries().iter().find(|entry| entry.id == claim.id()).cloned()
        };
        if self.has(ModeBug::RepeatedAttemptsMoveBack)
            && let Some(waiting) = own(record).filter(|entry| !entry.is_granted())
        {
            retain(record, |entry| entry.id != waiting.id);
            record.insert(waiting);
        }
        let (hidden, visible): (Vec<_>, Vec<_>) =
            record.entries().iter().cloned().partition(|entry| self.is_hidden(&claim, entry));
        *record = record_of(visible);
        let next_token = || Ok::<_, ()>(self.next_token(claim.token_block()));
        let mut attempt = record.acquire(&claim, now, next_token).unwrap();
        let after = record.entries().to_vec();
        *record = record_of(hidden.into_iter().chain(after).collect());
        let reader_before = before.entries().iter().find(|entry| entry.mode == ClaimMode::Shared);
        let token = match (self.bug, own(&before), &attempt) {
            (ModeBug::ReadersShareTokens, None, Attempt::Granted(_))
                if claim.mode() == ClaimMode::Shared =>
            {
                reader_before.and_then(|entry| entry.token)
            }
            (ModeBug::UpgradeKeepsToken, Some(own), Attempt::Granted(_)) => own.token,
            (ModeBug::RepeatedUpgradeHasNewToken, Some(own), Attempt::Granted(_))
                if claim.is_conversion() && own.mode == claim.mode() =>
            {
                Some(self.next_token(1))
            }
            (ModeBug::DowngradeChangesToken, Some(own), Attempt::Granted(_))
                if claim.is_conversion() && own.mode == ClaimMode::Exclusive =>
            {
                Some(self.next_token(1))
            }
            _ => None,
        };
        let lease_before =
            own(&before).map(|own| Duration::from_micros(own.until.saturating_sub(now)));
        if let (Some(token), Attempt::Granted(grant)) = (token, &mut attempt) {
            *grant = Grant::new(token, grant.lease);
            edit(record, |entry| {
                if entry.id == claim.id() {
                    entry.token = Some(token);
                }
            });
        }
        match &mut attempt {
            Attempt::Gone if self.has(ModeBug::ConversionGrants) => {
                let fresh = Claim::new(claim.key().clone(), claim.lease())
                    .with_id(claim.id())
                    .with_mode(claim.mode());
                return self.acquire(record, &fresh);
            }
            Attempt::Busy(busy) if self.has(ModeBug::UnitsMismatchIsBusy) => {
                busy.units_in_store = None;
            }
            Attempt::Granted(grant) if self.has(ModeBug::ConversionKeepsLease) => {
                grant.lease = lease_before.unwrap_or(grant.lease);
            }
            _ => {}
        }
        self.change_entries(record, now);
        attempt
    }

    /// Applies the bugs that change entries of the record.
    fn change_entries(&self, record: &mut LockRecord, now: u64) {
        let latest = record.until();
        edit(record, |entry| match self.bug {
            ModeBug::PlacesNeverLapse if !entry.is_granted() => entry.until = u64::MAX,
            ModeBug::PlacesLapseAtOnce if !entry.is_granted() => entry.until = now + 1,
            ModeBug::ClaimsExpireTogether => entry.until = latest,
            ModeBug::UpgradeBlocksNone => entry.upgrade_until = 0,
            ModeBug::UpgradeNeverLapses if entry.upgrade_until > 0 => {
                entry.upgrade_until = u64::MAX;
            }
            _ => {}
        });
    }

    /// Wakes the waiters, unless the bug suppresses this wake-up.
    fn wake(&self, record: &LockRecord, by_conversion: bool) {
        let is_missed = self.has(ModeBug::WakesOnlyWhenFree) && !record.is_empty()
            || self.has(ModeBug::ConversionsWakeNone) && by_conversion;
        if !is_missed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    fn with_record<T>(&self, key: &Key, change: impl FnOnce(&mut LockRecord) -> T) -> T {
        change(self.records.lock().unwrap().entry(key.clone()).or_default())
    }

    fn holders_of(&self, key: &Key, record: &LockRecord) -> Vec<Holder> {
        let mut visible = record.clone();
        if self.has(ModeBug::InspectReturnsWaiters) {
            let mut token = *self.last_token.lock().unwrap();
            edit(&mut visible, |entry| {
                token += 1;
                entry.token = entry.token.or_else(|| FencingToken::new(token));
            });
        }
        let mut holders = visible.holders(key, self.now());
        if self.has(ModeBug::InspectReturnsFirst) {
            holders.truncate(1);
        }
        if self.has(ModeBug::InspectForgetsModes) {
            holders.iter_mut().for_each(|holder| holder.mode = ClaimMode::Exclusive);
        }
        holders
    }
}

fn record_of(entries: Vec<RecordEntry>) -> LockRecord {
    let mut record = LockRecord::new();
    entries.into_iter().for_each(|entry| record.insert(entry));
    record
}

fn edit(record: &mut LockRecord, mut change: impl FnMut(&mut RecordEntry)) {
    let mut entries = record.entries().to_vec();
    entries.iter_mut().for_each(&mut change);
    *record = record_of(entries);
}

fn retain(record: &mut LockRecord, is_kept: impl Fn(&RecordEntry) -> bool) {
    *record = record_of(record.entries().iter().filter(|entry| is_kept(entry)).cloned().collect());
}

#[async_trait]
impl LockBackend for ModesBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("tiny", GuaranteeClass::Volatile, Reach::Process)
            .with_fencing()
            .with_shared()
            .with_upgradable()
            .with_permits()
            .with_fair_on_request()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let version = *self.changes.borrow();
        Ok(self.with_record(claim.key(), |record| match self.acquire(record, claim) {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_seen_version(version)),
            attempt => {
                if claim.is_conversion() {
                    self.wake(record, true);
                }
                attempt
            }
        }))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let renew = |claim: &Claim| {
            self.with_record(claim.key(), |record| {
                let renewal = record.renew(claim, self.now());
                if self.has(ModeBug::RenewalExtendsAll) {
                    let latest = record.until();
                    edit(record, |entry| entry.until = latest);
                }
                renewal
            })
        };
        claims.iter().map(|claim| Ok(renew(claim))).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        Ok(self.with_record(claim.key(), |record| {
            let is_waiting =
                record.entries().iter().any(|it| it.id == claim.id() && !it.is_granted());
            if is_waiting && self.has(ModeBug::PlacesOutliveReleases) {
                return Release::NotHeld;
            }
            let entry = record.release(claim);
            if entry.is_some() && self.has(ModeBug::ReleaseEndsAll) {
                *record = LockRecord::new();
            }
            self.wake(record, false);
            LockRecord::release_response(entry.as_ref(), self.now())
        }))
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        drop(self.changes.subscribe().wait_for(|count| *count != busy.seen_version).await);
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.registries.subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

#[async_trait]
impl LockAdmin for ModesBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        Ok(self.with_record(key, |record| self.holders_of(key, record)))
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let records = self.records.lock().unwrap();
        Ok(records.iter().flat_map(|(key, record)| self.holders_of(key, record)).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let released = self.with_record(key, |record| {
            let before = record.clone();
            let released = record.force_release(self.now());
            match self.bug {
                ModeBug::ForcedReleaseEndsFirst => {
                    *record = before.clone();
                    let mut granted = before.entries().iter().filter(|it| it.is_granted());
                    let first = granted.next().map(|entry| entry.id);
                    retain(record, |entry| Some(entry.id) != first);
                }
                ModeBug::ForcedReleaseClearsQueue => *record = LockRecord::new(),
                _ => {}
            }
            self.wake(record, false);
            released
        });
        self.registries.notify(key);
        Ok(released)
    }
}
