//! Verifies that the locks in a recorded history kept their promises. [`check`] runs the checks
//! that every store must pass. Some checks verify several promises.
//!
//! The checks report no false violation, and are fast enough to run over a complete history. An
//! operation with an unknown outcome may have taken effect at any later time, or never; the checks
//! accept both. With the feature `search`, the function `search` verifies the most important check,
//! `token_order`, by a slow, independent method.

// The promises.
mod order;
mod validity;
mod writes;

mod busy;
mod phases;
// An independent verification of `order`.
#[cfg(feature = "search")]
mod search;
// The report of a broken promise.
mod violation;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::history::{History, RecordedGrant, ReleaseResult, WriteResult};

pub use busy::{busy_answers, busy_answers_queued};
pub use order::token_order;
#[cfg(feature = "search")]
pub use search::{SearchResult, search};
pub use validity::validity;
pub use violation::{Promise, Violation};
pub use writes::{fenced_writes, guarded_writes};

/// The number of operations that a check judged. A test can fail if the numbers are too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckCounts {
    /// Grants in the history.
    pub grants: usize,
    /// Grants with a fencing token; only these are part of the token order.
    pub tokens: usize,
    /// Acquisitions that were answered with "busy".
    pub busy: usize,
    /// Fenced writes that were accepted.
    pub writes: usize,
    /// Operations with an unknown outcome: acquisitions, releases and writes. A grant that was
    /// never released counts as well.
    pub unknown: usize,
}

/// Runs all checks that every store must pass: [`token_order`], [`validity`], [`fenced_writes`] and
/// [`busy_answers`].
///
/// # Errors
/// Returns the first [`Violation`].
pub fn check(history: &History) -> Result<CheckCounts, Violation> {
    check_with(history, busy_answers)
}

/// Runs all checks that every store with a queue must pass: those of [`check`], with
/// [`busy_answers_queued`] instead of [`busy_answers`].
///
/// # Errors
/// Returns the first [`Violation`].
pub fn check_queued(history: &History) -> Result<CheckCounts, Violation> {
    check_with(history, busy_answers_queued)
}

/// Runs only [`token_order`] and [`validity`], for a history whose "busy" answers and writes are
/// not judged. Returns the number of grants in the history.
///
/// # Errors
/// Returns the first [`Violation`].
pub fn check_modes(history: &History) -> Result<usize, Violation> {
    token_order(history)?;
    validity(history)
}

fn check_with(
    history: &History,
    busy_answers: fn(&History) -> Result<usize, Violation>,
) -> Result<CheckCounts, Violation> {
    let tokens = token_order(history)?;
    let grants = validity(history)?;
    let writes = fenced_writes(history)?;
    let busy = busy_answers(history)?;
    let result = |grant: &RecordedGrant| {
        grant.release.map_or(ReleaseResult::Unknown, |release| release.result)
    };
    let unknown = history.unknown.len()
        + history.grants.iter().filter(|grant| result(grant) == ReleaseResult::Unknown).count()
        + history.writes.iter().filter(|write| write.answer == WriteResult::Unknown).count();
    Ok(CheckCounts { grants, tokens, busy, writes, unknown })
}

/// Groups items by key and keeps their order within each group.
fn by_key<'a, T>(
    items: impl IntoIterator<Item = &'a T>,
    key: impl Fn(&T) -> &Arc<str>,
) -> BTreeMap<&'a str, Vec<&'a T>> {
    // Ordered, so that the same violation is always reported first.
    let mut groups: BTreeMap<&str, Vec<&T>> = BTreeMap::new();
    for item in items {
        groups.entry(key(item)).or_default().push(item);
    }
    groups
}
