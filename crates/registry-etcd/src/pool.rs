//! A pool of unused leases. A claim takes a lease exclusively and returns it for later claims,
//! which saves a write. A lease with a request that may still arrive is never reused.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Moment};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::error::{Failure, unreadable};
use crate::lease::Lease;
use crate::link::Link;
use crate::txn;
use crate::wire::{LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest};

pub(crate) struct Pool {
    link: Link,
    /// Unused leases by their requested duration in seconds.
    idle: Mutex<HashMap<i64, Vec<Lease>>>,
    // Unbounded: the items are small, and most claims return their lease to the pool.
    done: mpsc::UnboundedSender<Left>,
    task: JoinHandle<()>,
}

/// An item for the background task to delete.
enum Left {
    Lease(i64),
    /// A tombstone that was created in that revision.
    Trace(Vec<u8>, i64),
    /// The tombstone of a holder that is being notified of its loss, and the time at which to
    /// delete it.
    LostTrace(Vec<u8>, Instant),
}

impl Pool {
    pub(crate) fn new(link: Link) -> Self {
        let (done, received) = mpsc::unbounded_channel();
        let task = tokio::spawn(clear_away(link.clone(), received));
        Self { link, idle: Mutex::default(), done, task }
    }

    /// Returns a lease of duration `seconds` that is not known to have ended.
    pub(crate) async fn take(&self, seconds: i64) -> Result<Lease, BackendError> {
        {
            let mut idle = self.idle();
            if let Some(leases) = idle.get_mut(&seconds) {
                // The lease that was returned last is the youngest.
                let lease = leases.pop().filter(|lease| !lease.left().is_zero());
                if lease.is_none() || leases.is_empty() {
                    idle.remove(&seconds);
                }
                if let Some(lease) = lease {
                    return Ok(lease);
                }
            }
        }
        self.grant(seconds).await
    }

    /// Requests a new lease.
    pub(crate) fn grant(
        &self,
        seconds: i64,
    ) -> impl Future<Output = Result<Lease, BackendError>> + Send + use<> {
        let link = self.link.clone();
        async move {
            let sent = Moment::now();
            // If the response is lost, the lease expires on its own, with nothing attached to it.
            let granted = link.call(LeaseGrantRequest { ttl: seconds }).await;
            let granted = granted.map_err(|failure| failure.into_error().as_refused())?;
            read(&granted, sent).ok_or_else(|| unreadable().as_refused())
        }
    }

    /// Returns a lease to the pool. No key may be attached to it, and no request for it may be
    /// pending.
    pub(crate) fn give_back(&self, seconds: i64, lease: Lease) {
        {
            let mut idle = self.idle();
            let leases = idle.entry(seconds).or_default();
            if leases.len() < IDLE_MAX {
                leases.push(lease);
                return;
            }
        }
        self.end(lease.id);
    }

    /// Revokes a lease in the background, which deletes all its keys.
    pub(crate) fn end(&self, lease: i64) {
        _ = self.done.send(Left::Lease(lease));
    }

    /// Deletes the tombstone `name` in the background, if it was created in the revision `created`.
    pub(crate) fn erase(&self, name: Vec<u8>, created: i64) {
        _ = self.done.send(Left::Trace(name, created));
    }

    /// Deletes the tombstone `name` of a lost entry in the background, after [`HEARING`]. The
    /// holder is notified of its loss only after this call.
    pub(crate) fn erase_later(&self, name: Vec<u8>) {
        _ = self.done.send(Left::LostTrace(name, Instant::now() + HEARING));
    }

    /// Revokes a lease, which deletes all its keys and fails every request for it that arrives
    /// later. Returns true if the lease existed.
    pub(crate) async fn end_now(&self, lease: i64) -> Result<bool, BackendError> {
        match self.link.call(LeaseRevokeRequest { id: lease }).await {
            Ok(_) => Ok(true),
            Err(Failure::NoLease) => Ok(false),
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Forgets all leases, because the members have ended one that should have lasted.
    pub(crate) fn distrust(&self) {
        self.idle().clear();
    }

    /// Revokes all unused leases.
    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for lease in idle.into_values().flatten() {
            if self.end_now(lease.id).await.is_err() {
                // The leases expire on their own.
                return;
            }
        }
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<i64, Vec<Lease>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

/// Returns the lease that was granted in response to a request sent at `sent`, if one was.
fn read(granted: &LeaseGrantResponse, sent: Moment) -> Option<Lease> {
    let ttl = u64::try_from(granted.ttl).ok().filter(|&ttl| ttl > 0)?;
    // A key that is attached to lease 0 has no lease and would never expire.
    let is_one = granted.id != 0 && granted.error.is_empty();
    is_one.then(|| Lease::new(granted.id, Duration::from_secs(ttl), sent))
}

async fn clear_away(link: Link, mut done: mpsc::UnboundedReceiver<Left>) {
    // Ordered by time.
    let mut later: VecDeque<(Vec<u8>, Instant)> = VecDeque::new();
    loop {
        let due = later.front().map(|&(_, at)| at);
        let is_due = async {
            match due {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // Failures are ignored: each item expires with its lease.
        tokio::select! {
            biased;
            () = is_due => if let Some((name, _)) = later.pop_front() {
                // The revision does not matter: no claim can write this name again, because none
                // has its lease.
                _ = link.call(txn::erase(&name)).await;
            },
            left = done.recv() => match left {
                Some(Left::Lease(id)) => _ = link.call(LeaseRevokeRequest { id }).await,
                Some(Left::Trace(name, created)) => {
                    _ = link.call(txn::delete(&name, created)).await;
                }
                Some(Left::LostTrace(name, at)) => later.push_back((name, at)),
                None => return,
            },
        }
    }
}

/// The maximum time from the response that a lock is lost until its holder is notified. Only local
/// work happens in between.
const HEARING: Duration = Duration::from_millis(25);

/// The maximum number of unused leases of one duration. A process that releases many locks at once
/// does not need more afterwards.
const IDLE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_no_lease_is_not_taken_for_one() {
        let granted = |id, ttl, error: &str| {
            read(&LeaseGrantResponse { id, ttl, error: error.to_owned() }, Moment::now())
        };
        assert_eq!(granted(7, 5, "").unwrap().id, 7);
        for (id, ttl, error) in [(0, 5, ""), (7, 0, ""), (7, -1, ""), (7, 5, "no")] {
            assert!(granted(id, ttl, error).is_none(), "{id} {ttl} {error:?}");
        }
    }
}
