//! Checks the writes that a fenced resource accepted. It judges the resource and its tokens, not
//! the locks.

use std::collections::HashMap;
use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedWrite, WriteResult};

use super::by_key;
use super::phases::{Phase, excludes, phases};
use super::violation::{Describer, Promise, Violation};

/// Checks that the tokens of accepted writes never decrease, for a resource that stores the newest
/// token it has accepted. Returns the number of judged writes: those that were accepted.
///
/// Two writes with overlapping windows may have taken effect in either order. Writes with an
/// unknown outcome are ignored.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::WritesNeverGoBack`].
pub fn fenced_writes(history: &History) -> Result<usize, Violation> {
    let mut judged = 0;
    for mut writes in by_key(accepted(history), |write| &write.key).into_values() {
        judged += writes.len();
        let newer = writes.iter().map(|write| NewerOperation::Write(write)).collect();
        if let Some((write, newer)) = first_stale(&mut writes, newer) {
            return Err(violation(history, Promise::WritesNeverGoBack, write, newer));
        }
    }
    Ok(judged)
}

/// Checks that no write is accepted once a newer grant exists whose mode excludes that of the
/// writer. The resource must atomically verify the lock with each write. Returns the number of
/// judged writes: those that were accepted.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::ReplacedHoldersCannotWrite`].
pub fn guarded_writes(history: &History) -> Result<usize, Violation> {
    let grants = by_key(&history.grants, |grant| &grant.key);
    let mut judged = 0;
    for (key, mut writes) in by_key(accepted(history), |write| &write.key) {
        judged += writes.len();
        let grants = grants.get(key).into_iter().flatten();
        let phases: Vec<Phase<'_>> = grants.flat_map(|grant| phases(grant)).collect();
        // The last mode of each token, which is the weakest one.
        let modes: HashMap<u64, ClaimMode> =
            phases.iter().filter_map(|phase| Some((phase.token?, phase.mode))).collect();
        let mode_of = |write: &RecordedWrite| {
            modes.get(&write.token).copied().unwrap_or(ClaimMode::Exclusive)
        };
        while let Some(mode) = writes.first().map(|write| mode_of(write)) {
            let (mut of_mode, others) =
                writes.into_iter().partition(|write| mode_of(write) == mode);
            writes = others;
            let newer = phases.iter().filter(|phase| excludes(phase.mode, mode));
            let newer = newer.filter_map(|phase| Some(NewerOperation::Grant(*phase, phase.token?)));
            if let Some((write, newer)) = first_stale(&mut of_mode, newer.collect()) {
                return Err(violation(history, Promise::ReplacedHoldersCannotWrite, write, newer));
            }
        }
    }
    Ok(judged)
}

fn accepted(history: &History) -> impl Iterator<Item = &RecordedWrite> {
    history.writes.iter().filter(|write| write.answer == WriteResult::Accepted)
}

/// An operation whose answer makes all older tokens stale.
#[derive(Clone, Copy)]
enum NewerOperation<'a> {
    Write(&'a RecordedWrite),
    Grant(Phase<'a>, u64),
}

impl NewerOperation<'_> {
    fn token(&self) -> u64 {
        match self {
            Self::Write(write) => write.token,
            Self::Grant(_, token) => *token,
        }
    }

    fn answered_at(&self) -> u64 {
        match self {
            Self::Write(write) => write.window.to,
            Self::Grant(phase, _) => phase.begin.to,
        }
    }

    fn describe_with(&self, describe: Describer) -> String {
        match self {
            Self::Write(write) => describe.write(write),
            Self::Grant(phase, _) => describe.grant(phase.grant),
        }
    }
}

/// Returns the first write that began after the answer of an operation with a newer token, and that
/// operation.
fn first_stale<'a>(
    writes: &mut [&'a RecordedWrite],
    mut newer: Vec<NewerOperation<'a>>,
) -> Option<(&'a RecordedWrite, NewerOperation<'a>)> {
    writes.sort_by_key(|write| write.window.from);
    newer.sort_by_key(NewerOperation::answered_at);
    let mut answers = newer.into_iter().peekable();
    let mut newest: Option<NewerOperation<'_>> = None;
    for write in writes {
        let is_earlier = |answer: &NewerOperation<'_>| answer.answered_at() < write.window.from;
        while let Some(answer) = answers.next_if(is_earlier) {
            if newest.is_none_or(|newest| newest.token() < answer.token()) {
                newest = Some(answer);
            }
        }
        if let Some(newest) = newest.filter(|newest| newest.token() > write.token) {
            return Some((write, newest));
        }
    }
    None
}

fn violation(
    history: &History,
    promise: Promise,
    write: &RecordedWrite,
    newer: NewerOperation<'_>,
) -> Violation {
    let describe = Describer::new(history);
    Violation {
        promise,
        key: Arc::clone(&write.key),
        why: format!(
            "token {} was accepted after token {} existed, {}",
            write.token,
            newer.token(),
            describe.time(newer.answered_at()),
        ),
        operations: vec![newer.describe_with(describe), describe.write(write)],
    }
}
