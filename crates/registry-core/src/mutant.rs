//! Deliberate bugs. Tests switch on one bug at a time, and prove that the test suite finds it.
//!
//! In a build with `--cfg lock_registry_mutants`, `switch_mutant` switches on a bug for the whole
//! process. In other builds, [`mutated`] always returns `false`, and the compiler removes the bugs.

/// The deliberate bugs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// The in-process store frees a key for a claim that does not hold it.
    ReleaseByOtherClaim = 1,
    /// A lease counts from the response instead of from the time at which the request was sent.
    DeadlineFromReply,
    /// The lease renewer continues after the release has begun, and the store lets a renewal
    /// restore a grant.
    RenewAfterRelease,
    /// A dropped acquisition does not release its claim.
    CancelledAcquireLeaks,
    /// The local permit passes to the next caller before the response to the release.
    PermitBeforeRelease,
    /// A local lock is removed from the table while its lock is held.
    HeldLockEvicted,
    /// A failed release is reported as success.
    ReleaseErrorSwallowed,
    /// A waiter does not poll.
    WakeUpOnly,
    /// The record of a key grants a shared claim alongside an exclusive claim.
    ReaderAlongsideWriter,
    /// The record of a key grants an upgrade alongside other grants.
    UpgradeAlongsideReaders,
    /// An upgrade does not take a new token.
    UpgradeKeepsToken,
    /// The units of each permit are counted twice.
    UnitsCountedTwice,
    /// The units of a holder that died are not returned when its lease ends.
    UnitsOfDeadHolderKept,
    /// A waiting exclusive claim does not block new readers.
    WriterStarved,
    /// The queue place of a waiter does not expire with its lease.
    ExpiredPlaceKept,
    /// The local permit passes to the last waiter instead of the first.
    WrongWaiterAdmitted,
    /// A reader joins a shared grant that is being released.
    EndedGrantJoined,
    /// A lock of several keys keeps one of them while it waits for another.
    HalfOfKeysKept,
    /// In a store's queue, a permit is granted without counting the units of the entries before it.
    /// Only stores with a queue use this code. The test of all short queues finds this bug.
    QueuedUnitsNotSummed,
    /// In a store's queue, an upgrade ignores readers that hold the key. Only stores with a queue
    /// use this code. The test of all short queues finds this bug.
    QueuedUpgradeAlongsideReaders,
    /// After a forced release, the registries over the same backend do not verify their claims.
    /// Tests with a server find this bug. The simulation does not, because its in-process store
    /// reports each loss.
    ForcedReleaseUnverified,
    /// A caller that does not poll its future keeps its claim and its local permit, or the guard
    /// that it was sent. The simulation has no such callers.
    UnpolledCallerKept,
}

impl Mutant {
    /// The bugs that the simulation of exclusive locks finds.
    pub const OF_EXCLUSIVE_LOCKS: [Self; 8] = [
        Self::ReleaseByOtherClaim,
        Self::DeadlineFromReply,
        Self::RenewAfterRelease,
        Self::CancelledAcquireLeaks,
        Self::PermitBeforeRelease,
        Self::HeldLockEvicted,
        Self::ReleaseErrorSwallowed,
        Self::WakeUpOnly,
    ];

    /// The bugs that the simulation of all modes finds.
    pub const OF_MODES: [Self; 10] = [
        Self::ReaderAlongsideWriter,
        Self::UpgradeAlongsideReaders,
        Self::UpgradeKeepsToken,
        Self::UnitsCountedTwice,
        Self::UnitsOfDeadHolderKept,
        Self::WriterStarved,
        Self::ExpiredPlaceKept,
        Self::WrongWaiterAdmitted,
        Self::EndedGrantJoined,
        Self::HalfOfKeysKept,
    ];

    /// The bugs that the test of all short queues finds.
    pub const OF_QUEUES: [Self; 2] =
        [Self::QueuedUnitsNotSummed, Self::QueuedUpgradeAlongsideReaders];
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ON: AtomicU8 = AtomicU8::new(0);

    /// Switches one bug on, or all of them off if `mutant` is `None`.
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
