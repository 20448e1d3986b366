//! A quorum of independent masters. A claim that more than half of them grant holds the lock.
//!
//! The algorithm is Redlock (redis.io, "Distributed Locks with Redis") with two differences. First,
//! the lease is counted from before the first request, on a monotonic clock; the engine does this
//! for every store. Second, a grant has a fencing token: the largest one that the granting majority
//! returned. It is written back to a majority that still has the claim before the grant counts. Any
//! later grant shares a master with that majority, so its token is larger, unless that master lost
//! its data and its clock is behind.
//!
//! Each request goes to all masters concurrently, and the answers of a majority decide. If more
//! answers may change the decision, they are awaited for twice the time that the majority took.
//! Requests to the remaining masters continue in the background. A late grant of a held claim
//! counts for its renewals; a late grant of a failed or released claim is withdrawn.

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

use crate::config::{Address, RedisConfig};
use crate::ears::moment;
use crate::rumours::Rumours;
use crate::store::{Answer, Seen, Store};

pub(crate) struct Quorum {
    masters: Arc<[Arc<Master>]>,
    attempts: Mutex<HashMap<ClaimId, Arc<tokio::sync::Mutex<()>>>>,
    unanswered: Unanswered,
}

struct Master {
    store: Store,
    restart_guard: Duration,
    giving_back: Semaphore,
    /// The process id that this address first led to; empty if this user may not read it.
    identity: OnceLock<String>,
    /// The process that answers now, for [`restart_guard`](RedisConfig::with_restart_guard).
    seen: Mutex<Option<SeenProcess>>,
}

/// A server process and the time of its first answer.
struct SeenProcess {
    run_id: String,
    since: Instant,
    /// Until then, the process counts as older than the restart guard without another check.
    old_until: Option<Instant>,
}

impl Quorum {
    /// Connects to a majority of the masters.
    pub(crate) async fn open(
        addresses: &[Address],
        config: &RedisConfig,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let master = |address| {
            let store = Store::member(address, config, rumours)?;
            Ok(Arc::new(Master {
                store,
                restart_guard: config.restart_guard,
                giving_back: Semaphore::new(GIVEN_BACK_MAX),
                identity: OnceLock::new(),
                seen: Mutex::default(),
            }))
        };
        let masters = addresses.iter().map(master).collect::<Result<_, BackendError>>()?;
        let quorum = Self { masters, attempts: Mutex::default(), unanswered: Arc::default() };
        let connecting =
            quorum.ask_all(|_, master| async move { master.store.link.connect().await });
        quorum.majority_of(connecting).await.map_err(BackendError::as_refused)?;
        quorum.refuse_duplicates().await?;
        Ok(quorum)
    }

    /// Returns an error if two addresses lead to one server, whose vote would count twice. A master
    /// that is down now is checked before its first vote.
    async fn refuse_duplicates(&self) -> Result<(), BackendError> {
        let masters = Arc::clone(&self.masters);
        let mut asked = self.ask_all(move |nth, _| {
            let masters = Arc::clone(&masters);
            async move { identify(&masters, nth).await }
        });
        let mut answered = 0;
        while asked.is_patient || answered < self.majority() {
            match asked.next().await {
                Heard::Answer(Ok(())) => answered += 1,
                Heard::Answer(Err(error)) if error.kind() == BackendErrorKind::Misconfigured => {
                    return Err(error);
                }
                Heard::Answer(Err(_)) | Heard::NothingYet => {}
                Heard::All => break,
            }
        }
        // Checked once more, because answers arrive in any order.
        (0..self.masters.len()).try_for_each(|nth| refuse_duplicate(&self.masters, nth))
    }

    fn majority(&self) -> usize {
        self.masters.len() / 2 + 1
    }

