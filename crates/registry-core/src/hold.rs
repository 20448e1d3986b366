//! One holder's use of a held claim: its token, its owner, its guards. A claim has one hold at a
//! time, and each hand-over begins a new one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

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
    /// The number of live guards. Never increases again from zero.
    guards: AtomicUsize,
    /// A [`Fate`], set when the last guard is gone.
    fate: AtomicU8,
}

/// The state of a lock under one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Held, or the release has just begun.
    Held,
    /// Released by the holder while it was held.
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
            fate: AtomicU8::new(Fate::Held.code()),
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

    /// Returns another guard, unless the last one is gone or the lock is lost.
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

    /// Removes one guard. The last one ends the hold: as released, unless the lock was lost before.
    pub(crate) fn leave(&self) -> Option<Result<Ending, LostReason>> {
        if self.guards.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        let ended = self.held.end();
        // Before a hand-over, because a later loss of the claim belongs to the next hold.
        let fate = ended.as_ref().map_or_else(|reason| Fate::Lost(*reason), |_| Fate::LetGo);
        self.fate.store(fate.code(), Ordering::Release);
        self.held.hint_loss();
        Some(ended)
    }

    /// Returns the state of the lock under this hold.
    pub(crate) fn fate(&self) -> Fate {
        // The loss is read first: a loss seen before the end of this hold is a loss of this hold.
        let loss = self.held.loss();
        match Fate::of_code(self.fate.load(Ordering::Acquire)) {
            Fate::Held => loss.map_or(Fate::Held, Fate::Lost),
            settled => settled,
        }
    }
}

impl Fate {
    const ALL: [Self; 6] = [
        Self::Held,
        Self::LetGo,
        Self::Lost(LostReason::Expired),
        Self::Lost(LostReason::Gone),
        Self::Lost(LostReason::MaxHold),
        Self::Lost(LostReason::Closed),
    ];

    /// Returns the index in [`ALL`](Self::ALL), for an atomic.
    const fn code(self) -> u8 {
        match self {
            Self::Held => 0,
            Self::LetGo => 1,
            Self::Lost(LostReason::Expired) => 2,
            Self::Lost(LostReason::Gone) => 3,
            Self::Lost(LostReason::MaxHold) => 4,
            Self::Lost(LostReason::Closed) => 5,
        }
    }

    fn of_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fate_is_read_as_it_was_written() {
        for fate in Fate::ALL {
            assert_eq!(Fate::of_code(fate.code()), fate);
        }
    }
}
