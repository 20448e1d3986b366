//! Bugs on purpose, for the tests that prove that the proof harness finds them. Absent from every normal build.
//!
//! Built with `--cfg lock_registry_mutants`, one bug at a time can be switched on for the whole process; without it
//! [`mutated`] is the constant `false` and leaves no trace.

/// One bug each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// The in-process store frees a key for whoever asks.
    ReleaseWithoutOwner = 1,
    /// A lease counts from the reply instead of from before the request.
    DeadlineFromReply,
    /// The keeper goes on after the release has begun, and the store lets a renewal bring a grant back.
    RenewAfterRelease,
    /// A dropped acquisition forgets what it sent.
    CancelledAcquireLeaks,
    /// The next local caller starts before the release has been answered.
    TurnBeforeRelease,
    /// A slot leaves the table while its lock is held.
    HeldSlotEvicted,
    /// A failed release is reported as success.
    ReleaseErrorSwallowed,
    /// A waiter trusts wake-ups alone.
    WakeUpOnly,
    /// A registry does not verify its own claim after it has broken the key. Found over a server, not by the simulation, whose
    /// in-process store reports each loss.
    BrokenLockUnverified,
    /// A caller that does not poll its future keeps its place, its turn and its claim. The simulation has no such callers.
    UnpolledCallerKept,
}

impl Mutant {
    /// Those that the simulation finds.
    pub const ALL: [Self; 8] = [
        Self::ReleaseWithoutOwner,
        Self::DeadlineFromReply,
        Self::RenewAfterRelease,
        Self::CancelledAcquireLeaks,
        Self::TurnBeforeRelease,
        Self::HeldSlotEvicted,
        Self::ReleaseErrorSwallowed,
        Self::WakeUpOnly,
    ];
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ON: AtomicU8 = AtomicU8::new(0);

    /// Switches one bug on, or all of them off.
    pub fn switch_mutant(mutant: Option<Mutant>) {
        ON.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(crate) fn mutated(mutant: Mutant) -> bool {
        ON.load(Ordering::Relaxed) == mutant as u8
    }
}

#[cfg(lock_registry_mutants)]
pub(crate) use switch::mutated;
#[cfg(lock_registry_mutants)]
pub use switch::switch_mutant;

#[cfg(not(lock_registry_mutants))]
pub(crate) const fn mutated(_mutant: Mutant) -> bool {
    false
}
