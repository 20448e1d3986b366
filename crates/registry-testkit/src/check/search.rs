//! A second opinion: a general search for an order of effects that explains a history, after Wing and Gong, and Lowe. It
//! shares no idea with the sweep of `order`; it is here so that the sweep need not be believed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use porcupine_rs::{CheckResult, Model, Operation, check_operations_timeout};

use crate::history::{Attempt, Ending, Grant, History, Window};

use super::by_key;

/// How many acquisitions of unknown outcome are tried for each key. Each of them multiplies the orders to try, and leaving one
/// out changes no verdict: it can be put after everything else. Some are tried all the same, to
/// have that believed by nobody either.
const UNKNOWN_MAX: usize = 3;

/// What the search found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "yes, no, or no time")]
pub enum Opinion {
    /// Some order of effects explains the history.
    Explained,
    /// No order does, on this key.
    Impossible {
        /// The key.
        key: String,
    },
    /// Time ran out on this key. This is not a pass.
    Undecided {
        /// The key.
        key: String,
    },
}

/// Searches for an order of effects in which the locks of `history` are mutexes that know their owner and number their
/// grants upwards. The time it takes can grow exponentially with operations that overlap: keep histories short.
///
/// It judges what [`token_order`](super::token_order) judges, and grants without tokens as well: of these
/// it asks that holders exclude each other.
///
/// It blocks its thread for up to `limit`.
#[must_use]
pub fn search(history: &History, limit: Duration) -> Opinion {
    let deadline = Instant::now() + limit;
    let mut unknown = by_key(&history.unknown, |attempt| &attempt.key);
    let mut keys: BTreeMap<&str, Vec<Operation<Mutex>>> = BTreeMap::new();
    for (key, grants) in by_key(&history.grants, |grant| &grant.key) {
        let unknown = unknown.remove(key).unwrap_or_default();
        keys.insert(key, operations(&grants, &unknown));
    }
    for (key, operations) in keys {
        let left = deadline.saturating_duration_since(Instant::now());
        match check_operations_timeout(&operations, left) {
            CheckResult::Ok => {}
            CheckResult::Illegal => return Opinion::Impossible { key: key.into() },
            CheckResult::Unknown => return Opinion::Undecided { key: key.into() },
        }
    }
    Opinion::Explained
}

fn operations(grants: &[&Grant], unknown: &[&Attempt]) -> Vec<Operation<Mutex>> {
    let mut operations = Vec::new();
    let mut hold = |client: u32, token: Option<u64>, acquire: Window, end: Window| {
        let hold = operations.len();
        operations.push(operation(client, acquire, Step::Acquire { hold, token }));
        operations.push(operation(client, end, Step::End { hold }));
    };
    for grant in grants {
        let freed = grant.release.filter(|release| release.ending == Ending::Freed);
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

fn operation(client: u32, window: Window, op: Step) -> Operation<Mutex> {
    Operation {
        client_id: Some(client),
        call_time: signed(window.from),
        return_time: signed(window.to),
        op,
        metadata: None,
    }
}

/// Beyond 292 years everything is never.
fn signed(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

/// A mutex that knows its owner and whose grants carry growing tokens.
#[derive(Debug, Clone)]
struct Mutex;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    holder: Option<usize>,
    newest: Option<u64>,
}

#[derive(Debug, Clone)]
enum Step {
    Acquire { hold: usize, token: Option<u64> },
    End { hold: usize },
}

impl Model for Mutex {
    type State = State;
    type Op = Step;
    type Metadata = ();

    fn init() -> State {
        State { holder: None, newest: None }
    }

    fn step(state: &State, step: &Step) -> (bool, State) {
        match *step {
            Step::Acquire { hold, token } => {
                let free = state.holder.is_none();
                let grows = token.is_none() || token > state.newest;
                (free && grows, State { holder: Some(hold), newest: token.max(state.newest) })
            }
            Step::End { hold } => {
                let own = state.holder == Some(hold);
                (own, State { holder: None, newest: state.newest })
            }
        }
    }
}
