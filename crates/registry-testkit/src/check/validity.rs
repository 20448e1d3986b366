//! Checks that two guards of a key are never valid at the same time, unless their modes allow it.
//! It ignores tokens, so it applies to every store.

use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{History, RecordedGrant};

use super::by_key;
use super::phases::{Phase, excludes, phases};
use super::violation::{Describer, Promise, Violation};

/// Checks that guards of one key are never valid at the same time if their modes exclude each
/// other. Also checks that the valid permits never take more units than the key has. Returns the
/// number of judged guards.
///
/// A guard is valid from the time its caller receives it until its release, its loss or its expiry.
/// During this time, the holder believes that it holds the lock. Unlike the token order, the check
/// does not accept that the store ended a hold while its guard was valid. If the last renewals of a
/// guard were not recorded, the guard counts as ended too early. This can hide a violation but
/// never cause a false one. While a conversion is in flight, its guard counts as valid in the
/// weaker of the two modes. A conversion with an unknown outcome ends the guard at its call.
///
/// A forced release of a lock breaks this promise until the holder detects it. Exclude such keys
/// from the history.
///
/// # Errors
/// Returns a [`Violation`] of [`Promise::ValidGuardsAreCompatible`] or [`Promise::UnitsFit`].
pub fn validity(history: &History) -> Result<usize, Violation> {
    for grants in by_key(&history.grants, |grant| &grant.key).into_values() {
        let mut all: Vec<Phase<'_>> = grants.into_iter().flat_map(phases).collect();
        all.retain(|phase| phase.valid_window().from < phase.valid_window().to);
        all.sort_by_key(|phase| phase.valid_window().from);
        let mut valid: Vec<Phase<'_>> = Vec::new();
        for phase in all {
            let from = phase.valid_window().from;
            valid.retain(|other| other.valid_window().to > from);
            let excluded = |other: &&Phase<'_>| {
                !std::ptr::eq(other.grant, phase.grant) && excludes(other.mode, phase.mode)
            };
            if let Some(other) = valid.iter().find(excluded) {
                return Err(incompatible(history, other, &phase));
            }
            valid.push(phase);
            check_units_in_use(
                history,
                &phase,
                valid.iter().map(|valid| (valid.mode, valid.grant)),
                from,
            )?;
        }
    }
    Ok(history.grants.len())
}

/// Checks that the permits in `held`, which includes `newest`, take at most the units of the key.
/// The error text names the time `at`.
pub(super) fn check_units_in_use<'a>(
    history: &History,
    newest: &Phase<'_>,
    held: impl Iterator<Item = (ClaimMode, &'a RecordedGrant)> + Clone,
    at: u64,
) -> Result<(), Violation> {
    let ClaimMode::Permits { of, .. } = newest.mode else { return Ok(()) };
    let taken: u64 = held.clone().map(|(mode, _)| u64::from(mode.units())).sum();
    if taken <= u64::from(of) {
        return Ok(());
    }
    let describe = Describer::new(history);
    Err(Violation {
        promise: Promise::UnitsFit,
        key: Arc::clone(&newest.grant.key),
        why: format!("{taken} units of {of} were taken at {}", describe.time(at)),
        operations: held
            .filter(|(mode, _)| mode.units() > 0)
            .map(|(_, grant)| describe.grant(grant))
            .collect(),
    })
}

fn incompatible(history: &History, first: &Phase<'_>, second: &Phase<'_>) -> Violation {
    let describe = Describer::new(history);
    let overlap_start = second.valid_window().from;
    let overlap_end = first.valid_window().to.min(second.valid_window().to);
    Violation {
        promise: Promise::ValidGuardsAreCompatible,
        key: Arc::clone(&first.grant.key),
        why: format!(
            "both were valid from {} to {}, one {}, the other {}",
            describe.time(overlap_start),
            describe.time(overlap_end),
            first.mode,
            second.mode,
        ),
        operations: vec![describe.grant(first.grant), describe.grant(second.grant)],
    }
}
