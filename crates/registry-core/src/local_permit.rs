//! A local permit for a lock that a backend acquires without the engine, such as a lock in the
//! caller's own transaction.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Moment, sleep};
use crate::key::Key;
use crate::lease::LeaseTerms;
use crate::local_lock::{Admission, LocalLock, LocalPermit, NotAdmitted};
use crate::options::Terms;
use crate::registry::Registry;
use crate::watch::{Parked, Suspended, Suspension};

impl Registry {
    /// Waits up to `wait` for the local permit of `key`, then runs `attempts`
    /// and returns its output.
    ///
    /// A backend uses this for a lock that it acquires without the engine. Without a permit, such
    /// an acquisition would compete with local callers that hand the claim over without a request
    /// to the store.
    ///
    /// If the permit has not come after one second, `attempts` also runs while the caller waits for
    /// it: the caller in front may wait for something that this caller has locked already, which
    /// only the store can detect.
    ///
    /// The permit ends when `attempts` is ready, or after the registry's lease. In the latter case
    /// `attempts` continues while the caller waits for its next permit. `attempts` also runs if the
    /// permit does not come in time or the registry is closing.
    ///
    /// # Cancel safety
    /// Dropping the future releases the permit and drops `attempts`.
    pub async fn with_local_permit<T>(
        &self,
        key: &Key,
        wait: Duration,
        attempts: impl Future<Output = T>,
    ) -> T {
        let deadline = Moment::now().after(wait);
        let local_lock = self.local_lock(key.clone());
        let engine = local_lock.engine();
        let patience = engine.defaults.lease;
        let mut attempts = pin!(attempts);
        let mut permit = {
            let mut waiting = pin!(wait_for_permit(&local_lock, deadline));
            tokio::select! {
                biased;
                permit = &mut waiting => permit,
                () = sleep(UNPERMITTED_AFTER) => tokio::select! {
                    biased;
                    output = &mut attempts => return output,
                    permit = waiting => permit,
                },
            }
        };
        while let Some(held) = permit {
            let mut suspension = Suspension::new(engine.background.watch(), patience);
            let mut limit = pin!(sleep(patience));
            let run = suspension.run(held, |_, cx| match attempts.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
            });
            if let Ok((_, Some(output))) = run.await {
                return output;
            }
            // Polled while waiting: a request of `attempts` may be in progress, and may be granted
            // at any time.
            permit = tokio::select! {
                biased;
                output = &mut attempts => return output,
                permit = wait_for_permit(&local_lock, deadline) => permit,
            };
        }
        attempts.await
    }
}

/// How long a caller waits for its permit without an attempt.
const UNPERMITTED_AFTER: Duration = Duration::from_secs(1);

/// Waits for a permit. Returns `None` if it did not come in time, or the registry is closing.
async fn wait_for_permit(local_lock: &Arc<LocalLock>, deadline: Moment) -> Option<LocalPermit> {
    let own = &local_lock.engine().default_terms;
    // A waiter with a `max_hold` gets no hand-over, so the caller in front of it releases its claim
    // in the store.
    let lease = LeaseTerms { max_hold: Some(Duration::ZERO), ..own.lease };
    let terms = Arc::new(Terms { lease, ..Terms::clone(own) });
    loop {
        match local_lock.enter(None, &terms, Some(deadline)).await {
            Ok(Admission::LocalPermit(permit)) => return Some(permit),
            Err(NotAdmitted::PassedOn) => {}
            Ok(Admission::Reentered(_) | Admission::HandedOver(_))
            | Err(NotAdmitted::TimedOut(_) | NotAdmitted::Closed) => return None,
        }
    }
}

/// A caller whose future is not polled loses its permit. Its attempts continue when it is polled
/// again.
impl Parked for LocalPermit {
    type Replacement = ();

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        drop(self);
        cell.leave(());
    }
}
