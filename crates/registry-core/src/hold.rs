//! One holder's use of a held claim: its token, its owner, its guards. A claim has one hold at a time, and after a
//! hand-over another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::LostReason;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::held::{Ending, HeldClaim};
use crate::owner::Owner;

#[derive(Debug)]
pub(crate) struct Hold {
    held: Arc<HeldClaim>,
    token: Option<FencingToken>,
    owner: Option<Owner>,
    /// Guards that are alive. Never rises again from zero.
    guards: AtomicUsize,
    /// Known when the last guard has gone: why the lock was lost before, if it was.
    end: OnceLock<Option<LostReason>>,
}

/// What can become of a lock under one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Held, or just being let go.
    Held,
    /// Let go by the holder's will, while it was held.
    LetGo,
    Lost(LostReason),
}

impl Hold {
    /// Starts a hold with its first guard.
    pub(crate) fn first_guard(
        held: Arc<HeldClaim>,
        token: Option<FencingToken>,
        owner: Option<Owner>,
    ) -> LockGuard {
        LockGuard::new(Arc::new(Self {
            held,
            token,
            owner,
            guards: AtomicUsize::new(1),
            end: OnceLock::new(),
        }))
    }

    pub(crate) fn held(&self) -> &Arc<HeldClaim> {
        &self.held
    }

    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.token
    }

    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// One more guard, unless the last one is gone or the lock is lost.
    pub(crate) fn enter_again(self: &Arc<Self>) -> Option<LockGuard> {
        if self.held.valid_until() <= crate::clock::Moment::now() {
            return None;
        }
        self.guards
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |guards| {
                if guards == 0 { None } else { guards.checked_add(1) }
            })
            .ok()?;
        Some(LockGuard::new(Arc::clone(self)))
    }

    /// One guard less. With the last one the hold ends, by the holder's will unless the lock was lost before.
    pub(crate) fn leave(&self) -> Option<Result<Ending, LostReason>> {
        if self.guards.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        let ended = self.held.end();
        // Before the claim is handed over: what becomes of it then is another hold's fate.
        let _ = self.end.set(ended.as_ref().err().copied());
        self.held.hint_loss();
        Some(ended)
    }

    /// What has become of the lock under this hold.
    pub(crate) fn fate(&self) -> Fate {
        // In this order: a loss that is seen before the end is known is a loss of this hold.
        let loss = self.held.loss();
        match self.end.get() {
            Some(None) => Fate::LetGo,
            Some(Some(reason)) => Fate::Lost(*reason),
            None => loss.map_or(Fate::Held, Fate::Lost),
        }
    }
}
