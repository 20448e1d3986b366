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
    judge(history, |_, _| false)
}

/// The same for a store that queues: there somebody who only stands in line, and gives up before it is granted anything, is in the way of
/// those who come later.
///
/// # Errors
/// A [`Violation`] of [`Promise::BusyMeansHeld`].
pub fn busy_answers_in_line(history: &History) -> Result<usize, Violation> {
    judge(history, |attempts, attempt| {
        let overlaps = |other: &Attempt| {
            other.window.from <= attempt.window.to && attempt.window.from <= other.window.to
        };
        attempts.iter().any(|other| !std::ptr::eq(*other, attempt) && overlaps(other))
    })
}

/// `is_excused` decides, of all attempts on a key that were told "busy", about one in whose time nobody held the lock.
fn judge(
    history: &History,
    is_excused: impl Fn(&[&Attempt], &Attempt) -> bool,
) -> Result<usize, Violation> {
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
        for &attempt in &attempts {
            let called = holds.partition_point(|hold| hold.from <= attempt.window.to);
            let reason = called.checked_sub(1).map(|last| holds[last].to);
            if reason.is_none_or(|latest| latest < attempt.window.from)
                && !is_excused(&attempts, attempt)
            {
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