    fn alone_with(&self, claim: &Claim) -> Alone<'_> {
        let turn = Arc::clone(self.attempts().entry(claim.id()).or_default());
        Alone { quorum: self, id: claim.id(), turn }
    }

    fn attempts(&self) -> MutexGuard<'_, HashMap<ClaimId, Arc<tokio::sync::Mutex<()>>>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many masters may fail.
    fn spare(&self) -> usize {
        self.masters.len() - self.majority()
    }

    /// Sends a request to all masters concurrently. Each request runs to completion, even if its
    /// caller no longer waits for the response.
    fn ask_all<T, F>(&self, ask: impl Fn(usize, Arc<Master>) -> F) -> Asked<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let masters = self.masters.iter().enumerate();
        let calls = masters.map(|(nth, master)| tokio::spawn(ask(nth, Arc::clone(master))));
        Asked {
            calls: calls.collect(),
            asked_at: Instant::now(),
            patience: Box::pin(sleep(SLOW)),
            is_patient: true,
        }
    }

    /// Waits until a majority has succeeded or can no longer succeed.
    async fn majority_of<T>(&self, mut asked: Asked<T>) -> Result<Vec<T>, BackendError> {
        let mut done = Vec::new();
        let mut trouble = None;
        let mut failed = 0;
        while failed <= self.spare() {
            match asked.next().await {
                Heard::Answer(Ok(answer)) => done.push(answer),
                Heard::Answer(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                Heard::NothingYet => {}
                Heard::All => break,
            }
            if done.len() >= self.majority() {
                return Ok(done);
            }
        }
        Err(self.too_few(trouble))
    }

    fn not_granted(
        &self,
        granted: usize,
        trouble: Option<BackendError>,
        busy: Vec<(Option<Duration>, Holder)>,
        asked_at: u64,
    ) -> Result<Contest, BackendError> {
        // An outage must not be reported as a holder: the lock may be free on the silent masters.
        if granted + busy.len() < self.majority() || busy.is_empty() {
            return Err(self.too_few(trouble));
        }
        Ok(busy_with(busy, asked_at))
    }

    /// Returns the error for a missing majority, with one master's error as an example.
    fn too_few(&self, example: Option<BackendError>) -> BackendError {
        let (all, majority) = (self.masters.len(), self.majority());
        match example {
            Some(example) => {
                let says = format!("{example}; of {all} masters {majority} are needed");
                BackendError::new(example.kind(), says).with_source(example)
            }
            None => BackendError::transient(format!(
                "redis: too few masters agree; of {all}, {majority} are needed"
            )),
        }
    }

    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Answer, BackendError> {
        // Attempts of one claim run one after the other. Concurrent ones would agree on different
        // tokens.
        let alone = self.alone_with(claim);
        let _turn = alone.turn.lock().await;
        let begun = Instant::now();
        let mut split = None;
        for _ in 0..ROUNDS_MAX {
            // The engine limits the duration of an attempt and retries.
            if split.is_some() && begun.elapsed() > ROUNDS_TIME {
                break;
            }
            let mut round = Round::new(self, claim);
            match round.contend().await? {
                Contest::Won(token, lease) => {
                    round.kept = true;
                    return Ok(Answer::Granted { token, lease, settled: true });
                }
                Contest::Lost(busy) => return Ok(busy),
                Contest::Split(busy) => split = busy.or(split),
            }
            drop(round);
            sleep(jitter()).await;
        }
        split.map_or_else(|| Err(self.too_few(None)), Ok)
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let claims: Arc<[Claim]> = claims.into();
        let mut asked = self.ask_all(|_, master| {
            let claims = Arc::clone(&claims);
            async move { Ok(master.store.renew(&claims).await) }
        });
        let mut votes: Vec<Votes> = claims.iter().map(|_| Votes::default()).collect();
        let mut hurries = false;
        loop {
            let answers = match asked.next().await {
                Heard::Answer(answers) => answers,
                Heard::NothingYet if hurries => break,
                Heard::NothingYet => continue,
                Heard::All => break,
            };
            let answers = answers.unwrap_or_else(|error| vec![Err(error); claims.len()]);
            for (votes, answer) in votes.iter_mut().zip(answers) {
                votes.count(answer);
            }
            let known = votes.iter().filter(|votes| votes.verdict(self).is_some()).count();
            if known == claims.len() {
                break;
            }
            if !hurries && known > 0 {
                // A claim that depends on a silent master must not delay the others until their
                // leases end.
                hurries = true;
                let lease = claims.iter().map(Claim::lease).min().unwrap_or_default();
                asked.wait_for(SLOW_RENEWAL.min(lease / 10));
            }
        }
        let open = || Err(self.too_few(None));
        votes.into_iter().map(|votes| votes.verdict(self).unwrap_or_else(open)).collect()
    }

    /// Releases the claim on all masters. Returns once a majority has decided; the other releases
    /// are retried until the lease ends.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let round = self.unanswered().get(&claim.id()).and_then(Weak::upgrade);
        if let Some(round) = &round {
            round.is_over.store(true, Ordering::Release);
        }
        let asked = self.ask_all(|nth, master| {
            let (claim, round) = (claim.clone(), round.clone());
            async move {
                let may_arrive = || round.as_ref().is_some_and(|round| round.did(nth) == UNKNOWN);
                master.give_back(&claim, may_arrive).await
            }
        });
        self.freed(asked).await
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<ClaimId, Weak<Questions>>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let asked = self.ask_all(|_, master| {
            let key = key.clone();
            async move { master.store.force_release(&key).await }
        });
        self.freed(asked).await
    }

    /// Returns `Freed` if a majority of the masters had the lock, or if a minority had it and other
    /// masters are silent. If all masters answer, at most one of several concurrent releases of
    /// one lock returns `Freed`.
    async fn freed(&self, mut asked: Asked<Release>) -> Result<Release, BackendError> {
        let (mut freed, mut not_held, mut failed) = (0, 0, 0);
        let mut trouble = None;
        while asked.is_patient || freed + not_held < self.majority() {
            match asked.next().await {
                Heard::Answer(Ok(Release::Freed)) => freed += 1,
                Heard::Answer(Ok(Release::NotHeld)) => not_held += 1,
                Heard::Answer(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                Heard::NothingYet => {}
                Heard::All => break,
            }
            if freed >= self.majority() {
                return Ok(Release::Freed);
            }
            if not_held > self.spare() {
                return Ok(Release::NotHeld);
            }
            if failed > self.spare() {
                return Err(self.too_few(trouble));
            }
        }
        if freed + not_held < self.majority() {
            return Err(self.too_few(trouble));
        }
        // The silent masters may have had the claim, and `NotHeld` would be reported as a loss.
        Ok(if freed > 0 { Release::Freed } else { Release::NotHeld })
    }

    /// Waits until a majority may have been released after `asked_at`.
    pub(crate) async fn wait(&self, key: &Key, asked_at: u64) {
        let waits = self.masters.iter().map(|master| Box::pin(master.store.wait(key, asked_at)));
        let mut waits: Vec<_> = waits.collect();
        for _ in 0..self.majority() {
            let ((), _, others) = select_all(waits).await;
            waits = others;
        }
    }

    /// Returns whether the release messages of all masters would arrive. A majority would not
    /// suffice, because a release need not reach every master of that majority.
    pub(crate) fn hears_of(&self, key: &Key) -> bool {
        self.masters.iter().all(|master| master.store.hears_of(key))
    }

    pub(crate) async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let asked = self.ask_all(|_, master| {
            let key = key.clone();
            async move { master.store.look(&[key]).await }
        });
        Ok(self.agreed(asked).await?.pop())
    }

    pub(crate) async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.agreed(self.ask_all(|_, master| async move { master.store.list().await })).await
    }

    /// Returns the holders that a majority of the masters agrees on.
    async fn agreed(&self, mut asked: Asked<Vec<Seen>>) -> Result<Vec<Holder>, BackendError> {
        let mut claims: HashMap<(Key, Vec<u8>), Vec<Holder>> = HashMap::new();
        let mut answered = 0;
        let mut trouble = None;
        // Once a majority has answered, the other answers only add precision.
        while asked.is_patient || answered < self.majority() {
            match asked.next().await {
                Heard::Answer(Ok(seen)) => {
                    answered += 1;
                    for Seen { claim, holder } in seen {
                        claims.entry((holder.key.clone(), claim)).or_default().push(holder);
                    }
                }
                Heard::Answer(Err(error)) => _ = trouble.get_or_insert(error),
                Heard::NothingYet => {}
                Heard::All => break,
            }
        }
        if answered < self.majority() {
            return Err(self.too_few(trouble));
        }
        // Any silent master may agree.
        let unheard = self.masters.len() - answered;
        let agreed = claims.into_values().filter(|held| held.len() + unheard >= self.majority());
        Ok(agreed.filter_map(summary).collect())
    }

    pub(crate) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let asked = self.masters.iter().map(|master| master.store.look_for_trouble());
        let mut findings = Vec::new();
        let mut down = Vec::new();
        let all = join_all(asked).await;
        for found in all {
            match found {
                Ok(found) => findings.extend(found),
                Err(error) => down.push(error),
            }
        }
        if down.len() > self.spare()
            && let Some(example) = down.pop()
        {
            return Err(self.too_few(Some(example)));
        }
        findings.extend(down.iter().map(|error| {
            Finding::warning(format!("a master of the quorum is not there: {error}"))
        }));
        findings.extend(self.duplicates().await);
        findings.extend(self.clock_distance().await);
        Ok(findings)
    }

    /// Returns a finding for each address that leads to the same server as an earlier one.
    async fn duplicates(&self) -> Vec<Finding> {
        let ids = join_all(self.masters.iter().map(|master| master.store.run_id())).await;
        let known: Vec<(String, String)> = (self.masters.iter().zip(ids))
            .filter_map(|(master, id)| Some((master.name(), id.ok()?)))
            .collect();
        let mut found = Vec::new();
        for (nth, (name, id)) in known.iter().enumerate() {
            let earlier = known.iter().take(nth).find(|(_, other)| other == id);
            found.extend(earlier.map(|(other, _)| Finding::warning(same_server(other, name, id))));
        }
        found
    }

    /// Returns a finding if the masters' clocks differ too much.
    async fn clock_distance(&self) -> Option<Finding> {
        let times = join_all(self.masters.iter().map(|master| master.store.clock())).await;
        let ahead: Vec<i64> = times.into_iter().filter_map(Result::ok).collect();
        let distance = ahead.iter().max()? - ahead.iter().min()?;
        (distance > CLOCK_DISTANCE_US).then(|| {
            Finding::warning(format!(
                "the masters' clocks are {} ms apart: tokens may not grow after a master has lost its data; synchronise them",
                distance / 1_000
            ))
        })
    }

    pub(crate) async fn close(&self) {
        join_all(self.masters.iter().map(|master| master.store.link.close())).await;
    }
}

