//! A small store of exclusive locks that has at most one bug. The module `broken` shows that the
//! suite detects each bug, and that the store passes without a bug.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clock, Harness, Store};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Grant, GuaranteeClass,
    Holder, Invalidations, Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use tokio::sync::watch;
use tokio::time::Instant;

/// The bug of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreBug {
    None,
    ReleaseByOtherClaim,
    ReleaseComparesLease,
    ReleaseIgnoresKey,
    ReleaseIsDelayed,
    ReleaseAlwaysFreed,
    RenewRevives,
    RenewGrants,
    RenewWithoutOwner,
    RenewShortens,
    BatchStopsAtGone,
    BatchOutOfOrder,
    BatchOfOneLease,
    BatchTruncated,
    TokensResetOnRelease,
    TokensPerClient,
    TokensIgnoreBlock,
    NewTokenOnRepeat,
    TokensOfCoarseClock,
    ConstantToken,
    RepeatedAcquireIsBusy,
    RepeatedAcquireCounts,
    RepeatedAcquireShortens,
    CheckThenAct,
    BusyExtendsLease,
    BusyQueuesClaim,
    NeverExpires,
    ExpiresEarly,
    StatesLongerLease,
    WakesAreMissed,
    WakesOwnClientOnly,
    KeysFolded,
    KeysTrimmed,
    KeysTruncated,
    KeysEscapedBadly,
    ListsExpired,
    LabelsLost,
    ForceReleaseHasNoEffect,
    ForceReleaseWakesNone,
    ForceReleaseSendsNoInvalidation,
    NotifiesLastRegistryOnly,
    InspectRenews,
    ConnectionHeldByCaller,
}

#[derive(Debug)]
pub(crate) struct Tiny(pub(crate) StoreBug);

#[async_trait]
impl Harness for Tiny {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        Box::new(TinyStore { bug: self.0, shared: Arc::default() })
    }
}

#[derive(Debug)]
struct TinyStore {
    bug: StoreBug,
    shared: Arc<TinyState>,
}

#[async_trait]
impl Store for TinyStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        Arc::new(TinyBackend {
            bug: self.bug,
            shared: Arc::clone(&self.shared),
            own_releases: watch::Sender::new(0),
            own_last_token: Mutex::new(0),
        })
    }
}

#[derive(Debug)]
struct TinyState {
    rows: Mutex<HashMap<String, TinyRow>>,
    last_token: Mutex<u64>,
    releases: watch::Sender<u64>,
    registries: Mutex<Vec<Invalidations>>,
    connection: tokio::sync::Mutex<()>,
}

impl Default for TinyState {
    fn default() -> Self {
        Self {
            rows: Mutex::default(),
            last_token: Mutex::new(0),
            releases: watch::Sender::new(0),
            registries: Mutex::default(),
            connection: tokio::sync::Mutex::default(),
        }
    }
}

#[derive(Debug, Clone)]
struct TinyRow {
    key: Key,
    id: ClaimId,
    lease: Duration,
    token: u64,
    block: u32,
    until: Instant,
    repeats: u32,
    label: Option<String>,
    /// With [`StoreBug::BusyQueuesClaim`]: the claim that is granted after the release.
    queued: Option<Claim>,
}

impl TinyRow {
    fn is_live(&self) -> bool {
        Instant::now() < self.until
    }

    fn holder(&self) -> Holder {
        Holder::new(self.key.clone())
            .with_label(self.label.clone())
            .with_token(FencingToken::new(self.token))
            .with_times(None, Some(self.until - Instant::now()))
    }
}

#[derive(Debug)]
struct TinyBackend {
    bug: StoreBug,
    shared: Arc<TinyState>,
    own_releases: watch::Sender<u64>,
    own_last_token: Mutex<u64>,
}

impl TinyBackend {
    fn row_name(&self, key: &Key) -> String {
        let key = key.as_str();
        match self.bug {
            StoreBug::KeysFolded => key.to_lowercase(),
            StoreBug::KeysTrimmed => key.trim_end_matches(' ').to_owned(),
            StoreBug::KeysTruncated => key.chars().take(255).collect(),
            StoreBug::KeysEscapedBadly => key.replace('/', "_"),
            _ => key.to_owned(),
        }
    }

    fn next_token(&self, block: u32) -> u64 {
        let mut last = match self.bug {
            StoreBug::TokensPerClient => self.own_last_token.lock().unwrap(),
            _ => self.shared.last_token.lock().unwrap(),
        };
        if self.bug == StoreBug::TokensOfCoarseClock {
            let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            *last = since.as_secs();
            return *last;
        }
        let first = *last + 1;
        let block = if self.bug == StoreBug::TokensIgnoreBlock { 1 } else { u64::from(block) };
        *last = first + block - 1;
        first
    }

