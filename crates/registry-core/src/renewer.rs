//! The lease renewer: renews the held claims of a registry and ends those whose lease runs out.
//! Time arithmetic is in `lease`.
//!
//! A registry has one task and one schedule. Claims that are due together are renewed in batches
//! per shard. Each batch is a separate call, so that no shard waits for another. Started by
//! [`RegistryBuilder::build`](crate::RegistryBuilder::build).

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::{Claim, LockBackend, Renewal};
use crate::capabilities::RenewalPolicy;
use crate::clock::Moment;
use crate::contained::{catch_panic, discard};
use crate::error::{BackendError, LostReason};
use crate::invalidation::{Invalidated, InvalidationQueue};
use crate::local_lock::LocalLocks;
use crate::schedule::{Renewable, RenewerAction, Schedule};
use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};

/// The task of one registry.
pub(crate) struct LeaseRenewer {
    pub(crate) backend: Arc<dyn LockBackend>,
    pub(crate) schedule: Arc<Schedule>,
    pub(crate) invalidations: Arc<InvalidationQueue>,
    pub(crate) local_locks: Arc<LocalLocks>,
}

impl LeaseRenewer {
    /// Renews and ends grants until the schedule is stopped.
    pub(crate) async fn run(self) {
        let Self { backend, schedule, invalidations, .. } = &self;
        let mut calls: FuturesUnordered<BatchCall> = FuturesUnordered::new();
        loop {
            let now = Moment::now();
            let invalidated = self.invalidate(now);
            let Some(due) = schedule.due(now) else {
                break;
            };
            let mut renewals: BTreeMap<u32, Batches> = BTreeMap::new();
            let policy = renewal_policy(&**backend);
            let batch_max = policy.batch_max;
            let mut has_renewal = false;
            for (timer, grant) in due {
                match Arc::clone(&grant).next_action(timer, now) {
                    RenewerAction::Nothing => {}
                    RenewerAction::Lose(reason) => _ = grant.lose(reason),
                    RenewerAction::Renew { requested, is_verification, unanswered } => {
                        if unanswered {
                            grant.renewal_unanswered(now);
                        }
                        has_renewal |= !is_verification;
                        let batches = renewals.entry(shard(&**backend, grant.claim())).or_default();
                        batches.add(&grant, requested, batch_max);
                    }
                }
            }
            if has_renewal {
                let free = renewals.values().map(|batches| batches.free(batch_max));
                let free = free.fold(0, usize::saturating_add);
                for grant in schedule.next_renewals(free) {
                    let batches = renewals.get_mut(&shard(&**backend, grant.claim()));
                    if let Some(batches) = batches.filter(|batches| batches.free(batch_max) > 0)
                        && let Some(requested) =
                            Arc::clone(&grant).renew_early(now, policy.whole_shard)
                    {
                        batches.add(&grant, requested, batch_max);
                    }
                }
            }
            for batch in renewals.into_values().flat_map(|batches| batches.0) {
                calls.push(renew(Arc::clone(backend), batch, now));
            }
            if invalidated {
                // Invalidations may arrive without a pause, and other tasks of this thread must
                // run.
                tokio::task::yield_now().await;
            }
            let wakes_at = schedule.wakes_at();
            let sleep = async {
                match wakes_at {
                    Some(at) => tokio::time::sleep(at.since(Moment::now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                batch = poll_fn(|cx| Pin::new(&mut calls).poll_next(cx)), if !calls.is_empty() => {
                    if let Some(batch) = batch {
                        apply_results(batch);
                    }
                }
                () = schedule.changed.notified() => {}
                () = invalidations.changed.notified() => {}
                () = sleep => {}
            }
        }
        // Completes the calls in flight: clause 6 of the contract does not allow dropping them.
        while poll_fn(|cx| Pin::new(&mut calls).poll_next(cx)).await.is_some() {}
    }

    /// Passes queued invalidations to their claims. Returns false if there were none.
    fn invalidate(&self, now: Moment) -> bool {
        let affected = match self.invalidations.take() {
            Invalidated::None => return false,
            Invalidated::Of(keys) => {
                let mut affected = Vec::new();
                for key in keys {
                    if let Some(local_lock) = self.local_locks.get(key.as_str()) {
                        // Before the lookup: a claim that is not in the schedule yet checks the
                        // epoch after it is added.
                        local_lock.invalidate();
                        affected.extend(self.schedule.find(&local_lock.last_timer));
                        let concurrent = local_lock.concurrent_grants().into_iter();
                        affected.extend(concurrent.map(|grant| grant as Arc<dyn Renewable>));
                    }
                }
                affected
            }
            Invalidated::OfAll => {
                // Before the lookup, for the same reason.
                self.invalidations.invalidate_all();
                self.schedule.all()
            }
        };
        for grant in affected {
            grant.invalidate(now);
        }
        true
    }
}

impl Drop for LeaseRenewer {
    fn drop(&mut self) {
        // Also when the runtime shuts down and drops the task.
        self.invalidations.close();
    }
}

/// The renewals of one shard, grouped into calls.
#[derive(Default)]
struct Batches(Vec<Vec<(Weak<dyn Renewable>, Claim)>>);

impl Batches {
    fn add(&mut self, grant: &Arc<dyn Renewable>, requested: Duration, batch_max: usize) {
        let claim = (Arc::downgrade(grant), grant.claim().clone().with_lease(requested));
        match self.0.last_mut().filter(|last| last.len() < batch_max) {
            Some(last) => last.push(claim),
            None => self.0.push(vec![claim]),
        }
    }

    /// Returns how many more claims the last call can include.
    fn free(&self, batch_max: usize) -> usize {
        self.0.last().map_or(0, |last| batch_max.saturating_sub(last.len()))
    }
}

/// One renewal call, its claims and its results.
struct Batch {
    /// Weak, so that a claim that ends during the call does not keep its local lock alive.
    grants: Vec<Weak<dyn Renewable>>,
    sent_at: Moment,
    responses: Vec<Result<Renewal, BackendError>>,
}

type BatchCall = Pin<Box<dyn Future<Output = Batch> + Send>>;

fn renew(
    backend: Arc<dyn LockBackend>,
    batch: Vec<(Weak<dyn Renewable>, Claim)>,
    sent_at: Moment,
) -> BatchCall {
    let (grants, claims): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    // If the backend panics, only this batch fails, not the lease renewer's task.
    let call = AssertUnwindSafe(async move { backend.renew(&claims).await }).catch_unwind();
    Box::pin(call.map(move |responses| Batch {
        grants,
        sent_at,
        responses: responses.map_err(discard).unwrap_or_default(),
    }))
}

fn shard(backend: &dyn LockBackend, claim: &Claim) -> u32 {
    catch_panic(|| backend.shard(claim)).unwrap_or_default()
}

fn renewal_policy(backend: &dyn LockBackend) -> RenewalPolicy {
    // If the backend panics, its limit is unknown. A batch of one claim is within every limit.
    let policy = catch_panic(|| backend.capabilities().renewal)
        .unwrap_or(RenewalPolicy::new().with_batch_max(1));
    // The field may have been set to zero directly.
    policy.with_batch_max(policy.batch_max)
}

fn apply_results(batch: Batch) {
    let mut responses = batch.responses.into_iter();
    for grant in batch.grants {
        let response = responses.next().unwrap_or_else(|| Err(BackendError::missing_renewal()));
        let Some(grant) = grant.upgrade() else { continue };
        match response {
            Ok(Renewal::Renewed(granted)) => grant.confirmed(batch.sent_at, granted),
            Ok(Renewal::Gone) => _ = grant.lose(LostReason::Gone),
            Err(error) => grant.renewal_failed(batch.sent_at, &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::{Attempt, Capabilities, PassThroughBackend, Registry, Release};

    /// Requests a verification of each lock that is held for more than 25 ms.
    #[derive(Debug)]
    struct VerifyingBackend(PassThroughBackend);

    #[async_trait]
    impl LockBackend for VerifyingBackend {
        fn capabilities(&self) -> Capabilities {
            let policy = RenewalPolicy::new().with_verify_after(Duration::from_millis(25));
            self.0.capabilities().with_renewal(policy)
        }

        async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
            self.0.try_acquire(claim).await
        }

        async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
            self.0.renew(claims).await
        }

        async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
            self.0.release(claim).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn locks_that_are_held_briefly_wake_the_renewer_once() {
        let registry = Registry::builder(Arc::new(VerifyingBackend(PassThroughBackend::new())))
            .build()
            .unwrap();
        let lock = registry.obtain("orders/42");
        // First with an otherwise empty schedule, then next to a lock that is held throughout.
        for with_another in [false, true] {
            let other = if with_another {
                Some(registry.obtain("orders/43").lock().await.unwrap())
            } else {
                None
            };
            // Longer than any timer that the other lock or earlier locks have set.
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            let began = Moment::now();
            for millis in 0..20 {
                let guard = lock.lock().await.unwrap();
                let schedule = Arc::clone(&guard.hold().grant().engine().schedule);
                guard.unlock().await.unwrap();
                // Paused time advances only when all tasks are idle.
                tokio::time::sleep(Duration::from_millis(1)).await;
                let planned = Some(began.after(Duration::from_millis(25)));
                assert_eq!(schedule.wakes_at(), planned, "after {millis} ms");
            }
            drop(other);
        }
    }
}
