//! Begin and end events of calls, holds and releases. Exactly one end event follows each begin
//! event, even after a dropped future, a panic or a loss. Gauges and spans rely on this.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::Claim;
use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::LostReason;
use crate::event::{AcquireEnd, HoldEnd, LockEvent, ReleaseEnd};
use crate::fencing::FencingToken;
use crate::key::Key;
use crate::mode::ClaimMode;

/// A call that acquires a lock. Dropping this value emits the end event.
pub(crate) struct ObservedCall<'a> {
    engine: &'a Engine,
    key: &'a Key,
    id: u64,
    mode: ClaimMode,
    began_at: Moment,
    end: AcquireEnd,
}

impl<'a> ObservedCall<'a> {
    /// Emits the begin event of a call. Returns `None` without observers.
    pub(crate) fn begin(engine: &'a Engine, key: &'a Key, mode: ClaimMode) -> Option<Self> {
        if engine.observers.is_empty() {
            return None;
        }
        let (id, began_at) = (next_id(), Moment::now());
        let call = Self { engine, key, id, mode, began_at, end: AcquireEnd::Dropped };
        engine.emit(|| LockEvent::AcquireBegan { id, key: key.as_str(), mode });
        Some(call)
    }

    /// Emits the end event of the call.
    pub(crate) fn end(mut self, end: AcquireEnd) {
        self.end = end;
    }
}

impl Drop for ObservedCall<'_> {
    fn drop(&mut self) {
        self.engine.emit(|| LockEvent::AcquireEnded {
            id: self.id,
            key: self.key.as_str(),
            mode: self.mode,
            waited: Moment::now().since(self.began_at),
            end: self.end,
        });
    }
}

/// The holds of one grant whose end events have not been emitted.
#[derive(Debug, Default)]
pub(crate) struct ObservedHolds(Mutex<Vec<ObservedHold>>);

#[derive(Debug)]
struct ObservedHold {
    id: u64,
    token: FencingToken,
    began_at: Moment,
}

impl ObservedHolds {
    /// Emits the begin event of a hold, and returns the id of the hold. The caller must then check
    /// whether the grant is lost, because a loss before this call has not ended the hold.
    pub(crate) fn begin(&self, engine: &Engine, claim: &Claim, token: FencingToken) -> u64 {
        let (id, began_at) = (next_id(), Moment::now());
        let (key, mode) = (claim.key().as_str(), claim.mode());
        engine.emit(|| LockEvent::HoldBegan { id, key, mode, token });
        self.open_holds().push(ObservedHold { id, token, began_at });
        id
    }

    /// Emits the end event of a hold whose last guard is gone, or whose lock was converted. Does
    /// nothing if the end event was emitted before.
    pub(crate) fn end(&self, engine: &Engine, claim: &Claim, id: u64) {
        let ended = {
            let mut open_holds = self.open_holds();
            let index = open_holds.iter().position(|hold| hold.id == id);
            index.map(|index| open_holds.swap_remove(index))
        };
        if let Some(hold) = ended {
            hold.emit_end(engine, claim, HoldEnd::Released);
        }
    }

    /// Emits the end events of all holds of a lost grant.
    pub(crate) fn end_all(&self, engine: &Engine, claim: &Claim, reason: LostReason) {
        if engine.observers.is_empty() {
            return;
        }
        // Taken in a statement of its own: in the head of the loop, the mutex would stay locked
        // while observers run, and an observer may drop a guard of this grant.
        let ended = mem::take(&mut *self.open_holds());
        for hold in ended {
            hold.emit_end(engine, claim, HoldEnd::Lost(reason));
        }
    }

    fn open_holds(&self) -> MutexGuard<'_, Vec<ObservedHold>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ObservedHold {
    fn emit_end(self, engine: &Engine, claim: &Claim, end: HoldEnd) {
        let Self { id, token, began_at } = self;
        engine.emit(|| LockEvent::HoldEnded {
            id,
            key: claim.key().as_str(),
            mode: claim.mode(),
            token,
            held_for: Moment::now().since(began_at),
            end,
        });
    }
}

/// A release. Dropping this value emits the end event.
#[derive(Debug)]
pub(crate) struct ObservedRelease {
    engine: Arc<Engine>,
    key: Key,
    mode: ClaimMode,
    id: u64,
    pub(crate) end: ReleaseEnd,
}

impl ObservedRelease {
    /// Emits the begin event of a release. Returns `None` without observers.
    pub(crate) fn begin(engine: &Arc<Engine>, claim: &Claim, token: FencingToken) -> Option<Self> {
        if engine.observers.is_empty() {
            return None;
        }
        let (id, key, mode) = (next_id(), claim.key().clone(), claim.mode());
        engine.emit(|| LockEvent::ReleaseBegan { id, key: key.as_str(), mode, token });
        Some(Self { engine: Arc::clone(engine), key, mode, id, end: ReleaseEnd::Failed })
    }
}

impl Drop for ObservedRelease {
    fn drop(&mut self) {
        self.engine.emit(|| LockEvent::ReleaseEnded {
            id: self.id,
            key: self.key.as_str(),
            mode: self.mode,
            end: self.end,
        });
    }
}

/// Returns a number that no other call, hold or release of this process has.
fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}
