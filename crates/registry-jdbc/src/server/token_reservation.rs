//! Token reservations. With a reservation, a session can be granted the same key again without a
//! write. This module uses no connection and no SQL. Used by `session`.
//!
//! A grant normally updates the key's row, so that the next token is larger. If the row still
//! contains this session's last claim, no other client was granted the key since. Then reading the
//! row is enough.
//!
//! Tokens are server times in microseconds. A write may reserve all tokens up to a time slightly
//! ahead of the clock. The session issues a reserved token only when the server's clock has reached
//! it. A crash may lose a row with its reservation. This is safe: new tokens come from the clock
//! and exceed every issued token, unless the clock was set back.
//!
//! After a reservation, another client's first token may be ahead of the clock. To limit this
//! difference, a reservation covers only a fraction of the time since the session's uninterrupted
//! series of grants began. While the tokens are ahead of the clock, no session reserves: each write
//! would otherwise move the tokens further ahead by a whole reservation.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use registry_core::{Claim, ClaimId, FencingToken};
use tokio::time::Instant;

/// What this session has written to a row: its claim, and the reserved tokens that are still
/// unused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WrittenRow {
    pub(crate) claim: ClaimId,
    pub(crate) tokens: Range<i64>,
}

/// How an attempt of a session may obtain its token, given the session's earlier grants of the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenPlan {
    /// The expected content of the row, if this session was granted the key recently.
    pub(crate) last_row: Option<WrittenRow>,
    /// The number of tokens that the grant itself needs.
    block_size: i64,
    /// The number of tokens to reserve in addition, if the row is unchanged and the tokens are not
    /// ahead of the clock.
    reserve: i64,
}

/// A grant that a session received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionGrant {
    pub(crate) token: FencingToken,
    /// The row after this grant. Its `tokens` are the reserved tokens after those of this grant.
    pub(crate) row: WrittenRow,
    /// Whether no other client was granted the key since this session's last grant.
    pub(crate) is_unchanged: bool,
}

impl TokenPlan {
    /// Returns how many tokens the write takes: those of the grant, and the reservation if one is
    /// due. `now_if_unchanged` is the server's time, if no other client was granted the key since
    /// this session's last grant.
    pub(crate) fn tokens_to_write(&self, now_if_unchanged: Option<i64>) -> i64 {
        let last_row = self.last_row.as_ref();
        let reserves =
            last_row.zip(now_if_unchanged).is_some_and(|(last, now)| last.tokens.start <= now);
        if reserves { self.block_size.saturating_add(self.reserve) } else { self.block_size }
    }

    /// Returns a grant that needs no write. Its tokens begin at `now`, the server's time. Returns
    /// `None` unless all of them are reserved and unused.
    pub(crate) fn grant_from_reservation(&self, now: i64) -> Option<SessionGrant> {
        let last = self.last_row.as_ref()?;
        let next_unused = now.checked_add(self.block_size)?;
        if now < last.tokens.start || last.tokens.end < next_unused {
            return None;
        }
        let row = WrittenRow { claim: last.claim, tokens: next_unused..last.tokens.end };
        Some(SessionGrant { token: FencingToken::try_from(now).ok()?, row, is_unchanged: true })
    }

    /// Returns the grant after a write of the row with `token`. Returns `None` if `token` is not a
    /// valid token.
    pub(crate) fn grant_from_write(
        &self,
        claim: &Claim,
        token: i64,
        now_if_unchanged: Option<i64>,
    ) -> Option<SessionGrant> {
        let tokens = token.checked_add(self.block_size)?
            ..token.checked_add(self.tokens_to_write(now_if_unchanged))?;
        let row = WrittenRow { claim: claim.id(), tokens };
        let is_unchanged = now_if_unchanged.is_some();
        Some(SessionGrant { token: FencingToken::try_from(token).ok()?, row, is_unchanged })
    }
}

/// The recent grants of one session, by lock name. They are invalid in another session.
#[derive(Debug, Default)]
pub(crate) struct TokenReservations(HashMap<Vec<u8>, GrantSeries>);

/// Consecutive grants of one key to this session, without another client's grant in between.
#[derive(Debug)]
struct GrantSeries {
    started_at: Instant,
    last_grant_at: Instant,
    /// The first token of the last grant.
    last_token: FencingToken,
    row: WrittenRow,
}

