//! Repeated grants of one key to the same session, some of which need no write. Contains no
//! connection and no SQL. Used by `session`.
//!
//! A grant changes the key's row, so that tokens grow and fences hold. If no other client was
//! granted the key since, the row still contains this session's claim, and reading it is enough.
//! For that, a write reserves the tokens of some time ahead. A reserved token is issued only when
//! the server's clock has reached it. A crash may lose a row with its reserved tokens; later
//! tokens, taken from the clock, exceed every issued one, unless the clock goes backwards.
//!
//! Other clients must skip the unused tokens of a reservation, and are then ahead of the clock. So
//! a session reserves only a part of the time during which no other client has wanted the key.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use registry_core::{Claim, ClaimId, FencingToken};
use tokio::time::Instant;

/// What this session has written to a row: its claim, and the reserved tokens that are not used
/// yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) claim: ClaimId,
    pub(crate) tokens: Range<i64>,
}

/// The ways in which a grant may obtain its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Terms {
    /// What the row contains, if no other client was granted the key since.
    pub(crate) last: Option<Note>,
    /// The number of tokens that the grant itself needs.
    own: i64,
    /// The number of tokens to reserve in addition, if the row is unchanged.
    ahead: i64,
}

/// A grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) token: FencingToken,
    /// The current content of the row, with the tokens that this grant leaves.
    pub(crate) note: Note,
    /// Whether no other client was granted the key since this session's last grant.
    pub(crate) goes_on: bool,
}

impl Terms {
    /// Returns the number of tokens to write to the row.
    pub(crate) const fn block(&self, goes_on: bool) -> i64 {
        if goes_on { self.own.saturating_add(self.ahead) } else { self.own }
    }

    /// Returns the grant without a change of the row, if the clock has reached a reserved token
    /// that is not used yet.
    pub(crate) fn unwritten(&self, now: i64) -> Option<Taken> {
        let last = self.last.as_ref()?;
        let rest = now.checked_add(self.own)?;
        if now < last.tokens.start || last.tokens.end < rest {
            return None;
        }
        let note = Note { claim: last.claim, tokens: rest..last.tokens.end };
        Some(Taken { token: FencingToken::try_from(now).ok()?, note, goes_on: true })
    }

    /// Returns the grant after a change of the row, or `None` if `token` is not a valid token.
    pub(crate) fn written(&self, claim: &Claim, token: i64, goes_on: bool) -> Option<Taken> {
        let tokens = token.checked_add(self.own)?..token.checked_add(self.block(goes_on))?;
        let note = Note { claim: claim.id(), tokens };
        Some(Taken { token: FencingToken::try_from(token).ok()?, note, goes_on })
    }
}

/// What a session knows of its recent grants, by lock name. It is invalid in another session.
#[derive(Debug, Default)]
pub(crate) struct Runs(HashMap<Vec<u8>, Run>);

/// Consecutive grants of one key to this session, without another client's grant in between.
#[derive(Debug)]
struct Run {
    began: Instant,
    latest: Instant,
    note: Note,
}

impl Run {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.latest) >= AHEAD_MAX
    }

    /// Returns for how much time to reserve tokens: none if the next grant will probably come later
    /// than that.
    fn ahead(&self, now: Instant) -> Duration {
        let ahead = (now.saturating_duration_since(self.began) / PART_OF_RUN).min(AHEAD_MAX);
        let pause = now.saturating_duration_since(self.latest);
        if ahead > pause { ahead } else { Duration::ZERO }
    }
}

impl Runs {
    /// Returns the terms of a grant that is requested now.
    pub(crate) fn terms(&self, name: &[u8], claim: &Claim, now: Instant) -> Terms {
        let run = self.0.get(name).filter(|run| !run.is_over(now));
        let ahead = run.map_or(Duration::ZERO, |run| run.ahead(now));
        Terms {
            last: run.map(|run| run.note.clone()),
            own: i64::from(claim.token_block()),
            // The clock's unit is a microsecond.
            ahead: i64::try_from(ahead.as_micros()).unwrap_or(0),
        }
    }

