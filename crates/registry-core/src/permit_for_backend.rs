//! A local permit for a lock that a backend acquires without the engine, such as a lock in the
//! caller's own transaction.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Moment, sleep};
use crate::key::Key;
use crate::lease::LeaseOptions;
use crate::local_lock::{Admission, LocalLock, LocalPermit, NotAdmitted};
use crate::options::ClaimOptions;
use crate::registry::Registry;
use crate::watch::{SuspendedState, Suspension, SuspensionCell};

impl Registry {
    /// Waits up to `wait` for the local permit of `key`, then runs `attempts`
    /// and returns its output.
    ///
    /// A backend uses this for a lock that it acquires without the engine. Without a permit, such
    /// an acquisition would wait while local callers hand a claim over to each other.
    ///
    /// After one second without a permit, `attempts` runs while this call continues to wait for the
    /// permit. The caller in front may wait for something that this caller has locked, which is a
    /// deadlock that only the store can detect.
    ///
    /// The permit is released when `attempts` is ready, or after the length of the registry's
    /// lease. In the latter case, `attempts` continues while this call waits for its next permit.
    /// If no permit comes within `wait`, or the registry is closing, `attempts` runs without one.
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
        let permit_max = engine.defaults.lease;
        let mut attempts = pin!(attempts);
        let mut permit = {
            let mut waiting = pin!(wait_for_permit(&local_lock, deadline));
            tokio::select! {
                biased;
                permit = &mut waiting => permit,
                () = sleep(ATTEMPT_WITHOUT_PERMIT_AFTER) => tokio::select! {
                    biased;
                    output = &mut attempts => return output,
                    permit = waiting => permit,
                },
            }
        };
        while let Some(current) = permit {
            let mut suspension = Suspension::new(engine.background.watch(), permit_max);
            let mut limit = pin!(sleep(permit_max));
            let run = suspension.run(current, |_, cx| match attempts.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
            });
            if let Ok((_, Some(output))) = run.await {
                return output;
            }
            // `attempts` is polled while this waits, because its request may be granted at any
            // time.
            permit = tokio::select! {
                biased;
                output = &mut attempts => return output,
                permit = wait_for_permit(&local_lock, deadline) => permit,
            };
        }
        attempts.await
    }
}

/// How long a caller waits for its permit before it attempts without one.
const ATTEMPT_WITHOUT_PERMIT_AFTER: Duration = Duration::from_secs(1);

/// Waits for a permit. Returns `None` if it did not come in time, or the registry is closing.
async fn wait_for_permit(local_lock: &Arc<LocalLock>, deadline: Moment) -> Option<LocalPermit> {
    let defaults = &local_lock.engine().default_options;
    // With options that differ from those of any claim, this waiter gets no hand-over: the caller
    // in front releases its claim in the store.
    let lease = LeaseOptions { max_hold: Some(Duration::ZERO), ..defaults.lease };
    let options = Arc::new(ClaimOptions { lease, ..ClaimOptions::clone(defaults) });
    loop {
        match local_lock.enter(None, &options, Some(deadline)).await {
            Ok(Admission::LocalPermit(permit)) => return Some(permit),
            Err(NotAdmitted::PassedOn) => {}
            Ok(Admission::Reentered(_) | Admission::HandedOver(_) | Admission::Joined(_))
            | Err(NotAdmitted::TimedOut(_) | NotAdmitted::HeldByOwner(_) | NotAdmitted::Closed) => {
                return None;
            }
        }
    }
}

/// If the future is not polled, it loses the permit. At its next poll, `attempts` continues.
impl SuspendedState for LocalPermit {
    type Replacement = ();

    fn abandon(self, cell: &Arc<SuspensionCell<Self>>) {
        drop(self);
        cell.resolve(());
    }
}
