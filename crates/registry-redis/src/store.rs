//! The locks of servers that have one history between them: a single server, a master and its replicas, a cluster. Says nothing of Lua, see
//! `script`, nothing of names, see `names`, and nothing of where a server is, see `link`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use redis::{FromRedisValue, Value};
use registry_core::{
    BackendError, BackendErrorKind, Claim, FencingToken, Holder, Key, Release, Renewal,
};

use crate::config::{Address, Durability, Layout, Publish, RedisConfig, Servers};
use crate::ears::{Hearing, moment};
use crate::error::explain;
use crate::link::{Link, Node};
use crate::names::Names;
use crate::record::{Record, lease_left};
use crate::rumours::Rumours;
use crate::script::{Call, Scripts};
use crate::slot::slot;

/// What came of an attempt.
pub(crate) enum Answer {
    Granted {
        token: FencingToken,
        lease: Duration,
        /// In a quorum, whether a majority has settled on the token.
        settled: bool,
    },
    Busy {
        left: Option<Duration>,
        holder: Holder,
        asked_at: u64,
    },
}

/// Who holds a lock, and by which claim.
pub(crate) struct Seen {
    pub(crate) claim: Vec<u8>,
    pub(crate) holder: Holder,
}

pub(crate) struct Store {
    pub(crate) names: Names,
    pub(crate) link: Link,
    scripts: &'static Scripts,
    /// Locks are spread over slots.
    clustered: bool,
    alone: bool,
    publish: &'static str,
    pub(crate) token_memory: Duration,
    durability: Durability,
}

impl Store {
    /// Connects.
    pub(crate) async fn open(
        config: &RedisConfig,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let link = Link::open(config, hearing(config), rumours).await?;
        link.connect().await?;
        Ok(Self::over(link, config))
    }

    /// One master of several, which may be down just now.
    pub(crate) fn member(
        address: &Address,
        config: &RedisConfig,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let link = Link::to(address, config, hearing(config), rumours)?;
        Ok(Self::over(link, config))
    }

    fn over(link: Link, config: &RedisConfig) -> Self {
        let hearing = hearing(config);
        Self {
            link,
            scripts: Scripts::of(config.layout),
            clustered: matches!(config.servers, Servers::Cluster(_)),
            alone: matches!(config.servers, Servers::Single(_)),
            publish: if hearing.sharded { "SPUBLISH" } else { "PUBLISH" },
            token_memory: config.token_memory,
            durability: config.durability,
            names: hearing.names,
        }
    }

    /// Whether there is one server, which needs no name.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// The part of the servers that `key` is in: what fails together.
    pub(crate) fn shard(&self, key: &Key) -> u32 {
        if !self.clustered {
            return 0;
        }
        let node = self.link.known(slot(&self.names.lock(key)));
        node.map_or(0, |node| {
            node.name()
                .bytes()
                .fold(1, |hash: u32, byte| hash.wrapping_mul(31).wrapping_add(byte.into()))
        })
    }

