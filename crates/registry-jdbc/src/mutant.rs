//! Bugs on purpose in the stores of database servers, for the tests that prove that they would be found. Absent from every normal build.
//!
//! Built with `--cfg lock_registry_mutants`, one bug at a time can be switched on for the whole process, before a store is opened; without it
//! [`mutated`] is the constant `false` and leaves no trace.

use std::borrow::Cow;

/// One bug each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// A release frees the key, whoever holds it.
    ReleaseWithoutOwner = 1,
    /// A renewal brings a lease back that has ended.
    RenewalRevives,
    /// A key that was let go is granted again, whoever has it meanwhile.
    TakesAgainWhatOthersHold,
    /// A grant has the token of the one before.
    TokenStandsStill,
    /// Each client reads a clock of its own.
    ClientClock,
    /// A fence looks at the row and does not lock it.
    FenceWithoutLock,
    /// A session takes its row for unchanged without a look at who was granted the key last.
    SessionTrustsItsMemory,
    /// A session goes on granting without writing, although a fence relies on the row.
    SessionForgetsFences,
    /// A session's renewals and releases queue behind acquisitions.
    SessionRenewsInTurn,
    /// A claim passes to the next local caller although a fenced transaction of the one before may be open.
    FenceAllowsHandOver,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::ReleaseWithoutOwner,
        Self::RenewalRevives,
        Self::TakesAgainWhatOthersHold,
        Self::TokenStandsStill,
        Self::ClientClock,
        Self::FenceWithoutLock,
        Self::SessionTrustsItsMemory,
        Self::SessionForgetsFences,
        Self::SessionRenewsInTurn,
        Self::FenceAllowsHandOver,
    ];
}

/// A bug in a statement.
pub(crate) struct Slip {
    pub(crate) mutant: Mutant,
    pub(crate) right: &'static str,
    pub(crate) wrong: &'static str,
}

impl Slip {
    pub(crate) const fn new(mutant: Mutant, right: &'static str, wrong: &'static str) -> Self {
        Self { mutant, right, wrong }
    }
}

/// The statement, with the bug in it that is switched on, if it is one of these.
pub(crate) fn slipped<'a>(statement: &'a str, slips: &[Slip]) -> Cow<'a, str> {
    match slips.iter().find(|slip| mutated(slip.mutant)) {
        None => Cow::Borrowed(statement),
        Some(slip) => {
            assert!(statement.contains(slip.right), "{:?} has lost its place", slip.mutant);
            Cow::Owned(statement.replace(slip.right, slip.wrong))
        }
    }
}

/// What the server's clock is for a client, as SQL.
pub(crate) fn clock(now: &str) -> Cow<'_, str> {
    if mutated(Mutant::ClientClock) {
        // Any two clients are an hour apart, or several.
        let hours = next_clock();
        return Cow::Owned(format!("({now} + {hours} * 3600000000)"));
    }
    Cow::Borrowed(now)
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

    use super::Mutant;

    static ON: AtomicU8 = AtomicU8::new(0);
    static CLOCKS: AtomicU64 = AtomicU64::new(0);

    /// Switches one bug on, or all of them off.
    pub fn switch_mutant(mutant: Option<Mutant>) {
        ON.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(crate) fn mutated(mutant: Mutant) -> bool {
        ON.load(Ordering::Relaxed) == mutant as u8
    }

    pub(super) fn next_clock() -> u64 {
        CLOCKS.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(lock_registry_mutants)]
pub(crate) use switch::mutated;
#[cfg(lock_registry_mutants)]
use switch::next_clock;
#[cfg(lock_registry_mutants)]
pub use switch::switch_mutant;

#[cfg(not(lock_registry_mutants))]
pub(crate) const fn mutated(_mutant: Mutant) -> bool {
    false
}

#[cfg(not(lock_registry_mutants))]
const fn next_clock() -> u64 {
    0
}
