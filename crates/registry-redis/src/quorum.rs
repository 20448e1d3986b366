//! A quorum of independent masters. A claim holds the lock if more than half of the masters grant
//! it.
//!
//! The algorithm is Redlock (redis.io, "Distributed Locks with Redis"). The engine measures the
//! validity time on a monotonic clock. In addition, a grant has a fencing token. If a majority
//! already reports the same token from an earlier round, the quorum chooses this token. Otherwise
//! it chooses the largest token that the granting masters returned. The quorum writes the chosen
//! token to a majority that still has the claim, and only then reports the grant. Any later grant
//! shares a master with that majority, so its token is larger. The exception is a shared master
//! that lost its data and whose clock is behind.
//!
//! Each request goes to all masters concurrently, and the responses of a majority decide. If more
//! responses may change the decision, the quorum awaits them for a grace period, which the
//! constants at the end of this file limit. Requests to the remaining masters continue in the
//! background. If such a request is granted late and the claim already holds the lock, the grant
//! counts in later renewals. If the claim does not hold the lock, the quorum withdraws the grant.

use std::cmp::Ordering as Order;
use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{
    BackendError, BackendErrorKind, Claim, ClaimId, FencingToken, Finding, Holder, Key, Release,
    Renewal,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, sleep};

use crate::config::{RedisConfig, ServerAddress};
use crate::invalidations::InvalidationForwarder;
use crate::listener::last_event_seq;
use crate::store::{AcquireResult, ClaimHolder, CorruptRecord, RedisStore};

pub(crate) struct Quorum {
    masters: Arc<[Arc<QuorumMaster>]>,
    claim_mutexes: Mutex<HashMap<ClaimId, Arc<tokio::sync::Mutex<()>>>>,
    pending_rounds: PendingRounds,
}

struct QuorumMaster {
    store: RedisStore,
    /// The position of the address in the configuration.
    index: usize,
    voters: Arc<Voters>,
    /// See [`with_restart_guard`](RedisConfig::with_restart_guard).
    min_process_age: Duration,
    retry_permits: Semaphore,
    /// The `run_id` of the first server process that responded at this address. Empty if the user
    /// may not read the `run_id`.
    first_run_id: OnceLock<String>,
    /// The process that responded to the last attempt. `None` while `min_process_age` is zero.
    observed_process: Mutex<Option<ObservedProcess>>,
}

/// The address that has the vote of each server, by the server's `run_id`: the first address that
/// led to the server.
#[derive(Debug, Default)]
struct Voters(Mutex<HashMap<String, Voter>>);

#[derive(Debug)]
struct Voter {
    index: usize,
    name: String,
}

/// A server process and the time of its first response.
struct ObservedProcess {
    run_id: String,
    since: Instant,
    /// Until this time, attempts skip the check of the process age. The next check stores the age
    /// on the server again. `None` before the first successful check of this client.
    verified_until: Option<Instant>,
}

impl Quorum {
    /// Connects to a majority of the masters.
    pub(crate) async fn open(
        addresses: &[ServerAddress],
        config: &RedisConfig,
        invalidations: &InvalidationForwarder,
    ) -> Result<Self, BackendError> {
        let voters = Arc::<Voters>::default();
        let master = |(index, address)| {
            let store = RedisStore::for_quorum_master(address, config, invalidations)?;
            Ok(Arc::new(QuorumMaster {
                store,
                index,
                voters: Arc::clone(&voters),
                min_process_age: config.min_process_age,
                retry_permits: Semaphore::new(CONCURRENT_RETRIES_MAX),
                first_run_id: OnceLock::new(),
                observed_process: Mutex::default(),
            }))
        };
        let masters =
            addresses.iter().enumerate().map(master).collect::<Result<_, BackendError>>()?;
        let quorum =
            Self { masters, claim_mutexes: Mutex::default(), pending_rounds: Arc::default() };
        let connecting =
            quorum.send_to_all(|_, master| async move { master.store.connections.connect().await });
        quorum.await_majority(connecting).await.map_err(BackendError::as_refused)?;
        quorum.check_no_duplicates().await?;
        Ok(quorum)
    }

    /// Returns an error if two addresses lead to the same server, because its vote would count
    /// twice. An unreachable master is checked before its first vote.
    async fn check_no_duplicates(&self) -> Result<(), BackendError> {
        let mut requests =
            self.send_to_all(|_, master| async move { master.ensure_sole_voter().await });
        let mut responded = 0;
        while requests.is_in_grace_period || responded < self.majority() {
            match requests.next().await {
                ResponseEvent::Response(Ok(())) => responded += 1,
                ResponseEvent::Response(Err(error))
                    if error.kind() == BackendErrorKind::Misconfigured =>
                {
                    return Err(error);
                }
                ResponseEvent::Response(Err(_)) | ResponseEvent::GracePeriodOver => {}
                ResponseEvent::AllReceived => break,
            }
        }
        Ok(())
    }

    fn majority(&self) -> usize {
        self.masters.len() / 2 + 1
    }

