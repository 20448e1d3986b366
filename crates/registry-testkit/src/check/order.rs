//! The main check: the holders of a key follow each other in the order of their tokens. It ignores
//! leases.
//!
//! A lock is a mutex whose grants are numbered. In every linearization of a history, the grants are
//! in the order of their tokens, and each hold ends before the next grant. The whole order is
//! therefore fixed, and no search is necessary. One sweep places each step as early as its window
//! and its predecessor allow. If a step then falls after the end of its own window, the history has
//! no linearization.

use std::sync::Arc;

use crate::history::{History, RecordedGrant, ReleaseResult, Window};

use super::by_key;
use super::violation::{Describer, Promise, Violation};

/// Checks that the holders of each key follow each other in the order of their tokens, and that no
/// token is issued twice. Returns the number of judged grants: those with a token.
///
/// A release that freed the lock proves that it was held until then. All other holds may have ended
/// at any time after their grant, by expiry or by a release whose reply was lost. Acquisitions with
/// an unknown outcome are ignored, because they may have taken effect after all other operations.
///
/// The check takes `O(n log n)` time.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::TokensAreUnique`] or [`Promise::HoldersFollowTokens`].
pub fn token_order(history: &History) -> Result<usize, Violation> {
    let mut judged = 0;
    for grants in by_key(&history.grants, |grant| &grant.key).into_values() {
        let mut numbered: Vec<(u64, &RecordedGrant)> =
            grants.iter().filter_map(|grant| Some((grant.token?, *grant))).collect();
        numbered.sort_by_key(|(token, _)| *token);
        judged += numbered.len();
        check_unique(history, &numbered)?;
        sweep(history, &numbered)?;
    }
    Ok(judged)
}

fn check_unique(history: &History, numbered: &[(u64, &RecordedGrant)]) -> Result<(), Violation> {
    let duplicates = numbered.windows(2).find(|pair| pair[0].0 == pair[1].0);
    let Some([(token, first), (_, second)]) = duplicates else { return Ok(()) };
    let describe = Describer::new(history);
    Err(Violation {
        promise: Promise::TokensAreUnique,
        key: Arc::clone(&first.key),
        why: format!("token {token} was issued twice"),
        operations: vec![describe.grant(first), describe.grant(second)],
    })
}

/// A step of a hold, which takes effect at some time within its window.
#[derive(Clone, Copy)]
struct OrderStep<'a> {
    name: &'static str,
    token: u64,
    grant: &'a RecordedGrant,
    window: Window,
}

fn sweep(history: &History, numbered: &[(u64, &RecordedGrant)]) -> Result<(), Violation> {
    let mut now = 0;
    // The step that determined `now`.
    let mut latest: Option<OrderStep<'_>> = None;
    for step in numbered.iter().flat_map(|(token, grant)| steps(*token, grant)) {
        if latest.is_none() || step.window.from > now {
            now = step.window.from;
            latest = Some(step);
        }
        if now > step.window.to
            && let Some(earlier) = latest
        {
            return Err(violation(history, earlier, step));
        }
    }
    Ok(())
}

fn steps(token: u64, grant: &RecordedGrant) -> [OrderStep<'_>; 2] {
    let freed = grant.release.filter(|release| release.ending == ReleaseResult::Freed);
    let end = match freed {
        Some(release) => release.window,
        None => Window::open(grant.acquire.from),
    };
    [
        OrderStep { name: "acquisition", token, grant, window: grant.acquire },
        OrderStep { name: "end", token, grant, window: end },
    ]
}

fn violation(history: &History, earlier: OrderStep<'_>, later: OrderStep<'_>) -> Violation {
    let describe = Describer::new(history);
    let mut operations = vec![describe.grant(earlier.grant)];
    if later.token != earlier.token {
        operations.push(describe.grant(later.grant));
    }
    Violation {
        promise: Promise::HoldersFollowTokens,
        key: Arc::clone(&later.grant.key),
        why: format!(
            "the {} of token {} was over {}, before the {} of token {} could begin {}",
            later.name,
            later.token,
            describe.time(later.window.to),
            earlier.name,
            earlier.token,
            describe.time(earlier.window.from),
        ),
        operations,
    }
}