    fn expiry(&self, lease: Duration) -> Instant {
        Instant::now()
            + match self.bug {
                StoreBug::NeverExpires => lease + Duration::from_secs(1_000_000),
                StoreBug::ExpiresEarly => lease / 2,
                _ => lease,
            }
    }

    fn new_row(&self, claim: &Claim) -> TinyRow {
        TinyRow {
            key: claim.key().clone(),
            id: claim.id(),
            lease: claim.lease(),
            token: self.next_token(claim.token_block()),
            block: claim.token_block(),
            until: self.expiry(claim.lease()),
            repeats: 0,
            label: claim.label().filter(|_| self.bug != StoreBug::LabelsLost).map(str::to_owned),
            queued: None,
        }
    }

    fn granted(&self, row: &TinyRow) -> Attempt {
        let token = if self.bug == StoreBug::ConstantToken { 1 } else { row.token };
        let token = FencingToken::new(token).unwrap();
        let left = row.until - Instant::now();
        let stated_lease = match self.bug {
            StoreBug::StatesLongerLease => left * 2,
            StoreBug::ExpiresEarly => row.lease,
            StoreBug::NeverExpires => row.lease,
            _ => left,
        };
        Attempt::Granted(Grant::new(token, stated_lease))
    }

    fn wake(&self) {
        self.shared.releases.send_modify(|count| *count += 1);
        self.own_releases.send_modify(|count| *count += 1);
    }

    fn renew_one(&self, rows: &mut HashMap<String, TinyRow>, claim: &Claim) -> Renewal {
        let until = self.expiry(claim.lease());
        match rows.get_mut(&self.row_name(claim.key())) {
            Some(row)
                if (row.id == claim.id() || self.bug == StoreBug::RenewWithoutOwner)
                    && (row.is_live() || self.bug == StoreBug::RenewRevives) =>
            {
                row.until =
                    if self.bug == StoreBug::RenewShortens { until } else { row.until.max(until) };
                let left = row.until - Instant::now();
                Renewal::Renewed(if self.bug == StoreBug::ExpiresEarly { left * 2 } else { left })
            }
            None if self.bug == StoreBug::RenewGrants => {
                rows.insert(self.row_name(claim.key()), self.new_row(claim));
                Renewal::Renewed(claim.lease())
            }
            _ => Renewal::Gone,
        }
    }
}