    /// `attempt` is for a master of a quorum.
    pub(crate) async fn try_acquire(
        &self,
        claim: &Claim,
        attempt: Option<&str>,
    ) -> Result<Answer, BackendError> {
        let lock = self.names.lock(claim.key());
        // Before the question: what is heard of after it was asked may outdate the answer.
        let asked_at = moment();
        let mut call = self
            .scripts
            .acquire
            .call([lock.as_str(), &self.names.token(&lock)])
            .arg(self.names.claim(claim.id()))
            .arg(millis(claim.lease()))
            .arg(claim.token_block())
            .arg(self.memory_of_tokens(claim))
            .arg(claim.label().unwrap_or_default());
        if let Some(attempt) = attempt {
            call = call.arg(attempt);
        }
        let slot = self.slot(&lock);
        if !self.durability.is_wanted() {
            return read_attempt(self.link.run(slot, &call).await?, claim.key(), asked_at);
        }
        let durable = self.link.run_durably(slot, &call).await?;
        let answer = read_attempt(durable.answer, claim.key(), asked_at)?;
        match (answer, durable.missing) {
            (Answer::Granted { .. }, Some(missing)) => {
                let trouble =
                    BackendError::transient(format!("redis: {missing}; the grant was given back"));
                // Unless it is known to be given back, it is as if there had been no answer.
                Err(if self.release(claim).await.is_ok() { trouble.as_refused() } else { trouble })
            }
            (answer, _) => Ok(answer),
        }
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut by_slot: BTreeMap<u16, Vec<(usize, String)>> = BTreeMap::new();
        for (at, claim) in claims.iter().enumerate() {
            let lock = self.names.lock(claim.key());
            by_slot.entry(self.slot(&lock)).or_default().push((at, lock));
        }
        let mut answers = vec![Err(unreadable()); claims.len()];
        let calls = by_slot.iter().map(async |(slot, locks)| {
            let mut call = self.scripts.renew.call(locks.iter().map(|(_, lock)| lock.as_str()));
            for claim in locks.iter().filter_map(|(at, _)| claims.get(*at)) {
                call = call.arg(self.names.claim(claim.id())).arg(millis(claim.lease()));
            }
            let renewed = self.renew_together(*slot, &call.watching()).await;
            if self.clustered
                && locks.len() > 1
                && renewed.as_ref().is_err_and(BackendError::refused)
            {
                // A slot that is being moved has some of them here and some there.
                return (locks, self.renew_one_by_one(*slot, claims, locks).await);
            }
            let each =
                |nth| renewed.as_ref().map_err(Clone::clone).map(|left| left.get(nth).copied());
            (locks, (0..locks.len()).map(each).collect::<Vec<_>>())
        });
        for (locks, renewed) in join_all(calls).await {
            for (nth, (at, _)) in locks.iter().enumerate() {
                let left = renewed.get(nth).cloned().unwrap_or(Ok(None));
                answers[*at] = left.and_then(|left| {
                    let left = left.ok_or_else(unreadable)?;
                    Ok(lease_left(left).map_or(Renewal::Gone, Renewal::Renewed))
                });
            }
        }
        answers
    }

    async fn renew_one_by_one(
        &self,
        slot: u16,
        claims: &[Claim],
        locks: &[(usize, String)],
    ) -> Vec<Result<Option<i64>, BackendError>> {
        let calls = locks.iter().map(async |(at, lock)| {
            let Some(claim) = claims.get(*at) else { return Ok(None) };
            let call = self.scripts.renew.call([lock.as_str()]);
            let call = call.arg(self.names.claim(claim.id())).arg(millis(claim.lease()));
            Ok(self.renew_together(slot, &call.watching()).await?.first().copied())
        });
        join_all(calls).await
    }

    async fn renew_together(&self, slot: u16, call: &Call<'_>) -> Result<Vec<i64>, BackendError> {
        if !self.durability.is_wanted() {
            return read(self.link.run(slot, call).await?);
        }
        // What a failover may take back must not be counted on.
        let durable = self.link.run_durably(slot, call).await?;
        match durable.missing {
            Some(missing) => Err(BackendError::transient(format!("redis: {missing}"))),
            None => read(durable.answer),
        }
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let lock = self.names.lock(claim.key());
        let keys = [lock.as_str(), &self.names.token(&lock)];
        let call = self.scripts.release.call(keys);
        let call = call.arg(self.names.claim(claim.id())).arg(claim.token_block());
        self.free(&lock, call).await
    }

    /// Ends what one attempt of a claim has got.
    pub(crate) async fn withdraw(
        &self,
        claim: &Claim,
        attempt: &str,
    ) -> Result<Release, BackendError> {
        let lock = self.names.lock(claim.key());
        let call = self.scripts.withdraw.call([lock.as_str()]);
        let call = call.arg(self.names.claim(claim.id())).arg(attempt);
        self.free(&lock, call).await
    }

