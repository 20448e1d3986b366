//! Checks that "busy" is the truth: an outage must never be reported as "somebody else holds it".

use std::sync::Arc;

use crate::history::{Attempt, Ending, Grant, History, Window};

use super::by_key;
use super::violation::{Promise, Teller, Violation};

/// Checks that whoever was told "busy" asked while somebody may have held the lock. Answers how many it judged.
///
/// A hold may last from its call until its release has answered; a hold that was not surely released, and an acquisition of
/// unknown outcome, may last for ever. So this finds lies in quiet times, not every lie.
///
/// # Errors
/// A [`Violation`] of [`Promise::BusyMeansHeld`].
pub fn busy_answers(history: &History) -> Result<usize, Violation> {
    let grants = by_key(&history.grants, |grant| &grant.key);
    let unknown = by_key(&history.unknown, |attempt| &attempt.key);
    for (key, attempts) in by_key(&history.busy, |attempt| &attempt.key) {
        let grants = grants.get(key).into_iter().flatten().map(|grant| possibly_held(grant));
        let unknown = unknown.get(key).into_iter().flatten().map(|attempt| attempt.window);
        let mut holds: Vec<Window> = grants.chain(unknown).collect();
        holds.sort_by_key(|hold| hold.from);
        // From here on `to` is the latest end of this hold and of all that were called before it.
        let mut latest = 0;
        for hold in &mut holds {
            latest = hold.to.max(latest);
            hold.to = latest;
        }
        for attempt in attempts {
            let called = holds.partition_point(|hold| hold.from <= attempt.window.to);
            let reason = called.checked_sub(1).map(|last| holds[last].to);
            if reason.is_none_or(|latest| latest < attempt.window.from) {
                return Err(violation(history, attempt));
            }
        }
    }
    Ok(history.busy.len())
}

fn possibly_held(grant: &Grant) -> Window {
    match grant.release {
        Some(release) if release.ending == Ending::Freed => {
            Window::new(grant.acquire.from, release.window.to)
        }
        _ => Window::open(grant.acquire.from),
    }
}

fn violation(history: &History, attempt: &Attempt) -> Violation {
    Violation {
        promise: Promise::BusyMeansHeld,
        key: Arc::clone(&attempt.key),
        why: "nobody can have held it in that time".into(),
        operations: vec![Teller::new(history).attempt(attempt)],
    }
}
