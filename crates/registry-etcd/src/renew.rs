//! Renews claims. Extends each lease, then reads all keys in one transaction, or in several if they
//! do not fit. The read verifies that the keys exist. A majority answers the read, so its response
//! also confirms the extensions.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::{OptionFuture, join, join_all, try_join};
use registry_core::{BackendError, Claim, Moment, Renewal};
use tokio::time::timeout;

use crate::backend::EtcdBackend;
use crate::claims::ClaimEntry;
use crate::client::RequestLimits;
use crate::error::CallError;
use crate::keep_alive::LeaseStatus;
use crate::lease::{EtcdLease, ttl_seconds};
use crate::proto::KeyValue;
use crate::txn::{self, TxnResults};
use crate::watcher::KeyWatch;

/// A renewal in progress, with a copy of its entry.
#[derive(Clone)]
struct PendingRenewal {
    name: Vec<u8>,
    create_revision: i64,
    lease: EtcdLease,
    /// The requested duration of the lease, if this client created it.
    ttl_seconds: Option<i64>,
    /// The requested duration of the lease, if the renewal replaced the lease.
    new_ttl_seconds: Option<i64>,
    /// The lease of the tombstone, if known.
    tombstone_lease: Option<i64>,
    lease_status: LeaseStatus,
}

type RenewalResult = Result<Renewal, BackendError>;

impl EtcdBackend {
    /// Renews claims that fit into one transaction.
    pub(crate) async fn renew_batch(&self, claims: &[Claim]) -> Vec<RenewalResult> {
        let started_renewals = join_all(claims.iter().map(|claim| self.start_renewal(claim))).await;
        let names: Vec<_> =
            started_renewals.iter().flatten().flatten().map(|renewal| &*renewal.name).collect();
        let idle_timeout =
            claims.iter().map(|claim| self.idle_timeout_of(claim)).min().unwrap_or_default();
        let snapshot = match &*names {
            [] => Ok(KeySnapshot::default()),
            names => self.read_entries(names, idle_timeout).await,
        };
        let renewals = claims.iter().zip(started_renewals).map(|(claim, renewal)| {
            let snapshot = &snapshot;
            async move {
                let result = match (renewal?, snapshot) {
                    (None, _) => Ok(Renewal::Gone),
                    (Some(renewal), Ok(snapshot)) => {
                        self.finish_renewal(claim, renewal, snapshot).await
                    }
                    (Some(_), Err(error)) => Err(error.clone()),
                };
                if matches!(result, Ok(Renewal::Gone)) {
                    self.abandon_lost_entry(claim).await;
                }
                result
            }
        });
        join_all(renewals).await
    }

    /// Returns how long the connection may receive nothing while `claim` is renewed. The remaining
    /// time of the lease must suffice for an attempt with another member.
    fn idle_timeout_of(&self, claim: &Claim) -> Duration {
        self.client.response_timeout().min((claim.lease() / 6).max(IDLE_TIMEOUT_MIN))
    }

    /// Extends the claim's lease. Returns `None` if the claim was not granted, or its entry does
    /// not exist any more.
    async fn start_renewal(&self, claim: &Claim) -> Result<Option<PendingRenewal>, BackendError> {
        let cached = {
            let entry_guard = self.claims.lock_entry(claim).await;
            let entry = entry_guard.as_ref();
            if entry.is_some_and(|entry| entry.own_watch.as_ref().is_some_and(KeyWatch::is_deleted))
            {
                // An immediate return lets the holder detect the loss before the next claim is
                // granted.
                return Ok(None);
            }
            entry.and_then(PendingRenewal::for_entry)
        };
        let renewal = match cached {
            Some(renewal) => Some(renewal),
            None => self.find_entry(claim).await?.as_ref().and_then(PendingRenewal::for_entry),
        };
        let Some(mut renewal) = renewal else { return Ok(None) };
        let idle_timeout = self.idle_timeout_of(claim);
        // A third of the lease is the engine's interval between renewals.
        let limits = RequestLimits { idle_timeout, total: idle_timeout.max(claim.lease() / 3) };
        let tombstone_lease = self.find_and_extend_tombstone_lease(renewal.ttl_seconds);
        let needs_rewrite = tombstone_lease.is_none() || tombstone_lease != renewal.tombstone_lease;
        let rewriting =
            needs_rewrite.then(|| self.rewrite_tombstone(renewal.clone(), idle_timeout));
        let rewriting = OptionFuture::from(rewriting);
        let (lease_status, rewritten) =
            join(self.keep_alive.extend(&mut renewal.lease, limits), rewriting).await;
        renewal.tombstone_lease = rewritten.unwrap_or(tombstone_lease);
        renewal.lease_status = lease_status?;
        if claim.lease() > renewal.lease.ttl() && renewal.lease_status == LeaseStatus::Alive {
            return self.attach_longer_lease(claim, renewal).await;
        }
        Ok(Some(renewal))
    }

