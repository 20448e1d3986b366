//! Lock operations on servers with one shared history: a single server, a master and its replicas,
//! or a cluster. Lua is in `script`, key names are in `names`, and routing to servers is in `link`.

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

/// The result of an attempt.
pub(crate) enum Answer {
    Granted {
        token: FencingToken,
        lease: Duration,
        /// False while the token is provisional, which occurs only in a quorum.
        settled: bool,
    },
    Busy {
        left: Option<Duration>,
        holder: Holder,
        asked_at: u64,
    },
}

/// The holder of a lock and its claim.
pub(crate) struct Seen {
    pub(crate) claim: Vec<u8>,
    pub(crate) holder: Holder,
}

pub(crate) struct Store {
    pub(crate) names: Names,
    pub(crate) link: Link,
    scripts: &'static Scripts,
    /// Locks are distributed over hash slots.
    clustered: bool,
    alone: bool,
    publish: &'static str,
    pub(crate) token_memory: Duration,
    durability: Durability,
}

impl Store {
    /// Connects to the servers.
    pub(crate) async fn open(
        config: &RedisConfig,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let link = Link::open(config, hearing(config), rumours).await?;
        link.connect().await?;
        Ok(Self::over(link, config))
    }

    /// Creates the store of one quorum master, without connecting: the master may be down.
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

    /// Returns whether the store is a single server, whose findings need no server name.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Returns a number for the server that holds `key`. Keys with the same number fail together.
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

    /// Tries to acquire the lock. `attempt` is given for a master of a quorum only.
    pub(crate) async fn try_acquire(
        &self,
        claim: &Claim,
        attempt: Option<&str>,
    ) -> Result<Answer, BackendError> {
        let lock = self.names.lock(claim.key());
        // Read before the request: a later message may make the response obsolete.
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
                // Unless the release is confirmed, the outcome of the acquisition is unknown.
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
                // While a slot migrates, its keys are spread over two servers.
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
        // A renewal that a failover may undo must not count.
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

    /// Releases the grant of one attempt of a claim.
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

    /// Runs a script that deletes `lock` and publishes its release.
    async fn free(&self, lock: &str, call: Call<'_>) -> Result<Release, BackendError> {
        let mut call =
            call.arg(self.publish).arg(self.names.message(lock)).arg(self.names.channel(lock));
        if let Some(common) = self.names.common_channel() {
            call = call.arg(common);
        }
        let freed: i64 = read(self.link.run(self.slot(lock), &call).await?)?;
        Ok(if freed > 0 { Release::Freed } else { Release::NotHeld })
    }

    /// Stores the token of a majority. Returns false if the claim does not hold the lock here.
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

    /// Waits until `key` may have been released after `asked_at`.
    pub(crate) async fn wait(&self, key: &Key, asked_at: u64) {
        let lock = self.names.lock(key);
        match self.link.known(self.slot(&lock)) {
            Some(node) => node.ears.wait(&self.names.channel(&lock), asked_at).await,
            // No server is known for the slot; the engine polls.
            None => std::future::pending().await,
        }
    }

    /// Returns whether a release message for `key` would arrive.
    pub(crate) fn hears_of(&self, key: &Key) -> bool {
        let lock = self.names.lock(key);
        let node = self.link.known(self.slot(&lock));
        node.is_some_and(|node| node.ears.are_confirmed(&self.names.channel(&lock)))
    }

    /// Returns the holders of those `keys` that are locked.
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

    /// Returns the holders of all locks in the namespace.
    pub(crate) async fn list(&self) -> Result<Vec<Seen>, BackendError> {
        let nodes = self.link.nodes().await?;
        let scans = nodes.iter().map(|node| self.scan(node));
        let mut keys: Vec<Key> = Vec::new();
        for found in join_all(scans).await {
            keys.extend(found?);
        }
        // SCAN may return a key twice during a rehash or a slot migration.
        keys.sort();
        keys.dedup();
        self.look(&keys).await
    }

    async fn scan(&self, node: &Arc<Node>) -> Result<Vec<Key>, BackendError> {
        let mut keys = Vec::new();
        let mut cursor = 0_u64;
        let began = Instant::now();
        // SCAN visits a bounded part of the database per call, so other clients are not blocked.
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
            // The engine's time-out is long over, and a proxy may never return cursor 0.
            if began.elapsed() > LIST_LIMIT {
                return Err(BackendError::transient(
                    "redis: the database is too large to be listed in time",
                ));
            }
        }
    }

    /// Returns the hash slot of `lock`, or 0 outside a cluster.
    fn slot(&self, lock: &str) -> u16 {
        if self.clustered { slot(lock) } else { 0 }
    }

    /// Returns how long the newest token is stored, in ms. It outlives the lease, because in
    /// foreign layouts the grant's token exists only there. It also covers the time until the clock
    /// has passed the last reserved token.
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

/// Returns the channel scheme for release messages.
pub(crate) fn hearing(config: &RedisConfig) -> Hearing {
    let clustered = matches!(config.servers, Servers::Cluster(_));
    let sharded = match config.publish {
        Publish::Sharded => true,
        Publish::Plain => false,
        Publish::Auto => clustered && config.layout != Layout::Spring,
    };
    Hearing { names: names(config), sharded }
}

/// Returns the key names of this configuration.
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
            // If another client removed the expiry, the grant outlives any lease.
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

/// A lock's record, its remaining lease in ms, and its token.
type Found = (Vec<u8>, i64, Option<i64>);

/// Returns the server's time and the findings for each lock.
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

/// Rounds up to whole milliseconds: a lease must not be shorter than requested.
pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The length of a claim in the native layout.
const CLAIM_BYTES: usize = 32;
/// The number of keys that one SCAN call visits.
const SCAN_AT_ONCE: usize = 500;
/// The number of locks per call of the look script. With tracking, some servers record all keys at
/// each read.
const LOOK_AT_ONCE: usize = 20;
/// The number of concurrent calls of the look script.
const LOOKS_AT_ONCE: usize = 32;
/// Ten times the engine's time-out.
const LIST_LIMIT: Duration = Duration::from_secs(30);
