//! Lock operations on a single server, on a master with replicas, on a cluster, or on one master of
//! a quorum. `script` contains the Lua code, `names` the key names, and `connections` the routing
//! to servers.

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

use crate::config::{Durability, Layout, Publish, RedisConfig, ServerAddress, ServerAddresses};
use crate::connections::{RedisConnections, RedisNode};
use crate::error::to_backend_error;
use crate::invalidations::InvalidationForwarder;
use crate::listener::{ChannelScheme, last_event_seq};
use crate::multi_claim::{StoredValue, parse_multi_claim_record};
use crate::names::RedisKeyNames;
use crate::record::{ExclusiveRecord, parse_pttl};
use crate::script::{ScriptCall, Scripts};
use crate::slot::hash_slot;

/// The store's response to an acquisition.
pub(crate) enum AcquireResult {
    Granted {
        token: FencingToken,
        lease: Duration,
        /// In a quorum, false until the quorum has written its chosen token to this master.
        /// Otherwise true.
        is_token_written: bool,
    },
    Busy {
        /// `None` if the lock has no expiry.
        remaining: Option<Duration>,
        holder: Holder,
        /// The sequence number of the last event that the listener had received before the request.
        event_seq: u64,
    },
}

/// The store's response to an acquisition of the exclusive lock.
pub(crate) enum ExclusiveAttempt {
    Decided(AcquireResult),
    /// The key has a record of several claims, which the script does not decide.
    FoundRecord(StoredValue),
}

/// The store's response to an attempt for several locks.
pub(crate) enum BatchResult {
    /// The token and the remaining lease of each lock.
    Granted(Vec<(FencingToken, Duration)>),
    /// The index of a busy lock, and the response for it.
    Busy(usize, AcquireResult),
    /// One script cannot decide the attempt. The engine then tries each claim separately.
    Declined,
}

/// The holder of a lock, and its claim as the store records it.
pub(crate) struct ClaimHolder {
    /// Empty for a claim in a record of several claims.
    pub(crate) claim: Vec<u8>,
    pub(crate) holder: Holder,
}

/// The result of an inspection for a corrupt record of several claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CorruptRecord {
    /// An error.
    IsError,
    /// A holder without fields.
    IsHeld,
}

pub(crate) struct RedisStore {
    pub(crate) names: RedisKeyNames,
    pub(crate) connections: RedisConnections,
    pub(crate) scripts: &'static Scripts,
    /// In a cluster, each lock belongs to a hash slot.
    is_cluster: bool,
    /// The configuration is a single server: no sentinels, cluster or quorum.
    is_single: bool,
    /// `PUBLISH` or `SPUBLISH`.
    pub(crate) publish_command: &'static str,
    pub(crate) token_memory: Duration,
    pub(crate) durability: Durability,
}

impl RedisStore {
    /// Connects to the servers.
    pub(crate) async fn open(
        config: &RedisConfig,
        invalidations: &InvalidationForwarder,
    ) -> Result<Self, BackendError> {
        let connections =
            RedisConnections::new(config, channel_scheme(config), invalidations).await?;
        connections.connect().await?;
        Ok(Self::from_connections(connections, config))
    }

    /// Creates the store of one quorum master. Does not connect, because the master may be down.
    pub(crate) fn for_quorum_master(
        address: &ServerAddress,
        config: &RedisConfig,
        invalidations: &InvalidationForwarder,
    ) -> Result<Self, BackendError> {
        let connections = RedisConnections::for_quorum_master(
            address,
            config,
            channel_scheme(config),
            invalidations,
        )?;
        Ok(Self::from_connections(connections, config))
    }

    fn from_connections(connections: RedisConnections, config: &RedisConfig) -> Self {
        let scheme = channel_scheme(config);
        Self {
            connections,
            scripts: Scripts::for_layout(config.layout),
            is_cluster: matches!(config.servers, ServerAddresses::Cluster(_)),
            is_single: matches!(config.servers, ServerAddresses::Single(_)),
            publish_command: if scheme.is_sharded { "SPUBLISH" } else { "PUBLISH" },
            token_memory: config.token_memory,
            durability: config.durability,
            names: scheme.names,
        }
    }

    /// Returns whether the configuration is a single server, whose findings need no server name.
    /// Returns false for a master of a quorum.
    pub(crate) fn is_single_server(&self) -> bool {
        self.is_single
    }