    pub(crate) async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let lock = self.names.lock(key);
        let call = self.scripts.break_open.call([lock.as_str()]);
        self.free(&lock, call).await
    }

    /// Runs a script that frees `lock` and publishes its release.
    async fn free(&self, lock: &str, call: Call<'_>) -> Result<Release, BackendError> {
        let mut call =
            call.arg(self.publish).arg(self.names.message(lock)).arg(self.names.channel(lock));
        if let Some(common) = self.names.common_channel() {
            call = call.arg(common);
        }
        let freed: i64 = read(self.link.run(self.slot(lock), &call).await?)?;
        Ok(if freed > 0 { Release::Freed } else { Release::NotHeld })
    }

    /// Writes down the token that a majority has settled on. False if the claim does not hold the lock here.
    pub(crate) async fn raise(
        &self,
        claim: &Claim,
        attempt: &str,
        token: FencingToken,
    ) -> Result<bool, BackendError> {
        let lock = self.names.lock(claim.key());
        let call = self
            .scripts
            .raise
            .call([lock.as_str(), &self.names.token(&lock)])
            .arg(self.names.claim(claim.id()))
            .arg(attempt)
            .arg(token.get())
            .arg(token.get() + u64::from(claim.token_block()) - 1)
            .arg(self.memory_of_tokens(claim));
        let raised: i64 = read(self.link.run(self.slot(&lock), &call).await?)?;
        Ok(raised == 1)
    }

    /// Returns when `key` may have been released after `asked_at`.
    pub(crate) async fn wait(&self, key: &Key, asked_at: u64) {
        let lock = self.names.lock(key);
        match self.link.known(self.slot(&lock)) {
            Some(node) => node.ears.wait(&self.names.channel(&lock), asked_at).await,
            // Nobody is known to have it; the engine looks by itself.
            None => std::future::pending().await,
        }
    }

    /// Returns whether a message of the release of `key` would arrive.
    pub(crate) fn hears_of(&self, key: &Key) -> bool {
        let lock = self.names.lock(key);
        let node = self.link.known(self.slot(&lock));
        node.is_some_and(|node| node.ears.are_confirmed(&self.names.channel(&lock)))
    }

    /// The holders of those locks that are held.
    pub(crate) async fn look(&self, keys: &[Key]) -> Result<Vec<Seen>, BackendError> {
        let mut by_slot: BTreeMap<u16, Vec<(&Key, String)>> = BTreeMap::new();
        for key in keys {
            let lock = self.names.lock(key);
            by_slot.entry(self.slot(&lock)).or_default().push((key, lock));
        }
        let pieces = by_slot
            .iter()
            .flat_map(|(slot, locks)| locks.chunks(LOOK_AT_ONCE).map(move |locks| (*slot, locks)));
        let looks: Vec<_> = pieces.map(|(slot, locks)| self.look_together(slot, locks)).collect();
        let holders: Vec<Vec<Seen>> =
            stream::iter(looks).buffer_unordered(LOOKS_AT_ONCE).try_collect().await?;
        Ok(holders.into_iter().flatten().collect())
    }

    async fn look_together(
        &self,
        slot: u16,
        locks: &[(&Key, String)],
    ) -> Result<Vec<Seen>, BackendError> {
        let names: Vec<String> =
            locks.iter().flat_map(|(_, lock)| [lock.clone(), self.names.token(lock)]).collect();
        let call = self.scripts.look.call(&names);
        let answer: Vec<Value> = read(self.link.run(slot, &call).await?)?;
        let (now, records) = read_look(&answer)?;
        let held = locks.iter().zip(records).filter(|((key, _), (record, ..))| {
            !record.is_empty() && self.names.is_holder(key, record)
        });
        let holder = |((key, _), (record, left, token)): (&(&Key, String), Found)| {
            let holder = Record::read(&record, token).holder((*key).clone(), now, left);
            Seen { claim: record.into_iter().take(CLAIM_BYTES).collect(), holder }
        };
        Ok(held.map(holder).collect())
    }

    /// The holders of all locks of the namespace.
    pub(crate) async fn list(&self) -> Result<Vec<Seen>, BackendError> {
        let nodes = self.link.nodes().await?;
        let scans = nodes.iter().map(|node| self.scan(node));
        let mut keys: Vec<Key> = Vec::new();
        for found in join_all(scans).await {
            keys.extend(found?);
        }
        // A key may be told twice while the database is rearranged, or the cluster.
        keys.sort();
        keys.dedup();
        self.look(&keys).await
    }

    async fn scan(&self, node: &Arc<Node>) -> Result<Vec<Key>, BackendError> {
        let mut keys = Vec::new();
        let mut cursor = 0_u64;
        let began = Instant::now();
        // SCAN looks at a bounded piece of the database at a time, so nobody else is held up.
        loop {
            let scan = redis::cmd("SCAN")
                .arg(cursor)
                .arg("MATCH")
                .arg(self.names.pattern())
                .arg("COUNT")
                .arg(SCAN_AT_ONCE)
                .arg("TYPE")
                .arg(self.names.kind())
                .to_owned();
            let (next, names): (u64, Vec<Vec<u8>>) = read(self.link.ask(node, &scan).await?)?;
            let name = |name: Vec<u8>| self.names.key(std::str::from_utf8(&name).ok()?);
            keys.extend(names.into_iter().filter_map(name));
            cursor = next;
            if cursor == 0 {
                return Ok(keys);
            }
            // The caller has long gone, and a proxy may lead in circles.
            if began.elapsed() > LIST_LIMIT {
                return Err(BackendError::transient(
                    "redis: the database is too large to be listed in time",
                ));
            }
        }
    }

    /// Where `lock` is, among servers that share their locks out.
    fn slot(&self, lock: &str) -> u16 {
        if self.clustered { slot(lock) } else { 0 }
    }

    /// How long tokens are remembered: never shorter than the grant, which in some layouts can tell its token only from there, and
    /// until the clock is past the last of them.
    fn memory_of_tokens(&self, claim: &Claim) -> u64 {
        let reserved = Duration::from_micros(claim.token_block().into());
        millis(self.token_memory.max(claim.lease() * 2) + reserved)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("link", &self.link).finish_non_exhaustive()
    }
}