#[async_trait]
impl LockBackend for TinyBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("tiny", GuaranteeClass::Volatile, Reach::Process)
            .with_fencing()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if self.bug == StoreBug::ConnectionHeldByCaller {
            let _connection = self.shared.connection.lock().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let name = self.row_name(claim.key());
        if self.bug == StoreBug::CheckThenAct {
            let taken = self.shared.rows.lock().unwrap().get(&name).is_some_and(TinyRow::is_live);
            tokio::time::sleep(Duration::from_millis(1)).await;
            if !taken {
                let row = self.new_row(claim);
                self.shared.rows.lock().unwrap().insert(name, row.clone());
                return Ok(self.granted(&row));
            }
        }
        let version = match self.bug {
            StoreBug::WakesOwnClientOnly => *self.own_releases.borrow(),
            _ => *self.shared.releases.borrow(),
        };
        let mut rows = self.shared.rows.lock().unwrap();
        if let Some(row) = rows.get_mut(&name).filter(|row| row.is_live()) {
            if row.id == claim.id() && self.bug != StoreBug::RepeatedAcquireIsBusy {
                row.repeats += 1;
                if self.bug == StoreBug::NewTokenOnRepeat {
                    row.token = self.next_token(row.block);
                }
                if self.bug == StoreBug::RepeatedAcquireShortens {
                    row.until = self.expiry(claim.lease());
                }
                return Ok(self.granted(row));
            }
            if self.bug == StoreBug::BusyExtendsLease {
                row.until = self.expiry(row.lease);
            }
            if self.bug == StoreBug::BusyQueuesClaim {
                row.queued = Some(claim.clone());
            }
            let left = row.until - Instant::now();
            return Ok(Attempt::Busy(
                Busy::new()
                    .with_retry_after(left)
                    .with_holder(row.holder())
                    .with_seen_version(version),
            ));
        }
        let row = self.new_row(claim);
        let answer = self.granted(&row);
        rows.insert(name, row);
        Ok(answer)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut rows = self.shared.rows.lock().unwrap();
        let mut claims = claims.to_vec();
        match self.bug {
            StoreBug::BatchOutOfOrder => claims.sort_by_key(|claim| Reverse(claim.key().clone())),
            StoreBug::BatchTruncated => claims.truncate(99),
            StoreBug::BatchOfOneLease => {
                let lease = claims.first().map(Claim::lease);
                claims = claims.into_iter().map(|claim| claim.with_lease(lease.unwrap())).collect();
            }
            _ => {}
        }
        let mut stopped = false;
        let mut answers = Vec::new();
        for claim in &claims {
            let answer = if stopped { Renewal::Gone } else { self.renew_one(&mut rows, claim) };
            stopped |= self.bug == StoreBug::BatchStopsAtGone && answer == Renewal::Gone;
            answers.push(Ok(answer));
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let freed = {
            let mut rows = self.shared.rows.lock().unwrap();
            let name = match self.bug {
                StoreBug::ReleaseIgnoresKey => {
                    let row = rows.iter().find(|(_, row)| row.id == claim.id());
                    row.map_or_else(|| self.row_name(claim.key()), |(name, _)| name.clone())
                }
                _ => self.row_name(claim.key()),
            };
            let ours = rows.get(&name).is_some_and(|row| {
                (row.id == claim.id() || self.bug == StoreBug::ReleaseByOtherClaim)
                    && (row.lease == claim.lease() || self.bug != StoreBug::ReleaseComparesLease)
            });
            match rows.get_mut(&name).filter(|_| ours) {
                Some(row) if self.bug == StoreBug::RepeatedAcquireCounts && row.repeats > 0 => {
                    row.repeats -= 1;
                    true
                }
                Some(row) if self.bug == StoreBug::ReleaseIsDelayed => {
                    let live = row.is_live();
                    row.until = row.until.min(Instant::now() + Duration::from_millis(50));
                    row.id = ClaimId::from_bits(0);
                    live
                }
                Some(row) => {
                    let live = row.is_live();
                    let queued = row.queued.take();
                    rows.remove(&name);
                    if let Some(queued) = queued {
                        let row = self.new_row(&queued);
                        rows.insert(name, row);
                    }
                    if self.bug == StoreBug::TokensResetOnRelease {
                        *self.shared.last_token.lock().unwrap() = 0;
                    }
                    live
                }
                None => false,
            }
        };
        self.wake();
        Ok(if freed || self.bug == StoreBug::ReleaseAlwaysFreed {
            Release::Freed
        } else {
            Release::NotHeld
        })
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        let mut releases = match self.bug {
            StoreBug::WakesOwnClientOnly => self.own_releases.subscribe(),
            _ => self.shared.releases.subscribe(),
        };
        if self.bug == StoreBug::WakesAreMissed {
            drop(releases.changed().await);
            return;
        }
        drop(releases.wait_for(|count| *count != busy.seen_version).await);
    }

    fn subscribe(&self, invalidations: Invalidations) {
        let mut registries = self.shared.registries.lock().unwrap();
        if self.bug == StoreBug::NotifiesLastRegistryOnly {
            registries.clear();
        }
        registries.push(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

#[async_trait]
impl LockAdmin for TinyBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let mut rows = self.shared.rows.lock().unwrap();
        let Some(row) = rows.get_mut(&self.row_name(key)) else { return Ok(Vec::new()) };
        if !row.is_live() && self.bug != StoreBug::ListsExpired {
            return Ok(Vec::new());
        }
        if self.bug == StoreBug::InspectRenews {
            row.until = Instant::now() + row.lease;
        }
        Ok(vec![row.holder()])
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.shared.rows.lock().unwrap();
        let live = rows.values().filter(|row| row.is_live() || self.bug == StoreBug::ListsExpired);
        Ok(live.map(TinyRow::holder).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        if self.bug == StoreBug::ForceReleaseHasNoEffect {
            return Ok(Release::Freed);
        }
        let row = self.shared.rows.lock().unwrap().remove(&self.row_name(key));
        if self.bug != StoreBug::ForceReleaseWakesNone {
            self.wake();
        }
        if self.bug != StoreBug::ForceReleaseSendsNoInvalidation {
            self.shared.registries.lock().unwrap().iter().for_each(|registry| registry.notify(key));
        }
        Ok(if row.is_some_and(|row| row.is_live()) { Release::Freed } else { Release::NotHeld })
    }
}