    fn claim_mutex(&self, claim: &Claim) -> ClaimMutexRef<'_> {
        let mutex = Arc::clone(self.claim_mutexes().entry(claim.id()).or_default());
        ClaimMutexRef { quorum: self, id: claim.id(), mutex: Some(mutex) }
    }

    fn claim_mutexes(&self) -> MutexGuard<'_, HashMap<ClaimId, Arc<tokio::sync::Mutex<()>>>> {
        self.claim_mutexes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of masters that may fail without preventing a majority.
    fn failures_max(&self) -> usize {
        self.masters.len() - self.majority()
    }

    /// Sends a request to all masters concurrently. Each request runs to completion, even if its
    /// caller no longer waits for the response.
    fn send_to_all<T, F>(
        &self,
        request: impl Fn(usize, Arc<QuorumMaster>) -> F,
    ) -> PendingResponses<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let masters = self.masters.iter().enumerate();
        let calls = masters.map(|(index, master)| tokio::spawn(request(index, Arc::clone(master))));
        PendingResponses {
            calls: calls.collect(),
            started_at: Instant::now(),
            grace_period: Box::pin(sleep(RESPONSE_GRACE_PERIOD_MAX)),
            is_in_grace_period: true,
        }
    }

    /// Waits until a majority has succeeded or can no longer succeed.
    async fn await_majority<T>(
        &self,
        mut requests: PendingResponses<T>,
    ) -> Result<Vec<T>, BackendError> {
        let mut succeeded = Vec::new();
        let mut first_error = None;
        let mut failed = 0;
        while failed <= self.failures_max() {
            match requests.next().await {
                ResponseEvent::Response(Ok(response)) => succeeded.push(response),
                ResponseEvent::Response(Err(error)) => {
                    failed += 1;
                    first_error.get_or_insert(error);
                }
                ResponseEvent::GracePeriodOver => {}
                ResponseEvent::AllReceived => break,
            }
            if succeeded.len() >= self.majority() {
                return Ok(succeeded);
            }
        }
        Err(self.no_majority_error(first_error))
    }

    /// Returns the outcome of a round in which too few masters granted the claim.
    fn outcome_without_majority(
        &self,
        granted: usize,
        first_error: Option<BackendError>,
        busy: Vec<(Option<Duration>, Holder)>,
        event_seq: u64,
    ) -> Result<RoundOutcome, BackendError> {
        // If too few masters respond, this is an error and not `Busy`: the lock may be free on the
        // others.
        if granted + busy.len() < self.majority() || busy.is_empty() {
            return Err(self.no_majority_error(first_error));
        }
        Ok(busy_outcome(busy, event_seq))
    }

    /// Returns the error for a missing majority. Its source is `example`, the error of one master.
    fn no_majority_error(&self, example: Option<BackendError>) -> BackendError {
        let (all, majority) = (self.masters.len(), self.majority());
        match example {
            Some(example) => {
                let cause = example.message();
                let message = format!("{cause}; {majority} of {all} masters are required");
                BackendError::new(example.kind(), message).with_source(example)
            }
            None => BackendError::transient(format!(
                "redis: too few masters agree; {majority} of {all} are required, so check that they respond"
            )),
        }
    }

    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<AcquireResult, BackendError> {
        // Attempts of one claim run one after the other, because concurrent attempts could
        // choose different tokens.
        let claim_mutex = self.claim_mutex(claim);
        let _guard = claim_mutex.lock().await;
        let started_at = Instant::now();
        let mut split_result = None;
        for round in 0..ROUNDS_MAX {
            // An earlier round has found a holder. After `ROUNDS_TIMEOUT`, the attempt reports that
            // holder instead of starting another round, and the engine decides when to retry.
            if split_result.is_some() && started_at.elapsed() > ROUNDS_TIMEOUT {
                break;
            }
            if round > 0 {
                sleep(jitter()).await;
            }
            let mut round = QuorumRound::new(self, claim);
            match round.run().await? {
                RoundOutcome::Granted(token, lease) => {
                    round.keeps_grants = true;
                    return Ok(AcquireResult::Granted { token, lease, is_token_written: true });
                }
                RoundOutcome::Busy(busy) => return Ok(busy),
                RoundOutcome::Split(busy) => split_result = busy.or(split_result),
            }
        }
        split_result.map_or_else(|| Err(self.no_majority_error(None)), Ok)
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let claims: Arc<[Claim]> = claims.into();
        let mut requests = self.send_to_all(|_, master| {
            let claims = Arc::clone(&claims);
            async move { Ok(master.store.renew(&claims).await) }
        });
        let mut votes: Vec<RenewalVotes> = claims.iter().map(|_| RenewalVotes::default()).collect();
        let mut has_final_grace_period = false;
        loop {
            let responses = match requests.next().await {
                ResponseEvent::Response(responses) => responses,
                ResponseEvent::GracePeriodOver if has_final_grace_period => break,
                ResponseEvent::GracePeriodOver => continue,
                ResponseEvent::AllReceived => break,
            };
            let responses = responses.unwrap_or_else(|error| vec![Err(error); claims.len()]);
            for (votes, response) in votes.iter_mut().zip(responses) {
                votes.add(response);
            }
            let decided = votes.iter().filter(|votes| votes.result(self).is_some()).count();
            if decided == claims.len() {
                break;
            }
            if !has_final_grace_period && decided > 0 {
                // A claim that depends on an unresponsive master must not delay the other claims
                // until their leases end.
                has_final_grace_period = true;
                let lease = claims.iter().map(Claim::lease).min().unwrap_or_default();
                requests.set_grace_period(RENEWAL_GRACE_PERIOD_MAX.min(lease / 10));
            }
        }
        let undecided = || Err(self.no_majority_error(None));
        votes.into_iter().map(|votes| votes.result(self).unwrap_or_else(undecided)).collect()
    }

    /// Releases the claim on all masters. Returns once the responses of a majority decide, see
    /// `await_release`. Background tasks retry the release on the remaining masters until the lease
    /// ends, at most [`CONCURRENT_RETRIES_MAX`] at a time for each master.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let round = self.pending_rounds().get(&claim.id()).and_then(Weak::upgrade);
        if let Some(round) = &round {
            round.is_cancelled.store(true, Ordering::Release);
        }
        let requests = self.send_to_all(|index, master| {
            let (claim, round) = (claim.clone(), round.clone());
            async move {
                let may_still_grant = || {
                    round.as_ref().is_some_and(|round| round.master_result(index) == RESULT_UNKNOWN)
                };
                master.release_with_retries(&claim, may_still_grant).await
            }
        });
        self.await_release(requests).await
    }

    fn pending_rounds(&self) -> MutexGuard<'_, HashMap<ClaimId, Weak<RoundState>>> {
        self.pending_rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let requests = self.send_to_all(|_, master| {
            let key = key.clone();
            async move { master.store.force_release(&key).await }
        });
        self.await_release(requests).await
    }

    /// Returns `Freed` if a majority of the masters had the lock. Also returns `Freed` if at least
    /// one master had the lock and, with the unresponsive masters, a majority may have had it. If
    /// all masters respond in time, at most one of several concurrent releases of one lock returns
    /// `Freed`.
    async fn await_release(
        &self,
        mut requests: PendingResponses<Release>,
    ) -> Result<Release, BackendError> {
        let (mut freed, mut not_held, mut failed) = (0, 0, 0);
        let mut first_error = None;
        while requests.is_in_grace_period || freed + not_held < self.majority() {
            match requests.next().await {
                ResponseEvent::Response(Ok(Release::Freed)) => freed += 1,
                ResponseEvent::Response(Ok(Release::NotHeld)) => not_held += 1,
                ResponseEvent::Response(Err(error)) => {
                    failed += 1;
                    first_error.get_or_insert(error);
                }
                ResponseEvent::GracePeriodOver => {}
                ResponseEvent::AllReceived => break,
            }
            if freed >= self.majority() {
                return Ok(Release::Freed);
            }
            if not_held > self.failures_max() {
                return Ok(Release::NotHeld);
            }
            if failed > self.failures_max() {
                return Err(self.no_majority_error(first_error));
            }
        }
        if freed + not_held < self.majority() {
            return Err(self.no_majority_error(first_error));
        }
        // The unresponsive masters may have had the claim, and the engine would report `NotHeld` as
        // a loss.
        Ok(if freed > 0 { Release::Freed } else { Release::NotHeld })
    }

    /// Waits until a majority of the masters has reported a possible release of the key. Only
    /// reports after the event with this sequence number count. With [`NEVER_WOKEN`], this function
    /// never returns.
    pub(crate) async fn wait(&self, key: &Key, event_seq: u64) {
        let waits = self.masters.iter().map(|master| Box::pin(master.store.wait(key, event_seq)));
        let mut waits: Vec<_> = waits.collect();
        for _ in 0..self.majority() {
            let ((), _, pending) = select_all(waits).await;
            waits = pending;
        }
        if event_seq == NEVER_WOKEN {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether the client is subscribed to the key's release messages on all masters.
    /// Subscriptions on a majority are not sufficient: a wait needs reports from a majority, and a
    /// release may reach only some of the subscribed masters.
    pub(crate) fn is_subscribed(&self, key: &Key) -> bool {
        self.masters.iter().all(|master| master.store.is_subscribed(key))
    }

    pub(crate) async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let requests = self.send_to_all(|_, master| {
            let key = key.clone();
            async move { master.store.inspect_keys(&[key], CorruptRecord::IsError).await }
        });
        Ok(self.agreed_holders(requests).await?.pop())
    }

    pub(crate) async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.agreed_holders(self.send_to_all(|_, master| async move { master.store.list().await }))
            .await
    }

    /// Returns the holders that a majority of the masters reports. An unresponsive master counts as
    /// if it had reported every holder.
    async fn agreed_holders(
        &self,
        mut requests: PendingResponses<Vec<ClaimHolder>>,
    ) -> Result<Vec<Holder>, BackendError> {
        let mut claims: HashMap<(Key, Vec<u8>), Vec<Holder>> = HashMap::new();
        let mut responded = 0;
        let mut first_error = None;
        // After a majority has responded, further responses only make the result more precise.
        while requests.is_in_grace_period || responded < self.majority() {
            match requests.next().await {
                ResponseEvent::Response(Ok(holders)) => {
                    responded += 1;
                    for ClaimHolder { claim, holder } in holders {
                        claims.entry((holder.key.clone(), claim)).or_default().push(holder);
                    }
                }
                ResponseEvent::Response(Err(error)) => _ = first_error.get_or_insert(error),
                ResponseEvent::GracePeriodOver => {}
                ResponseEvent::AllReceived => break,
            }
        }
        if responded < self.majority() {
            return Err(self.no_majority_error(first_error));
        }
        // Each unresponsive master may have the claim.
        let missing = self.masters.len() - responded;
        let agreed = claims.into_values().filter(|held| held.len() + missing >= self.majority());
        Ok(agreed.filter_map(merge_holders).collect())
    }

    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let requests = self.masters.iter().map(|master| master.store.diagnose());
        let mut findings = Vec::new();
        let mut unreachable = Vec::new();
        for diagnosis in join_all(requests).await {
            match diagnosis {
                Ok(found) => findings.extend(found),
                Err(error) => unreachable.push(error),
            }
        }
        if unreachable.len() > self.failures_max()
            && let Some(example) = unreachable.pop()
        {
            return Err(self.no_majority_error(Some(example)));
        }
        findings.extend(unreachable.iter().map(|error| {
            Finding::warning(format!("a master of the quorum cannot be checked: {error}"))
        }));
        findings.extend(self.diagnose_duplicates().await);
        findings.extend(self.diagnose_clock_skew().await);
        Ok(findings)
    }

    /// Returns a finding for each address that leads to the same server as an earlier address.
    async fn diagnose_duplicates(&self) -> Vec<Finding> {
        let ids = join_all(self.masters.iter().map(|master| master.store.fetch_run_id())).await;
        let known: Vec<(String, String)> = (self.masters.iter().zip(ids))
            .filter_map(|(master, id)| Some((master.name(), id.ok()?)))
            .collect();
        let mut found = Vec::new();
        for (index, (name, id)) in known.iter().enumerate() {
            let earlier = known.iter().take(index).find(|(_, other)| other == id);
            found.extend(
                earlier.map(|(other, _)| Finding::warning(same_server_message(other, name, id))),
            );
        }
        found
    }

    /// Returns a finding if the masters' clocks differ too much.
    async fn diagnose_clock_skew(&self) -> Option<Finding> {
        let measurements = self.masters.iter().map(|master| master.store.measure_clock_offset());
        let offsets = join_all(measurements).await;
        let offsets: Vec<i64> = offsets.into_iter().filter_map(Result::ok).collect();
        let skew = offsets.iter().max()?.saturating_sub(*offsets.iter().min()?);
        (skew > CLOCK_SKEW_MAX_US).then(|| {
            Finding::warning(format!(
                "the masters' clocks are {} ms apart; synchronise the clocks; otherwise tokens may stop growing after a master loses its data",
                skew / 1_000
            ))
        })
    }

    pub(crate) async fn close(&self) {
        join_all(self.masters.iter().map(|master| master.store.connections.close())).await;
    }
}