    /// Returns a number that identifies the server of `key`, so that keys of one server have the
    /// same number. Returns 0 outside a cluster, and for an unknown server.
    pub(crate) fn shard(&self, key: &Key) -> u32 {
        if !self.is_cluster {
            return 0;
        }
        let node = self.connections.known_node(hash_slot(&self.names.lock_name(key)));
        node.map_or(0, |node| {
            node.name()
                .bytes()
                .fold(1, |hash: u32, byte| hash.wrapping_mul(31).wrapping_add(byte.into()))
        })
    }

    /// Tries to acquire the lock on a master of a quorum.
    pub(crate) async fn try_acquire_on_master(
        &self,
        claim: &Claim,
        round_id: &str,
    ) -> Result<AcquireResult, BackendError> {
        Ok(match self.try_acquire(claim, Some(round_id)).await? {
            ExclusiveAttempt::Decided(result) => result,
            // A quorum has exclusive locks only, so another program wrote this record.
            ExclusiveAttempt::FoundRecord(stored) => AcquireResult::Busy {
                remaining: stored.remaining(),
                holder: Holder::new(claim.key().clone()),
                event_seq: stored.event_seq(),
            },
        })
    }

    /// Tries to acquire the exclusive lock. Only a quorum passes a `round_id`.
    pub(crate) async fn try_acquire(
        &self,
        claim: &Claim,
        round_id: Option<&str>,
    ) -> Result<ExclusiveAttempt, BackendError> {
        let lock = self.names.lock_name(claim.key());
        // The client reads the number before the request, so that `wait` reports each release after
        // the request.
        let event_seq = last_event_seq();
        let mut call = self
            .scripts
            .acquire
            .call([lock.as_str(), &self.names.token_key(&lock)])
            .arg(self.names.holder_id(claim.id()))
            .arg(ceil_millis(claim.lease()))
            .arg(claim.token_block())
            .arg(self.token_ttl_ms(claim))
            .arg(claim.label().unwrap_or_default());
        if let Some(round_id) = round_id {
            call = call.arg(round_id);
        }
        let response = self.run_grant(self.slot(&lock), &call, claim).await?;
        parse_acquire_response(response, claim.key(), event_seq)
    }

    /// Tries to acquire the exclusive locks of all claims with one script. Declines claims of
    /// different slots, grants that must be durable, and keys with a record of several claims. Also
    /// declines if a server of a cluster refuses the script, or if the token of an earlier grant is
    /// not stored.
    pub(crate) async fn try_acquire_all(
        &self,
        claims: &[Claim],
    ) -> Result<BatchResult, BackendError> {
        let (Some(first), Some((slot, keys))) = (claims.first(), self.keys_of_one_slot(claims))
        else {
            return Ok(BatchResult::Declined);
        };
        if self.durability.is_required() {
            return Ok(BatchResult::Declined);
        }
        let event_seq = last_event_seq();
        let mut call = self
            .scripts
            .acquire_all
            .call(keys.iter().map(String::as_str))
            .arg(ceil_millis(first.lease()))
            .arg(first.token_block())
            .arg(self.token_ttl_ms(first))
            .arg(first.label().unwrap_or_default());
        for claim in claims {
            call = call.arg(self.names.holder_id(claim.id()));
        }
        let response = match self.connections.run(slot, &call).await {
            // A migrating slot has its keys on two servers, and one script cannot access both.
            Err(error) if self.is_cluster && error.refused() => return Ok(BatchResult::Declined),
            response => response?,
        };
        let Value::Array(parts) = response else { return Err(unexpected_response()) };
        match &parts[..] {
            [Value::Int(1), grants @ ..] if grants.len() == 2 * claims.len() => {
                let grant = |grant: &[Value]| match grant {
                    [token, Value::Int(remaining)] => {
                        let token = parse_integer(token);
                        let token = token.and_then(|token| FencingToken::try_from(token).ok());
                        // A grant without an expiry does not end; see `parse_acquire_response`.
                        let lease = parse_pttl(*remaining).unwrap_or(Duration::MAX);
                        Ok((token.ok_or_else(unexpected_response)?, lease))
                    }
                    _ => Err(unexpected_response()),
                };
                grants.chunks(2).map(grant).collect::<Result<_, _>>().map(BatchResult::Granted)
            }
            [busy @ .., Value::Int(index)] if busy.first() == Some(&Value::Int(0)) => {
                let index = usize::try_from(*index).map_err(|_| unexpected_response())?;
                let claim = claims.get(index).ok_or_else(unexpected_response)?;
                let busy = Value::Array(busy.to_vec());
                match parse_acquire_response(busy, claim.key(), event_seq)? {
                    ExclusiveAttempt::Decided(busy) => Ok(BatchResult::Busy(index, busy)),
                    ExclusiveAttempt::FoundRecord(_) => Err(unexpected_response()),
                }
            }
            [Value::Int(2)] => Ok(BatchResult::Declined),
            _ => Err(unexpected_response()),
        }
    }

