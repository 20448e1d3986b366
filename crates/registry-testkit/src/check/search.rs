//! An independent check: a general search for a linearization of a history, with the algorithm of
//! Wing and Gong and the extension by Lowe. It shares no method with the sweep in `order`, and so
//! verifies the sweep.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use porcupine_rs::{CheckResult, Model, Operation, check_operations_timeout};
use registry_core::ClaimMode;

use crate::history::{
    ConversionResult, History, RecordedAttempt, RecordedGrant, ReleaseResult, Window,
};

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

/// Searches for a linearization of `history` for a model of a lock. The lock knows its holders and
/// their modes. A new token is larger than the tokens of all earlier holders that exclude the new
/// holder, and no token is issued twice. The time can grow exponentially with the number of
/// overlapping operations, so keep histories short.
///
/// The search judges the same grants as [`token_order`](super::token_order), and also grants
/// without tokens, for which it checks only mutual exclusion and units.
///
/// Blocks its thread for at most `limit`.
#[must_use]
pub fn search(history: &History, limit: Duration) -> SearchResult {
    let deadline = Instant::now() + limit;
    let mut unknown = by_key(&history.unknown, |attempt| &attempt.key);
    let mut keys: BTreeMap<&str, Vec<Operation<LockModel>>> = BTreeMap::new();
    for (key, grants) in by_key(&history.grants, |grant| &grant.key) {
        let mut tokens = HashSet::new();
        if !grants.iter().filter_map(|grant| grant.token).all(|token| tokens.insert(token)) {
            return SearchResult::NotLinearizable { key: key.into() };
        }
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
) -> Vec<Operation<LockModel>> {
    let mut operations = Vec::new();
    for (hold, grant) in grants.iter().enumerate() {
        let RecordedGrant { client, mode, token, acquire, .. } = **grant;
        let step = ModelStep::Acquire { hold, mode, token };
        operations.push(operation(client, acquire, step));
        for conversion in &grant.conversions {
            if let ConversionResult::Granted(token) = conversion.result {
                let step = ModelStep::Convert { hold, mode: conversion.mode, token };
                operations.push(operation(client, conversion.window, step));
            }
        }
        let freed = grant.release.filter(|release| release.result == ReleaseResult::Freed);
        let end = freed.map_or_else(|| Window::open(acquire.from), |release| release.window);
        operations.push(operation(client, end, ModelStep::End { hold }));
    }
    for (number, attempt) in unknown.iter().take(UNKNOWN_MAX).enumerate() {
        let (hold, mode) = (grants.len() + number, attempt.mode);
        let step = ModelStep::Acquire { hold, mode, token: None };
        operations.push(operation(attempt.client, attempt.window, step));
        operations.push(operation(attempt.client, attempt.window, ModelStep::End { hold }));
    }
    operations
}

fn operation(client: u32, window: Window, op: ModelStep) -> Operation<LockModel> {
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

/// A lock that knows its holders and their modes, and issues increasing tokens.
#[derive(Debug, Clone)]
struct LockModel;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct LockState {
    /// The mode and the token of each hold.
    holders: BTreeMap<usize, (ClaimMode, Option<u64>)>,
    /// The newest token of each mode: `(0, 0)` exclusive, `(1, 0)` shared, `(2, 0)` upgradable,
    /// `(3, N)` permits of N units.
    newest: BTreeMap<(u8, u32), u64>,
}

#[derive(Debug, Clone)]
enum ModelStep {
    Acquire { hold: usize, mode: ClaimMode, token: Option<u64> },
    Convert { hold: usize, mode: ClaimMode, token: Option<u64> },
    End { hold: usize },
}

impl LockState {
    /// Adds a holder. Returns whether the lock could grant the claim.
    fn grant(&mut self, hold: usize, mode: ClaimMode, token: Option<u64>) -> bool {
        let fits = self.holders.values().all(|(held, _)| held.is_compatible(mode));
        let taken: u64 = self.holders.values().map(|(held, _)| u64::from(held.units())).sum();
        let has_units = match mode {
            ClaimMode::Permits { take, of } => taken + u64::from(take) <= u64::from(of),
            _ => true,
        };
        let excluded = |class: &(u8, u32)| match (class, mode) {
            ((3, of), ClaimMode::Permits { of: own, .. }) => *of != own,
            ((1 | 2, _), ClaimMode::Shared) | ((1, _), ClaimMode::Upgradable) => false,
            _ => true,
        };
        let mut before = self.newest.iter().filter(|(class, _)| excluded(class));
        let grows = token.is_none_or(|token| before.all(|(_, newest)| *newest < token));
        self.add_holder(hold, mode, token);
        fits && has_units && grows
    }

    fn add_holder(&mut self, hold: usize, mode: ClaimMode, token: Option<u64>) {
        self.holders.insert(hold, (mode, token));
        let class = match mode {
            ClaimMode::Exclusive => (0, 0),
            ClaimMode::Shared => (1, 0),
            ClaimMode::Upgradable => (2, 0),
            ClaimMode::Permits { of, .. } => (3, of),
            other => unreachable!("no such mode: {other}"),
        };
        if let Some(token) = token {
            let newest = self.newest.entry(class).or_default();
            *newest = token.max(*newest);
        }
    }
}

impl Model for LockModel {
    type State = LockState;
    type Op = ModelStep;
    type Metadata = ();

    fn init() -> LockState {
        LockState::default()
    }

    fn step(state: &LockState, step: &ModelStep) -> (bool, LockState) {
        let mut state = state.clone();
        let is_legal = match *step {
            ModelStep::Acquire { hold, mode, token } => state.grant(hold, mode, token),
            ModelStep::Convert { hold, mode, token } => match state.holders.remove(&hold) {
                None => false,
                Some(_) if mode == ClaimMode::Exclusive => state.grant(hold, mode, token),
                Some((_, before)) => {
                    state.add_holder(hold, mode, token);
                    token == before
                }
            },
            ModelStep::End { hold } => state.holders.remove(&hold).is_some(),
        };
        (is_legal, state)
    }
}
