//! Checks that guards of a key are valid at the same time only if their modes allow it. It ignores
//! tokens, so it applies to every store.

use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedGrant, Window};

use super::by_key;
use super::violation::{Describer, Promise, Violation};

/// Checks that the validity periods of the guards of one key overlap only if their modes are
/// compatible and the units of all permits fit. Returns the number of judged guards.
///
/// A guard is valid from the time its caller receives it until its release, its loss or its expiry.
/// This is what the holder believes. The check is stricter than the token order: it does not accept
/// a hold that ended too early. A guard with unrecorded last renewals counts as ended early. This
/// can hide a violation but never cause a false one.
///
/// A forced release of a lock breaks this promise until the holder detects it. Exclude such keys
/// from the history.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::OneValidGuard`].
pub fn validity(history: &History) -> Result<usize, Violation> {
    for mut guards in by_key(&history.grants, |grant| &grant.key).into_values() {
        guards.sort_by_key(|guard| valid(guard).from);
        let mut others: Vec<&RecordedGrant> = Vec::new();
        for guard in guards {
            let window = valid(guard);
            if window.from >= window.to {
                continue;
            }
            others.retain(|other| valid(other).to > window.from);
            if let Some(other) = conflict(&others, guard) {
                return Err(violation(history, other, guard));
            }
            others.push(guard);
        }
    }
    Ok(history.grants.len())
}

/// Returns one of `others` that must not be valid together with `guard`.
fn conflict<'a>(others: &[&'a RecordedGrant], guard: &RecordedGrant) -> Option<&'a RecordedGrant> {
    if let ClaimMode::Permits { take, of } = guard.mode {
        let taken: u32 = others.iter().map(|other| other.mode.units()).sum();
        if taken + take > of {
            return others.last().copied();
        }
    }
    others.iter().copied().find(|other| !other.mode.is_compatible(guard.mode))
}

/// Returns the period during which the holder could believe that it holds the lock. The end is
/// exclusive.
fn valid(guard: &RecordedGrant) -> Window {
    let released = guard.release.map(|release| release.window.from);
    let ends = [released, guard.lost, guard.valid_until];
    let end = ends.into_iter().flatten().min().unwrap_or(u64::MAX);
    Window::new(guard.acquire.to, end)
}

fn violation(history: &History, first: &RecordedGrant, second: &RecordedGrant) -> Violation {
    let describe = Describer::new(history);
    let both_from = valid(second).from;
    let both_to = valid(first).to.min(valid(second).to);
    Violation {
        promise: Promise::OneValidGuard,
        key: Arc::clone(&first.key),
        why: format!(
            "both were valid from {} to {}",
            describe.time(both_from),
            describe.time(both_to)
        ),
        operations: vec![describe.grant(first), describe.grant(second)],
    }
}