/// How releases are told.
pub(crate) fn hearing(config: &RedisConfig) -> Hearing {
    let clustered = matches!(config.servers, Servers::Cluster(_));
    let sharded = match config.publish {
        Publish::Sharded => true,
        Publish::Plain => false,
        Publish::Auto => clustered && config.layout != Layout::Spring,
    };
    Hearing { names: names(config), sharded }
}

/// What keys are called.
pub(crate) fn names(config: &RedisConfig) -> Names {
    let clustered = matches!(config.servers, Servers::Cluster(_));
    Names::new(config.layout, config.namespace(), clustered)
}

fn read_attempt(answer: Value, key: &Key, asked_at: u64) -> Result<Answer, BackendError> {
    let Value::Array(parts) = answer else { return Err(unreadable()) };
    match &parts[..] {
        [Value::Int(1), token, Value::Int(left)] => {
            let settled = !matches!(token, Value::BulkString(text) if text.starts_with(b"0"));
            let token = number(token).and_then(|token| FencingToken::try_from(token).ok());
            // Without an expiry, if somebody took it away, it lasts longer than any lease.
            let lease = lease_left(*left).unwrap_or(Duration::MAX);
            Ok(Answer::Granted { token: token.ok_or_else(unreadable)?, lease, settled })
        }
        [Value::Int(0), Value::Int(left), Value::BulkString(record), now, token] => {
            let now = number(now).ok_or_else(unreadable)?;
            let holder = Record::read(record, number(token)).holder(key.clone(), now, *left);
            Ok(Answer::Busy { left: lease_left(*left), holder, asked_at })
        }
        _ => Err(unreadable()),
    }
}

/// A lock's record, the lease that it has left, and its token.
type Found = (Vec<u8>, i64, Option<i64>);

/// The time on the server's clock, and what was found for each lock.
fn read_look(answer: &[Value]) -> Result<(i64, Vec<Found>), BackendError> {
    let (now, records) = answer.split_first().ok_or_else(unreadable)?;
    let now = number(now).ok_or_else(unreadable)?;
    let record = |found: &[Value]| match found {
        [Value::BulkString(record), Value::Int(left), token] => {
            Ok((record.clone(), *left, number(token)))
        }
        _ => Err(unreadable()),
    };
    Ok((now, records.chunks(3).map(record).collect::<Result<_, _>>()?))
}

fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}

pub(crate) fn read<T: FromRedisValue>(answer: Value) -> Result<T, BackendError> {
    redis::from_redis_value(answer).map_err(|error| explain(&error.into()))
}

pub(crate) fn unreadable() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "redis: a script was answered in a way that it cannot answer; is there a proxy in between?",
    )
}

/// Whole milliseconds, rounded up: a lease must not be shorter than it was asked for.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// How long a claim is in the native layout.
const CLAIM_BYTES: usize = 32;
/// How many keys of a database are gone through in one step of a server.
const SCAN_AT_ONCE: usize = 500;
/// How many locks are looked at in one step of a server: where it tells of changes, each read makes it note all of them.
const LOOK_AT_ONCE: usize = 20;
/// How many such steps are asked for together.
const LOOKS_AT_ONCE: usize = 32;
/// Ten times what the engine waits for.
const LIST_LIMIT: Duration = Duration::from_secs(30);