/// Returns the error of a release that exceeds the limit of concurrent retries. Its source is the
/// master's `last_error`, if any.
fn retry_limit_error(last_error: Option<BackendError>) -> BackendError {
    let message = format!(
        "redis: this release is not retried, because the limit of {CONCURRENT_RETRIES_MAX} concurrent retries at this master is reached; the grant ends with its lease; \
         check that the master responds"
    );
    match last_error {
        Some(error) => BackendError::transient(message).with_source(error),
        None => BackendError::transient(message),
    }
}

fn same_server_message(first: &str, second: &str, id: &str) -> String {
    format!(
        "{first} and {second} are the same server (run_id {id}), whose vote would count twice; name each master of a quorum once"
    )
}

impl QuorumMaster {
    fn name(&self) -> String {
        self.store.connections.known_node(0).map(|node| node.name().to_owned()).unwrap_or_default()
    }

    /// Fetches and stores the `run_id` of the server, unless an earlier call has stored it. Returns
    /// an error if another address led to the same server before. Only that address has a vote.
    async fn ensure_sole_voter(&self) -> Result<(), BackendError> {
        if self.first_run_id.get().is_none() {
            let id = match self.store.fetch_run_id().await {
                Ok(id) => id,
                // The server responds, but the user may not read the `run_id`.
                Err(error) if error.kind() != BackendErrorKind::Transient => String::new(),
                Err(error) => return Err(error),
            };
            self.first_run_id.get_or_init(|| id);
        }
        let Some(id) = self.first_run_id.get().filter(|id| !id.is_empty()) else { return Ok(()) };
        let mut voters = self.voters.0.lock().unwrap_or_else(PoisonError::into_inner);
        let voter = voters
            .entry(id.clone())
            .or_insert_with(|| Voter { index: self.index, name: self.name() });
        let message = match voter.index.cmp(&self.index) {
            Order::Equal => return Ok(()),
            Order::Less => same_server_message(&voter.name, &self.name(), id),
            Order::Greater => same_server_message(&self.name(), &voter.name, id),
        };
        Err(BackendError::new(BackendErrorKind::Misconfigured, format!("redis: {message}"))
            .as_refused())
    }