    /// Returns the common slot of the claims, and their locks, each followed by its token key.
    /// Returns `None` if the slots differ.
    fn keys_of_one_slot(&self, claims: &[Claim]) -> Option<(u16, Vec<String>)> {
        let locks: Vec<String> =
            claims.iter().map(|claim| self.names.lock_name(claim.key())).collect();
        let slot = self.slot(locks.first()?);
        if locks.iter().any(|lock| self.slot(lock) != slot) {
            return None;
        }
        let keys = locks.into_iter().flat_map(|lock| {
            let token_key = self.names.token_key(&lock);
            [lock, token_key]
        });
        Some((slot, keys.collect()))
    }

    /// Runs a script that may grant or convert `claim`. If the change does not reach the required
    /// replicas or disks, returns an error and releases a new grant.
    pub(crate) async fn run_grant(
        &self,
        slot: u16,
        call: &ScriptCall<'_>,
        claim: &Claim,
    ) -> Result<Value, BackendError> {
        if !self.durability.is_required() {
            return self.connections.run(slot, call).await;
        }
        let durable = self.connections.run_durably(slot, call).await?;
        match durable.shortfall {
            Some(shortfall) if is_grant(&durable.response) && claim.is_conversion() => {
                // A release would also end the grant that the claim already had. A repeated
                // conversion changes nothing, and waits for the replicas and disks again.
                Err(BackendError::transient(format!(
                    "redis: the conversion is not durable: {shortfall}; check the replicas and disks"
                )))
            }
            Some(shortfall) if is_grant(&durable.response) => {
                let store_error = |outcome| {
                    BackendError::transient(format!(
                        "redis: {shortfall}, and the grant {outcome}; check the replicas and disks"
                    ))
                };
                // If the release fails, the outcome of the acquisition is unknown. The box keeps
                // this rarely needed, large future out of the caller's future.
                Err(match Box::pin(self.release(claim)).await {
                    Ok(_) => store_error("was released").as_refused(),
                    Err(failure) => {
                        store_error("could not be released and ends with its lease at the latest")
                            .with_source(failure)
                    }
                })
            }
            _ => Ok(durable.response),
        }
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut by_slot: BTreeMap<u16, Vec<(usize, String)>> = BTreeMap::new();
        for (index, claim) in claims.iter().enumerate() {
            let lock = self.names.lock_name(claim.key());
            by_slot.entry(self.slot(&lock)).or_default().push((index, lock));
        }
        let mut results = vec![Err(unexpected_response()); claims.len()];
        let calls = by_slot.iter().map(async |(slot, locks)| {
            let mut call = self.scripts.renew.call(locks.iter().map(|(_, lock)| lock.as_str()));
            for claim in locks.iter().filter_map(|(index, _)| claims.get(*index)) {
                call = call.arg(self.names.holder_id(claim.id())).arg(ceil_millis(claim.lease()));
            }
            let renewed = self.run_renewal(*slot, &call.with_tracking()).await;
            if self.is_cluster
                && locks.len() > 1
                && renewed.as_ref().is_err_and(BackendError::refused)
            {
                // A migrating slot has its keys on two servers, and one script cannot access both.
                return (locks, self.renew_one_by_one(*slot, claims, locks).await);
            }
            let renewable_lease = |position| {
                renewed
                    .as_ref()
                    .map_err(Clone::clone)
                    .map(|remaining| remaining.get(position).copied())
            };
            (locks, (0..locks.len()).map(renewable_lease).collect::<Vec<_>>())
        });
        for (locks, renewed) in join_all(calls).await {
            for ((index, _), remaining) in locks.iter().zip(renewed) {
                results[*index] = remaining.and_then(|remaining| {
                    let remaining = remaining.ok_or_else(unexpected_response)?;
                    Ok(parse_pttl(remaining).map_or(Renewal::Gone, Renewal::Renewed))
                });
            }
        }
        results
    }

