//! A pool of unused leases. A claim uses a lease exclusively and returns the lease to the pool. A
//! later claim reuses the lease, which saves a write. No claim reuses a lease while an earlier
//! request for that lease may still arrive.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use registry_core::{BackendError, Moment};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::client::EtcdClient;
use crate::error::{CallError, protocol_error};
use crate::lease::EtcdLease;
use crate::proto::{LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest};
use crate::txn;

pub(crate) struct LeasePool {
    client: EtcdClient,
    /// Unused leases by their requested duration in seconds.
    idle: Mutex<HashMap<i64, Vec<EtcdLease>>>,
    // The channel is unbounded, because the commands are small and most claims return their lease
    // to the pool.
    cleanup: mpsc::UnboundedSender<CleanupCommand>,
    task: JoinHandle<()>,
}

/// A command for the background task. A failed command is harmless, because every key expires with
/// its lease.
enum CleanupCommand {
    RevokeLease(i64),
    /// Deletes the tombstone if it was created in the revision `create_revision`.
    DeleteTombstone {
        name: Vec<u8>,
        create_revision: i64,
    },
    /// Deletes the tombstone of a lost entry at the time `at`.
    DeleteTombstoneOfLostEntry {
        name: Vec<u8>,
        at: Instant,
    },
}

impl LeasePool {
    pub(crate) fn new(client: EtcdClient) -> Self {
        let (cleanup, receiver) = mpsc::unbounded_channel();
        let task = tokio::spawn(run_cleanup(client.clone(), receiver));
        Self { client, idle: Mutex::default(), cleanup, task }
    }

    /// Takes an unexpired lease of duration `ttl_seconds` from the pool, or requests a new lease.
    pub(crate) async fn acquire(&self, ttl_seconds: i64) -> Result<EtcdLease, BackendError> {
        {
            let mut idle = self.idle();
            if let Some(leases) = idle.get_mut(&ttl_seconds) {
                // The lease that was released last usually has the longest remaining time.
                let lease = leases.pop().filter(|lease| !lease.remaining().is_zero());
                if lease.is_none() || leases.is_empty() {
                    idle.remove(&ttl_seconds);
                }
                if let Some(lease) = lease {
                    return Ok(lease);
                }
            }
        }
        self.grant(ttl_seconds).await
    }

    /// Requests a new lease.
    pub(crate) fn grant(
        &self,
        ttl_seconds: i64,
    ) -> impl Future<Output = Result<EtcdLease, BackendError>> + Send + use<> {
        let client = self.client.clone();
        async move {
            let sent_at = Moment::now();
            // If the response is lost, the lease expires without effect, because no key is attached
            // to it.
            let granted = client.call(LeaseGrantRequest { ttl: ttl_seconds }).await;
            let granted = granted.map_err(|failure| failure.into_error().as_refused())?;
            decode_lease(&granted, sent_at).ok_or_else(|| protocol_error().as_refused())
        }
    }

    /// Returns a lease to the pool. No key may be attached to it, and no request for it may be
    /// pending.
    pub(crate) fn release(&self, ttl_seconds: i64, lease: EtcdLease) {
        {
            let mut idle = self.idle();
            let leases = idle.entry(ttl_seconds).or_default();
            if leases.len() < IDLE_MAX {
                leases.push(lease);
                return;
            }
        }
        self.revoke_later(lease.id);
    }

    /// Revokes a lease in the background, which deletes all its keys.
    pub(crate) fn revoke_later(&self, lease: i64) {
        _ = self.cleanup.send(CleanupCommand::RevokeLease(lease));
    }

    /// Deletes the tombstone `name` in the background, if it was created in the revision
    /// `create_revision`.
    pub(crate) fn delete_tombstone_later(&self, name: Vec<u8>, create_revision: i64) {
        _ = self.cleanup.send(CleanupCommand::DeleteTombstone { name, create_revision });
    }

    /// Deletes the tombstone `name` of a lost entry in the background, after
    /// [`LOSS_NOTIFICATION_DELAY_MAX`]. The holder is notified of the loss only after this call
    /// returns.
    pub(crate) fn delete_tombstone_of_lost_entry_later(&self, name: Vec<u8>) {
        let at = Instant::now() + LOSS_NOTIFICATION_DELAY_MAX;
        _ = self.cleanup.send(CleanupCommand::DeleteTombstoneOfLostEntry { name, at });
    }

