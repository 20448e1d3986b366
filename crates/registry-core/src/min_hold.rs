//! The `min_hold` of a lock that its holder has released: the lease is renewed until it is over.
//! Called by `guard`, which then releases the claim.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Claim, Renewal};
use crate::clock::Moment;
use crate::engine::{Engine, backoff};
use crate::error::LostReason;
use crate::invalidation::Epoch;
use crate::lease::{drift_margin, lease_covering};

/// Receives a message once the first renewal has an outcome, or none is needed. The message is an
/// error if the claim is lost.
pub(crate) type FirstRenewal = oneshot::Sender<Result<(), LostReason>>;

/// The rest of the `min_hold` of a claim without guards.
pub(crate) struct MinHold<'a, E> {
    pub(crate) claim: &'a Claim,
    pub(crate) engine: &'a Engine,
    pub(crate) end: Moment,
    /// The end of the lease.
    pub(crate) valid_until: Moment,
    /// Returns the current invalidation epoch of the key.
    pub(crate) epoch: E,
}

impl<E: Fn() -> Epoch + Sync> MinHold<'_, E> {
    /// Waits until the `min_hold` is over or the claim is lost. Returns false if the time limit of
    /// `close` comes first.
    pub(crate) async fn wait(&self, first_renewal: Option<FirstRenewal>) -> bool {
        tokio::select! {
            biased;
            () = self.renew_until_end(first_renewal) => true,
            () = self.engine.close_limit_reached.wait() => false,
        }
    }

    /// Waits until the end, and renews the lease while it would end before. Returns early if the
    /// claim is lost.
    ///
    /// Also renews after an invalidation of the key: if its release was forced, local callers must
    /// not wait for the rest of the `min_hold`.
    async fn renew_until_end(&self, mut first_renewal: Option<FirstRenewal>) {
        let (engine, end) = (self.engine, self.end);
        let mut notify = |outcome| first_renewal.take().map(|sender| sender.send(outcome));
        let mut until = self.valid_until;
        let mut failures = 0;
        let mut epoch = (self.epoch)();
        let mut renews = until < end;
        loop {
            let mut next_at = end;
            if renews {
                epoch = (self.epoch)();
                let now = Moment::now();
                // The store limits the length of a lease, so one renewal may not be enough.
                let (min, max) = (engine.capabilities.lease_min, engine.capabilities.lease_max);
                let lease = lease_covering(end.since(now)).clamp(min, max);
                let mut renewal = engine.renew(self.claim.clone().with_lease(lease));
                let pause = match renewal.response_within(engine.defaults.operation_timeout).await {
                    Some(Ok(Renewal::Renewed(granted))) => {
                        failures = 0;
                        until = until.max(now.after(granted.saturating_sub(drift_margin(granted))));
                        renews = until < end;
                        granted / 3
                    }
                    Some(Ok(Renewal::Gone)) => {
                        notify(Err(LostReason::Gone));
                        return;
                    }
                    Some(Err(error)) if !error.is_retryable() => {
                        renews = false;
                        Duration::ZERO
                    }
                    Some(Err(_)) | None => {
                        failures += 1;
                        Duration::ZERO
                    }
                };
                let next = Moment::now().after(pause.max(backoff(failures)));
                // Once the lease is over, it cannot be renewed.
                renews &= until >= end || next < until;
                if renews {
                    next_at = next.min(end);
                }
            }
            notify(Ok(()));
            if self.invalidated_before(next_at, epoch).await {
                renews = true;
            } else if next_at >= end {
                return;
            }
        }
    }

    /// Waits for an invalidation of the key, which changes its epoch from `known`. Returns false if
    /// there is none before `limit`.
    async fn invalidated_before(&self, limit: Moment, known: Epoch) -> bool {
        let engine = self.engine;
        loop {
            // Sleeps first: a renewal may itself cause an invalidation, which the loop must not
            // follow.
            engine.sleep_until(Moment::now().after(engine.defaults.poll).min(limit)).await;
            if Moment::now() >= limit {
                return false;
            }
            if (self.epoch)() != known {
                return true;
            }
        }
    }
}
