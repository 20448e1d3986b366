//! Checks that "busy" answers are true: an outage must never be reported as "another client holds
//! the lock".

use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedAttempt, RecordedGrant, ReleaseResult, Window};

use super::by_key;
use super::phases::may_delay;
use super::violation::{Describer, Promise, Violation};

/// Checks that each acquisition answered with "busy" ran while another client may have held the
/// lock. Returns the number of judged answers.
///
/// A hold may last from the call of its acquisition until the answer of its release. A hold without
/// a confirmed release, and an acquisition with an unknown outcome, may last forever. The check
/// therefore finds false answers only in periods without such holds.
///
/// A hold that is compatible with the attempt does not explain a "busy" answer, unless both are
/// permits. On a key with modes other than exclusive, the store records a waiting writer, and this
/// record can outlive the writer's call. On such a key, the answer is also explained by another
/// "busy" attempt that was called before the answer, if its mode can delay this one.
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

/// Judges all "busy" attempts. If no client can have held the lock during an attempt, a waiting
/// writer that the store has recorded can still explain the answer. `is_excused` can accept the
/// attempt as well. Its arguments are all "busy" attempts on the key, and the attempt in question.
fn judge(
    history: &History,
    is_excused: impl Fn(&[&RecordedAttempt], &RecordedAttempt) -> bool,
) -> Result<usize, Violation> {
    let grants = by_key(&history.grants, |grant| &grant.key);
    let unknown = by_key(&history.unknown, |attempt| &attempt.key);
    for (key, attempts) in by_key(&history.busy, |attempt| &attempt.key) {
        let none = Vec::new();
        let (grants, unknown) = (grants.get(key).unwrap_or(&none), unknown.get(key));
        let unknown = unknown.map_or(&[][..], Vec::as_slice);
        let granted_modes = grants.iter().map(|grant| grant.mode);
        let modes = granted_modes.chain(attempts.iter().map(|attempt| attempt.mode));
        let records_waiters = modes.into_iter().any(|mode| mode != ClaimMode::Exclusive);
        let may_be_recorded = |other: &RecordedAttempt, attempt: &RecordedAttempt| {
            records_waiters
                && !std::ptr::eq(other, attempt)
                && other.window.from <= attempt.window.to
                && may_delay(other.mode, attempt.mode)
        };
        let mut holds_by_mode: Vec<(ClaimMode, Vec<Window>)> = Vec::new();
        for &attempt in &attempts {
            let known = holds_by_mode.iter().position(|(mode, _)| *mode == attempt.mode);
            let known = known.unwrap_or_else(|| {
                let holds = windows_by_start(attempt.mode, grants, unknown);
                holds_by_mode.push((attempt.mode, holds));
                holds_by_mode.len() - 1
            });
            let holds = &holds_by_mode[known].1;
            let begun_count = holds.partition_point(|hold| hold.from <= attempt.window.to);
            let latest_end = begun_count.checked_sub(1).map(|last| holds[last].to);
            if latest_end.is_none_or(|end| end < attempt.window.from)
                && !is_excused(&attempts, attempt)
                && !attempts.iter().any(|other| may_be_recorded(other, attempt))
            {
                return Err(violation(history, attempt));
            }
        }
    }
    Ok(history.busy.len())
}

/// Returns the windows in which a claim of `mode` may have had to wait, sorted by their start. The
/// end of each window is the latest of its own end and those of all windows before it.
fn windows_by_start(
    mode: ClaimMode,
    grants: &[&RecordedGrant],
    unknown: &[&RecordedAttempt],
) -> Vec<Window> {
    let is_reason = |grant: &&&RecordedGrant| {
        let mut conversions = grant.conversions.iter();
        may_delay(grant.mode, mode)
            || conversions.any(|conversion| may_delay(conversion.mode, mode))
    };
    let held = grants.iter().filter(is_reason).map(|grant| possibly_held(grant));
    let unknown = unknown.iter().filter(|attempt| may_delay(attempt.mode, mode));
    let mut windows: Vec<Window> = held.chain(unknown.map(|attempt| attempt.window)).collect();
    windows.sort_by_key(|window| window.from);
    let mut latest = 0;
    for window in &mut windows {
        latest = window.to.max(latest);
        window.to = latest;
    }
    windows
}

fn possibly_held(grant: &RecordedGrant) -> Window {
    match grant.release {
        Some(release) if release.result == ReleaseResult::Freed => {
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
