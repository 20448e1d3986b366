//! Checks that "busy" answers are true: an outage must never be reported as "another client holds
//! the lock".

use std::sync::Arc;

use crate::history::{History, RecordedAttempt, RecordedGrant, ReleaseResult, Window};

use super::by_key;
use super::violation::{Describer, Promise, Violation};

/// Checks that each acquisition answered with "busy" ran while another client may have held the
/// lock. Returns the number of judged answers.
///
/// A hold may last from its call until the answer of its release. A hold without a confirmed
/// release, and an acquisition with an unknown outcome, may last forever. The check therefore finds
/// false answers only in periods without such holds.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::BusyMeansHeld`].
pub fn busy_answers(history: &History) -> Result<usize, Violation> {
    judge(history, |_, _| false)
}

/// Like [`busy_answers`], for a store with a queue. There, a queued client blocks later clients,
/// even if it gives up before its grant. A "busy" answer is therefore also accepted if its attempt
/// overlaps another one answered with "busy".
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::BusyMeansHeld`].
pub fn busy_answers_queued(history: &History) -> Result<usize, Violation> {
    judge(history, |attempts, attempt| {
        let overlaps = |other: &RecordedAttempt| {
            other.window.from <= attempt.window.to && attempt.window.from <= other.window.to
        };
        attempts.iter().any(|other| !std::ptr::eq(*other, attempt) && overlaps(other))
    })
}

/// Judges all "busy" attempts. If no client can have held the lock during an attempt, `is_excused`
/// decides whether to accept it. Its arguments are all "busy" attempts on the key, and the attempt
/// in question.
fn judge(
    history: &History,
    is_excused: impl Fn(&[&RecordedAttempt], &RecordedAttempt) -> bool,
) -> Result<usize, Violation> {
    let grants = by_key(&history.grants, |grant| &grant.key);
    let unknown = by_key(&history.unknown, |attempt| &attempt.key);
    for (key, attempts) in by_key(&history.busy, |attempt| &attempt.key) {
        let grants = grants.get(key).into_iter().flatten().map(|grant| possibly_held(grant));
        let unknown = unknown.get(key).into_iter().flatten().map(|attempt| attempt.window);
        let mut holds: Vec<Window> = grants.chain(unknown).collect();
        holds.sort_by_key(|hold| hold.from);
        // After this loop, `to` is the latest end of this hold and of all holds that were called
        // before it.
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

fn possibly_held(grant: &RecordedGrant) -> Window {
    match grant.release {
        Some(release) if release.ending == ReleaseResult::Freed => {
            Window::new(grant.acquire.from, release.window.to)
        }
        _ => Window::open(grant.acquire.from),
    }
}

fn violation(history: &History, attempt: &RecordedAttempt) -> Violation {
    Violation {
        promise: Promise::BusyMeansHeld,
        key: Arc::clone(&attempt.key),
        why: "no client can have held the lock at that time".into(),
        operations: vec![Describer::new(history).attempt(attempt)],
    }
}