    /// Returns whether a client has observed the server process for at least `min_process_age`:
    /// this client, or another client according to the age that is stored on the server. If so,
    /// stores the age again, unless this client has stored it recently.
    ///
    /// The uptime that a server reports depends on its wall clock, which an administrator can
    /// change. Clients therefore measure the age on monotonic clocks, from the process's first
    /// response. A client that has measured `min_process_age` stores this age on the server, for
    /// clients that start later.
    async fn verify_process_age(&self) -> Result<bool, BackendError> {
        let run_id = self.store.fetch_run_id().await?;
        let (age, is_verified) = {
            let mut observed = self.observed_process();
            let now = Instant::now();
            let known = observed.take().filter(|process| process.run_id == run_id);
            let new_process =
                || ObservedProcess { run_id: run_id.clone(), since: now, verified_until: None };
            let process = observed.insert(known.unwrap_or_else(new_process));
            (
                now.duration_since(process.since),
                process.verified_until.is_some_and(|until| now < until),
            )
        };
        if is_verified {
            return Ok(true);
        }
        // A process that has reached `min_process_age` once stays old enough.
        let is_old_enough = age >= self.min_process_age || self.had_min_process_age(&run_id);
        let stored_age = match self.store.load_process_age(&run_id).await {
            Err(error) if !is_old_enough => return Err(error),
            loaded => loaded.unwrap_or_default(),
        };
        if !is_old_enough && stored_age < self.min_process_age {
            return Ok(false);
        }
        // Other clients, which may require a larger age, read the stored age. If this write fails,
        // they measure the age themselves.
        let age = age.max(stored_age).max(self.min_process_age);
        let _ = self.store.save_process_age(&run_id, age).await;
        if let Some(process) =
            self.observed_process().as_mut().filter(|process| process.run_id == run_id)
        {
            // The stored age expires after `token_memory`. The client stores it again after half
            // that time.
            process.verified_until = Some(Instant::now() + self.store.token_memory / 2);
        }
        Ok(true)
    }

    fn had_min_process_age(&self, run_id: &str) -> bool {
        self.observed_process()
            .as_ref()
            .is_some_and(|process| process.run_id == run_id && process.verified_until.is_some())
    }

