//! The `min_hold` of a lock that its holder has released: renews the lease until the `min_hold` is
//! over. Its caller `guard` then releases the claim.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Claim, Renewal};
use crate::clock::Moment;
use crate::engine::{Engine, backoff};
use crate::error::LostReason;
use crate::invalidation::Epoch;
use crate::lease::{drift_margin, lease_covering};

/// Sends `Ok` once the first renewal has an outcome or no renewal is needed. Sends the reason if
/// the claim is lost.
pub(crate) type FirstRenewalSender = oneshot::Sender<Result<(), LostReason>>;

/// The rest of the `min_hold` of a claim without guards.
pub(crate) struct MinHold<'a, E> {
    pub(crate) claim: &'a Claim,
    pub(crate) engine: &'a Engine,
    /// The end of the `min_hold`.
    pub(crate) end: Moment,
    /// The end of the lease.
    pub(crate) valid_until: Moment,
    /// An invalidation of the key has not been verified yet, or its verification has found that the
    /// claim is gone.
    pub(crate) may_be_gone: bool,
    /// Returns the current invalidation epoch of the key.
    pub(crate) current_epoch: E,
}

impl<E: Fn() -> Epoch + Sync> MinHold<'_, E> {
    /// Waits until the `min_hold` is over or the claim is lost. Returns false if the time limit of
    /// `close` ends before.
    pub(crate) async fn wait(&self, first_renewal: Option<FirstRenewalSender>) -> bool {
        tokio::select! {
            biased;
            () = self.renew_until_end(first_renewal) => true,
            () = self.engine.close_limit_reached.wait() => false,
        }
    }

    /// Waits until the end of the `min_hold`, and renews the lease if it would end before that.
    /// Returns early if the claim is lost.
    ///
    /// An invalidation of the key also causes a renewal, which detects a forced release. Local
    /// callers must not wait for the rest of the `min_hold` after a forced release.
    async fn renew_until_end(&self, mut first_renewal: Option<FirstRenewalSender>) {
        let (engine, end) = (self.engine, self.end);
        let mut send_outcome = |outcome| first_renewal.take().map(|sender| sender.send(outcome));
        let mut valid_until = self.valid_until;
        let mut failures = 0;
        let mut epoch = (self.current_epoch)();
        let mut must_renew = self.may_be_gone || valid_until < end;
        loop {
            let mut next_at = end;
            if must_renew {
                epoch = (self.current_epoch)();
                let now = Moment::now();
                // The store limits the length of a lease, so the loop may need several renewals.
                let (min, max) = (engine.capabilities.lease_min, engine.capabilities.lease_max);
                let lease = lease_covering(end.since(now)).clamp(min, max);
                let mut renewal = engine.renew(self.claim.clone().with_lease(lease));
                // Another renewal must fit into the rest of the lease.
                let limit = (valid_until.since(now) / 2).max(self.claim.lease() / 20);
                let limit = limit.min(engine.defaults.operation_timeout);
                let pause = match renewal.response_within(limit).await {
                    Some(Ok(Renewal::Renewed(granted))) => {
                        failures = 0;
                        let trusted = granted.saturating_sub(drift_margin(granted));
                        valid_until = valid_until.max(now.after(trusted));
                        must_renew = valid_until < end;
                        granted / 3
                    }
                    Some(Ok(Renewal::Gone)) => {
                        send_outcome(Err(LostReason::Gone));
                        return;
                    }
                    Some(Err(error)) if !error.is_retryable() => {
                        must_renew = false;
                        Duration::ZERO
                    }
                    Some(Err(_)) | None => {
                        failures += 1;
                        Duration::ZERO
                    }
                };
                let next = Moment::now().after(pause.max(backoff(failures).min(limit)));
                // A renewal cannot restore a lease that is over.
                must_renew &= valid_until >= end || next < valid_until;
                if must_renew {
                    next_at = next.min(end);
                }
            }
            send_outcome(Ok(()));
            if self.wait_for_invalidation(next_at, epoch).await {
                must_renew = true;
            } else if next_at >= end {
                return;
            }
        }
    }

    /// Waits until an invalidation has changed the key's epoch from `known`. Returns false if no
    /// invalidation arrives before `limit`.
    async fn wait_for_invalidation(&self, limit: Moment, known: Epoch) -> bool {
        let engine = self.engine;
        loop {
            // The loop sleeps before it compares epochs. A renewal may itself cause an
            // invalidation, which must not cause the next renewal at once.
            engine.sleep_until(Moment::now().after(engine.defaults.poll).min(limit)).await;
            if Moment::now() >= limit {
                return false;
            }
            if (self.current_epoch)() != known {
                return true;
            }
        }
    }
}
