//! An in-process store that queues its claims and grants them in order of arrival. A caller that
//! ends without leaving the queue blocks all later claims for a lease.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Grant, GuaranteeClass,
    Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A store of one key. Clones are the same store.
#[derive(Debug, Clone, Default)]
pub(crate) struct FairBackend(Arc<FairStore>);

#[derive(Debug, Default)]
struct FairStore {
    state: Mutex<FairState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct FairState {
    holder: Option<FairQueueEntry>,
    queue: VecDeque<FairQueueEntry>,
    token: u64,
    /// The number of changes, which waiters compare.
    changes: u64,
}

#[derive(Debug)]
struct FairQueueEntry {
    claim: ClaimId,
    until: Instant,
}

impl FairState {
    fn expire(&mut self) {
        let now = Instant::now();
        self.holder.take_if(|holder| holder.until <= now);
        self.queue.retain(|entry| entry.until > now);
    }

    fn grant(&self, claim: &Claim) -> Attempt {
        Attempt::Granted(Grant::new(FencingToken::new(self.token).unwrap(), claim.lease()))
    }

    fn is_holder(&self, claim: &Claim) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.claim == claim.id())
    }
}

impl FairBackend {
    /// Returns the number of claims that hold the key or queue for it.
    pub(crate) fn records(&self) -> usize {
        let mut state = self.0.state.lock().unwrap();
        state.expire();
        state.queue.len() + usize::from(state.holder.is_some())
    }
}

#[async_trait]
impl LockBackend for FairBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("fair", GuaranteeClass::Durable, Reach::Process)
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut state = self.0.state.lock().unwrap();
        state.expire();
        if state.is_holder(claim) {
            return Ok(state.grant(claim));
        }
        let until = Instant::now() + claim.lease();
        let index = state.queue.iter().position(|entry| entry.claim == claim.id());
        if state.holder.is_none() && index.map_or(state.queue.is_empty(), |index| index == 0) {
            state.queue.pop_front();
            state.token += u64::from(claim.token_block());
            state.holder = Some(FairQueueEntry { claim: claim.id(), until });
            return Ok(state.grant(claim));
        }
        match index {
            Some(index) => state.queue[index].until = until,
            None if claim.joins_queue() => {
                state.queue.push_back(FairQueueEntry { claim: claim.id(), until })
            }
            None => {}
        }
        let blocker = state.holder.as_ref().or_else(|| state.queue.front());
        let left = blocker.map_or(Duration::ZERO, |blocker| blocker.until - Instant::now());
        Ok(Attempt::Busy(Busy::new().with_retry_after(left).with_seen_version(state.changes)))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut state = self.0.state.lock().unwrap();
        state.expire();
        let mut renew = |claim: &Claim| match &mut state.holder {
            Some(holder) if holder.claim == claim.id() => {
                holder.until = holder.until.max(Instant::now() + claim.lease());
                Renewal::Renewed(claim.lease())
            }
            _ => Renewal::Gone,
        };
        claims.iter().map(|claim| Ok(renew(claim))).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut state = self.0.state.lock().unwrap();
        state.expire();
        let held = state.is_holder(claim);
        if held {
            state.holder = None;
        }
        state.queue.retain(|entry| entry.claim != claim.id());
        state.changes += 1;
        drop(state);
        self.0.changed.notify_waiters();
        Ok(if held { Release::Freed } else { Release::NotHeld })
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn wait(&self, _: &Claim, busy: &Busy) {
        let changed = self.0.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if self.0.state.lock().unwrap().changes == busy.seen_version {
            changed.await;
        }
    }
}

#[async_trait]
impl LockAdmin for FairBackend {
    async fn force_release(&self, _: &Key) -> Result<Release, BackendError> {
        let mut state = self.0.state.lock().unwrap();
        state.expire();
        let freed = state.holder.take();
        state.changes += 1;
        drop(state);
        self.0.changed.notify_waiters();
        Ok(freed.map_or(Release::NotHeld, |_| Release::Freed))
    }
}