    /// Records a grant.
    pub(crate) fn went_on(&mut self, name: &[u8], taken: &Taken, now: Instant) {
        if self.0.len() >= RUNS_MAX {
            self.0.retain(|_, run| !run.is_over(now));
        }
        let known = self.0.get(name).filter(|run| taken.goes_on && !run.is_over(now));
        let began = known.map_or(now, |run| run.began);
        if self.0.len() < RUNS_MAX || self.0.contains_key(name) {
            let run = Run { began, latest: now, note: taken.note.clone() };
            self.0.insert(name.to_vec(), run);
        }
    }

    /// Forgets the key: its next grant must change the row.
    pub(crate) fn forget(&mut self, name: &[u8]) {
        self.0.remove(name);
    }

    /// Forgets everything, because the session has changed.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The maximum time for which tokens are reserved, and the maximum pause within a run. It is far
/// shorter than the time for which rows of free keys are kept.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// Tokens are reserved for the duration of the run divided by this number.
const PART_OF_RUN: u32 = 8;

/// The maximum number of remembered keys. For other keys each grant changes the row.
const RUNS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use registry_core::Key;

    use super::*;

    const NAME: &[u8] = b"name";

    fn claim() -> Claim {
        Claim::new(Key::new("orders/42").unwrap(), Duration::from_secs(30)).with_token_block(3)
    }

    /// A run of duration `lasted`, whose latest grant is at its end.
    fn run_of(lasted: Duration) -> (Runs, Claim, Instant) {
        let (mut runs, claim, began) = (Runs::default(), claim(), Instant::now());
        let taken = runs.terms(NAME, &claim, began).written(&claim, 100, false).unwrap();
        runs.went_on(NAME, &taken, began);
        runs.0.get_mut(NAME).unwrap().latest = began + lasted;
        (runs, claim, began + lasted)
    }

    #[test]
    fn a_reserve_is_a_part_of_the_time_for_which_nobody_else_came() {
        let (runs, claim, now) = run_of(Duration::from_millis(80));
        let terms = runs.terms(NAME, &claim, now);
        assert_eq!((terms.block(true), terms.block(false)), (3 + 10_000, 3));
        // Rare grants reserve nothing, and the reservation has a limit.
        let later = runs.terms(NAME, &claim, now + Duration::from_millis(40));
        assert_eq!(later.block(true), 3);
        let (runs, claim, now) = run_of(Duration::from_secs(3_600));
        assert_eq!(runs.terms(NAME, &claim, now).block(true), 3 + 1_000_000);
        assert_eq!(runs.terms(NAME, &claim, now + AHEAD_MAX).last, None);
        // After another client's grant the run starts again.
        let mut runs = runs;
        let taken = runs.terms(NAME, &claim, now).written(&claim, 500, false).unwrap();
        runs.went_on(NAME, &taken, now);
        assert_eq!(runs.terms(NAME, &claim, now).block(true), 3);
    }

    #[test]
    fn a_reserved_token_is_given_out_once_and_not_before_its_time() {
        let (mut runs, claim, now) = run_of(Duration::from_millis(80));
        let taken = runs.terms(NAME, &claim, now).written(&claim, 1_000, true).unwrap();
        assert_eq!(taken.note.tokens, 1_003..11_003);
        runs.went_on(NAME, &taken, now);
        let terms = runs.terms(NAME, &claim, now);
        // The clock stands still or was set back.
        assert_eq!(terms.unwritten(1_002), None);
        let next = terms.unwritten(1_003).unwrap();
        assert_eq!((i64::from(next.token), &next.note.tokens), (1_003, &(1_006..11_003)));
        assert_eq!(next.note.claim, taken.note.claim);
        runs.went_on(NAME, &next, now);
        let terms = runs.terms(NAME, &claim, now);
        assert_eq!(terms.unwritten(1_005), None);
        assert!(terms.unwritten(11_000).is_some());
        assert_eq!(terms.unwritten(11_001), None);
        runs.forget(NAME);
        assert_eq!(runs.terms(NAME, &claim, now).unwritten(5_000), None);
    }

    #[test]
    fn only_so_many_keys_are_remembered() {
        let (mut runs, claim, now) = run_of(Duration::ZERO);
        let taken = runs.terms(NAME, &claim, now).written(&claim, 100, false).unwrap();
        for n in 0..2 * RUNS_MAX {
            runs.went_on(&n.to_be_bytes(), &taken, now);
        }
        assert_eq!(runs.0.len(), RUNS_MAX);
        runs.went_on(b"other", &taken, now + AHEAD_MAX);
        assert_eq!(runs.0.len(), 1);
    }
}