    fn observed_process(&self) -> MutexGuard<'_, Option<ObservedProcess>> {
        self.observed_process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn try_acquire(
        &self,
        claim: &Claim,
        round_state: &RoundState,
    ) -> Result<AcquireResult, BackendError> {
        if !self.min_process_age.is_zero() && !self.verify_process_age().await? {
            return Err(BackendError::new(
                BackendErrorKind::Transient,
                format!(
                    "redis: no client has observed this server process for {:?} (`restart_guard`) yet, so it may have \
                     restarted without its data; this master is used once it has been observed for that long",
                    self.min_process_age
                ),
            )
            .with_address(self.name())
            .as_refused());
        }
        if round_state.is_cancelled.load(Ordering::Acquire) {
            return Err(
                BackendError::transient("redis: the attempt was cancelled; retry").as_refused()
            );
        }
        self.store.try_acquire_on_master(claim, &round_state.round_id).await
    }

    /// Releases the claim. Retries after an error until the lease ends, unless
    /// [`CONCURRENT_RETRIES_MAX`] other releases and withdrawals retry at this master. If
    /// `may_still_grant` returns true, also retries after `NotHeld`, because a late request may
    /// still acquire the lock.
    async fn release_with_retries(
        &self,
        claim: &Claim,
        may_still_grant: impl Fn() -> bool,
    ) -> Result<Release, BackendError> {
        let until = Instant::now() + claim.lease();
        let mut pause = RETRY_PAUSE_MIN;
        let mut retry_permit = None;
        loop {
            let is_grant_possible = may_still_grant();
            let response = self.store.release(claim).await.map(|released| released.outcome);
            let must_retry = match &response {
                Ok(outcome) => *outcome == Release::NotHeld && is_grant_possible,
                Err(_) => true,
            };
            if !must_retry || Instant::now() + pause >= until {
                return response;
            }
            if retry_permit.is_none() {
                let Ok(permit) = self.retry_permits.try_acquire() else {
                    return Err(retry_limit_error(response.err()).with_address(self.name()));
                };
                retry_permit = Some(permit);
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Withdraws this round's grant. Retries after an error until the lease ends, unless
    /// [`CONCURRENT_RETRIES_MAX`] other releases and withdrawals retry at this master. If the
    /// round's result at this master is unknown, also retries after `NotHeld`, because the master
    /// may grant the claim later.
    async fn withdraw(&self, claim: &Claim, round_state: &RoundState, index: usize) {
        let until = Instant::now() + claim.lease();
        let mut pause = RETRY_PAUSE_MIN;
        let mut retry_permit = None;
        loop {
            // The result is read before the withdrawal is sent, because an acquisition without a
            // response may still arrive after the withdrawal.
            let master_result = round_state.master_result(index);
            if master_result == RESULT_NOT_GRANTED {
                return;
            }
            match self.store.withdraw(claim, &round_state.round_id).await {
                Ok(Release::Freed) => return,
                Ok(Release::NotHeld) if master_result == RESULT_GRANTED => return,
                _ if Instant::now() + pause >= until => return,
                _ => {}
            }
            if retry_permit.is_none() {
                let Ok(permit) = self.retry_permits.try_acquire() else { return };
                retry_permit = Some(permit);
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }
}

/// One round of an attempt. Unless `keeps_grants` is set, the drop withdraws this round's grants
/// from all masters. Grants of a later round of this claim stay: the claim may hold the lock
/// through them.
struct QuorumRound<'a> {
    quorum: &'a Quorum,
    claim: &'a Claim,
    round_state: Arc<RoundState>,
    keeps_grants: bool,
}

/// The rounds for which some masters have not responded yet, by claim.
type PendingRounds = Arc<Mutex<HashMap<ClaimId, Weak<RoundState>>>>;

/// The state that all requests of one round share. It exists until all these requests have ended.
struct RoundState {
    claim: ClaimId,
    /// Each round's id is larger than all earlier ids, so that a late request of an earlier round
    /// does not change a later grant.
    round_id: String,
    /// The result of each master: `RESULT_UNKNOWN`, `RESULT_NOT_GRANTED` or `RESULT_GRANTED`.
    results: Box<[AtomicU8]>,
    /// The round has failed or its claim was released. The client then sends no further acquisition
    /// of this round.
    is_cancelled: AtomicBool,
    pending_rounds: PendingRounds,
}

impl RoundState {
    fn master_result(&self, index: usize) -> u8 {
        self.results.get(index).map_or(RESULT_NOT_GRANTED, |result| result.load(Ordering::Acquire))
    }
}

impl Drop for RoundState {
    fn drop(&mut self) {
        let mut rounds = self.pending_rounds.lock().unwrap_or_else(PoisonError::into_inner);
        // A later round of the same claim may have replaced the entry.
        if rounds.get(&self.claim).is_some_and(|round| round.strong_count() == 0) {
            rounds.remove(&self.claim);
        }
    }
}

impl<'a> QuorumRound<'a> {
    fn new(quorum: &'a Quorum, claim: &'a Claim) -> Self {
        let round_state = Arc::new(RoundState {
            claim: claim.id(),
            round_id: format!("{:016x}", NEXT_ROUND_ID.fetch_add(1, Ordering::Relaxed)),
            results: quorum.masters.iter().map(|_| AtomicU8::new(RESULT_UNKNOWN)).collect(),
            is_cancelled: AtomicBool::new(false),
            pending_rounds: Arc::clone(&quorum.pending_rounds),
        });
        quorum.pending_rounds().insert(claim.id(), Arc::downgrade(&round_state));
        Self { quorum, claim, round_state, keeps_grants: false }
    }

    async fn run(&mut self) -> Result<RoundOutcome, BackendError> {
        let quorum = self.quorum;
        let event_seq = last_event_seq();
        let mut requests = quorum.send_to_all(|index, master| {
            let (claim, round_state) = (self.claim.clone(), Arc::clone(&self.round_state));
            async move {
                let response = match master.ensure_sole_voter().await {
                    Ok(()) => master.try_acquire(&claim, &round_state).await,
                    // The client has not sent the acquisition to this master.
                    Err(error) => Err(error.as_refused()),
                };
                let master_result = match &response {
                    Ok(AcquireResult::Granted { .. }) => RESULT_GRANTED,
                    Ok(AcquireResult::Busy { .. }) => RESULT_NOT_GRANTED,
                    Err(error) if error.refused() => RESULT_NOT_GRANTED,
                    Err(_) => RESULT_UNKNOWN,
                };
                if let Some(result) = round_state.results.get(index) {
                    result.store(master_result, Ordering::Release);
                }
                response
            }
        });
        // Without a majority of responses the round ends with an error, so the first grace period
        // is long.
        requests.set_grace_period(BUSY_GRACE_PERIOD);
        let mut votes = Votes::default();
        let mut is_grace_period_restarted = false;
        while !votes.is_decided(quorum, requests.is_in_grace_period) {
            match requests.next().await {
                ResponseEvent::Response(response) => votes.add(response),
                ResponseEvent::GracePeriodOver => continue,
                ResponseEvent::AllReceived => break,
            }
            let responses = votes.granted.len() + votes.busy.len();
            if !is_grace_period_restarted && responses >= quorum.majority() {
                is_grace_period_restarted = true;
                if is_disputed(&votes.granted, quorum.majority()) {
                    requests.set_grace_period(RESPONSE_GRACE_PERIOD_MAX);
                } else {
                    requests.restart_grace_period();
                }
            }
        }
        let Votes { granted, busy, first_error, .. } = votes;
        // An earlier attempt may have acquired the lock. A failure of this round must not withdraw
        // that grant.
        let written = granted.iter().filter(|grant| grant.is_token_written).count();
        let missing = quorum.masters.len() - granted.len() - busy.len();
        self.keeps_grants = written > 0 && written + missing >= quorum.majority();
        let largest = granted.iter().map(|grant| grant.token).max();
        let token = agreed_token(&granted, quorum.majority()).or(largest);
        let lease = granted.iter().map(|grant| grant.lease).min();
        let (Some(token), Some(lease)) = (token, lease) else {
            return quorum.outcome_without_majority(0, first_error, busy, event_seq);
        };
        if granted.len() < quorum.majority() {
            return quorum.outcome_without_majority(granted.len(), first_error, busy, event_seq);
        }
        self.write_token(token).await.map(|is_written| {
            if is_written { RoundOutcome::Granted(token, lease) } else { RoundOutcome::Split(None) }
        })
    }

    /// Writes the token to a majority that has this round's grant. Returns false if too few masters
    /// have this grant or confirm the write in time.
    async fn write_token(&self, token: FencingToken) -> Result<bool, BackendError> {
        let quorum = self.quorum;
        // This request also goes to masters that have not responded yet. If the acquisition was
        // already sent, it precedes this request on the same connection.
        let mut requests = quorum.send_to_all(|_, master| {
            let (claim, round_state) = (self.claim.clone(), Arc::clone(&self.round_state));
            async move { master.store.store_token(&claim, &round_state.round_id, token).await }
        });
        let (mut stored, mut not_held, mut failed) = (0, 0, 0);
        let (mut first_error, mut is_grace_period_restarted) = (None, false);
        while not_held + failed <= quorum.failures_max() {
            match requests.next().await {
                ResponseEvent::Response(Ok(true)) => stored += 1,
                ResponseEvent::Response(Ok(false)) => not_held += 1,
                ResponseEvent::Response(Err(error)) => {
                    failed += 1;
                    first_error.get_or_insert(error);
                }
                ResponseEvent::GracePeriodOver => {}
                ResponseEvent::AllReceived => break,
            }
            if stored >= quorum.majority() {
                return Ok(true);
            }
            if !is_grace_period_restarted && stored + not_held >= quorum.majority() {
                is_grace_period_restarted = true;
                requests.restart_grace_period();
            }
            if !requests.is_in_grace_period && stored + not_held >= quorum.majority() {
                break;
            }
        }
        if failed > quorum.failures_max() {
            Err(quorum.no_majority_error(first_error))
        } else {
            Ok(false)
        }
    }
}

impl Drop for QuorumRound<'_> {
    fn drop(&mut self) {
        if self.keeps_grants {
            return;
        }
        self.round_state.is_cancelled.store(true, Ordering::Release);
        // Without a tokio runtime no request is possible. The grants then end with their lease.
        if tokio::runtime::Handle::try_current().is_ok() {
            drop(self.quorum.send_to_all(|index, master| {
                let (claim, round_state) = (self.claim.clone(), Arc::clone(&self.round_state));
                async move {
                    master.withdraw(&claim, &round_state, index).await;
                    Ok(())
                }
            }));
        }
    }
}

/// The result of a round.
enum RoundOutcome {
    Granted(FencingToken, Duration),
    Busy(AcquireResult),
    /// No two busy masters report the same token, or too few masters confirmed the token. The
    /// attempt returns the contained result if all further rounds also end this way.
    Split(Option<AcquireResult>),
}

/// A reference to the mutex of one claim. The drop of the last reference removes the mutex.
struct ClaimMutexRef<'a> {
    quorum: &'a Quorum,
    id: ClaimId,
    /// `None` only during the drop of this reference.
    mutex: Option<Arc<tokio::sync::Mutex<()>>>,
}

impl ClaimMutexRef<'_> {
    async fn lock(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        Some(self.mutex.as_ref()?.lock().await)
    }
}

impl Drop for ClaimMutexRef<'_> {
    fn drop(&mut self) {
        let mut claim_mutexes = self.quorum.claim_mutexes();
        // A count of 2 is this reference and the map's. The map is locked here, so concurrent drops
        // run one after the other, and the last one finds a count of 2.
        if self.mutex.take().is_some_and(|mutex| Arc::strong_count(&mutex) == 2) {
            claim_mutexes.remove(&self.id);
        }
    }
}

