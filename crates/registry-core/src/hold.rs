//! One holder's use of a held claim: its token, its owner, its guards. A claim has one hold at a time, and after a
//! hand-over another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::LostReason;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::held::HeldClaim;
use crate::owner::Owner;

#[derive(Debug)]
pub(crate) struct Hold {
    held: Arc<HeldClaim>,
    token: Option<FencingToken>,
    owner: Option<Owner>,
    /// Guards that are alive. Never rises again from zero.
    guards: AtomicUsize,
}

impl Hold {
    /// Starts a hold with its first guard.
    pub(crate) fn first_guard(
        held: Arc<HeldClaim>,
        token: Option<FencingToken>,
        owner: Option<Owner>,
    ) -> LockGuard {
        LockGuard::new(Arc::new(Self { held, token, owner, guards: AtomicUsize::new(1) }))
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

    /// One guard less. True for the last one.
    pub(crate) fn leave(&self) -> bool {
        self.guards.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the holder has let go by its own will.
    pub(crate) fn is_over(&self) -> bool {
        self.guards.load(Ordering::Acquire) == 0
    }

    /// Why the lock was lost, if it was lost while this hold had it.
    pub(crate) fn loss(&self) -> Option<LostReason> {
        if self.is_over() { None } else { self.held.loss() }
    }
}