    /// Writes the entry's tombstone again, because another client may have ended the tombstone's
    /// lease. Returns the lease of the tombstone, or `None` after a failure.
    async fn rewrite_tombstone(&self, renewal: PendingRenewal, limit: Duration) -> Option<i64> {
        let (tombstone, ttl_seconds) =
            (self.names.tombstone_name(&renewal.name)?, renewal.ttl_seconds?);
        let rewrite = async {
            let lease = self
                .tombstones
                .find_or_grant(ttl_seconds, &self.pool, &self.keep_alive)
                .await
                .ok()?;
            let put =
                txn::rewrite_tombstone(&renewal.name, renewal.create_revision, &tombstone, lease);
            match self.execute(put).await {
                Ok(_) => Some(lease),
                Err(CallError::LeaseNotFound) => {
                    self.tombstones.remove(lease);
                    None
                }
                Err(_) => None,
            }
        };
        // After the time limit, the next renewal tries again.
        timeout(limit, rewrite).await.ok().flatten()
    }

    /// Attaches the claim's key to a longer lease. The key and its creation revision do not change.
    async fn attach_longer_lease(
        &self,
        claim: &Claim,
        mut renewal: PendingRenewal,
    ) -> Result<Option<PendingRenewal>, BackendError> {
        let ttl_seconds = ttl_seconds(claim.lease());
        let tombstone = match self.names.tombstone_name(&renewal.name) {
            Some(name) => Some((
                name,
                self.tombstones.find_or_grant(ttl_seconds, &self.pool, &self.keep_alive).await?,
            )),
            None => None,
        };
        let tombstone = tombstone.as_ref().map(|(name, lease)| (&**name, *lease));
        let tombstone_lease = tombstone.map(|(_, lease)| lease);
        let longer_lease = self.pool.grant(ttl_seconds).await?;
        let attached =
            txn::attach_lease(&renewal.name, renewal.create_revision, longer_lease.id, tombstone);
        let attached = self.execute(attached).await.map_err(|failure| {
            if let (CallError::LeaseNotFound, Some(lease)) = (&failure, tombstone_lease) {
                self.tombstones.remove(lease);
            }
            let error = failure.into_error();
            // If the outcome is unknown, the key may be attached to the new lease. The next renewal
            // then reads the lease of the key.
            if error.refused() {
                self.pool.revoke_later(longer_lease.id);
            }
            error
        });
        if !attached?.succeeded {
            self.pool.revoke_later(longer_lease.id);
            return Ok(None);
        }
        renewal.lease = longer_lease;
        renewal.new_ttl_seconds = Some(ttl_seconds);
        renewal.tombstone_lease = tombstone_lease;
        Ok(Some(renewal))
    }

    async fn read_entries(
        &self,
        names: &[&[u8]],
        idle_timeout: Duration,
    ) -> Result<KeySnapshot, BackendError> {
        let read = txn::read_keys(names.iter().copied());
        let results = self.client.call_within(read, idle_timeout).await;
        let results =
            results.and_then(|results| TxnResults::decode(results).map_err(CallError::Other));
        let results = match results {
            Err(CallError::TooManyOperations) if names.len() > 1 => {
                let (first_half, second_half) = names.split_at(names.len() / 2);
                let halves = try_join(
                    Box::pin(self.read_entries(first_half, idle_timeout)),
                    Box::pin(self.read_entries(second_half, idle_timeout)),
                );
                let (first_half, second_half) = halves.await?;
                return Ok(first_half.merge(second_half));
            }
            results => results.map_err(CallError::into_error)?,
        };
        KeySnapshot::decode(results, names.len())
    }

    async fn finish_renewal(
        &self,
        claim: &Claim,
        mut renewal: PendingRenewal,
        snapshot: &KeySnapshot,
    ) -> RenewalResult {
        let is_same = |found: &&KeyValue| found.create_revision == renewal.create_revision;
        let Some(found) = snapshot.keys.get(&renewal.name).filter(is_same) else {
            if renewal.new_ttl_seconds.is_some() {
                // The key that this renewal attached to the new lease was deleted since.
                self.pool.revoke_later(renewal.lease.id);
            }
            return Ok(Renewal::Gone);
        };
        let mut entry_guard = self.claims.lock_entry(claim).await;
        let entry = entry_guard
            .as_mut()
            .filter(|entry| entry.create_revision == Some(renewal.create_revision));
        if found.lease != renewal.lease.id {
            // An earlier request attached the key to `found.lease`, but its response was lost. The
            // next renewal extends `found.lease`.
            if let Some(entry) = entry {
                self.replace_lease(
                    entry,
                    EtcdLease::new(found.lease, Duration::ZERO, Moment::now()),
                    None,
                );
            }
            return Err(BackendError::transient(
                "etcd: the key is attached to another lease; the renewal is repeated",
            ));
        }
        if renewal.lease_status == LeaseStatus::NotFound {
            // A lagging member may not know a lease that the majority knows.
            return Err(BackendError::transient(
                "etcd: the member does not know the lease; the renewal is repeated",
            ));
        }
        renewal.lease.record_majority_response(snapshot.term);
        let remaining = renewal.lease.remaining();
        if let Some(entry) = entry {
            if renewal.new_ttl_seconds.is_some() {
                self.replace_lease(entry, renewal.lease, renewal.new_ttl_seconds);
            } else if entry.lease.id == renewal.lease.id && entry.lease.remaining() < remaining {
                entry.lease = renewal.lease;
            }
            entry.tombstone_lease = renewal.tombstone_lease;
            if !entry.own_watch.as_ref().is_some_and(KeyWatch::is_active)
                && !self.watcher.subscribers().is_empty()
            {
                let start_revision = snapshot.revision.saturating_add(1);
                entry.own_watch = Some(self.watcher.watch_held_key(
                    claim.key(),
                    entry.name.clone(),
                    start_revision,
                ));
            }
        }
        if remaining < claim.lease() / 2 {
            return Err(BackendError::transient(
                "etcd: the leader changed before it confirmed the lease; the renewal is repeated",
            ));
        }
        Ok(Renewal::Renewed(remaining.min(claim.lease())))
    }