    async fn renew_one_by_one(
        &self,
        slot: u16,
        claims: &[Claim],
        locks: &[(usize, String)],
    ) -> Vec<Result<Option<i64>, BackendError>> {
        let calls = locks.iter().map(async |(index, lock)| {
            let Some(claim) = claims.get(*index) else { return Ok(None) };
            let call = self.scripts.renew.call([lock.as_str()]);
            let call = call.arg(self.names.holder_id(claim.id())).arg(ceil_millis(claim.lease()));
            Ok(self.run_renewal(slot, &call.with_tracking()).await?.first().copied())
        });
        join_all(calls).await
    }

    async fn run_renewal(
        &self,
        slot: u16,
        call: &ScriptCall<'_>,
    ) -> Result<Vec<i64>, BackendError> {
        if !self.durability.is_required() {
            return parse_response(self.connections.run(slot, call).await?);
        }
        // A failover may undo a renewal without the required durability, so such a renewal is an
        // error.
        let durable = self.connections.run_durably(slot, call).await?;
        match durable.shortfall {
            Some(shortfall) => Err(not_durable(&shortfall)),
            None => parse_response(durable.response),
        }
    }

    /// Ends the claim's grant, or removes the claim from the queue.
    pub(crate) async fn release(&self, claim: &Claim) -> Result<Released, BackendError> {
        let lock = self.names.lock_name(claim.key());
        let keys = [lock.as_str(), &self.names.token_key(&lock)];
        let call = self.scripts.release.call(keys);
        let call = call.arg(self.names.holder_id(claim.id())).arg(claim.token_block());
        let bits = self.run_release(&lock, call).await?;
        Ok(Released::from_bits(bits))
    }

    /// Ends the grants of all claims, with one script if they have the same slot.
    pub(crate) async fn release_all(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Released, BackendError>> {
        let release_one = |claim| self.release(claim);
        let Some((slot, keys)) = self.keys_of_one_slot(claims) else {
            return join_all(claims.iter().map(release_one)).await;
        };
        let mut call = self.scripts.release_all.call(keys.iter().map(String::as_str));
        for (claim, lock) in claims.iter().zip(keys.iter().step_by(2)) {
            call = call.arg(self.names.holder_id(claim.id())).arg(claim.token_block());
            call = self.with_release_message(call, lock);
        }
        let bits: Vec<i64> = match self.connections.run(slot, &call).await.and_then(parse_response)
        {
            Ok(bits) => bits,
            // A migrating slot has its keys on two servers, and one script cannot access both.
            Err(error) if self.is_cluster && error.refused() => {
                return join_all(claims.iter().map(release_one)).await;
            }
            Err(error) => return vec![Err(error); claims.len()],
        };
        // The script reports a failed release without its error, so the release is repeated alone.
        let released =
            claims.iter().enumerate().map(async |(index, claim)| match bits.get(index) {
                Some(&bits) if bits >= 0 => Ok(Released::from_bits(bits)),
                _ => self.release(claim).await,
            });
        join_all(released).await
    }

    /// Releases the claim's grant if the grant's latest round is `round_id`.
    pub(crate) async fn withdraw(
        &self,
        claim: &Claim,
        round_id: &str,
    ) -> Result<Release, BackendError> {
        let lock = self.names.lock_name(claim.key());
        let call = self.scripts.withdraw.call([lock.as_str()]);
        let call = call.arg(self.names.holder_id(claim.id())).arg(round_id);
        self.run_release(&lock, call).await.map(release_outcome)
    }

    pub(crate) async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let lock = self.names.lock_name(key);
        let call = self.scripts.force_release.call([lock.as_str()]);
        self.run_release(&lock, call).await.map(release_outcome)
    }

    /// Runs a script that ends grants of `lock` and publishes their release.
    async fn run_release(&self, lock: &str, call: ScriptCall<'_>) -> Result<i64, BackendError> {
        let call = self.with_release_message(call, lock);
        parse_response(self.connections.run(self.slot(lock), &call).await?)
    }