/// The masters' responses to the renewal of one claim.
#[derive(Default)]
struct RenewalVotes {
    renewed: Vec<Duration>,
    gone: usize,
    failed: usize,
    first_error: Option<BackendError>,
}

impl RenewalVotes {
    fn add(&mut self, response: Result<Renewal, BackendError>) {
        match response {
            Ok(Renewal::Renewed(remaining)) => self.renewed.push(remaining),
            Ok(Renewal::Gone) => self.gone += 1,
            Err(error) => {
                self.failed += 1;
                self.first_error.get_or_insert(error);
            }
        }
    }

    /// Returns `None` while the result is undecided.
    fn result(&self, quorum: &Quorum) -> Option<Result<Renewal, BackendError>> {
        let (all, majority) = (quorum.masters.len(), quorum.majority());
        if self.renewed.len() >= majority {
            let mut remaining = self.renewed.clone();
            remaining.sort_unstable_by(|a, b| b.cmp(a));
            return Some(Ok(Renewal::Renewed(remaining[majority - 1])));
        }
        // The masters that may still have the claim are no majority.
        if self.gone > all - majority {
            return Some(Ok(Renewal::Gone));
        }
        let first_error =
            self.first_error.as_ref().filter(|_| self.gone + self.failed > all - majority);
        first_error.map(|error| Err(quorum.no_majority_error(Some(error.clone()))))
    }
}

