//! Leases that no claim has just now. A claim takes one for itself alone and gives it back for the next one, which spares a write; a
//! lease of which something may still be on its way is never given to anybody else.

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
    /// By the time in seconds that was asked for.
    idle: Mutex<HashMap<i64, Vec<Lease>>>,
    // Without a limit: these are numbers, and most claims give their lease back.
    done: mpsc::UnboundedSender<Left>,
    task: JoinHandle<()>,
}

/// What nobody needs any more.
enum Left {
    Lease(i64),
    /// A trace that came to be in that revision.
    Trace(Vec<u8>, i64),
    /// The trace of a holder that hears of its loss just now.
    LostTrace(Vec<u8>, Instant),
}

impl Pool {
    pub(crate) fn new(link: Link) -> Self {
        let (done, received) = mpsc::unbounded_channel();
        let task = tokio::spawn(clear_away(link.clone(), received));
        Self { link, idle: Mutex::default(), done, task }
    }

    /// A lease that lasts for `seconds` when it is kept alive, and is not known to have ended.
    pub(crate) async fn take(&self, seconds: i64) -> Result<Lease, BackendError> {
        {
            let mut idle = self.idle();
            if let Some(leases) = idle.get_mut(&seconds) {
                // The last that was given back is the youngest.
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

    /// A new lease.
    pub(crate) fn grant(
        &self,
        seconds: i64,
    ) -> impl Future<Output = Result<Lease, BackendError>> + Send + use<> {
        let link = self.link.clone();
        async move {
            let sent = Moment::now();
            // A lease that nobody hears of ends by itself, and has nothing attached to it.
            let granted = link.call(LeaseGrantRequest { ttl: seconds }).await;
            let granted = granted.map_err(|failure| failure.into_error().as_refused())?;
            read(&granted, sent).ok_or_else(|| unreadable().as_refused())
        }
    }

    /// Takes back a lease that has nothing attached to it, nor anything on its way.
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

    /// Ends a lease with all that is attached to it, in the background.
    pub(crate) fn end(&self, lease: i64) {
        _ = self.done.send(Left::Lease(lease));
    }

    /// Does away with the trace `name`, if it is the one that came to be in the revision `created`, in the background.
    pub(crate) fn erase(&self, name: Vec<u8>, created: i64) {
        _ = self.done.send(Left::Trace(name, created));
    }

    /// Does away with the trace `name` of a place that is lost, in the background, and a little later: when this is called its holder is yet
    /// to hear of it.
    pub(crate) fn erase_later(&self, name: Vec<u8>) {
        _ = self.done.send(Left::LostTrace(name, Instant::now() + HEARING));
    }

    /// Ends a lease with all that is attached to it, and all that may yet arrive for it. True if it was there.
    pub(crate) async fn end_now(&self, lease: i64) -> Result<bool, BackendError> {
        match self.link.call(LeaseRevokeRequest { id: lease }).await {
            Ok(_) => Ok(true),
            Err(Failure::NoLease) => Ok(false),
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Forgets all leases: the servers have ended one that should have lasted.
    pub(crate) fn distrust(&self) {
        self.idle().clear();
    }

    /// Ends all leases that no claim has.
    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for lease in idle.into_values().flatten() {
            if self.end_now(lease.id).await.is_err() {
                // They end by themselves.
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

/// The lease that was granted in answer to a request of `sent`, if one was.
fn read(granted: &LeaseGrantResponse, sent: Moment) -> Option<Lease> {
    let ttl = u64::try_from(granted.ttl).ok().filter(|&ttl| ttl > 0)?;
    // What is attached to a lease of no number is attached to none, and would stay for ever.
    let is_one = granted.id != 0 && granted.error.is_empty();
    is_one.then(|| Lease::new(granted.id, Duration::from_secs(ttl), sent))
}

async fn clear_away(link: Link, mut done: mpsc::UnboundedReceiver<Left>) {
    // In the order of their time.
    let mut later: VecDeque<(Vec<u8>, Instant)> = VecDeque::new();
    loop {
        let due = later.front().map(|&(_, at)| at);
        let is_due = async {
            match due {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // What is not heard ends by itself, with its lease.
        tokio::select! {
            biased;
            () = is_due => if let Some((name, _)) = later.pop_front() {
                // Whatever its revision is: nobody can leave it again, as nobody has that lease any more.
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

/// How long a holder needs at most from the answer that its lock is lost until it knows. Nothing but its own work is between these.
const HEARING: Duration = Duration::from_millis(25);

/// How many leases of one length wait for a claim. Those who hold many locks and let them go at once need no more of them afterwards.
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