impl GrantSeries {
    fn has_ended(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_grant_at) >= RESERVATION_TIME_MAX
    }

    /// Returns the length of time for which to reserve tokens. Zero if the pause since the last
    /// grant was at least as long: the next grant would probably come too late.
    fn reservation_time(&self, now: Instant) -> Duration {
        let reserve = (now.saturating_duration_since(self.started_at) / RESERVE_DIVISOR)
            .min(RESERVATION_TIME_MAX);
        let pause = now.saturating_duration_since(self.last_grant_at);
        if reserve > pause { reserve } else { Duration::ZERO }
    }
}

impl TokenReservations {
    /// Returns the token plan of a grant that is requested now.
    pub(crate) fn plan(&self, name: &[u8], claim: &Claim, now: Instant) -> TokenPlan {
        let series = self.0.get(name).filter(|series| !series.has_ended(now));
        let reserve = series.map_or(Duration::ZERO, |series| series.reservation_time(now));
        TokenPlan {
            last_row: series.map(|series| series.row.clone()),
            block_size: i64::from(claim.token_block()),
            // The clock's unit is a microsecond.
            reserve: i64::try_from(reserve.as_micros()).unwrap_or(0),
        }
    }

    /// Records a grant, unless [`SERIES_MAX`] other keys are remembered.
    pub(crate) fn record_grant(&mut self, name: &[u8], granted: &SessionGrant, now: Instant) {
        if self.0.len() >= SERIES_MAX {
            self.0.retain(|_, series| !series.has_ended(now));
        }
        let previous =
            self.0.get(name).filter(|series| granted.is_unchanged && !series.has_ended(now));
        let started_at = previous.map_or(now, |series| series.started_at);
        if self.0.len() < SERIES_MAX || self.0.contains_key(name) {
            let (last_token, row) = (granted.token, granted.row.clone());
            let series = GrantSeries { started_at, last_grant_at: now, last_token, row };
            self.0.insert(name.to_vec(), series);
        }
    }

    /// Makes the tokens available again that the released grant with the first token `token` did
    /// not use. Otherwise, a grant within the next microseconds could not use the reservation.
    pub(crate) fn return_unused(&mut self, name: &[u8], token: FencingToken, used: u32) {
        if let Some(series) = self.0.get_mut(name).filter(|series| series.last_token == token) {
            let first_unused = i64::from(token).saturating_add(i64::from(used));
            let tokens = &mut series.row.tokens;
            tokens.start = tokens.start.min(first_unused);
        }
    }

    /// Removes the key, so that its next grant must write the row.
    pub(crate) fn remove(&mut self, name: &[u8]) {
        self.0.remove(name);
    }

    /// Removes all keys. A new session must write each row again.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The maximum time for which tokens are reserved, and the maximum pause within a series. This time
/// is far shorter than the time for which rows of free keys are kept.
const RESERVATION_TIME_MAX: Duration = Duration::from_secs(1);

/// Tokens are reserved for the duration of the series divided by this number.
const RESERVE_DIVISOR: u32 = 8;

/// The maximum number of remembered keys. A grant of any other key writes the row.
const SERIES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use registry_core::Key;

    use super::*;

    const NAME: &[u8] = b"name";

    fn claim() -> Claim {
        Claim::new(Key::new("orders/42").unwrap(), Duration::from_secs(30)).with_token_block(3)
    }

    /// Returns reservations with one series of this duration, its claim, and the time of its last
    /// grant.
    fn series_of(duration: Duration) -> (TokenReservations, Claim, Instant) {
        let (mut reservations, claim, started_at) =
            (TokenReservations::default(), claim(), Instant::now());
        let granted = reservations
            .plan(NAME, &claim, started_at)
            .grant_from_write(&claim, 100, None)
            .unwrap();
        reservations.record_grant(NAME, &granted, started_at);
        reservations.0.get_mut(NAME).unwrap().last_grant_at = started_at + duration;
        (reservations, claim, started_at + duration)
    }

    #[test]
    fn a_reservation_is_a_part_of_the_time_without_other_grants() {
        let (reservations, claim, now) = series_of(Duration::from_millis(80));
        let plan = reservations.plan(NAME, &claim, now);
        let tokens = (plan.tokens_to_write(Some(103)), plan.tokens_to_write(None));
        assert_eq!(tokens, (3 + 10_000, 3));
        // Rare grants reserve nothing, and the reservation has a limit.
        let later = reservations.plan(NAME, &claim, now + Duration::from_millis(40));
        assert_eq!(later.tokens_to_write(Some(103)), 3);
        let (reservations, claim, now) = series_of(Duration::from_secs(3_600));
        assert_eq!(reservations.plan(NAME, &claim, now).tokens_to_write(Some(103)), 3 + 1_000_000);
        assert_eq!(reservations.plan(NAME, &claim, now + RESERVATION_TIME_MAX).last_row, None);
        // After another client's grant a new series starts.
        let mut reservations = reservations;
        let granted =
            reservations.plan(NAME, &claim, now).grant_from_write(&claim, 500, None).unwrap();
        reservations.record_grant(NAME, &granted, now);
        assert_eq!(reservations.plan(NAME, &claim, now).tokens_to_write(Some(503)), 3);
    }