/// Determines which server process the master `nth` is. Returns an error if an earlier address
/// leads to the same process.
async fn identify(masters: &[Arc<Master>], nth: usize) -> Result<(), BackendError> {
    let Some(master) = masters.get(nth) else { return Ok(()) };
    if master.identity.get().is_none() {
        let id = match master.store.run_id().await {
            Ok(id) => id,
            // The server answers but does not disclose its process id.
            Err(error) if error.kind() != BackendErrorKind::Transient => String::new(),
            Err(error) => return Err(error),
        };
        master.identity.get_or_init(|| id);
    }
    refuse_duplicate(masters, nth)
}

/// Returns an error if an earlier address leads to the same server: only the first address votes.
fn refuse_duplicate(masters: &[Arc<Master>], nth: usize) -> Result<(), BackendError> {
    let Some(master) = masters.get(nth) else { return Ok(()) };
    let id = master.identity.get().filter(|id| !id.is_empty());
    let same = |other: &&Arc<Master>| id.is_some() && other.identity.get() == id;
    let Some((other, id)) = masters.iter().take(nth).find(same).zip(id) else { return Ok(()) };
    let says = same_server(&other.name(), &master.name(), id);
    Err(BackendError::new(BackendErrorKind::Misconfigured, format!("redis: {says}")).as_refused())
}

