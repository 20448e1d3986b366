//! A small store with one bug at a time, to show that the suite detects it. Without a bug, the
//! store is correct.
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clock, Harness, Store};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Grant, GuaranteeClass,
    Holder, Invalidations, Key, LockBackend, Reach, Release, Renewal,
};
use tokio::sync::watch;
use tokio::time::Instant;

/// The bug of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "each test file uses some")]
pub(crate) enum Bug {
    None,
    ReleaseWithoutOwner,
    ReleaseComparesLease,
    ReleaseIgnoresKey,
    ReleaseFreesLate,
    ReleaseAlwaysFreed,
    RenewResurrects,
    RenewGrants,
    RenewWithoutOwner,
    RenewShortens,
    BatchStopsAtGone,
    BatchOutOfOrder,
    BatchOfOneLease,
    BatchCutOff,
    TokensResetOnRelease,
    TokensPerClient,
    TokensIgnoreBlock,
    TokensAnewOnRepeat,
    TokensOfCoarseClock,
    NoToken,
    AcquireBusyForItself,
    AcquireCountsRepeats,
    AcquireShortensOnRepeat,
    CheckThenAct,
    BusyProlongs,
    BusyKeepsClaim,
    NeverExpires,
    ExpiresEarly,
    TellsLongerLease,
    WakesAreMissed,
    WakesOwnClientOnly,
    KeysFolded,
    KeysTrimmed,
    KeysCut,
    KeysEscapedBadly,
    ListsTheDead,
    ForgetsLabels,
    ForcesNothing,
    ForcesWithoutWaking,
    ForcesInSilence,
    TellsLastRegistryOnly,
    InspectRenews,
    ConnectionHeldByCaller,
}

#[derive(Debug)]
pub(crate) struct Tiny(pub(crate) Bug);

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
    bug: Bug,
    shared: Arc<Shared>,
}

#[async_trait]
impl Store for TinyStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        Arc::new(TinyBackend {
            bug: self.bug,
            shared: Arc::clone(&self.shared),
            own: watch::Sender::new(0),
            own_token: Mutex::new(0),
        })
    }
}

#[derive(Debug)]
struct Shared {
    rows: Mutex<HashMap<String, Row>>,
    last_token: Mutex<u64>,
    releases: watch::Sender<u64>,
    registries: Mutex<Vec<Invalidations>>,
    connection: tokio::sync::Mutex<()>,
}

impl Default for Shared {
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
struct Row {
    key: Key,
    id: ClaimId,
    lease: Duration,
    token: u64,
    block: u32,
    until: Instant,
    repeats: u32,
    label: Option<String>,
    next: Option<Claim>,
}

impl Row {
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
    bug: Bug,
    shared: Arc<Shared>,
    own: watch::Sender<u64>,
    own_token: Mutex<u64>,
}

impl TinyBackend {
    fn name(&self, key: &Key) -> String {
        let key = key.as_str();
        match self.bug {
            Bug::KeysFolded => key.to_lowercase(),
            Bug::KeysTrimmed => key.trim_end_matches(' ').to_owned(),
            Bug::KeysCut => key.chars().take(255).collect(),
            Bug::KeysEscapedBadly => key.replace('/', "_"),
            _ => key.to_owned(),
        }
    }

    fn next_token(&self, block: u32) -> u64 {
        let mut last = match self.bug {
            Bug::TokensPerClient => self.own_token.lock().unwrap(),
            _ => self.shared.last_token.lock().unwrap(),
        };
        if self.bug == Bug::TokensOfCoarseClock {
            let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            *last = since.as_secs();
            return *last;
        }
        let first = *last + 1;
        let block = if self.bug == Bug::TokensIgnoreBlock { 1 } else { u64::from(block) };
        *last = first + block - 1;
        first
    }

    fn lasts(&self, lease: Duration) -> Instant {
        Instant::now()
            + match self.bug {
                Bug::NeverExpires => lease + Duration::from_secs(1_000_000),
                Bug::ExpiresEarly => lease / 2,
                _ => lease,
            }
    }

