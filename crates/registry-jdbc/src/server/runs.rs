//! Grants of one key after another to the same session, which need not all be written down. Knows no server and no connection.
//!
//! A grant changes the key's row, so that tokens grow and a fence holds. If nobody else was granted the key since this session was, the row still says so,
//! and then there is nothing to be changed: the session only reads it. For that the row reserves the tokens of some time to come. A reserved token is only
//! given out when the server's clock has reached it, so tokens are above those that a crash may have swallowed, with the row that reserved them, as long as the clock is.
//!
//! What a session leaves of its reserve, others have to jump over, and are then ahead of the clock. So it reserves no more than a part of the time for which
//! nobody else has wanted the key.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use registry_core::{Claim, ClaimId, FencingToken};
use tokio::time::Instant;

/// What was noted in a row by this session, and the tokens that it has reserved and not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) claim: ClaimId,
    pub(crate) tokens: Range<i64>,
}

/// How a grant may come by its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Terms {
    /// What the row says, if nobody else was granted the key since.
    pub(crate) last: Option<Note>,
    /// How many tokens the grant itself needs.
    own: i64,
    /// How many are to be reserved with them, if the row still says what it did.
    ahead: i64,
}

/// A grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) token: FencingToken,
    /// What stands in the row now, with the tokens that this grant has left of it.
    pub(crate) note: Note,
    /// Whether nobody else was granted the key since the last time.
    pub(crate) goes_on: bool,
}

impl Terms {
    /// How many tokens to write down.
    pub(crate) const fn block(&self, goes_on: bool) -> i64 {
        if goes_on { self.own.saturating_add(self.ahead) } else { self.own }
    }

    /// The grant if the row need not be changed, because the clock has come to a token that is reserved for this session and nobody has had.
    pub(crate) fn unwritten(&self, now: i64) -> Option<Taken> {
        let last = self.last.as_ref()?;
        let rest = now.checked_add(self.own)?;
        if now < last.tokens.start || last.tokens.end < rest {
            return None;
        }
        let note = Note { claim: last.claim, tokens: rest..last.tokens.end };
        Some(Taken { token: FencingToken::try_from(now).ok()?, note, goes_on: true })
    }

    /// The grant if the row was changed for it. `None` if that is no token.
    pub(crate) fn written(&self, claim: &Claim, token: i64, goes_on: bool) -> Option<Taken> {
        let tokens = token.checked_add(self.own)?..token.checked_add(self.block(goes_on))?;
        let note = Note { claim: claim.id(), tokens };
        Some(Taken { token: FencingToken::try_from(token).ok()?, note, goes_on })
    }
}

/// What a session knows of the keys that it was granted lately, by the names of their locks. It is worth nothing in another session.
#[derive(Debug, Default)]
pub(crate) struct Runs(HashMap<Vec<u8>, Run>);

/// Grants that no other came between.
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

    /// How much time to reserve tokens for; none, if the next grant is likely to come after that.
    fn ahead(&self, now: Instant) -> Duration {
        let ahead = (now.saturating_duration_since(self.began) / PART_OF_RUN).min(AHEAD_MAX);
        let pause = now.saturating_duration_since(self.latest);
        if ahead > pause { ahead } else { Duration::ZERO }
    }
}

impl Runs {
    /// For a grant that is asked for now.
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

    /// It was granted.
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

    /// The next grant has to change the row, whatever it says.
    pub(crate) fn forget(&mut self, name: &[u8]) {
        self.0.remove(name);
    }

    /// The session is another one.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// For no longer than that tokens are reserved, and a run lasts without a grant. Far shorter than what rows of free keys are kept.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// Tokens are reserved for this part of the time that the run has lasted.
const PART_OF_RUN: u32 = 8;

/// So many keys are remembered. Others have their rows changed with each grant.
const RUNS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use registry_core::Key;

    use super::*;

    const NAME: &[u8] = b"name";

    fn claim() -> Claim {
        Claim::new(Key::new("orders/42").unwrap(), Duration::from_secs(30)).with_token_block(3)
    }

    /// A run that has lasted for `lasted`, with a grant just now.
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
        // Whoever comes rarely reserves nothing, and there is a limit.
        let later = runs.terms(NAME, &claim, now + Duration::from_millis(40));
        assert_eq!(later.block(true), 3);
        let (runs, claim, now) = run_of(Duration::from_secs(3_600));
        assert_eq!(runs.terms(NAME, &claim, now).block(true), 3 + 1_000_000);
        assert_eq!(runs.terms(NAME, &claim, now + AHEAD_MAX).last, None);
        // Somebody else came: from the beginning.
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
        // The clock stands still, or was put back.
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
