//! The leases of tombstones.
//!
//! In the native layout, a claim that joins a queue also writes a tombstone next to the queue,
//! under another lease. A release deletes the entry and the tombstone. A tombstone without an entry
//! therefore shows that the entry was deleted without a release. The holder of the deleted entry
//! may not have detected the loss yet. If a claim that no entry blocks finds such a tombstone, it
//! waits for `GRANT_DELAY` and then deletes the tombstone.
//!
//! A tombstone's lease lasts longer than its entry's lease. With equal leases, a leader that
//! resumes after a pause could expire both leases at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, WeakShared};
use registry_core::{BackendError, Moment};

use crate::keep_alive::{KeepAlive, KeepAliveOutcome, PendingKeepAlive};
use crate::lease::EtcdLease;
use crate::pool::LeasePool;

/// The leases of tombstones. All entries whose own leases have the same duration share one
/// tombstone lease.
#[derive(Debug, Default)]
pub(crate) struct TombstoneLeases {
    leases: Mutex<HashMap<i64, TombstoneLease>>,
    /// The `LeaseGrant` requests in progress. All callers that need the same lease await one
    /// response. The references are weak: if all these callers panic or are dropped, the next
    /// caller sends a new request.
    pending_grants: Mutex<HashMap<i64, PendingGrant>>,
}

type PendingGrant = WeakShared<BoxFuture<'static, Result<EtcdLease, BackendError>>>;

#[derive(Debug)]
struct TombstoneLease {
    id: i64,
    /// The lease lasts for its full duration from this time on, unless another client ends it.
    extended_at: Moment,
    /// A `LeaseKeepAlive` request whose outcome was not read yet.
    pending_keep_alive: Option<PendingKeepAlive>,
}

impl TombstoneLeases {
    /// Returns the lease for the tombstone of an entry whose own lease lasts `ttl_seconds`.
    /// Requests a new lease if none exists.
    pub(crate) async fn find_or_grant(
        &self,
        ttl_seconds: i64,
        pool: &LeasePool,
        keep_alive: &KeepAlive,
    ) -> Result<i64, BackendError> {
        if let Some(lease) = self.find_and_extend(ttl_seconds, keep_alive) {
            return Ok(lease);
        }
        let pending_grant = {
            let mut pending_grants = self.pending_grants();
            if let Some(lease) = self.find_and_extend(ttl_seconds, keep_alive) {
                return Ok(lease);
            }
            match pending_grants.get(&ttl_seconds).and_then(WeakShared::upgrade) {
                Some(pending_grant) => pending_grant,
                None => {
                    let grant = pool.grant(ttl_seconds.saturating_mul(TOMBSTONE_TTL_FACTOR));
                    let pending_grant = grant.boxed().shared();
                    if let Some(weak) = pending_grant.downgrade() {
                        pending_grants.insert(ttl_seconds, weak);
                    }
                    pending_grant
                }
            }
        };
        let granted = pending_grant.clone().await;
        let mut pending_grants = self.pending_grants();
        let current = pending_grants.get(&ttl_seconds).and_then(WeakShared::upgrade);
        if current.is_some_and(|current| current.ptr_eq(&pending_grant)) {
            pending_grants.remove(&ttl_seconds);
            if let Ok(lease) = &granted {
                let tombstone_lease = TombstoneLease {
                    id: lease.id,
                    extended_at: lease.last_extended(),
                    pending_keep_alive: None,
                };
                self.leases().insert(ttl_seconds, tombstone_lease);
            }
        }
        granted.map(|lease| lease.id)
    }

    /// Returns the tombstone lease for entries whose own leases last `ttl_seconds`, if that
    /// tombstone lease exists. Requests its extension if the extension is due.
    pub(crate) fn find_and_extend(&self, ttl_seconds: i64, keep_alive: &KeepAlive) -> Option<i64> {
        let entry_ttl = Duration::from_secs(u64::try_from(ttl_seconds).unwrap_or(0));
        let now = Moment::now();
        let mut leases = self.leases();
        let tombstone_lease = leases.get_mut(&ttl_seconds)?;
        let has_ended = match tombstone_lease
            .pending_keep_alive
            .as_mut()
            .and_then(PendingKeepAlive::take_outcome)
        {
            Some(KeepAliveOutcome::Extended(since)) => {
                tombstone_lease.extended_at = since;
                tombstone_lease.pending_keep_alive = None;
                false
            }
            // The lease has ended, or the member lags and does not know the lease yet. A new lease
            // is requested, and the next renewal of each entry writes a new tombstone.
            Some(KeepAliveOutcome::LeaseNotFound) => true,
            None => false,
        };
        let age = now.since(tombstone_lease.extended_at);
        if has_ended || age >= entry_ttl * 2 {
            // The lease has ended, or its remaining time is at most the duration of an entry's
            // lease. A tombstone written now could end before its entry.
            leases.remove(&ttl_seconds);
            return None;
        }
        let last_request = tombstone_lease
            .pending_keep_alive
            .as_ref()
            .map_or(tombstone_lease.extended_at, |pending| pending.queued_at);
        if now.since(last_request) >= entry_ttl / 3 {
            // A later call reads the outcome. If this request fails, the next one follows after a
            // third of the entry's lease, which is well before `usable_until`.
            let usable_until = tombstone_lease.extended_at.after(entry_ttl * 2);
            tombstone_lease.pending_keep_alive =
                Some(keep_alive.request_extension(tombstone_lease.id, usable_until, entry_ttl / 6));
        }
        Some(tombstone_lease.id)
    }

    /// Removes a lease that the members do not know.
    pub(crate) fn remove(&self, lease: i64) {
        self.leases().retain(|_, tombstone_lease| tombstone_lease.id != lease);
    }

    /// Revokes all leases, which also deletes the tombstones.
    pub(crate) async fn close(&self, pool: &LeasePool) {
        let leases = std::mem::take(&mut *self.leases());
        for tombstone_lease in leases.into_values() {
            if pool.revoke(tombstone_lease.id).await.is_err() {
                // The leases expire on their own.
                return;
            }
        }
    }

    fn pending_grants(&self) -> MutexGuard<'_, HashMap<i64, PendingGrant>> {
        self.pending_grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<i64, TombstoneLease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The duration of a tombstone's lease, as a multiple of the duration of the entry's lease.
const TOMBSTONE_TTL_FACTOR: i64 = 3;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::client::EtcdClient;
    use crate::config::EtcdConfig;

    #[tokio::test]
    async fn a_dropped_caller_leaves_no_pending_grant() {
        // Accepts the connection and never responds.
        let member = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let addr = member.local_addr().unwrap();
        let config = EtcdConfig::new([(addr.ip().to_string(), addr.port())]);
        let client = EtcdClient::new(&config).unwrap();
        let (pool, keep_alive) = (LeasePool::new(client.clone()), KeepAlive::new(client));
        let leases = TombstoneLeases::default();
        let first = Box::pin(leases.find_or_grant(3, &pool, &keep_alive));
        let mut second = Box::pin(leases.find_or_grant(3, &pool, &keep_alive));
        let is_pending = || leases.pending_grants().values().any(|it| it.upgrade().is_some());
        assert!(second.as_mut().now_or_never().is_none() && is_pending());
        assert!(first.now_or_never().is_none() && is_pending(), "the other caller still awaits it");
        drop(second);
        assert!(!is_pending());
    }
}
