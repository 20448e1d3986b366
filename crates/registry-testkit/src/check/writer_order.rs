//! Checks the tokens of locks in several modes. Readers and permits that hold a key together say
//! nothing by their tokens, so only pairs with a writer are compared.

use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedGrant};

use super::by_key;
use super::violation::{Describer, Promise, Violation};

/// Checks that an acquisition of a writer has a larger token than all acquisitions of its key that
/// were answered before it was called, and that all acquisitions have larger tokens than the
/// writers before them. Returns the number of judged grants: those with a token.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::WritersFollowTokens`].
pub fn writer_order(history: &History) -> Result<usize, Violation> {
    let mut judged = 0;
    for mut grants in by_key(&history.grants, |grant| &grant.key).into_values() {
        grants.retain(|grant| grant.token.is_some());
        judged += grants.len();
        let mut answered = grants.clone();
        answered.sort_by_key(|grant| grant.acquire.to);
        let mut answered = answered.into_iter().peekable();
        grants.sort_by_key(|grant| grant.acquire.from);
        let (mut newest, mut newest_writer) = (None, None);
        for later in grants {
            while let Some(earlier) = answered.next_if(|it| it.acquire.to < later.acquire.from) {
                newest = newer(newest, earlier);
                if is_writer(earlier) {
                    newest_writer = newer(newest_writer, earlier);
                }
            }
            let before = if is_writer(later) { newest } else { newest_writer };
            if let Some(earlier) = before.filter(|earlier| earlier.token >= later.token) {
                return Err(violation(history, earlier, later));
            }
        }
    }
    Ok(judged)
}

fn is_writer(grant: &RecordedGrant) -> bool {
    grant.mode == ClaimMode::Exclusive
}

fn newer<'a>(
    newest: Option<&'a RecordedGrant>,
    grant: &'a RecordedGrant,
) -> Option<&'a RecordedGrant> {
    newest.into_iter().chain([grant]).max_by_key(|grant| grant.token)
}

fn violation(history: &History, earlier: &RecordedGrant, later: &RecordedGrant) -> Violation {
    let describe = Describer::new(history);
    Violation {
        promise: Promise::WritersFollowTokens,
        key: Arc::clone(&later.key),
        why: format!(
            "the second acquisition was called {}, after the first was answered {}",
            describe.time(later.acquire.from),
            describe.time(earlier.acquire.to),
        ),
        operations: vec![describe.grant(earlier), describe.grant(later)],
    }
}
