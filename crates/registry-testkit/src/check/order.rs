//! The main check: conflicting grants of a key take effect in the order of their tokens. The check
//! ignores leases.
//!
//! The grants of a lock are numbered by their tokens. In every linearization of a history, a grant
//! begins after the end of each grant that has a smaller token and an excluding mode. Compatible
//! grants may begin and end in any order. The order of all conflicting steps is therefore
//! fixed, and no search is necessary. One sweep places each step as early as its window and its
//! predecessors allow. If a step then falls after the end of its own window, the history has no
//! linearization.
//!
//! A conversion ends one mode and begins the next one in a single step.

use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedGrant, ReleaseResult, Window};

use super::by_key;
use super::phases::{Phase, excludes, phases};
use super::validity::check_units_in_use;
use super::violation::{Describer, Promise, Violation};

/// Checks the tokens of each key, and returns the number of judged grants: those with a token.
///
/// - Conflicting grants take effect in the order of their tokens.
/// - No token is issued twice.
/// - An upgrade takes a larger token, and a downgrade keeps its token.
/// - The permits never take more units than the key has.
///
/// A release that freed the lock proves that the lock was held until then. A conversion that was
/// granted proves the same. All other holds may have ended at any time after their grant, by expiry
/// or by a release whose reply was lost. Acquisitions and conversions with an unknown outcome are
/// ignored, because they may have taken effect after all other operations.
///
/// The check takes `O(n log n)` time. For permits, it also takes `O(n k)` time with up to `k`
/// concurrent holders.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::TokensAreUnique`], [`Promise::HoldersFollowTokens`] or
/// [`Promise::UnitsFit`].
pub fn token_order(history: &History) -> Result<usize, Violation> {
    let mut judged = 0;
    for grants in by_key(&history.grants, |grant| &grant.key).into_values() {
        let numbered = || grants.iter().filter(|grant| grant.token.is_some());
        judged += numbered().count();
        let mut all: Vec<(u64, Phase<'_>)> = numbered()
            .flat_map(|grant| phases(grant))
            .filter_map(|phase| Some((phase.token?, phase)))
            .collect();
        check_conversions(history, &all)?;
        // Stable, so that the phases of one grant keep their order.
        all.sort_by_key(|(token, _)| *token);
        check_unique(history, &all)?;
        sweep(history, &all)?;
        check_confirmed_units(history, &grants)?;
    }
    Ok(judged)
}

fn check_conversions(history: &History, phases: &[(u64, Phase<'_>)]) -> Result<(), Violation> {
    let is_wrong = |pair: &&[(u64, Phase<'_>)]| {
        let [(before, _), (token, phase)] = pair else { return false };
        let is_upgrade = phase.mode == ClaimMode::Exclusive;
        phase.is_converted && if is_upgrade { token <= before } else { token != before }
    };
    let Some([(before, _), (token, phase)]) = phases.windows(2).find(is_wrong) else {
        return Ok(());
    };
    Err(Violation {
        promise: Promise::HoldersFollowTokens,
        key: Arc::clone(&phase.grant.key),
        why: format!(
            "the conversion to {} has token {token} after token {before}; an upgrade must take a larger token, a downgrade must keep its token",
            phase.mode
        ),
        operations: vec![Describer::new(history).grant(phase.grant)],
    })
}

fn check_unique(history: &History, numbered: &[(u64, Phase<'_>)]) -> Result<(), Violation> {
    let is_duplicate = |pair: &&[(u64, Phase<'_>)]| {
        pair[0].0 == pair[1].0 && !std::ptr::eq(pair[0].1.grant, pair[1].1.grant)
    };
    let duplicates = numbered.windows(2).find(is_duplicate);
    let Some([(token, first), (_, second)]) = duplicates else { return Ok(()) };
    let describe = Describer::new(history);
    Err(Violation {
        promise: Promise::TokensAreUnique,
        key: Arc::clone(&first.grant.key),
        why: format!("token {token} was issued twice"),
        operations: vec![describe.grant(first.grant), describe.grant(second.grant)],
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

/// The earliest time of a step, and the step whose window determines it.
type Earliest<'a> = (u64, OrderStep<'a>);

/// The constraints that the phases with smaller tokens set for the next phase.
#[derive(Default)]
struct EarlierPhases<'a> {
    /// For each [class](same_class) of modes, the latest of the earliest possible ends of its
    /// phases.
    ends: Vec<(ClaimMode, Earliest<'a>)>,
    /// The phases that end by a conversion, with their starts, until that conversion is placed.
    unfinished: Vec<(Phase<'a>, Earliest<'a>)>,
}

impl<'a> EarlierPhases<'a> {
    /// Records the end of a phase of `mode`.
    fn record_end(&mut self, mode: ClaimMode, end: Earliest<'a>) {
        match self.ends.iter_mut().find(|(other, _)| same_class(*other, mode)) {
            Some((_, latest)) if latest.0 >= end.0 => {}
            Some((_, latest)) => *latest = end,
            None => self.ends.push((mode, end)),
        }
    }

    /// Returns the latest end of those phases that exclude `mode`.
    fn latest_end(&self, mode: ClaimMode) -> Option<Earliest<'a>> {
        let excluded = self.ends.iter().filter(|(other, _)| excludes(*other, mode));
        excluded.map(|(_, end)| *end).max_by_key(|(at, _)| *at)
    }
}

/// Returns whether both modes are excluded by the same modes.
fn same_class(one: ClaimMode, other: ClaimMode) -> bool {
    match (one, other) {
        (ClaimMode::Permits { of, .. }, ClaimMode::Permits { of: other, .. }) => of == other,
        _ => one == other,
    }
}

fn sweep(history: &History, numbered: &[(u64, Phase<'_>)]) -> Result<(), Violation> {
    let mut earlier = EarlierPhases::default();
    for (token, phase) in numbered {
        let step = |name, window| OrderStep { name, token: *token, grant: phase.grant, window };
        let name = if phase.is_converted { "conversion" } else { "acquisition" };
        let begin = step(name, phase.begin);
        let is_same_grant = |(other, _): &(Phase<'_>, _)| std::ptr::eq(other.grant, phase.grant);
        let position = earlier.unfinished.iter().position(is_same_grant);
        let previous = position.map(|position| earlier.unfinished.swap_remove(position));
        let excluded = |(other, _): &&(Phase<'_>, _)| excludes(other.mode, phase.mode);
        if let Some((other, (_, other_begin))) = earlier.unfinished.iter().find(excluded) {
            let conversion = OrderStep { name: "conversion", window: other.end, ..*other_begin };
            let why = format!(
                "the {name} with token {token} must follow the conversion of the holder with token {}, which has a larger token",
                conversion.token
            );
            return Err(violation(history, conversion, begin, why));
        }
        let mut earliest = (begin.window.from, begin);
        let previous_begin = previous.map(|(_, begin)| begin);
        for other in previous_begin.into_iter().chain(earlier.latest_end(phase.mode)) {
            if other.0 > earliest.0 {
                earliest = other;
            }
        }
        if earliest.0 > begin.window.to {
            return Err(late_step(history, earliest.1, begin));
        }
        if let Some((previous_phase, _)) = previous {
            earlier.record_end(previous_phase.mode, earliest);
        }
        if phase.next.is_some() {
            earlier.unfinished.push((*phase, earliest));
            continue;
        }
        let end = step("end", phase.end);
        if end.window.from > earliest.0 {
            earliest = (end.window.from, end);
        }
        if earliest.0 > end.window.to {
            return Err(late_step(history, earliest.1, end));
        }
        earlier.record_end(phase.mode, earliest);
    }
    Ok(())
}

/// Checks the units of all permits that were certainly held at the same time. A permit whose
/// release freed it was certainly held from the answer of its acquisition to the call of the
/// release.
fn check_confirmed_units(history: &History, grants: &[&RecordedGrant]) -> Result<(), Violation> {
    let confirmed = |grant: &RecordedGrant| {
        let release = grant.release.filter(|release| release.result == ReleaseResult::Freed)?;
        let (from, to) = (grant.acquire.to, release.window.from);
        (grant.mode.units() > 0 && from < to).then_some((from, to))
    };
    let permits = grants.iter().filter_map(|grant| Some((confirmed(grant)?, *grant)));
    let mut permits: Vec<((u64, u64), &RecordedGrant)> = permits.collect();
    permits.sort_by_key(|((from, _), _)| *from);
    let mut held: Vec<(u64, &RecordedGrant)> = Vec::new();
    for ((from, to), grant) in permits {
        held.retain(|(end, other)| *end > from && !excludes(other.mode, grant.mode));
        held.push((to, grant));
        let Some(phase) = phases(grant).pop() else { continue };
        check_units_in_use(
            history,
            &phase,
            held.iter().map(|(_, grant)| (grant.mode, *grant)),
            from,
        )?;
    }
    Ok(())
}

/// Returns the violation by `later`, which took effect before `earlier`.
fn late_step(history: &History, earlier: OrderStep<'_>, later: OrderStep<'_>) -> Violation {
    let describe = Describer::new(history);
    let why = format!(
        "the {} of token {} was over {}, before the {} of token {} could begin {}",
        later.name,
        later.token,
        describe.time(later.window.to),
        earlier.name,
        earlier.token,
        describe.time(earlier.window.from),
    );
    violation(history, earlier, later, why)
}

fn violation(
    history: &History,
    earlier: OrderStep<'_>,
    later: OrderStep<'_>,
    why: String,
) -> Violation {
    let describe = Describer::new(history);
    let mut operations = vec![describe.grant(earlier.grant)];
    if !std::ptr::eq(later.grant, earlier.grant) {
        operations.push(describe.grant(later.grant));
    }
    Violation {
        promise: Promise::HoldersFollowTokens,
        key: Arc::clone(&later.grant.key),
        why,
        operations,
    }
}