fn same_server(one: &str, other: &str, id: &str) -> String {
    format!(
        "{one} and {other} are the same server (run_id {id}), whose vote would count twice; name each master of a quorum once"
    )
}

impl Master {
    fn name(&self) -> String {
        self.store.link.known(0).map(|node| node.name().to_owned()).unwrap_or_default()
    }

    /// Returns whether the server process has run for the restart guard, as observed by this
    /// process or by another client.
    ///
    /// A server counts its uptime on its wall clock, which may be set. Clients count on monotonic
    /// clocks, from the process's first answer. The first client that has waited long enough stores
    /// that on the server, for clients that start later.
    async fn is_old(&self) -> Result<bool, BackendError> {
        let run_id = self.store.run_id().await?;
        let (age, is_old) = {
            let mut seen = self.seen();
            let now = Instant::now();
            let known = seen.take().filter(|seen| seen.run_id == run_id);
            let fresh = || SeenProcess { run_id: run_id.clone(), since: now, old_until: None };
            let seen = seen.insert(known.unwrap_or_else(fresh));
            (now.duration_since(seen.since), seen.old_until.is_some_and(|until| now < until))
        };
        if is_old {
            return Ok(true);
        }
        // A process that was old enough stays so.
        if age >= self.restart_guard || self.was_old(&run_id) {
            // A hint for other clients. Without the right to write it, they wait for the full time
            // themselves.
            let _ = self.store.vouch(&run_id, self.restart_guard).await;
        } else if self.store.vouched(&run_id).await? < self.restart_guard {
            return Ok(false);
        }
        if let Some(seen) = self.seen().as_mut().filter(|seen| seen.run_id == run_id) {
            // The stored age expires after the token memory, so it is renewed at half that time.
            seen.old_until = Some(Instant::now() + self.store.token_memory / 2);
        }
        Ok(true)
    }