    /// Adds the arguments with which a script publishes the release of `lock`.
    pub(crate) fn with_release_message<'a>(
        &self,
        call: ScriptCall<'a>,
        lock: &str,
    ) -> ScriptCall<'a> {
        let call = call
            .arg(self.publish_command)
            .arg(self.names.message(lock))
            .arg(self.names.channel(lock));
        match self.names.common_channel() {
            Some(common) => call.arg(common),
            None => call,
        }
    }

    /// Stores the token that the quorum has chosen. Returns false if this server has no grant of
    /// the round `round_id`.
    pub(crate) async fn store_token(
        &self,
        claim: &Claim,
        round_id: &str,
        token: FencingToken,
    ) -> Result<bool, BackendError> {
        let lock = self.names.lock_name(claim.key());
        let call = self
            .scripts
            .store_token
            .call([lock.as_str(), &self.names.token_key(&lock)])
            .arg(self.names.holder_id(claim.id()))
            .arg(round_id)
            .arg(token.get())
            .arg(token.get() + u64::from(claim.token_block()) - 1)
            .arg(self.token_ttl_ms(claim));
        let stored: i64 = parse_response(self.connections.run(self.slot(&lock), &call).await?)?;
        Ok(stored == 1)
    }

    /// Waits for a possible release of `key` after the event with this sequence number.
    pub(crate) async fn wait(&self, key: &Key, event_seq: u64) {
        let lock = self.names.lock_name(key);
        match self.connections.known_node(self.slot(&lock)) {
            Some(node) => node.listener.wait(&self.names.channel(&lock), event_seq).await,
            // The server of the slot is unknown, so the engine polls.
            None => std::future::pending().await,
        }
    }

    /// Returns whether the client is subscribed to the release messages of `key`.
    pub(crate) fn is_subscribed(&self, key: &Key) -> bool {
        let lock = self.names.lock_name(key);
        let node = self.connections.known_node(self.slot(&lock));
        node.is_some_and(|node| node.listener.is_subscribed(&self.names.channel(&lock)))
    }

    /// Returns the holders of all locked keys among `keys`.
    pub(crate) async fn inspect_keys(
        &self,
        keys: &[Key],
        corrupt_record: CorruptRecord,
    ) -> Result<Vec<ClaimHolder>, BackendError> {
        let mut by_slot: BTreeMap<u16, Vec<(&Key, String)>> = BTreeMap::new();
        for key in keys {
            let lock = self.names.lock_name(key);
            by_slot.entry(self.slot(&lock)).or_default().push((key, lock));
        }
        let chunks_of_slots = by_slot.iter().flat_map(|(slot, locks)| {
            locks.chunks(KEYS_PER_INSPECTION).map(move |locks| (*slot, locks))
        });
        let inspections: Vec<_> = chunks_of_slots
            .map(|(slot, locks)| self.inspect_chunk(slot, locks, corrupt_record))
            .collect();
        let holders: Vec<Vec<ClaimHolder>> =
            stream::iter(inspections).buffer_unordered(CONCURRENT_READS_MAX).try_collect().await?;
        Ok(holders.into_iter().flatten().collect())
    }

    async fn inspect_chunk(
        &self,
        slot: u16,
        locks: &[(&Key, String)],
        corrupt_record: CorruptRecord,
    ) -> Result<Vec<ClaimHolder>, BackendError> {
        let names: Vec<String> =
            locks.iter().flat_map(|(_, lock)| [lock.clone(), self.names.token_key(lock)]).collect();
        let call = self.scripts.inspect.call(&names);
        let response: Vec<Value> = parse_response(self.connections.run(slot, &call).await?)?;
        let (now, records) = parse_inspection(&response)?;
        let held = locks.iter().zip(records).filter(|((key, _), (record, ..))| {
            !record.is_empty() && self.names.may_be_lock_record(key, record)
        });
        let mut holders = Vec::new();
        for ((key, _), (record, remaining, token)) in held {
            let multi_claim_record = match parse_multi_claim_record(&record) {
                // The fields of this record are unknown, as those of another program's value.
                Err(_) if corrupt_record == CorruptRecord::IsHeld => None,
                parsed => parsed?,
            };
            if let Some(multi_claim_record) = multi_claim_record {
                let found = multi_claim_record.holders(key, u64::try_from(now).unwrap_or(0));
                let claim_holder = |holder| ClaimHolder { claim: Vec::new(), holder };
                holders.extend(found.into_iter().map(claim_holder));
                continue;
            }
            let holder =
                ExclusiveRecord::parse(&record, token).holder((*key).clone(), now, remaining);
            holders.push(ClaimHolder {
                claim: record.into_iter().take(CLAIM_BYTES).collect(),
                holder,
            });
        }
        Ok(holders)
    }

    /// Returns the holders of all locks in the namespace.
    pub(crate) async fn list(&self) -> Result<Vec<ClaimHolder>, BackendError> {
        let (pattern, value_type) = (self.names.scan_pattern(), self.names.value_type());
        let keys = self.scan_all(&pattern, value_type, |name| self.names.parse_key(name)).await?;
        // One corrupt record must not hide all other locks.
        self.inspect_keys(&keys, CorruptRecord::IsHeld).await
    }

    /// Returns the keys in the namespace for which claims wait.
    pub(crate) async fn keys_with_waiters(&self) -> Result<Vec<Key>, BackendError> {
        let pattern = self.names.waiters_scan_pattern();
        self.scan_all(&pattern, "hash", |name| self.names.parse_waiters_key(name)).await
    }

    /// Scans all servers for names that match `pattern`. Returns their keys, sorted.
    async fn scan_all(
        &self,
        pattern: &str,
        value_type: &str,
        parse_name: impl Fn(&str) -> Option<Key>,
    ) -> Result<Vec<Key>, BackendError> {
        let nodes = self.connections.nodes().await?;
        let scans = nodes.iter().map(|node| self.scan(node, pattern, value_type));
        let mut keys: Vec<Key> = Vec::new();
        for found in join_all(scans).await {
            let names = found?.into_iter();
            keys.extend(names.filter_map(|name| parse_name(std::str::from_utf8(&name).ok()?)));
        }
        // SCAN may return a key twice during a rehash or a slot migration.
        keys.sort();
        keys.dedup();
        Ok(keys)
    }

    async fn scan(
        &self,
        node: &Arc<RedisNode>,
        pattern: &str,
        value_type: &str,
    ) -> Result<Vec<Vec<u8>>, BackendError> {
        let mut found = Vec::new();
        let mut cursor = 0_u64;
        let started_at = Instant::now();
        // Each SCAN call visits a bounded part of the database, so other clients are not blocked.
        loop {
            let scan = redis::cmd("SCAN")
                .arg(cursor)
                .arg("MATCH")
                .arg(pattern)
                .arg("COUNT")
                .arg(SCAN_COUNT)
                .arg("TYPE")
                .arg(value_type)
                .to_owned();
            let (next_cursor, names): (u64, Vec<Vec<u8>>) =
                parse_response(self.connections.send_command(node, &scan).await?)?;
            found.extend(names);
            cursor = next_cursor;
            if cursor == 0 {
                return Ok(found);
            }
            // A proxy may never return cursor 0, so the scan has a limit. The limit is far longer
            // than the engine's default time-out.
            if started_at.elapsed() > LIST_TIMEOUT {
                return Err(BackendError::transient(format!(
                    "redis: listing took longer than {LIST_TIMEOUT:?}; move the locks to a database with fewer keys"
                )));
            }
        }
    }

    /// Returns the hash slot of `lock`, or 0 outside a cluster.
    pub(crate) fn slot(&self, lock: &str) -> u16 {
        if self.is_cluster { hash_slot(lock) } else { 0 }
    }

    /// Returns the time in ms for which the token key is stored. The token key outlives a lease
    /// that is not renewed, because in foreign layouts only this key contains the grant's token.
    /// Renewals do not extend the time. The time also covers the interval until the clock has
    /// passed the last reserved token.
    pub(crate) fn token_ttl_ms(&self, claim: &Claim) -> u64 {
        let reserved = Duration::from_micros(claim.token_block().into());
        ceil_millis(self.token_memory.max(claim.lease() * 2) + reserved)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("connections", &self.connections).finish_non_exhaustive()
    }
}

