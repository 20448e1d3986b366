//! The modes of a grant, one after the other.

use registry_core::ClaimMode;

use crate::history::{ConversionResult, RecordedGrant, ReleaseResult, Window};

/// A part of a grant with one mode and one token: from the acquisition or a conversion to the next
/// conversion or the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phase<'a> {
    pub(super) grant: &'a RecordedGrant,
    pub(super) mode: ClaimMode,
    pub(super) token: Option<u64>,
    /// The acquisition, or the conversion to this mode.
    pub(super) begin: Window,
    /// The conversion to the next mode, or the release that freed the lock. An open window if the
    /// end of the phase is unknown.
    pub(super) end: Window,
    /// Whether a conversion began this phase.
    pub(super) is_converted: bool,
    /// The mode of the next phase.
    pub(super) next: Option<ClaimMode>,
}

/// Returns the phases of a grant. A conversion that was not granted begins no phase.
pub(super) fn phases(grant: &RecordedGrant) -> Vec<Phase<'_>> {
    let freed = grant.release.filter(|release| release.result == ReleaseResult::Freed);
    let end = freed.map_or_else(|| Window::open(grant.acquire.from), |release| release.window);
    let phase = |mode, token, begin, is_converted| Phase {
        grant,
        mode,
        token,
        begin,
        end,
        is_converted,
        next: None,
    };
    let mut phases = vec![phase(grant.mode, grant.token, grant.acquire, false)];
    for conversion in &grant.conversions {
        let ConversionResult::Granted(token) = conversion.result else { continue };
        if let Some(before) = phases.last_mut() {
            before.end = conversion.window;
            before.next = Some(conversion.mode);
        }
        phases.push(phase(conversion.mode, token, conversion.window, true));
    }
    phases
}

impl Phase<'_> {
    /// Returns the period during which the holder could believe that it holds the lock in this
    /// mode. The end is exclusive.
    pub(super) fn valid_window(&self) -> Window {
        let is_upgraded = |mode: ClaimMode| mode == ClaimMode::Exclusive;
        // While a conversion is in flight, the holder has only the weaker of the two modes.
        let from = if self.is_converted && !is_upgraded(self.mode) {
            self.begin.from
        } else {
            self.begin.to
        };
        let to = match self.next {
            Some(next) if is_upgraded(next) => self.end.to,
            Some(_) => self.end.from,
            None => self.valid_until(),
        };
        Window::new(from, to)
    }

    /// Returns the end of the last phase: the earliest of the release, the loss, the expiry, and a
    /// conversion with an unknown outcome.
    fn valid_until(&self) -> u64 {
        let RecordedGrant { release, lost, valid_until, conversions, .. } = self.grant;
        let unknown = conversions
            .iter()
            .find(|conversion| conversion.result == ConversionResult::Unknown)
            .map(|conversion| conversion.window.from);
        let released = release.map(|release| release.window.from);
        let ends = [released, *lost, *valid_until, unknown];
        ends.into_iter().flatten().min().unwrap_or(u64::MAX)
    }
}

/// Returns whether two claims of these modes never hold a key together, however many units it has.
pub(super) fn excludes(one: ClaimMode, other: ClaimMode) -> bool {
    match (one, other) {
        (ClaimMode::Permits { of, .. }, ClaimMode::Permits { of: other, .. }) => of != other,
        _ => !one.is_compatible(other),
    }
}

/// Returns whether a claim of the mode `held` can be the reason why another one is busy.
pub(super) fn may_delay(held: ClaimMode, wanted: ClaimMode) -> bool {
    excludes(held, wanted) || held.units() > 0 && wanted.units() > 0
}
