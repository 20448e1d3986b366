//! Planted bugs of the Redis store. They prove that the conformance tests detect such bugs. Normal
//! builds do not contain planted bugs.
//!
//! With `--cfg lock_registry_mutants`, a test can enable one bug at a time for the whole process,
//! before it opens a store.

use std::borrow::Cow;

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Mutant {
    /// The store reports a refused renewal as `Renewal::Gone`.
    RefusedRenewalReportedAsGone = 1,
}

impl Mutant {
    /// All planted bugs.
    pub const ALL: [Self; 1] = [Self::RefusedRenewalReportedAsGone];
}

/// Returns the renewal script, with the bug if `Mutant::RefusedRenewalReportedAsGone` is enabled.
pub(crate) fn renew_script(script: &'static str) -> Cow<'static, str> {
    const EXPECTED: &str = "not is_read and not is_wrong_type(claim_or_failure)";
    if !is_enabled(Mutant::RefusedRenewalReportedAsGone) {
        return Cow::Borrowed(script);
    }
    assert!(script.contains(EXPECTED), "the renewal script does not contain `{EXPECTED}`");
    Cow::Owned(script.replace(EXPECTED, "false"))
}

#[cfg(lock_registry_mutants)]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ENABLED: AtomicU8 = AtomicU8::new(0);

    /// Enables one bug, or disables all bugs.
    pub fn switch_mutant(mutant: Option<Mutant>) {
        ENABLED.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(super) fn is_enabled(mutant: Mutant) -> bool {
        ENABLED.load(Ordering::Relaxed) == mutant as u8
    }
}

#[cfg(lock_registry_mutants)]
use switch::is_enabled;
#[cfg(lock_registry_mutants)]
pub use switch::switch_mutant;

#[cfg(not(lock_registry_mutants))]
const fn is_enabled(_mutant: Mutant) -> bool {
    false
}