    fn was_old(&self, run_id: &str) -> bool {
        self.seen().as_ref().is_some_and(|seen| seen.run_id == run_id && seen.old_until.is_some())
    }

    fn seen(&self) -> MutexGuard<'_, Option<SeenProcess>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn try_acquire(
        &self,
        claim: &Claim,
        questions: &Questions,
    ) -> Result<Answer, BackendError> {
        if !self.restart_guard.is_zero() && !self.is_old().await? {
            return Err(BackendError::new(
                BackendErrorKind::Transient,
                "redis: the master was started a moment ago and may have lost its data (restart_guard)",
            )
            .as_refused());
        }
        if questions.is_over.load(Ordering::Acquire) {
            return Err(BackendError::transient("redis: the attempt is over").as_refused());
        }
        self.store.try_acquire(claim, Some(&questions.attempt)).await
    }

    /// Releases the claim, retrying until the server answers or the lease ends. If a grant
    /// `may_arrive` after the release, `NotHeld` is retried as well.
    async fn give_back(
        &self,
        claim: &Claim,
        may_arrive: impl Fn() -> bool,
    ) -> Result<Release, BackendError> {
        let until = Instant::now() + claim.lease();
        let mut pause = PAUSE_MIN;
        let mut patience = None;
        loop {
            let is_open = may_arrive();
            match self.store.release(claim).await {
                Ok(Release::NotHeld) if is_open && Instant::now() + pause < until => {}
                Err(_) if Instant::now() + pause < until => {}
                answer => return answer,
            }
            if patience.is_none() {
                let none =
                    |_| BackendError::transient("redis: a master of the quorum is not there");
                patience = Some(self.giving_back.try_acquire().map_err(none)?);
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Withdraws one attempt's grant from this master, and a grant that may still arrive if the
    /// master's response is unknown.
    async fn withdraw(&self, claim: &Claim, questions: &Questions, nth: usize) {
        let until = Instant::now() + claim.lease();
        let mut pause = PAUSE_MIN;
        let mut patience = None;
        loop {
            // A request without a response may still arrive after this withdrawal.
            let did = questions.did(nth);
            if did == NOTHING {
                return;
            }
            match self.store.withdraw(claim, &questions.attempt).await {
                Ok(Release::Freed) => return,
                Ok(Release::NotHeld) if did == GRANTED => return,
                _ if Instant::now() + pause >= until => return,
                _ => {}
            }
            if patience.is_none() {
                let Ok(permit) = self.giving_back.try_acquire() else { return };
                patience = Some(permit);
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// One attempt, which is withdrawn from all masters on drop unless `kept`. Only this attempt's
/// grants are withdrawn, because a later attempt may already have been granted the same claim.
struct Round<'a> {
    quorum: &'a Quorum,
    claim: &'a Claim,
    questions: Arc<Questions>,
    kept: bool,
}

/// The rounds that not all masters have answered, by claim.
type Unanswered = Arc<Mutex<HashMap<ClaimId, Weak<Questions>>>>;

/// The shared state of one round's requests. Lives until all masters have answered.
struct Questions {
    claim: ClaimId,
    /// Larger than all earlier ones, so that a late request of an earlier attempt does not change a
    /// later grant.
    attempt: String,
    /// Each master's result.
    answered: Box<[AtomicU8]>,
    /// The round has failed or its claim was released: requests that are not yet sent must not be
    /// sent.
    is_over: AtomicBool,
    unanswered: Unanswered,
}

impl Questions {
    fn did(&self, nth: usize) -> u8 {
        self.answered.get(nth).map_or(NOTHING, |answered| answered.load(Ordering::Acquire))
    }
}

impl Drop for Questions {
    fn drop(&mut self) {
        let mut rounds = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        // A later round of the same claim may have replaced the entry.
        if rounds.get(&self.claim).is_some_and(|round| round.strong_count() == 0) {
            rounds.remove(&self.claim);
        }
    }
}

impl<'a> Round<'a> {
    fn new(quorum: &'a Quorum, claim: &'a Claim) -> Self {
        let questions = Arc::new(Questions {
            claim: claim.id(),
            attempt: format!("{:016x}", ATTEMPTS.fetch_add(1, Ordering::Relaxed)),
            answered: quorum.masters.iter().map(|_| AtomicU8::new(UNKNOWN)).collect(),
            is_over: AtomicBool::new(false),
            unanswered: Arc::clone(&quorum.unanswered),
        });
        quorum.unanswered().insert(claim.id(), Arc::downgrade(&questions));
        Self { quorum, claim, questions, kept: false }
    }

    async fn contend(&mut self) -> Result<Contest, BackendError> {
        let quorum = self.quorum;
        let asked_at = moment();
        let mut asked = quorum.ask_all(|nth, master| {
            let (claim, questions) = (self.claim.clone(), Arc::clone(&self.questions));
            let masters = Arc::clone(&quorum.masters);
            async move {
                let answer = match identify(&masters, nth).await {
                    Ok(()) => master.try_acquire(&claim, &questions).await,
                    // The master was not asked for the lock.
                    Err(error) => Err(error.as_refused()),
                };
                let did = match &answer {
                    Ok(Answer::Granted { .. }) => GRANTED,
                    Ok(Answer::Busy { .. }) => NOTHING,
                    Err(error) if error.refused() => NOTHING,
                    Err(_) => UNKNOWN,
                };
                if let Some(answered) = questions.answered.get(nth) {
                    answered.store(did, Ordering::Release);
                }
                answer
            }
        });
        // Without a majority there is no decision, only an error, so the time limit is long.
        asked.wait_for(SLOW_MAJORITY);
        let mut granted: Vec<OneGrant> = Vec::new();
        let mut busy: Vec<(Option<Duration>, Holder)> = Vec::new();
        let mut trouble: Option<BackendError> = None;
        let (mut failed, mut hurries) = (0, false);
        while failed <= quorum.spare() {
            if granted.len() >= quorum.majority()
                && !(asked.is_patient && is_disputed(&granted, quorum.majority()))
            {
                break;
            }
            // The lock can no longer be acquired. More answers decide between `Busy` and a store
            // error.
            let open = granted.len() + busy.len() < quorum.majority();
            if busy.len() + failed > quorum.spare() && !(open && asked.is_patient) {
                break;
            }
            // The masters that might still grant the claim are slow or may never answer.
            if !open && !asked.is_patient {
                break;
            }
            match asked.next().await {
                Heard::Answer(Ok(Answer::Granted { token, lease, settled })) => {
                    granted.push((settled, token, lease));
                }
                Heard::Answer(Ok(Answer::Busy { left, holder, .. })) => busy.push((left, holder)),
                Heard::Answer(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                Heard::NothingYet => continue,
                Heard::All => break,
            }
            let heard = granted.len() + busy.len();
            if !hurries && heard >= quorum.majority() {
                hurries = true;
                if is_disputed(&granted, quorum.majority()) {
                    asked.wait_for(SLOW);
                } else {
                    asked.hurry();
                }
            }
        }
        // The claim may have been granted by an earlier attempt, which a failure now must not
        // withdraw.
        let settled = granted.iter().filter(|(settled, ..)| *settled).count();
        let unheard = quorum.masters.len() - granted.len() - busy.len();
        self.kept = settled > 0 && settled + unheard >= quorum.majority();
        let largest = granted.iter().map(|(_, token, _)| *token).max();
        let token = agreed_token(&granted, quorum.majority()).or(largest);
        let lease = granted.iter().map(|(.., lease)| *lease).min();
        let (Some(token), Some(lease)) = (token, lease) else {
            return quorum.not_granted(0, trouble, busy, asked_at);
        };
        if granted.len() < quorum.majority() {
            return quorum.not_granted(granted.len(), trouble, busy, asked_at);
        }
        self.settle(token)
            .await
            .map(|settled| if settled { Contest::Won(token, lease) } else { Contest::Split(None) })
    }

    /// Writes the token to a majority that has this attempt's grant. Returns false if too few
    /// masters have it.
    async fn settle(&self, token: FencingToken) -> Result<bool, BackendError> {
        let quorum = self.quorum;
        // Masters that have not answered yet are included: the claim request precedes this one on
        // the same connection.
        let mut raised = quorum.ask_all(|_, master| {
            let (claim, questions) = (self.claim.clone(), Arc::clone(&self.questions));
            async move { master.store.raise(&claim, &questions.attempt, token).await }
        });
        let (mut held, mut others, mut failed) = (0, 0, 0);
        let (mut trouble, mut hurries) = (None, false);
        while others + failed <= quorum.spare() {
            match raised.next().await {
                Heard::Answer(Ok(true)) => held += 1,
                Heard::Answer(Ok(false)) => others += 1,
                Heard::Answer(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                Heard::NothingYet => {}
                Heard::All => break,
            }
            if held >= quorum.majority() {
                return Ok(true);
            }
            if !hurries && held + others >= quorum.majority() {
                hurries = true;
                raised.hurry();
            }
            if !raised.is_patient && held + others >= quorum.majority() {
                break;
            }
        }
        if failed > quorum.spare() { Err(quorum.too_few(trouble)) } else { Ok(false) }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        self.questions.is_over.store(true, Ordering::Release);
        // Without a runtime no request is possible; the lease ends the grants.
        if tokio::runtime::Handle::try_current().is_ok() {
            drop(self.quorum.ask_all(|nth, master| {
                let (claim, questions) = (self.claim.clone(), Arc::clone(&self.questions));
                async move {
                    master.withdraw(&claim, &questions, nth).await;
                    Ok(())
                }
            }));
        }
    }
}

/// The result of a round.
enum Contest {
    Won(FencingToken, Duration),
    Lost(Answer),
    /// Several attempts blocked each other, possibly those of one claim. The next round may
    /// succeed.
    Split(Option<Answer>),
}

/// The running attempts of one claim, which take turns.
struct Alone<'a> {
    quorum: &'a Quorum,
    id: ClaimId,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let mut attempts = self.quorum.attempts();
        // The remaining references are the map's and this one.
        if Arc::strong_count(&self.turn) == 2 {
            attempts.remove(&self.id);
        }
    }
}

/// The masters' answers to the renewal of one claim.
#[derive(Default)]
struct Votes {
    renewed: Vec<Duration>,
    gone: usize,
    failed: usize,
    trouble: Option<BackendError>,
}

impl Votes {
    fn count(&mut self, answer: Result<Renewal, BackendError>) {
        match answer {
            Ok(Renewal::Renewed(left)) => self.renewed.push(left),
            Ok(Renewal::Gone) => self.gone += 1,
            Err(error) => {
                self.failed += 1;
                self.trouble.get_or_insert(error);
            }
        }
    }

    /// Returns `None` while the result is undecided.
    fn verdict(&self, quorum: &Quorum) -> Option<Result<Renewal, BackendError>> {
        let (all, majority) = (quorum.masters.len(), quorum.majority());
        if self.renewed.len() >= majority {
            let mut left = self.renewed.clone();
            left.sort_unstable_by(|a, b| b.cmp(a));
            return Some(Ok(Renewal::Renewed(left[majority - 1])));
        }
        // Too few masters remain that might still have the claim.
        if self.gone > all - majority {
            return Some(Ok(Renewal::Gone));
        }
        let trouble = self.trouble.as_ref().filter(|_| self.gone + self.failed > all - majority);
        trouble.map(|trouble| Err(quorum.too_few(Some(trouble.clone()))))
    }
}

/// Returns the result of a round that other holders blocked.
fn busy_with(busy: Vec<(Option<Duration>, Holder)>, asked_at: u64) -> Contest {
    // Several masters return the same token only after a majority agreed on it. Otherwise several
    // attempts may have blocked each other. If these waited for messages, all would wake at the
    // same time and block each other again.
    let agreed = busy
        .iter()
        .position(|(_, one)| busy.iter().filter(|(_, other)| one.token == other.token).count() > 1);
    match busy.into_iter().nth(agreed.unwrap_or(0)) {
        Some((left, holder)) if agreed.is_some() => {
            Contest::Lost(Answer::Busy { left, holder, asked_at })
        }
        Some((_, holder)) => {
            Contest::Split(Some(Answer::Busy { left: Some(jitter()), holder, asked_at: u64::MAX }))
        }
        None => Contest::Split(None),
    }
}

/// One master's grant: whether its token is settled, the token, and the lease.
type OneGrant = (bool, FencingToken, Duration);

/// Returns whether some master reports a settled token but no majority reports the same one.
/// Further answers may decide.
fn is_disputed(granted: &[OneGrant], majority: usize) -> bool {
    granted.iter().any(|(settled, ..)| *settled) && agreed_token(granted, majority).is_none()
}

/// Returns the settled token that a majority reports. A minority's token may come from an
/// unfinished round, after which other claims may have received larger tokens.
fn agreed_token(granted: &[OneGrant], majority: usize) -> Option<FencingToken> {
    let settled = granted.iter().filter(|(settled, ..)| *settled).map(|(_, token, _)| *token);
    let votes = |token: &FencingToken| settled.clone().filter(|other| other == token).count();
    settled.clone().find(|token| votes(token) >= majority)
}

/// Returns a short random pause.
fn jitter() -> Duration {
    Duration::from_millis(rand::random_range(5..60))
}

/// Combines the masters' reports of one holder. The token is the most frequent one. The remaining
/// lease is one that a majority has at minimum.
fn summary(mut held: Vec<Holder>) -> Option<Holder> {
    let votes = |holder: &Holder| held.iter().filter(|other| other.token == holder.token).count();
    let token = held.iter().max_by_key(|holder| votes(holder))?.token;
    held.sort_by_key(|holder| holder.lease_left);
    let mut holder = held.swap_remove(held.len() / 2);
    holder.token = token;
    Some(holder)
}

/// Running requests to all masters.
struct Asked<T> {
    calls: FuturesUnordered<JoinHandle<Result<T, BackendError>>>,
    asked_at: Instant,
    patience: Pin<Box<Sleep>>,
    /// Further answers are awaited beyond those that are needed.
    is_patient: bool,
}

/// The next event of running requests.
enum Heard<T> {
    Answer(Result<T, BackendError>),
    /// The time limit is over: from now on, the necessary answers must suffice.
    NothingYet,
    All,
}

impl<T> Asked<T> {
    /// Called once a majority has answered: awaits the others for twice the time that this took.
    fn hurry(&mut self) {
        self.wait_for((self.asked_at.elapsed() * 2).clamp(SLOW_MIN, SLOW));
    }

    /// Awaits further answers for `patience` from now on.
    fn wait_for(&mut self, patience: Duration) {
        self.patience.as_mut().reset(Instant::now() + patience);
        self.is_patient = true;
    }

    /// Waits for the next answer or the end of the time limit.
    async fn next(&mut self) -> Heard<T> {
        tokio::select! {
            biased;
            answer = self.calls.next() => match answer {
                Some(Ok(answer)) => Heard::Answer(answer),
                Some(Err(_)) => {
                    Heard::Answer(Err(BackendError::transient("redis: the runtime has ended")))
                }
                None => Heard::All,
            },
            () = &mut self.patience, if self.is_patient => {
                self.is_patient = false;
                Heard::NothingYet
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

/// The limit of immediate retries after attempts blocked each other.
const ROUNDS_MAX: u32 = 8;
/// The time limit of these retries.
const ROUNDS_TIME: Duration = Duration::from_millis(300);
/// A master's result of an attempt.
const UNKNOWN: u8 = 0;
const NOTHING: u8 = 1;
const GRANTED: u8 = 2;
/// The limit of claims whose release is retried at one silent master. Beyond it, the lease ends the
/// grant there.
const GIVEN_BACK_MAX: usize = 256;
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long further answers are awaited beyond those that are needed.
const SLOW: Duration = Duration::from_millis(100);
/// The minimum of that time once a majority has answered.
const SLOW_MIN: Duration = Duration::from_millis(5);
/// The limit while a majority has not answered and the lock can no longer be acquired.
const SLOW_MAJORITY: Duration = Duration::from_millis(500);
/// The limit for renewals, where giving up too early loses a lock.
const SLOW_RENEWAL: Duration = Duration::from_secs(1);
/// The next attempt's number. Only attempts of one claim are compared, and a claim belongs to one
/// process.
static ATTEMPTS: AtomicU64 = AtomicU64::new(1);
const CLOCK_DISTANCE_US: i64 = 500_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(settled: bool, token: u64) -> OneGrant {
        (settled, FencingToken::new(token).unwrap(), Duration::from_secs(1))
    }

    /// A round that did not finish leaves its token on a minority; other claims may have received
    /// larger tokens since.
    #[test]
    fn the_token_of_a_minority_is_not_believed() {
        let granted = [grant(true, 5), grant(false, 9), grant(false, 8)];
        assert_eq!(agreed_token(&granted, 3), None);
        assert!(is_disputed(&granted, 3), "the others may know more");
        assert!(!is_disputed(&[grant(false, 9), grant(false, 8), grant(false, 7)], 3));
    }

    /// The claim was granted before, and its holder has this token.
    #[test]
    fn the_token_of_a_majority_is_the_claims_own() {
        let granted = [grant(true, 5), grant(false, 9), grant(true, 5), grant(true, 5)];
        assert_eq!(agreed_token(&granted, 3), FencingToken::new(5));
        assert!(!is_disputed(&granted, 3));
    }
}
