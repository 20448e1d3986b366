//! Checks that two guards of a key are never valid at once. Knows nothing of tokens, so it judges every store.

use std::sync::Arc;

use crate::history::{Grant, History, Window};

use super::by_key;
use super::violation::{Promise, Teller, Violation};

/// Checks that the times in which guards were valid never overlap on one key. Answers how many guards it judged.
///
/// A guard is valid from the moment its caller has it, until it is given back, told lost, or over by itself. This
/// is what a holder believes, and stricter than the order of tokens: it does not forgive a hold that ended too early.
/// A guard whose last renewals were not recorded counts as ended early, which can hide a fault and never invent one.
///
/// A lock that was broken by force breaks this promise until its holder learns of it, and rightly so: keep such keys out.
///
/// # Errors
/// A [`Violation`] of [`Promise::OneValidGuard`].
pub fn validity(history: &History) -> Result<usize, Violation> {
    for mut guards in by_key(&history.grants, |grant| &grant.key).into_values() {
        guards.sort_by_key(|guard| valid(guard).from);
        let mut longest: Option<&Grant> = None;
        for guard in guards {
            let window = valid(guard);
            if window.from >= window.to {
                continue;
            }
            if let Some(other) = longest.filter(|other| valid(other).to > window.from) {
                return Err(violation(history, other, guard));
            }
            // Of guards that do not overlap, the last to begin is the last to end.
            longest = Some(guard);
        }
    }
    Ok(history.grants.len())
}

/// When the holder could believe that it holds the lock. Its end is not part of it.
fn valid(guard: &Grant) -> Window {
    let given_back = guard.release.map(|release| release.window.from);
    let ends = [given_back, guard.lost, guard.valid_until];
    let end = ends.into_iter().flatten().min().unwrap_or(u64::MAX);
    Window::new(guard.acquire.to, end)
}

fn violation(history: &History, first: &Grant, second: &Grant) -> Violation {
    let tell = Teller::new(history);
    let both_from = valid(second).from;
    let both_to = valid(first).to.min(valid(second).to);
    Violation {
        promise: Promise::OneValidGuard,
        key: Arc::clone(&first.key),
        why: format!("both were valid from {} to {}", tell.time(both_from), tell.time(both_to)),
        operations: vec![tell.grant(first), tell.grant(second)],
    }
}
