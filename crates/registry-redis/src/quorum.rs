//! Masters that know nothing of each other. A lock is held by whoever holds it on more than half of them.
//!
//! The algorithm is Redlock (redis.io, "Distributed Locks with Redis"), with two differences. The time that a grant is good for is counted
//! from before the first question, on a clock that does not jump; the engine does that for every store. And a grant has a fencing
//! token: the largest of a majority's, written back to a majority that still has the claim before the grant counts. Any later grant
//! has a master in common with it, so its token is larger, unless that master has lost its data and its clock runs behind.
//!
//! All masters are asked together, and the answers of a majority decide. What the others say is not waited for, but a claim that came to
//! nothing is given back everywhere, and also where it may arrive later.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{
    BackendError, BackendErrorKind, Claim, FencingToken, Finding, Holder, Key, Release, Renewal,
};
use tokio::time::{Instant, sleep};

use crate::config::{Address, RedisConfig};
use crate::ears::moment;
use crate::rumours::Rumours;
use crate::store::{Answer, Store};

pub(crate) struct Quorum {
    masters: Vec<Arc<Master>>,
}

struct Master {
    store: Store,
    restart_guard: Duration,
}

impl Quorum {
    /// Connects to a majority.
    pub(crate) async fn open(
        addresses: &[Address],
        config: &RedisConfig,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let master = |address| {
            let store = Store::member(address, config, rumours)?;
            Ok(Arc::new(Master { store, restart_guard: config.restart_guard }))
        };
        let masters = addresses.iter().map(master).collect::<Result<_, BackendError>>()?;
        let quorum = Self { masters };
        let connecting =
            quorum.ask_all(|_, master| async move { master.store.link.connect().await });
        match quorum.majority_of(connecting).await {
            Ok(_) => Ok(quorum),
            Err(error) => Err(error.as_refused()),
        }
    }

    fn majority(&self) -> usize {
        self.masters.len() / 2 + 1
    }

    /// How many masters may fail.
    fn spare(&self) -> usize {
        self.masters.len() - self.majority()
    }