    #[test]
    fn tokens_ahead_of_the_clock_are_not_moved_further_ahead_by_a_reservation() {
        let (mut reservations, claim, now) = series_of(Duration::from_secs(8));
        let plan = reservations.plan(NAME, &claim, now);
        assert_eq!(plan.tokens_to_write(Some(102)), 3);
        assert_eq!(plan.tokens_to_write(Some(103)), 3 + 1_000_000);
        let granted = plan.grant_from_write(&claim, 103, Some(102)).unwrap();
        assert_eq!(granted.row.tokens, 106..106);
        assert!(granted.is_unchanged, "the series continues");
        reservations.record_grant(NAME, &granted, now);
        let plan = reservations.plan(NAME, &claim, now);
        assert_eq!(plan.tokens_to_write(Some(105)), 3);
        assert_eq!(plan.tokens_to_write(Some(106)), 3 + 1_000_000);
    }

    #[test]
    fn a_reserved_token_is_issued_once_and_not_before_its_time() {
        let (mut reservations, claim, now) = series_of(Duration::from_millis(80));
        let granted = reservations
            .plan(NAME, &claim, now)
            .grant_from_write(&claim, 1_000, Some(1_000))
            .unwrap();
        assert_eq!(granted.row.tokens, 1_003..11_003);
        reservations.record_grant(NAME, &granted, now);
        let plan = reservations.plan(NAME, &claim, now);
        // The clock has not advanced or was set back.
        assert_eq!(plan.grant_from_reservation(1_002), None);
        let next = plan.grant_from_reservation(1_003).unwrap();
        assert_eq!((i64::from(next.token), &next.row.tokens), (1_003, &(1_006..11_003)));
        assert_eq!(next.row.claim, granted.row.claim);
        reservations.record_grant(NAME, &next, now);
        let plan = reservations.plan(NAME, &claim, now);
        assert_eq!(plan.grant_from_reservation(1_005), None);
        assert!(plan.grant_from_reservation(11_000).is_some());
        assert_eq!(plan.grant_from_reservation(11_001), None);
        reservations.remove(NAME);
        assert_eq!(reservations.plan(NAME, &claim, now).grant_from_reservation(5_000), None);
    }

    #[test]
    fn a_release_returns_the_tokens_that_its_grant_did_not_use() {
        let (mut reservations, claim, now) = series_of(Duration::from_millis(80));
        let plan = reservations.plan(NAME, &claim, now);
        let granted = plan.grant_from_write(&claim, 1_000, Some(1_000)).unwrap();
        reservations.record_grant(NAME, &granted, now);
        let next_start = |reservations: &TokenReservations| {
            let plan = reservations.plan(NAME, &claim, now);
            [1_000, 1_001, 1_002, 1_003].map(|now| plan.grant_from_reservation(now).is_some())
        };
        assert_eq!(next_start(&reservations), [false, false, false, true]);
        let other = FencingToken::new(999).unwrap();
        reservations.return_unused(NAME, other, 1);
        assert_eq!(next_start(&reservations), [false, false, false, true]);
        reservations.return_unused(NAME, granted.token, 2);
        assert_eq!(next_start(&reservations), [false, false, true, true]);
        reservations.return_unused(NAME, granted.token, 3);
        assert_eq!(next_start(&reservations), [false, false, true, true], "returned only once");
    }

    #[test]
    fn the_number_of_remembered_keys_is_limited() {
        let (mut reservations, claim, now) = series_of(Duration::ZERO);
        let granted =
            reservations.plan(NAME, &claim, now).grant_from_write(&claim, 100, None).unwrap();
        for n in 0..2 * SERIES_MAX {
            reservations.record_grant(&n.to_be_bytes(), &granted, now);
        }
        assert_eq!(reservations.0.len(), SERIES_MAX);
        reservations.record_grant(b"other", &granted, now + RESERVATION_TIME_MAX);
        assert_eq!(reservations.0.len(), 1);
    }
}
