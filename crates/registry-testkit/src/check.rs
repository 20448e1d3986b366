//! Judges a recorded history: did the locks keep their promises? Each promise has a check of its own; [`check`] runs them.
//!
//! The checks are exact on what was recorded, fast enough to run over everything, and silent about what nobody can
//! know: an operation of unknown outcome may have taken effect at any later time, or never. With the feature `search`,
//! a function of that name gives a second, slow opinion on the most important of them.

// The promises.
mod order;
mod validity;
mod writes;

mod busy;
// A second opinion on the first of them.
#[cfg(feature = "search")]
mod search;
// What is told of a broken one.
mod violation;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::history::{Ending, Grant, History, WriteAnswer};

pub use busy::{busy_answers, busy_answers_in_line};
pub use order::token_order;
#[cfg(feature = "search")]
pub use search::{Opinion, search};
pub use validity::validity;
pub use violation::{Promise, Violation};
pub use writes::{fenced_writes, guarded_writes};

/// How much a check had to judge, so that a test can refuse to pass by having seen nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Checked {
    /// Grants in the history.
    pub grants: usize,
    /// Grants with a fencing token; only these have a place in the order of tokens.
    pub tokens: usize,
    /// Acquisitions that were told that somebody else holds the lock.
    pub busy: usize,
    /// Fenced writes that were accepted.
    pub writes: usize,
    /// Operations of unknown outcome: acquisitions, releases and writes.
    pub unknown: usize,
}

/// Runs all checks that every store must pass: [`token_order`], [`validity`], [`fenced_writes`] and [`busy_answers`].
///
/// # Errors
/// The first [`Violation`] that was found.
pub fn check(history: &History) -> Result<Checked, Violation> {
    check_with(history, busy_answers)
}

/// Runs all checks that every store which queues must pass: as [`check`], with [`busy_answers_in_line`].
///
/// # Errors
/// The first [`Violation`] that was found.
pub fn check_in_line(history: &History) -> Result<Checked, Violation> {
    check_with(history, busy_answers_in_line)
}

fn check_with(
    history: &History,
    busy_answers: fn(&History) -> Result<usize, Violation>,
) -> Result<Checked, Violation> {
    let tokens = token_order(history)?;
    let grants = validity(history)?;
    let writes = fenced_writes(history)?;
    let busy = busy_answers(history)?;
    let ending = |grant: &Grant| grant.release.map_or(Ending::Unknown, |release| release.ending);
    let unknown = history.unknown.len()
        + history.grants.iter().filter(|grant| ending(grant) == Ending::Unknown).count()
        + history.writes.iter().filter(|write| write.answer == WriteAnswer::Unknown).count();
    Ok(Checked { grants, tokens, busy, writes, unknown })
}

/// The items of each key, in the order in which they come.
fn by_key<'a, T>(
    items: impl IntoIterator<Item = &'a T>,
    key: impl Fn(&T) -> &Arc<str>,
) -> BTreeMap<&'a str, Vec<&'a T>> {
    // Ordered, so that of several violations the same one is always told.
    let mut groups: BTreeMap<&str, Vec<&T>> = BTreeMap::new();
    for item in items {
        groups.entry(key(item)).or_default().push(item);
    }
    groups
}
