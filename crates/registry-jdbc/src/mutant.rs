//! Deliberate bugs in the SQL stores. A test enables one bug, and checks that another test finds
//! the bug. A normal build contains none of the bugs.
//!
//! With `--cfg lock_registry_mutants`, `switch_mutant` enables one bug at a time for the whole
//! process. Call it before a store is opened, because the bug may change the store's statements.
//! Without this `cfg`, [`mutated`] always returns `false`.

use std::borrow::Cow;

/// One deliberate bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// A release frees the key even if another claim holds the key.
    ReleaseByOtherClaim = 1,
    /// A renewal revives an expired lease.
    RenewalRevives,
    /// A key that this process released is granted again even if another claim holds the key.
    ReacquiresHeldKey,
    /// A grant has the same token as the previous one.
    ConstantToken,
    /// Each client reads a clock of its own.
    ClientClock,
    /// A fence reads the row without locking it.
    FenceWithoutLock,
    /// A session assumes that its row is unchanged, without checking which claim was granted the
    /// key last.
    SessionSkipsClaimCheck,
    /// After a fence, a session grants the key without writing the row.
    SessionSkipsFenceWrite,
    /// A session's renewals and releases wait in one queue with acquisitions.
    SessionRenewsInQueue,
    /// A claim is handed over to the next local caller although a transaction that the previous
    /// caller fenced may be open.
    FenceAllowsHandOver,
}

impl Mutant {
    /// All mutants.
    pub const ALL: [Self; 10] = [
        Self::ReleaseByOtherClaim,
        Self::RenewalRevives,
        Self::ReacquiresHeldKey,
        Self::ConstantToken,
        Self::ClientClock,
        Self::FenceWithoutLock,
        Self::SessionSkipsClaimCheck,
        Self::SessionSkipsFenceWrite,
        Self::SessionRenewsInQueue,
        Self::FenceAllowsHandOver,
    ];
}

/// A bug in the text of a statement: `replacement` replaces `original`.
pub(crate) struct SqlMutation {
    pub(crate) mutant: Mutant,
    pub(crate) original: &'static str,
    pub(crate) replacement: &'static str,
}

impl SqlMutation {
    pub(crate) const fn new(
        mutant: Mutant,
        original: &'static str,
        replacement: &'static str,
    ) -> Self {
        Self { mutant, original, replacement }
    }
}

/// Returns the statement with the enabled bug of `mutations`, if any.
pub(crate) fn with_mutation<'a>(statement: &'a str, mutations: &[SqlMutation]) -> Cow<'a, str> {
    match mutations.iter().find(|mutation| mutated(mutation.mutant)) {
        None => Cow::Borrowed(statement),
        Some(mutation) => {
            assert!(
                statement.contains(mutation.original),
                "{:?} does not apply to this statement",
                mutation.mutant
            );
            Cow::Owned(statement.replace(mutation.original, mutation.replacement))
        }
    }
}

/// Returns `now`, the SQL expression of the server's clock. With [`Mutant::ClientClock`], each call
/// adds a different offset to it.
pub(crate) fn clock(now: &str) -> Cow<'_, str> {
    if mutated(Mutant::ClientClock) {
        // The clocks of any two clients differ by at least an hour.
        let hours = next_clock_offset();
        return Cow::Owned(format!("({now} + {hours} * 3600000000)"));
    }
    Cow::Borrowed(now)
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

    use super::Mutant;

    static ENABLED: AtomicU8 = AtomicU8::new(0);
    static NEXT_OFFSET: AtomicU64 = AtomicU64::new(0);

    /// Enables one bug, or disables all.
    pub fn switch_mutant(mutant: Option<Mutant>) {
        ENABLED.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(crate) fn mutated(mutant: Mutant) -> bool {
        ENABLED.load(Ordering::Relaxed) == mutant as u8
    }

    pub(super) fn next_clock_offset() -> u64 {
        NEXT_OFFSET.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(lock_registry_mutants)]
pub(crate) use switch::mutated;
#[cfg(lock_registry_mutants)]
use switch::next_clock_offset;
#[cfg(lock_registry_mutants)]
pub use switch::switch_mutant;

#[cfg(not(lock_registry_mutants))]
pub(crate) const fn mutated(_mutant: Mutant) -> bool {
    false
}

#[cfg(not(lock_registry_mutants))]
const fn next_clock_offset() -> u64 {
    0
}