    /// Asks all masters together. Each question is carried to its end, whether somebody waits for the answer or not.
    fn ask_all<T, F>(&self, ask: impl Fn(usize, Arc<Master>) -> F) -> Asked<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let masters = self.masters.iter().enumerate();
        masters.map(|(nth, master)| tokio::spawn(ask(nth, Arc::clone(master)))).collect()
    }

    /// Waits until a majority has done what was asked, or cannot any more.
    async fn majority_of<T>(&self, mut asked: Asked<T>) -> Result<Vec<T>, BackendError> {
        let mut done = Vec::new();
        let mut trouble = None;
        let mut failed = 0;
        while failed <= self.spare() {
            match next_answer(&mut asked).await {
                Some(Ok(answer)) => done.push(answer),
                Some(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                None => break,
            }
            if done.len() >= self.majority() {
                return Ok(done);
            }
        }
        Err(self.too_few(trouble))
    }

    /// Says that a majority is in trouble, and gives an example.
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
        let asked_at = moment();
        let mut round = Round::new(self, claim);
        let outcome = self.contend(claim, asked_at, &round).await;
        round.kept = matches!(outcome, Ok(Answer::Granted { .. }));
        outcome
    }

    async fn contend(
        &self,
        claim: &Claim,
        asked_at: u64,
        round: &Round<'_>,
    ) -> Result<Answer, BackendError> {
        let mut asked = self.ask_all(|nth, master| {
            let (claim, answered) = (claim.clone(), Arc::clone(&round.answered));
            async move {
                let answer = master.try_acquire(&claim).await;
                if answer.as_ref().err().is_none_or(BackendError::refused)
                    && let Some(answered) = answered.get(nth)
                {
                    answered.store(true, Ordering::Release);
                }
                answer
            }
        });
        let mut granted: Vec<(FencingToken, Duration)> = Vec::new();
        let mut busy: Vec<(Option<Duration>, Holder)> = Vec::new();
        let mut trouble: Option<BackendError> = None;
        let mut failed = 0;
        while granted.len() < self.majority() {
            match next_answer(&mut asked).await {
                Some(Ok(Answer::Granted { token, lease })) => granted.push((token, lease)),
                Some(Ok(Answer::Busy { left, holder, .. })) => busy.push((left, holder)),
                Some(Err(error)) => {
                    failed += 1;
                    trouble.get_or_insert(error);
                }
                None => break,
            }
            if busy.len() + failed > self.spare() {
                break;
            }
        }
        if granted.len() < self.majority() {
            // An outage must not be taken for a holder.
            if failed > self.spare() || busy.is_empty() {
                return Err(self.too_few(trouble));
            }
            return Ok(busy_with(busy, asked_at));
        }
        let token = granted.iter().map(|(token, _)| *token).max();
        let lease = granted.iter().map(|(_, lease)| *lease).min();
        let (Some(token), Some(lease)) = (token, lease) else { return Err(self.too_few(None)) };
        // Also where the claim arrives only now: its question came before this one, on the same connection.
        let mut raised = self.ask_all(|_, master| {
            let claim = claim.clone();
            async move { master.store.raise(&claim, token).await }
        });
        let (mut held, mut not) = (0, 0);
        let mut trouble = None;
        while held < self.majority() && not <= self.spare() {
            match next_answer(&mut raised).await {
                Some(Ok(true)) => held += 1,
                Some(Ok(false)) => not += 1,
                Some(Err(error)) => {
                    not += 1;
                    trouble.get_or_insert(error);
                }
                None => break,
            }
        }
        if held >= self.majority() {
            return Ok(Answer::Granted { token, lease });
        }
        Err(self.too_few(trouble))
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let claims: Arc<[Claim]> = claims.into();
        let mut asked = self.ask_all(|_, master| {
            let claims = Arc::clone(&claims);
            async move { Ok(master.store.renew(&claims).await) }
        });
        let mut votes: Vec<Votes> = claims.iter().map(|_| Votes::default()).collect();
        while let Some(answers) = next_answer(&mut asked).await {
            let answers = answers.unwrap_or_else(|error| vec![Err(error); claims.len()]);
            for (votes, answer) in votes.iter_mut().zip(answers) {
                votes.count(answer);
            }
            if votes.iter().all(|votes| votes.verdict(self).is_some()) {
                break;
            }
        }
        let open = || Err(self.too_few(None));
        votes.into_iter().map(|votes| votes.verdict(self).unwrap_or_else(open)).collect()
    }

    /// Ends the claim everywhere; a majority that has it is enough to say so, and the others are told until the lease is over.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let asked = self.ask_all(|_, master| {
            let claim = claim.clone();
            async move { master.give_back(&claim).await }
        });
        Ok(freed(&self.majority_of(asked).await?))
    }

    pub(crate) async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let asked = self.ask_all(|_, master| {
            let key = key.clone();
            async move { master.store.force_release(&key).await }
        });
        Ok(freed(&self.majority_of(asked).await?))
    }

    /// Returns when a majority may have been released after `asked_at`.
    pub(crate) async fn wait(&self, key: &Key, asked_at: u64) {
        let waits = self.masters.iter().map(|master| Box::pin(master.store.wait(key, asked_at)));
        let mut waits: Vec<_> = waits.collect();
        for _ in 0..self.majority() {
            let ((), _, others) = select_all(waits).await;
            waits = others;
        }
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

    /// The holders that a majority of the masters agrees on.
    async fn agreed(&self, mut asked: Asked<Vec<Holder>>) -> Result<Vec<Holder>, BackendError> {
        let mut seen: HashMap<(Key, Option<FencingToken>), (usize, Holder)> = HashMap::new();
        let mut answered = 0;
        let mut trouble = None;
        let mut slow = std::pin::pin!(sleep(SLOW));
        let mut patient = true;
        while answered < self.masters.len() {
            let answer = tokio::select! {
                answer = next_answer(&mut asked) => answer,
                // A majority has answered; the others would only make it clearer.
                () = &mut slow, if patient => {
                    patient = false;
                    if answered >= self.majority() { break }
                    continue;
                }
            };
            match answer {
                Some(Ok(holders)) => {
                    answered += 1;
                    for holder in holders {
                        let entry = seen
                            .entry((holder.key.clone(), holder.token))
                            .or_insert_with(|| (0, holder.clone()));
                        entry.0 += 1;
                        // It ends when a majority has ended; the shortest is on the safe side.
                        entry.1.lease_left = entry.1.lease_left.min(holder.lease_left);
                    }
                    if !patient && answered >= self.majority() {
                        break;
                    }
                }
                Some(Err(error)) => _ = trouble.get_or_insert(error),
                None => break,
            }
        }
        if answered < self.majority() {
            return Err(self.too_few(trouble));
        }
        let majority = self.majority();
        Ok(seen
            .into_values()
            .filter(|(votes, _)| *votes >= majority)
            .map(|(_, holder)| holder)
            .collect())
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
        findings.extend(self.clock_distance().await);
        Ok(findings)
    }

    /// What the masters' clocks say of each other.
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

type Asked<T> = FuturesUnordered<tokio::task::JoinHandle<Result<T, BackendError>>>;

impl Master {
    async fn try_acquire(&self, claim: &Claim) -> Result<Answer, BackendError> {
        if !self.restart_guard.is_zero() && self.store.uptime().await? < self.restart_guard {
            return Err(BackendError::new(
                BackendErrorKind::Transient,
                "redis: the master was started a moment ago and may have lost its data (restart_guard)",
            )
            .as_refused());
        }
        self.store.try_acquire(claim).await
    }

    /// Releases the claim until that is answered or its lease is over.
    async fn give_back(&self, claim: &Claim) -> Result<Release, BackendError> {
        let until = Instant::now() + claim.lease();
        let mut pause = PAUSE_MIN;
        loop {
            let error = match self.store.release(claim).await {
                Ok(release) => return Ok(release),
                Err(error) => error,
            };
            if Instant::now() + pause >= until {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// An attempt that is given back everywhere unless it is kept.
struct Round<'a> {
    quorum: &'a Quorum,
    claim: &'a Claim,
    /// Of each master, whether it is known what it did.
    answered: Arc<[AtomicBool]>,
    kept: bool,
}

impl<'a> Round<'a> {
    fn new(quorum: &'a Quorum, claim: &'a Claim) -> Self {
        let answered = quorum.masters.iter().map(|_| AtomicBool::new(false)).collect();
        Self { quorum, claim, answered, kept: false }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        drop(self.quorum.ask_all(|nth, master| {
            let (claim, answered) = (self.claim.clone(), Arc::clone(&self.answered));
            async move {
                let until = Instant::now() + claim.lease();
                let mut pause = PAUSE_MIN;
                loop {
                    // A question that was not answered may still arrive, after this.
                    let certain =
                        answered.get(nth).is_none_or(|answered| answered.load(Ordering::Acquire));
                    match master.give_back(&claim).await {
                        Ok(Release::NotHeld) if !certain && Instant::now() < until => {}
                        released => return released,
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }));
    }
}

/// What the masters said of one claim.
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

    /// `None` while it is open.
    fn verdict(&self, quorum: &Quorum) -> Option<Result<Renewal, BackendError>> {
        let (all, majority) = (quorum.masters.len(), quorum.majority());
        if self.renewed.len() >= majority {
            let mut left = self.renewed.clone();
            left.sort_unstable_by(|a, b| b.cmp(a));
            return Some(Ok(Renewal::Renewed(left[majority - 1])));
        }
        // Too few are left that might still have it.
        if self.gone > all - majority {
            return Some(Ok(Renewal::Gone));
        }
        let trouble = self.trouble.as_ref().filter(|_| self.gone + self.failed > all - majority);
        trouble.map(|trouble| Err(quorum.too_few(Some(trouble.clone()))))
    }
}

fn freed(answers: &[Release]) -> Release {
    if answers.contains(&Release::Freed) { Release::Freed } else { Release::NotHeld }
}

/// Says who stands in the way.
fn busy_with(busy: Vec<(Option<Duration>, Holder)>, asked_at: u64) -> Answer {
    // A token is the same on several masters only after a majority was won. Before that, several may have stopped each other; who
    // then waits for messages wakes when the others do, and they stop each other again.
    let agreed = busy
        .iter()
        .position(|(_, one)| busy.iter().filter(|(_, other)| one.token == other.token).count() > 1);
    match busy.into_iter().nth(agreed.unwrap_or(0)) {
        Some((left, holder)) if agreed.is_some() => Answer::Busy { left, holder, asked_at },
        Some((_, holder)) => {
            let left = Duration::from_millis(rand::random_range(5..60));
            Answer::Busy { left: Some(left), holder, asked_at: u64::MAX }
        }
        None => unreachable!("somebody said that it is busy"),
    }
}

async fn next_answer<T>(asked: &mut Asked<T>) -> Option<Result<T, BackendError>> {
    let ended = |_| Err(BackendError::transient("redis: the runtime has ended"));
    asked.next().await.map(|answer| answer.unwrap_or_else(ended))
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masters = self.masters.iter().map(|master| &master.store);
        f.debug_list().entries(masters).finish()
    }
}

const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
const SLOW: Duration = Duration::from_millis(100);
const CLOCK_DISTANCE_US: i64 = 500_000;