/// Returns the outcome of a round in which other claims hold the lock on too many masters.
fn busy_outcome(busy: Vec<(Option<Duration>, Holder)>, event_seq: u64) -> RoundOutcome {
    // Two masters report the same token only if a round has written it there. If no two tokens are
    // the same, several attempts may have blocked each other. They retry after a random pause. A
    // release message would wake them at the same time, and they would block each other again.
    let agreed_index = busy.iter().position(|(_, holder)| {
        busy.iter().filter(|(_, other)| holder.token == other.token).count() > 1
    });
    match busy.into_iter().nth(agreed_index.unwrap_or(0)) {
        Some((remaining, holder)) if agreed_index.is_some() => {
            RoundOutcome::Busy(AcquireResult::Busy { remaining, holder, event_seq })
        }
        Some((_, holder)) => RoundOutcome::Split(Some(AcquireResult::Busy {
            remaining: Some(jitter()),
            holder,
            event_seq: NEVER_WOKEN,
        })),
        None => RoundOutcome::Split(None),
    }
}

/// The sequence number of a wait that no release message ends, so that the engine polls.
const NEVER_WOKEN: u64 = u64::MAX;

/// The responses of the masters to one attempt.
#[derive(Default)]
struct Votes {
    granted: Vec<MasterGrant>,
    /// The remaining lease of each busy master's holder, if known, and the holder.
    busy: Vec<(Option<Duration>, Holder)>,
    failed: usize,
    first_error: Option<BackendError>,
}

impl Votes {
    fn add(&mut self, response: Result<AcquireResult, BackendError>) {
        match response {
            Ok(AcquireResult::Granted { token, lease, is_token_written }) => {
                self.granted.push(MasterGrant { token, is_token_written, lease });
            }
            Ok(AcquireResult::Busy { remaining, holder, .. }) => {
                self.busy.push((remaining, holder))
            }
            Err(error) => {
                self.failed += 1;
                self.first_error.get_or_insert(error);
            }
        }
    }

    /// Returns whether the round needs no further response.
    fn is_decided(&self, quorum: &Quorum, is_in_grace_period: bool) -> bool {
        let Self { granted, busy, failed, .. } = self;
        if *failed > quorum.failures_max() {
            return true;
        }
        if granted.len() >= quorum.majority()
            && !(is_in_grace_period && is_disputed(granted, quorum.majority()))
        {
            return true;
        }
        // If the round can no longer acquire the lock, further responses decide between `Busy` and
        // a store error.
        let lacks_majority_of_votes = granted.len() + busy.len() < quorum.majority();
        if busy.len() + failed > quorum.failures_max()
            && !(lacks_majority_of_votes && is_in_grace_period)
        {
            return true;
        }
        // After the grace period, a majority of responses is sufficient: the remaining masters may
        // never respond.
        !lacks_majority_of_votes && !is_in_grace_period
    }
}

/// One master's grant.
struct MasterGrant {
    token: FencingToken,
    /// The token is not provisional: a round has written it to this master.
    is_token_written: bool,
    lease: Duration,
}

/// Returns whether a master reports the token of an earlier round, but no majority reports the same
/// token. Further responses may complete a majority.
fn is_disputed(granted: &[MasterGrant], majority: usize) -> bool {
    granted.iter().any(|grant| grant.is_token_written) && agreed_token(granted, majority).is_none()
}

/// Returns the token of an earlier round if a majority reports the same token. A token that only a
/// minority reports may come from an unfinished round. Other claims may have received larger tokens
/// after that round.
fn agreed_token(granted: &[MasterGrant], majority: usize) -> Option<FencingToken> {
    let tokens = granted.iter().filter(|grant| grant.is_token_written).map(|grant| grant.token);
    let votes = |token: &FencingToken| tokens.clone().filter(|other| other == token).count();
    tokens.clone().find(|token| votes(token) >= majority)
}

/// Returns a short random pause.
fn jitter() -> Duration {
    Duration::from_millis(rand::random_range(5..60))
}

