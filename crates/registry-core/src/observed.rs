//! Begin and end events of calls, holds and releases. Each end event follows exactly once, also
//! after a dropped future, a panic or a loss: gauges and spans rely on it.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::{LockError, LostReason};
use crate::event::{AcquireEnd, HoldEnd, LockEvent, ReleaseEnd};
use crate::fencing::FencingToken;
use crate::grant::ActiveGrant;
use crate::guard::LockGuard;
use crate::local_lock::LocalLock;
use crate::mode::ClaimMode;

/// A call that acquires a lock. The drop emits its end.
pub(crate) struct ObservedCall<'a> {
    local_lock: &'a LocalLock,
    id: u64,
    mode: ClaimMode,
    began_at: Moment,
    end: AcquireEnd,
}

impl<'a> ObservedCall<'a> {
    /// Emits the begin of a call. Returns `None` without observers.
    pub(crate) fn begin(local_lock: &'a LocalLock, mode: ClaimMode) -> Option<Self> {
        let engine = local_lock.engine();
        if engine.observers.is_empty() {
            return None;
        }
        let id = next_id();
        let call = Self { local_lock, id, mode, began_at: Moment::now(), end: AcquireEnd::Dropped };
        let key = local_lock.key().as_str();
        engine.emit(|| LockEvent::AcquireBegan { id, key, mode });
        Some(call)
    }

    /// Ends the call with its result, and begins the hold of a new guard.
    pub(crate) fn end(mut self, result: Result<Option<&LockGuard>, &LockError>) {
        self.end = match result {
            Ok(Some(guard)) => AcquireEnd::Acquired(guard.fencing_token()),
            Ok(None) => AcquireEnd::Busy,
            Err(_) => AcquireEnd::Failed,
        };
        drop(self);
        if let Ok(Some(guard)) = result {
            guard.hold().observe();
        }
    }
}

impl Drop for ObservedCall<'_> {
    fn drop(&mut self) {
        self.local_lock.engine().emit(|| LockEvent::AcquireEnded {
            id: self.id,
            key: self.local_lock.key().as_str(),
            mode: self.mode,
            waited: Moment::now().since(self.began_at),
            end: self.end,
        });
    }
}

/// The holds of one grant whose end has not been emitted.
#[derive(Debug, Default)]
pub(crate) struct ObservedHolds(Mutex<Vec<ObservedHold>>);

#[derive(Debug)]
struct ObservedHold {
    id: u64,
    token: FencingToken,
    began_at: Moment,
}

impl ObservedHolds {
    /// Emits the begin of a hold, and returns its id. The caller then checks whether the grant is
    /// lost: a loss before this call has not ended the hold.
    pub(crate) fn begin(&self, grant: &ActiveGrant, token: FencingToken) -> u64 {
        let id = next_id();
        let (key, mode) = (grant.claim().key().as_str(), grant.claim().mode());
        grant.engine().emit(|| LockEvent::HoldBegan { id, key, mode, token });
        self.list().push(ObservedHold { id, token, began_at: Moment::now() });
        id
    }

    /// Emits the end of a hold whose last guard is gone.
    pub(crate) fn end(&self, grant: &ActiveGrant, id: u64) {
        let ended = {
            let mut list = self.list();
            let index = list.iter().position(|hold| hold.id == id);
            index.map(|index| list.swap_remove(index))
        };
        if let Some(hold) = ended {
            hold.emit_end(grant, HoldEnd::Released);
        }
    }

    /// Emits the ends of all holds of a lost grant.
    pub(crate) fn end_all(&self, grant: &ActiveGrant, reason: LostReason) {
        let ended = mem::take(&mut *self.list());
        ended.into_iter().for_each(|hold| hold.emit_end(grant, HoldEnd::Lost(reason)));
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<ObservedHold>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ObservedHold {
    fn emit_end(self, grant: &ActiveGrant, end: HoldEnd) {
        let Self { id, token, began_at } = self;
        grant.engine().emit(|| LockEvent::HoldEnded {
            id,
            key: grant.claim().key().as_str(),
            mode: grant.claim().mode(),
            token,
            held_for: Moment::now().since(began_at),
            end,
        });
    }
}

/// A release. The drop emits its end.
#[derive(Debug)]
pub(crate) struct ObservedRelease {
    grant: Arc<ActiveGrant>,
    id: u64,
    pub(crate) end: ReleaseEnd,
}

impl ObservedRelease {
    /// Emits the begin of a release. Returns `None` without observers.
    pub(crate) fn begin(grant: &Arc<ActiveGrant>, token: FencingToken) -> Option<Self> {
        if grant.engine().observers.is_empty() {
            return None;
        }
        let id = next_id();
        let (key, mode) = (grant.claim().key().as_str(), grant.claim().mode());
        grant.engine().emit(|| LockEvent::ReleaseBegan { id, key, mode, token });
        Some(Self { grant: Arc::clone(grant), id, end: ReleaseEnd::Failed })
    }
}

impl Drop for ObservedRelease {
    fn drop(&mut self) {
        let engine: &Engine = self.grant.engine();
        engine.emit(|| LockEvent::ReleaseEnded {
            id: self.id,
            key: self.grant.claim().key().as_str(),
            mode: self.grant.claim().mode(),
            end: self.end,
        });
    }
}

/// Returns a number that no other call, hold or release of this process has.
fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}