    /// Revokes a lease, which deletes all its keys and fails every request for it that arrives
    /// later. Returns true if the lease existed.
    pub(crate) async fn revoke(&self, lease: i64) -> Result<bool, BackendError> {
        match self.client.call(LeaseRevokeRequest { id: lease }).await {
            Ok(_) => Ok(true),
            Err(CallError::LeaseNotFound) => Ok(false),
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Removes all leases from the pool. `queue` and `modes` call this function after the members
    /// have ended a lease before its time.
    pub(crate) fn clear(&self) {
        self.idle().clear();
    }

    /// Revokes all unused leases.
    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for lease in idle.into_values().flatten() {
            if self.revoke(lease.id).await.is_err() {
                // The leases expire on their own.
                return;
            }
        }
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<i64, Vec<EtcdLease>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LeasePool {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for LeasePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasePool").finish_non_exhaustive()
    }
}

/// Returns the lease that the members granted in response to a request sent at `sent_at`. Returns
/// `None` if the response contains no valid lease.
fn decode_lease(granted: &LeaseGrantResponse, sent_at: Moment) -> Option<EtcdLease> {
    let ttl = u64::try_from(granted.ttl).ok().filter(|&ttl| ttl > 0)?;
    // Lease id 0 means no lease. A key with this id would never expire.
    let is_valid = granted.id != 0 && granted.error.is_empty();
    is_valid.then(|| EtcdLease::new(granted.id, Duration::from_secs(ttl), sent_at))
}

async fn run_cleanup(client: EtcdClient, mut commands: mpsc::UnboundedReceiver<CleanupCommand>) {
    let mut received = Vec::with_capacity(CLEANUP_REQUESTS_MAX);
    // The tombstones that are deleted later, ordered by time.
    let mut delayed: VecDeque<(Vec<u8>, Instant)> = VecDeque::new();
    loop {
        let due = delayed.front().map(|&(_, at)| at);
        let timer = async {
            match due {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = timer => if let Some((name, _)) = delayed.pop_front() {
                // The deletion needs no revision. If this client created the lease whose id is in
                // the name, that lease was revoked by an earlier command. No claim then writes this
                // name again.
                _ = client.call(txn::delete_any_revision(&name)).await;
            },
            count = commands.recv_many(&mut received, CLEANUP_REQUESTS_MAX) => {
                if count == 0 {
                    return;
                }
                let mut requests = Vec::new();
                for command in received.drain(..) {
                    match command {
                        CleanupCommand::RevokeLease(id) => {
                            let request = client.call(LeaseRevokeRequest { id });
                            requests.push(request.map(drop).boxed());
                        }
                        CleanupCommand::DeleteTombstone { name, create_revision } => {
                            let request = client.call(txn::delete(&name, create_revision));
                            requests.push(request.map(drop).boxed());
                        }
                        CleanupCommand::DeleteTombstoneOfLostEntry { name, at } => {
                            delayed.push_back((name, at));
                        }
                    }
                }
                // All requests end before the next delayed deletion.
                join_all(requests).await;
            }
        }
    }
}

/// The maximum number of concurrent clean-up requests. Callers create commands concurrently, so one
/// request at a time would not keep up with them.
const CLEANUP_REQUESTS_MAX: usize = 64;

/// The maximum time between the response that shows a loss and the notification of the holder.
/// `renew_batch` waits for no further response of this claim in between.
const LOSS_NOTIFICATION_DELAY_MAX: Duration = Duration::from_millis(25);

/// The maximum number of unused leases of one duration. When a process releases many locks at once,
/// the pool revokes all further leases.
const IDLE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_response_without_a_lease_is_rejected() {
        let granted = |id, ttl, error: &str| {
            decode_lease(&LeaseGrantResponse { id, ttl, error: error.to_owned() }, Moment::now())
        };
        assert_eq!(granted(7, 5, "").unwrap().id, 7);
        for (id, ttl, error) in [(0, 5, ""), (7, 0, ""), (7, -1, ""), (7, 5, "no")] {
            assert!(granted(id, ttl, error).is_none(), "{id} {ttl} {error:?}");
        }
    }
}