/// Returns the channel scheme for release messages.
pub(crate) fn channel_scheme(config: &RedisConfig) -> ChannelScheme {
    let is_cluster = matches!(config.servers, ServerAddresses::Cluster(_));
    let is_sharded = match config.publish {
        Publish::Sharded => true,
        Publish::Plain => false,
        Publish::Auto => is_cluster && config.layout != Layout::Spring,
    };
    ChannelScheme { names: key_names(config), is_sharded }
}

/// Returns the key names of this configuration.
pub(crate) fn key_names(config: &RedisConfig) -> RedisKeyNames {
    let is_cluster = matches!(config.servers, ServerAddresses::Cluster(_));
    RedisKeyNames::new(config.layout, config.namespace(), is_cluster)
}

fn parse_acquire_response(
    response: Value,
    key: &Key,
    event_seq: u64,
) -> Result<ExclusiveAttempt, BackendError> {
    let Value::Array(parts) = response else { return Err(unexpected_response()) };
    match &parts[..] {
        [Value::Int(1), token, Value::Int(remaining)] => {
            let is_token_written =
                !matches!(token, Value::BulkString(text) if text.starts_with(b"0"));
            let token = parse_integer(token).and_then(|token| FencingToken::try_from(token).ok());
            // Another client has removed the expiry, so the grant does not end by itself.
            let lease = parse_pttl(*remaining).unwrap_or(Duration::MAX);
            Ok(ExclusiveAttempt::Decided(AcquireResult::Granted {
                token: token.ok_or_else(unexpected_response)?,
                lease,
                is_token_written,
            }))
        }
        [Value::Int(0), Value::Int(remaining), Value::BulkString(record), now, token] => {
            let now = parse_integer(now).ok_or_else(unexpected_response)?;
            let holder = ExclusiveRecord::parse(record, parse_integer(token)).holder(
                key.clone(),
                now,
                *remaining,
            );
            Ok(ExclusiveAttempt::Decided(AcquireResult::Busy {
                remaining: parse_pttl(*remaining),
                holder,
                event_seq,
            }))
        }
        [Value::Int(2), ..] => {
            StoredValue::parse(&parts, event_seq).map(ExclusiveAttempt::FoundRecord)
        }
        _ => Err(unexpected_response()),
    }
}