/// Combines the masters' reports of one holder. The result has the most frequent token. The
/// remaining lease is the median, so at least half of the reports are that long or longer.
fn merge_holders(mut held: Vec<Holder>) -> Option<Holder> {
    let votes = |holder: &Holder| held.iter().filter(|other| other.token == holder.token).count();
    let token = held.iter().max_by_key(|holder| votes(holder))?.token;
    held.sort_by_key(|holder| holder.lease_left);
    let mut holder = held.swap_remove(held.len() / 2);
    holder.token = token;
    Some(holder)
}

/// Running requests to all masters.
struct PendingResponses<T> {
    calls: FuturesUnordered<JoinHandle<Result<T, BackendError>>>,
    started_at: Instant,
    grace_period: Pin<Box<Sleep>>,
    /// The caller still waits for responses beyond a majority. After the grace period, it stops as
    /// soon as a majority has responded. The caller may restart the period once.
    is_in_grace_period: bool,
}

/// The next event of running requests.
enum ResponseEvent<T> {
    Response(Result<T, BackendError>),
    /// The grace period is over.
    GracePeriodOver,
    AllReceived,
}

impl<T> PendingResponses<T> {
    /// Starts a new grace period of twice the time that the majority took, but at least
    /// [`RESPONSE_GRACE_PERIOD_MIN`] and at most [`RESPONSE_GRACE_PERIOD_MAX`]. Callers invoke this
    /// once a majority has responded.
    fn restart_grace_period(&mut self) {
        self.set_grace_period(
            (self.started_at.elapsed() * 2)
                .clamp(RESPONSE_GRACE_PERIOD_MIN, RESPONSE_GRACE_PERIOD_MAX),
        );
    }

    /// Starts a grace period of `limit`.
    fn set_grace_period(&mut self, limit: Duration) {
        self.grace_period.as_mut().reset(Instant::now() + limit);
        self.is_in_grace_period = true;
    }

    /// Waits for the next response or the end of the grace period.
    async fn next(&mut self) -> ResponseEvent<T> {
        tokio::select! {
            biased;
            response = self.calls.next() => match response {
                Some(Ok(response)) => ResponseEvent::Response(response),
                Some(Err(error)) => {
                    let message = if error.is_panic() {
                        "redis: a request panicked; report the defect with its backtrace"
                    } else {
                        "redis: the tokio runtime has shut down; open the registry in another runtime"
                    };
                    ResponseEvent::Response(Err(BackendError::transient(message)))
                }
                None => ResponseEvent::AllReceived,
            },
            () = &mut self.grace_period, if self.is_in_grace_period => {
                self.is_in_grace_period = false;
                ResponseEvent::GracePeriodOver
            }
        }
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masters = self.masters.iter().map(|master| &master.store);
        f.debug_list().entries(masters).finish()
    }
}

/// The maximum number of rounds per attempt, including the first round. A [`jitter`] pause of 5 to
/// 60 ms precedes each further round.
const ROUNDS_MAX: u32 = 8;
/// The time after which no further round starts, if an earlier round has found a holder.
const ROUNDS_TIMEOUT: Duration = Duration::from_millis(300);
/// The result of a round at one master.
const RESULT_UNKNOWN: u8 = 0;
const RESULT_NOT_GRANTED: u8 = 1;
const RESULT_GRANTED: u8 = 2;
/// The maximum number of releases and withdrawals that are retried concurrently at one master.
/// Without a retry, the grant ends with its lease.
const CONCURRENT_RETRIES_MAX: usize = 256;
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(20);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The maximum grace period for responses beyond a majority, unless a constant below states another
/// one.
const RESPONSE_GRACE_PERIOD_MAX: Duration = Duration::from_millis(100);
/// The minimum grace period after a majority has responded.
const RESPONSE_GRACE_PERIOD_MIN: Duration = Duration::from_millis(5);
/// The first grace period of a round, from its start. For at most this time, a round that can no
/// longer acquire the lock waits for a majority of responses. If a majority responds, the round can
/// return `Busy` instead of a store error.
const BUSY_GRACE_PERIOD: Duration = Duration::from_millis(500);
/// The maximum time for which a renewal waits for the remaining claims after the first claim is
/// decided. A shorter wait would lose locks at slow masters.
const RENEWAL_GRACE_PERIOD_MAX: Duration = Duration::from_secs(1);
/// The id of the next round. Uniqueness in this process is sufficient, because servers compare only
/// the rounds of one claim.
static NEXT_ROUND_ID: AtomicU64 = AtomicU64::new(1);
const CLOCK_SKEW_MAX_US: i64 = 500_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn written(token: u64) -> MasterGrant {
        MasterGrant { is_token_written: true, ..provisional(token) }
    }

    fn provisional(token: u64) -> MasterGrant {
        let token = FencingToken::new(token).unwrap();
        MasterGrant { token, is_token_written: false, lease: Duration::from_secs(1) }
    }

    /// An unfinished round leaves its token on a minority. Other claims may have received larger
    /// tokens after that round.
    #[test]
    fn the_token_of_a_minority_is_ignored() {
        let granted = [written(5), provisional(9), provisional(8)];
        assert_eq!(agreed_token(&granted, 3), None);
        assert!(is_disputed(&granted, 3), "a later response may decide");
        assert!(!is_disputed(&[provisional(9), provisional(8), provisional(7)], 3));
    }

    /// An earlier attempt of the claim acquired the lock, and its holder has this token.
    #[test]
    fn the_token_of_a_majority_is_used() {
        let granted = [written(5), provisional(9), written(5), written(5)];
        assert_eq!(agreed_token(&granted, 3), FencingToken::new(5));
        assert!(!is_disputed(&granted, 3));
    }
}
