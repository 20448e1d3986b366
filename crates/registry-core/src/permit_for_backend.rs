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
use crate::stall_detector::{MonitoredCell, MonitoredState, MonitoredWait};

impl Registry {
    /// Waits up to `wait` for the local permit of `key`, then runs `attempts` and returns its
    /// output.
    ///
    /// A backend uses this method for a lock that it acquires without the engine. Without a permit,
    /// such an acquisition would wait while local callers hand a claim over to each other.
    ///
    /// After one second without a permit, `attempts` also runs while this call waits for the
    /// permit. The holder of the permit might wait for a row that this caller has locked. The store
    /// can detect this deadlock only if this caller also waits in the store.
    ///
    /// The permit is released when `attempts` is ready, and at the latest after the length of the
    /// registry's lease. If `attempts` is not ready by then, it continues while this call waits for
    /// its next permit. If this call receives no permit within `wait`, or the registry is closing,
    /// `attempts` runs without a permit.
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
            let mut monitored_wait =
                MonitoredWait::new(engine.background.stall_detector(), permit_max);
            let mut limit = pin!(sleep(permit_max));
            let run = monitored_wait.run(current, |_, cx| match attempts.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
            });
            if let Ok((_, Some(output))) = run.await {
                return output;
            }
            // This call polls `attempts` during the wait, because the store may grant its request
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

/// The time for which a caller waits for its permit before it runs its attempts without a permit.
const ATTEMPT_WITHOUT_PERMIT_AFTER: Duration = Duration::from_secs(1);

/// Waits for a permit. Returns `None` at the deadline, or if the registry is closing.
async fn wait_for_permit(local_lock: &Arc<LocalLock>, deadline: Moment) -> Option<LocalPermit> {
    let defaults = &local_lock.engine().default_options;
    // The options of this waiter differ from the options of every claim, so it receives no
    // hand-over. The previous holder therefore releases its claim in the store.
    let lease = LeaseOptions { max_hold: Some(Duration::ZERO), ..defaults.lease };
    let options = Arc::new(ClaimOptions { lease, ..ClaimOptions::clone(defaults) });
    loop {
        match local_lock.enter(None, &options, Some(deadline)).await {
            Ok(Admission::LocalPermit(permit)) => {
                // The attempts of this caller record no response.
                permit.local_lock().record_response();
                return Some(permit);
            }
            Err(NotAdmitted::Revoked) => {}
            Ok(Admission::Reentered(_) | Admission::HandedOver(_) | Admission::Joined(_))
            | Err(NotAdmitted::TimedOut(_) | NotAdmitted::HeldByOwner(_) | NotAdmitted::Closed) => {
                return None;
            }
        }
    }
}

/// A future that is not polled loses the permit. At its next poll, `attempts` continues.
impl MonitoredState for LocalPermit {
    type Replacement = ();

    fn take_over(self, cell: &Arc<MonitoredCell<Self>>) {
        drop(self);
        cell.resolve(());
    }
}