/// Returns whether the response of a script begins with 1, which means a grant.
fn is_grant(response: &Value) -> bool {
    matches!(response, Value::Array(parts) if matches!(parts.first(), Some(Value::Int(1))))
}

/// The record of a lock, its remaining lease in ms, and its token.
type InspectedLock = (Vec<u8>, i64, Option<i64>);

/// Returns the server's time and the record of each lock.
fn parse_inspection(response: &[Value]) -> Result<(i64, Vec<InspectedLock>), BackendError> {
    let (now, records) = response.split_first().ok_or_else(unexpected_response)?;
    let now = parse_integer(now).ok_or_else(unexpected_response)?;
    let record = |found: &[Value]| match found {
        [Value::BulkString(record), Value::Int(remaining), token] => {
            Ok((record.clone(), *remaining, parse_integer(token)))
        }
        _ => Err(unexpected_response()),
    };
    Ok((now, records.chunks(3).map(record).collect::<Result<_, _>>()?))
}

pub(crate) fn parse_integer(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}

/// The response to a release.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Released {
    pub(crate) outcome: Release,
    /// Other claims hold the key or wait for it.
    pub(crate) others_remain: bool,
}

impl Released {
    /// Decodes the response of the script `release`.
    fn from_bits(bits: i64) -> Self {
        Self { outcome: release_outcome(bits & 1), others_remain: bits & 2 != 0 }
    }
}

fn release_outcome(freed: i64) -> Release {
    if freed > 0 { Release::Freed } else { Release::NotHeld }
}

pub(crate) fn parse_response<T: FromRedisValue>(response: Value) -> Result<T, BackendError> {
    redis::from_redis_value(response).map_err(|error| to_backend_error(&error.into()))
}

/// Returns the error of a change that lacks a part of the configured durability.
pub(crate) fn not_durable(shortfall: &str) -> BackendError {
    BackendError::transient(format!("redis: {shortfall}; check the replicas and disks"))
}

pub(crate) fn unexpected_response() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "redis: the response to a script is malformed; check for a proxy between client and server",
    )
}

/// Rounds up to whole milliseconds, because a lease must not be shorter than requested.
pub(crate) fn ceil_millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The length of a claim id in the native layout, in bytes.
const CLAIM_BYTES: usize = 32;
/// The approximate number of keys that one SCAN call visits.
const SCAN_COUNT: usize = 500;
/// The number of locks per call of the inspect script. A script blocks all other clients of its
/// server, so it must be short.
const KEYS_PER_INSPECTION: usize = 20;
/// The maximum number of concurrent calls of the scripts `inspect` and `waiters` per operation.
pub(crate) const CONCURRENT_READS_MAX: usize = 32;
/// The time limit for the scan of one server: ten times the engine's default time-out.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
