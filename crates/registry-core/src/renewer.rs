//! The lease renewer: renews the held claims of a registry, and ends a claim whose lease runs out.
//! Time arithmetic is in `lease`.
//!
//! A registry has one task and one schedule. In each round, the task renews all claims that are
//! due. It groups them by shard into batches. Each batch is a separate call, so that no shard waits
//! for another shard.
//! [`RegistryBuilder::build`](crate::RegistryBuilder::build) starts the task.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::{Claim, LockBackend, Renewal};
use crate::capabilities::RenewalPolicy;
use crate::clock::Moment;
use crate::error::{BackendError, LostReason};
use crate::invalidation::{Invalidated, InvalidationQueue};
use crate::local_lock::LocalLocks;
use crate::panic_safe::{catch_panic, discard_panic};
use crate::schedule::{Renewable, RenewalSchedule, RenewerAction};
use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};

/// The task of one registry.
pub(crate) struct LeaseRenewer {
    pub(crate) backend: Arc<dyn LockBackend>,
    pub(crate) schedule: Arc<RenewalSchedule>,
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
            let invalidated = self.dispatch_invalidations(now);
            let Some(due) = schedule.begin_round(now) else {
                break;
            };
            let mut renewals: BTreeMap<u32, PendingBatches> = BTreeMap::new();
            let policy = renewal_policy(&**backend);
            let batch_max = policy.batch_max;
            let mut has_regular_renewal = false;
            for (key, grant) in due {
                match Arc::clone(&grant).begin_due_action(key, now) {
                    RenewerAction::Nothing => {}
                    RenewerAction::Lose(reason) => _ = grant.lose(reason),
                    RenewerAction::Renew {
                        requested_lease,
                        is_verification,
                        previous_unanswered,
                    } => {
                        if previous_unanswered {
                            grant.emit_unanswered_renewal(now);
                        }
                        has_regular_renewal |= !is_verification;
                        let batches = renewals.entry(shard(&**backend, grant.claim())).or_default();
                        batches.add(&grant, requested_lease, batch_max);
                    }
                }
            }
            // The calls also renew claims that are due soon, which saves later calls.
            if has_regular_renewal {
                let capacities =
                    renewals.values().map(|batches| batches.remaining_capacity(batch_max));
                let capacity = capacities.fold(0, usize::saturating_add);
                for grant in schedule.next_renewals(capacity) {
                    let batches = renewals.get_mut(&shard(&**backend, grant.claim()));
                    if let Some(batches) =
                        batches.filter(|batches| batches.remaining_capacity(batch_max) > 0)
                        && let Some(requested_lease) =
                            Arc::clone(&grant).begin_early_renewal(now, policy.renews_whole_shard)
                    {
                        batches.add(&grant, requested_lease, batch_max);
                    }
                }
            }
            for batch in renewals.into_values().flat_map(|batches| batches.0) {
                calls.push(renew(Arc::clone(backend), batch, now));
            }
            if invalidated {
                // Invalidations may arrive without a pause. This task therefore yields to the other
                // tasks of its thread.
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
        // The renewer completes the calls in flight, because clause 6 of `LockBackend` forbids
        // dropping them.
        while poll_fn(|cx| Pin::new(&mut calls).poll_next(cx)).await.is_some() {}
    }

