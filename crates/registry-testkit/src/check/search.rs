//! An independent check: a general search for a linearization of a history, after Wing and Gong,
//! and Lowe. It shares no method with the sweep in `order`, and so verifies the sweep.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use porcupine_rs::{CheckResult, Model, Operation, check_operations_timeout};

use crate::history::{History, RecordedAttempt, RecordedGrant, ReleaseResult, Window};

use super::by_key;

/// The maximum number of acquisitions with an unknown outcome that are searched for each key. Each
/// of them multiplies the number of orders to try. Omitting one changes no verdict, because it can
/// take effect after all other operations. Some are included to verify this as well.
const UNKNOWN_MAX: usize = 3;

/// The result of the search.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "linearizable, not linearizable, or undecided")]
pub enum SearchResult {
    /// The history has a linearization.
    Linearizable,
    /// The operations on this key have no linearization.
    NotLinearizable {
        /// The key.
        key: String,
    },
    /// The time limit expired during the search of this key. This is not a pass.
    Undecided {
        /// The key.
        key: String,
    },
}

/// Searches for a linearization in which the locks of `history` are mutexes that know their owner
/// and issue increasing tokens. The time can grow exponentially with the number of overlapping
/// operations: keep histories short.
///
/// The search judges the same grants as [`token_order`](super::token_order), and also grants
/// without tokens, for which it checks only mutual exclusion.
///
/// Blocks its thread for at most `limit`.
#[must_use]
pub fn search(history: &History, limit: Duration) -> SearchResult {
    let deadline = Instant::now() + limit;
    let mut unknown = by_key(&history.unknown, |attempt| &attempt.key);
    let mut keys: BTreeMap<&str, Vec<Operation<MutexModel>>> = BTreeMap::new();
    for (key, grants) in by_key(&history.grants, |grant| &grant.key) {
        let unknown = unknown.remove(key).unwrap_or_default();
        keys.insert(key, operations(&grants, &unknown));
    }
    for (key, operations) in keys {
        let left = deadline.saturating_duration_since(Instant::now());
        match check_operations_timeout(&operations, left) {
            CheckResult::Ok => {}
            CheckResult::Illegal => return SearchResult::NotLinearizable { key: key.into() },
            CheckResult::Unknown => return SearchResult::Undecided { key: key.into() },
        }
    }
    SearchResult::Linearizable
}

fn operations(
    grants: &[&RecordedGrant],
    unknown: &[&RecordedAttempt],
) -> Vec<Operation<MutexModel>> {
    let mut operations = Vec::new();
    let mut hold = |client: u32, token: Option<u64>, acquire: Window, end: Window| {
        let hold = operations.len();
        operations.push(operation(client, acquire, ModelStep::Acquire { hold, token }));
        operations.push(operation(client, end, ModelStep::End { hold }));
    };
    for grant in grants {
        let freed = grant.release.filter(|release| release.ending == ReleaseResult::Freed);
        let end = match freed {
            Some(release) => release.window,
            None => Window::open(grant.acquire.from),
        };
        hold(grant.client, grant.token, grant.acquire, end);
    }
    for attempt in unknown.iter().take(UNKNOWN_MAX) {
        hold(attempt.client, None, attempt.window, attempt.window);
    }
    operations
}

fn operation(client: u32, window: Window, op: ModelStep) -> Operation<MutexModel> {
    Operation {
        client_id: Some(client),
        call_time: signed(window.from),
        return_time: signed(window.to),
        op,
        metadata: None,
    }
}

/// An `i64` holds 292 years of nanoseconds. Longer times count as infinite.
fn signed(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

/// A mutex that knows its owner and issues increasing tokens.
#[derive(Debug, Clone)]
struct MutexModel;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MutexState {
    holder: Option<usize>,
    newest: Option<u64>,
}

#[derive(Debug, Clone)]
enum ModelStep {
    Acquire { hold: usize, token: Option<u64> },
    End { hold: usize },
}

impl Model for MutexModel {
    type State = MutexState;
    type Op = ModelStep;
    type Metadata = ();

    fn init() -> MutexState {
        MutexState { holder: None, newest: None }
    }

    fn step(state: &MutexState, step: &ModelStep) -> (bool, MutexState) {
        match *step {
            ModelStep::Acquire { hold, token } => {
                let free = state.holder.is_none();
                let grows = token.is_none() || token > state.newest;
                (free && grows, MutexState { holder: Some(hold), newest: token.max(state.newest) })
            }
            ModelStep::End { hold } => {
                let own = state.holder == Some(hold);
                (own, MutexState { holder: None, newest: state.newest })
            }
        }
    }
}