    fn grant(&self, claim: &Claim) -> Row {
        Row {
            key: claim.key().clone(),
            id: claim.id(),
            lease: claim.lease(),
            token: self.next_token(claim.token_block()),
            block: claim.token_block(),
            until: self.lasts(claim.lease()),
            repeats: 0,
            label: claim.label().filter(|_| self.bug != Bug::ForgetsLabels).map(str::to_owned),
            next: None,
        }
    }

    fn granted(&self, row: &Row) -> Attempt {
        let token = FencingToken::new(row.token).filter(|_| self.bug != Bug::NoToken);
        let left = row.until - Instant::now();
        let told = match self.bug {
            Bug::TellsLongerLease => left * 2,
            Bug::ExpiresEarly => row.lease,
            Bug::NeverExpires => row.lease,
            _ => left,
        };
        Attempt::Granted(Grant::new(token, told))
    }

    fn wake(&self) {
        self.shared.releases.send_modify(|count| *count += 1);
        self.own.send_modify(|count| *count += 1);
    }

    fn renew_one(&self, rows: &mut HashMap<String, Row>, claim: &Claim) -> Renewal {
        let until = self.lasts(claim.lease());
        match rows.get_mut(&self.name(claim.key())) {
            Some(row)
                if (row.id == claim.id() || self.bug == Bug::RenewWithoutOwner)
                    && (row.is_live() || self.bug == Bug::RenewResurrects) =>
            {
                row.until =
                    if self.bug == Bug::RenewShortens { until } else { row.until.max(until) };
                let left = row.until - Instant::now();
                Renewal::Renewed(if self.bug == Bug::ExpiresEarly { left * 2 } else { left })
            }
            None if self.bug == Bug::RenewGrants => {
                rows.insert(self.name(claim.key()), self.grant(claim));
                Renewal::Renewed(claim.lease())
            }
            _ => Renewal::Gone,
        }
    }
}

#[async_trait]
impl LockBackend for TinyBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("tiny", GuaranteeClass::B, Reach::Process)
            .with_fencing()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if self.bug == Bug::ConnectionHeldByCaller {
            let _connection = self.shared.connection.lock().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let name = self.name(claim.key());
        if self.bug == Bug::CheckThenAct {
            let taken = self.shared.rows.lock().unwrap().get(&name).is_some_and(Row::is_live);
            tokio::time::sleep(Duration::from_millis(1)).await;
            if !taken {
                let row = self.grant(claim);
                self.shared.rows.lock().unwrap().insert(name, row.clone());
                return Ok(self.granted(&row));
            }
        }
        let mark = match self.bug {
            Bug::WakesOwnClientOnly => *self.own.borrow(),
            _ => *self.shared.releases.borrow(),
        };
        let mut rows = self.shared.rows.lock().unwrap();
        if let Some(row) = rows.get_mut(&name).filter(|row| row.is_live()) {
            if row.id == claim.id() && self.bug != Bug::AcquireBusyForItself {
                row.repeats += 1;
                if self.bug == Bug::TokensAnewOnRepeat {
                    row.token = self.next_token(row.block);
                }
                if self.bug == Bug::AcquireShortensOnRepeat {
                    row.until = self.lasts(claim.lease());
                }
                return Ok(self.granted(row));
            }
            if self.bug == Bug::BusyProlongs {
                row.until = self.lasts(row.lease);
            }
            if self.bug == Bug::BusyKeepsClaim {
                row.next = Some(claim.clone());
            }
            let left = row.until - Instant::now();
            return Ok(Attempt::Busy(
                Busy::new().with_retry_after(left).with_holder(row.holder()).with_mark(mark),
            ));
        }
        let row = self.grant(claim);
        let answer = self.granted(&row);
        rows.insert(name, row);
        Ok(answer)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut rows = self.shared.rows.lock().unwrap();
        let mut claims = claims.to_vec();
        match self.bug {
            Bug::BatchOutOfOrder => claims.sort_by_key(|claim| Reverse(claim.key().clone())),
            Bug::BatchCutOff => claims.truncate(999),
            Bug::BatchOfOneLease => {
                let lease = claims.first().map(Claim::lease);
                claims = claims.into_iter().map(|claim| claim.with_lease(lease.unwrap())).collect();
            }
            _ => {}
        }
        let mut stopped = false;
        let mut answers = Vec::new();
        for claim in &claims {
            let answer = if stopped { Renewal::Gone } else { self.renew_one(&mut rows, claim) };
            stopped |= self.bug == Bug::BatchStopsAtGone && answer == Renewal::Gone;
            answers.push(Ok(answer));
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let freed = {
            let mut rows = self.shared.rows.lock().unwrap();
            let name = match self.bug {
                Bug::ReleaseIgnoresKey => {
                    let of_id = rows.iter().find(|(_, row)| row.id == claim.id());
                    of_id.map_or_else(|| self.name(claim.key()), |(name, _)| name.clone())
                }
                _ => self.name(claim.key()),
            };
            let ours = rows.get(&name).is_some_and(|row| {
                (row.id == claim.id() || self.bug == Bug::ReleaseWithoutOwner)
                    && (row.lease == claim.lease() || self.bug != Bug::ReleaseComparesLease)
            });
            match rows.get_mut(&name).filter(|_| ours) {
                Some(row) if self.bug == Bug::AcquireCountsRepeats && row.repeats > 0 => {
                    row.repeats -= 1;
                    true
                }
                Some(row) if self.bug == Bug::ReleaseFreesLate => {
                    let live = row.is_live();
                    row.until = row.until.min(Instant::now() + Duration::from_millis(50));
                    row.id = ClaimId::from_bits(0);
                    live
                }
                Some(row) => {
                    let live = row.is_live();
                    let next = row.next.take();
                    rows.remove(&name);
                    if let Some(next) = next {
                        let row = self.grant(&next);
                        rows.insert(name, row);
                    }
                    if self.bug == Bug::TokensResetOnRelease {
                        *self.shared.last_token.lock().unwrap() = 0;
                    }
                    live
                }
                None => false,
            }
        };
        self.wake();
        Ok(if freed || self.bug == Bug::ReleaseAlwaysFreed {
            Release::Freed
        } else {
            Release::NotHeld
        })
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        let mut releases = match self.bug {
            Bug::WakesOwnClientOnly => self.own.subscribe(),
            _ => self.shared.releases.subscribe(),
        };
        if self.bug == Bug::WakesAreMissed {
            drop(releases.changed().await);
            return;
        }
        drop(releases.wait_for(|count| *count != busy.mark).await);
    }

    fn subscribe_invalidations(&self, hints: Invalidations) {
        let mut registries = self.shared.registries.lock().unwrap();
        if self.bug == Bug::TellsLastRegistryOnly {
            registries.clear();
        }
        registries.push(hints);
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let mut rows = self.shared.rows.lock().unwrap();
        let Some(row) = rows.get_mut(&self.name(key)) else { return Ok(None) };
        if !row.is_live() && self.bug != Bug::ListsTheDead {
            return Ok(None);
        }
        if self.bug == Bug::InspectRenews {
            row.until = Instant::now() + row.lease;
        }
        Ok(Some(row.holder()))
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.shared.rows.lock().unwrap();
        let live = rows.values().filter(|row| row.is_live() || self.bug == Bug::ListsTheDead);
        Ok(live.map(Row::holder).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        if self.bug == Bug::ForcesNothing {
            return Ok(Release::Freed);
        }
        let row = self.shared.rows.lock().unwrap().remove(&self.name(key));
        if self.bug != Bug::ForcesWithoutWaking {
            self.wake();
        }
        if self.bug != Bug::ForcesInSilence {
            self.shared.registries.lock().unwrap().iter().for_each(|hints| hints.notify(key));
        }
        Ok(if row.is_some_and(|row| row.is_live()) { Release::Freed } else { Release::NotHeld })
    }
}