    /// Schedules verifications of the claims whose keys are in the queue of invalidations. Returns
    /// false if the queue was empty.
    fn dispatch_invalidations(&self, now: Moment) -> bool {
        let affected = match self.invalidations.take() {
            Invalidated::None => return false,
            Invalidated::Keys(keys) => {
                let mut affected = Vec::new();
                for key in keys {
                    if let Some(local_lock) = self.local_locks.get(key.as_str()) {
                        // The epoch is incremented before the lookup. The lookup misses a grant
                        // that is not scheduled yet. Such a grant compares the epoch after it is
                        // scheduled, and so detects the invalidation.
                        local_lock.invalidate();
                        affected.extend(self.schedule.find(&local_lock.latest_entry_id));
                        let concurrent = local_lock.concurrent_grants().into_iter();
                        affected.extend(concurrent.map(|grant| grant as Arc<dyn Renewable>));
                    }
                }
                affected
            }
            Invalidated::All => {
                // The epoch is incremented before the lookup, for the same reason.
                self.invalidations.increment_registry_epoch();
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
        // This also closes the queue when the runtime shuts down, because the runtime drops this
        // task.
        self.invalidations.close();
    }
}

/// The renewals of one shard that are not sent yet, grouped into calls.
#[derive(Default)]
struct PendingBatches(Vec<Vec<(Weak<dyn Renewable>, Claim)>>);

impl PendingBatches {
    /// Adds the claim of `grant` to the last call, or to a new call if the last one is full.
    fn add(&mut self, grant: &Arc<dyn Renewable>, requested_lease: Duration, batch_max: usize) {
        let claim = (Arc::downgrade(grant), grant.claim().clone().with_lease(requested_lease));
        match self.0.last_mut().filter(|last| last.len() < batch_max) {
            Some(last) => last.push(claim),
            None => self.0.push(vec![claim]),
        }
    }

    /// Returns the number of claims that can still be added to the last call.
    fn remaining_capacity(&self, batch_max: usize) -> usize {
        self.0.last().map_or(0, |last| batch_max.saturating_sub(last.len()))
    }
}

/// A renewal call that has completed: its grants, and the responses to them.
struct CompletedBatch {
    /// The references are weak, so that a grant that ends during the call does not keep its local
    /// lock alive.
    grants: Vec<Weak<dyn Renewable>>,
    sent_at: Moment,
    responses: Vec<Result<Renewal, BackendError>>,
}

type BatchCall = Pin<Box<dyn Future<Output = CompletedBatch> + Send>>;

fn renew(
    backend: Arc<dyn LockBackend>,
    batch: Vec<(Weak<dyn Renewable>, Claim)>,
    sent_at: Moment,
) -> BatchCall {
    let (grants, claims): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    // A panic of the backend fails only this batch. The lease renewer's task continues.
    let call = AssertUnwindSafe(async move { backend.renew(&claims).await }).catch_unwind();
    Box::pin(call.map(move |responses| CompletedBatch {
        grants,
        sent_at,
        responses: responses.map_err(discard_panic).unwrap_or_default(),
    }))
}

fn shard(backend: &dyn LockBackend, claim: &Claim) -> u32 {
    catch_panic(|| backend.shard(claim)).unwrap_or_default()
}

fn renewal_policy(backend: &dyn LockBackend) -> RenewalPolicy {
    // If the backend panics, its limit is unknown. A batch of one claim is within every limit.
    let policy = catch_panic(|| backend.capabilities().renewal)
        .unwrap_or(RenewalPolicy::new().with_batch_max(1));
    // `with_batch_max` replaces a zero in the public field by one.
    policy.with_batch_max(policy.batch_max)
}

/// Passes each response to its grant.
fn apply_results(batch: CompletedBatch) {
    let mut responses = batch.responses.into_iter();
    for grant in batch.grants {
        let response = responses.next().unwrap_or_else(|| Err(BackendError::missing_renewal()));
        let Some(grant) = grant.upgrade() else { continue };
        match response {
            Ok(Renewal::Renewed(granted)) => grant.on_confirmed(batch.sent_at, granted),
            Ok(Renewal::Gone) => _ = grant.lose(LostReason::Gone),
            Err(error) => grant.on_renewal_failed(batch.sent_at, &error),
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
        // In the first pass, the schedule is otherwise empty. In the second pass, it also contains
        // another lock, which stays held.
        for with_another in [false, true] {
            let other = if with_another {
                Some(registry.obtain("orders/43").lock().await.unwrap())
            } else {
                None
            };
            // The sleep is longer than any timer that the other lock or earlier locks have set.
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            let began = Moment::now();
            for millis in 0..20 {
                let guard = lock.lock().await.unwrap();
                let schedule = Arc::clone(&guard.hold().grant().engine().schedule);
                guard.unlock().await.unwrap();
                // Paused time advances only when all tasks are idle.
                tokio::time::sleep(Duration::from_millis(1)).await;
                let first_verification = Some(began.after(Duration::from_millis(25)));
                assert_eq!(schedule.wakes_at(), first_verification, "after {millis} ms");
            }
            drop(other);
        }
    }
}