    /// Abandons the entry of a lock that is reported as lost.
    async fn abandon_lost_entry(&self, claim: &Claim) {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        if entry_guard.as_ref().is_some_and(|entry| entry.is_granted)
            && let Some(entry) = entry_guard.take()
        {
            self.abandon(entry);
        }
    }

    /// Replaces the lease of an entry by `lease`, to which its key is attached.
    fn replace_lease(&self, entry: &mut ClaimEntry, lease: EtcdLease, ttl_seconds: Option<i64>) {
        let previous = std::mem::replace(&mut entry.lease, lease);
        // The pool reuses a lease only for an entry that is named after it. This entry keeps the
        // name of its previous lease, so its new lease must not return to the pool.
        entry.must_not_recycle = true;
        // The caller sets this field if its renewal has written the tombstone.
        entry.tombstone_lease = None;
        if entry.ttl_seconds.is_some() && previous.id != entry.lease.id {
            self.pool.revoke_later(previous.id);
        }
        entry.ttl_seconds = ttl_seconds.or(entry.ttl_seconds);
    }
}

impl PendingRenewal {
    fn for_entry(entry: &ClaimEntry) -> Option<Self> {
        let create_revision = entry.create_revision.filter(|_| entry.is_granted)?;
        Some(Self {
            name: entry.name.clone(),
            create_revision,
            lease: entry.lease.clone(),
            ttl_seconds: entry.ttl_seconds,
            new_ttl_seconds: None,
            tombstone_lease: entry.tombstone_lease,
            lease_status: LeaseStatus::Alive,
        })
    }
}

/// The keys that one read found, and the revision and term of the read.
#[derive(Default)]
struct KeySnapshot {
    revision: i64,
    term: u64,
    keys: HashMap<Vec<u8>, KeyValue>,
}

impl KeySnapshot {
    /// Decodes the response to [`txn::read_keys`] of `count` names.
    fn decode(mut results: TxnResults, count: usize) -> Result<Self, BackendError> {
        let mut keys = HashMap::new();
        for _ in 0..count {
            if let Some(found) = results.next_key()? {
                keys.insert(found.key.clone(), found);
            }
        }
        Ok(Self { revision: results.header.revision, term: results.header.raft_term, keys })
    }

    /// Merges two results. The result has the lower revision and the lower term.
    fn merge(mut self, other: Self) -> Self {
        self.keys.extend(other.keys);
        let (revision, term) = (self.revision.min(other.revision), self.term.min(other.term));
        Self { revision, term, ..self }
    }
}

/// The minimum idle time-out of a connection, regardless of the lease.
const IDLE_TIMEOUT_MIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use registry_core::BackendErrorKind;

    use super::*;
    use crate::proto::{
        DeleteRangeResponse, OpResponse, RangeResponse, ResponseHeader, ResponseOp, TxnResponse,
    };

    fn found(name: &str) -> OpResponse {
        let entry = KeyValue { key: name.into(), ..KeyValue::default() };
        OpResponse::Range(RangeResponse { kvs: vec![entry], ..RangeResponse::default() })
    }

    fn decode(parts: Vec<OpResponse>) -> Result<KeySnapshot, BackendError> {
        let response = TxnResponse {
            header: Some(ResponseHeader { revision: 7, raft_term: 1 }),
            succeeded: true,
            responses: parts.into_iter().map(|part| ResponseOp { response: Some(part) }).collect(),
        };
        KeySnapshot::decode(TxnResults::decode(response).unwrap(), 2)
    }

    #[test]
    fn a_malformed_response_is_an_error_and_not_a_loss() {
        assert_eq!(decode(vec![found("a"), found("b")]).unwrap().keys.len(), 2);
        let deleted = OpResponse::Delete(DeleteRangeResponse::default());
        for parts in [vec![found("a")], vec![deleted, found("b")]] {
            let error = decode(parts).err().unwrap();
            assert_eq!(error.kind(), BackendErrorKind::Protocol);
        }
    }
}
