//! Planted bugs of the Redis store. They exist to prove that the conformance tests detect them;
//! normal builds do not contain them.
//!
//! With `--cfg lock_registry_mutants`, one bug at a time can be enabled for the whole process,
//! before a store is opened.

use std::borrow::Cow;

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// The server's refusal of a renewal counts as "the claim is gone".
    RefusalCountsAsGone = 1,
}

impl Mutant {
    /// All planted bugs.
    pub const ALL: [Self; 1] = [Self::RefusalCountsAsGone];
}

/// Returns the renewal script, with its bug if that is enabled.
pub(crate) fn renewal(script: &'static str) -> Cow<'static, str> {
    const RIGHT: &str = "not is_read and not is_foreign(held)";
    if !mutated(Mutant::RefusalCountsAsGone) {
        return Cow::Borrowed(script);
    }
    assert!(script.contains(RIGHT), "the planted bug has lost its place");
    Cow::Owned(script.replace(RIGHT, "false"))
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ON: AtomicU8 = AtomicU8::new(0);

    /// Enables one bug, or disables all.
    pub fn switch_mutant(mutant: Option<Mutant>) {
        ON.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(super) fn mutated(mutant: Mutant) -> bool {
        ON.load(Ordering::Relaxed) == mutant as u8
    }
}

#[cfg(lock_registry_mutants)]
use switch::mutated;
#[cfg(lock_registry_mutants)]
pub use switch::switch_mutant;

#[cfg(not(lock_registry_mutants))]
const fn mutated(_mutant: Mutant) -> bool {
    false
}
