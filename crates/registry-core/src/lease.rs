//! The lease of one held claim: until when it can be trusted, when to renew it, why it ended. No clock, no I/O.
//!
//! Everything here is arithmetic on moments that the caller has read. The one rule that matters: time is counted
//! from *before* the request was sent, less a margin for clocks that run at different rates.

use std::time::Duration;

use crate::capabilities::Capabilities;
use crate::clock::Moment;
use crate::error::LostReason;
use crate::mutant::{Mutant, mutated};

/// How long, how renewed, how far: what the holder asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseTerms {
    /// How long a grant or renewal lasts.
    pub(crate) length: Duration,
    /// Whether the keeper renews it.
    pub(crate) renews: bool,
    /// The holder's own upper limit, counted from the grant.
    pub(crate) max_hold: Option<Duration>,
}

/// What the keeper has to do about a lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing before this moment.
    At(Moment),
    /// Ask the store for this much more time.
    Renew(Duration),
    /// It is over.
    Over(LostReason),
}

#[derive(Debug)]
pub(crate) struct Lease {
    terms: LeaseTerms,
    valid_until: Moment,
    renew_at: Moment,
    /// The end that no renewal moves.
    cap: Option<Moment>,
    /// Renewals in a row that were sent and not answered.
    unanswered: u32,
}

impl Lease {
    /// A lease that the store granted for `granted` in answer to a request that left at `sent_at`.
    pub(crate) fn granted(
        terms: LeaseTerms,
        sent_at: Moment,
        granted: Duration,
        now: Moment,
    ) -> Self {
        let counted_from = if mutated(Mutant::DeadlineFromReply) { now } else { sent_at };
        let mut lease = Self {
            terms,
            valid_until: Moment::PAST,
            renew_at: Moment::PAST,
            cap: terms.max_hold.map(|max| sent_at.after(max)),
            unanswered: 0,
        };
        lease.extend(counted_from, granted);
        lease
    }

    /// The moment from which this lease must not be trusted any more.
    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    /// How long a grant or renewal lasts.
    pub(crate) fn length(&self) -> Duration {
        self.terms.length
    }

    /// Makes later renewals ask for `length`.
    pub(crate) fn set_length(&mut self, length: Duration) {
        self.terms.length = length;
    }

    /// What is to be done at `now`.
    pub(crate) fn due(&self, now: Moment) -> Due {
        if now >= self.valid_until {
            let at_cap = self.cap.is_some_and(|cap| self.valid_until >= cap);
            return Due::Over(if at_cap { LostReason::MaxHold } else { LostReason::Expired });
        }
        // A lease that already reaches its cap cannot get better.
        let renewable = self.terms.renews && self.cap.is_none_or(|cap| self.valid_until < cap);
        if !renewable || self.unanswered >= UNANSWERED_MAX {
            return Due::At(self.valid_until);
        }
        if now.after(TOGETHER) < self.renew_at {
            return Due::At(self.renew_at.min(self.valid_until));
        }
        Due::Renew(self.asks(now))
    }

    /// How much time a renewal at `now` asks for.
    pub(crate) fn asks(&self, now: Moment) -> Duration {
        match self.cap {
            None => self.terms.length,
            // Not below what stores take as a lease; the claim is given back at the cap in any case.
            Some(cap) => {
                self.terms.length.min(covering(cap.since(now))).max(Capabilities::LEASE_MIN)
            }
        }
    }

    /// Makes the next renewal due now, unless one is in flight.
    pub(crate) fn look(&mut self, now: Moment) {
        if self.unanswered == 0 {
            self.renew_at = self.renew_at.min(now);
        }
    }

    /// Notes that a renewal left at `now` and when to try again if it stays unanswered. True if the one before did.
    pub(crate) fn renewal_sent(&mut self, now: Moment, answer_limit: Duration) -> bool {
        self.unanswered += 1;
        self.renew_at = now.after(answer_limit);
        self.unanswered > 1
    }

    /// Notes that the renewal sent at `sent_at` was answered with `granted` more time.
    pub(crate) fn renewed(&mut self, sent_at: Moment, granted: Duration) {
        // The store is alive; what it left unanswered before says nothing any more.
        self.unanswered = 0;
        self.extend(sent_at, granted);
    }

    /// Notes that a renewal failed with an unknown outcome: the lease goes on as it was, the next try is at `retry_at`.
    pub(crate) fn renewal_failed(&mut self, retry_at: Moment) {
        self.unanswered = 0;
        self.renew_at = retry_at;
    }

    fn extend(&mut self, sent_at: Moment, granted: Duration) {
        let trusted = granted.saturating_sub(drift_margin(granted));
        let until = sent_at.after(trusted);
        // Replies may arrive out of order; an old one must not take back what a newer one gave.
        self.valid_until = self.valid_until.max(until);
        self.renew_at = self.renew_at.max(sent_at.after(granted / 3));
        if let Some(cap) = self.cap {
            self.valid_until = self.valid_until.min(cap);
        }
    }
}

/// What is taken off a lease because the store's clock and ours may run at different rates: 1 % and 2 ms, the margin of
/// the Redlock description (redis.io, "Distributed locks").
pub(crate) fn drift_margin(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// The lease that can be trusted for all of `span` in spite of the margin.
pub(crate) fn covering(span: Duration) -> Duration {
    span.saturating_add(span / 50).saturating_add(Duration::from_millis(4))
}

/// A renewal may start this much early, so that claims that are due at about the same time are renewed in one call.
pub(crate) const TOGETHER: Duration = Duration::from_millis(10);

/// A store that swallows this many renewals in a row is not asked again before one of them is answered.
const UNANSWERED_MAX: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: LeaseTerms =
        LeaseTerms { length: Duration::from_secs(30), renews: true, max_hold: None };

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_lease_counts_from_before_the_request_less_the_margin() {
        let sent = Moment::from_bits(0);
        let lease = Lease::granted(TERMS, sent, secs(30), sent.after(secs(5)));
        assert_eq!(lease.valid_until(), sent.after(secs(30) - drift_margin(secs(30))));
        assert_eq!(lease.due(sent.after(secs(5))), Due::At(sent.after(secs(10))));
        assert_eq!(lease.due(sent.after(secs(10))), Due::Renew(secs(30)));
        assert_eq!(lease.due(sent.after(secs(30))), Due::Over(LostReason::Expired));
    }

    #[test]
    fn a_late_old_reply_takes_nothing_back() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.renewed(sent.after(secs(10)), secs(30));
        let until = lease.valid_until();
        lease.renewed(sent.after(secs(1)), secs(30));
        assert_eq!(lease.valid_until(), until);
    }

    #[test]
    fn renewals_never_pass_max_hold_and_its_end_says_so() {
        let terms = LeaseTerms { max_hold: Some(secs(40)), ..TERMS };
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(terms, sent, secs(30), sent);
        assert_eq!(lease.due(sent.after(secs(20))), Due::Renew(covering(secs(20))));
        lease.renewed(sent.after(secs(20)), secs(30));
        assert_eq!(lease.valid_until(), sent.after(secs(40)));
        assert_eq!(lease.due(sent.after(secs(39))), Due::At(sent.after(secs(40))));
        assert_eq!(lease.due(sent.after(secs(40))), Due::Over(LostReason::MaxHold));
    }

    #[test]
    fn an_unrenewed_lease_is_never_renewed() {
        let terms = LeaseTerms { renews: false, ..TERMS };
        let sent = Moment::from_bits(0);
        let lease = Lease::granted(terms, sent, secs(30), sent);
        assert_eq!(lease.due(sent.after(secs(20))), Due::At(lease.valid_until()));
    }

    #[test]
    fn a_silent_store_is_asked_a_bounded_number_of_times() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        let mut now = sent.after(secs(10));
        let mut asked = 0;
        while let Due::Renew(_) = lease.due(now) {
            lease.renewal_sent(now, secs(1));
            now = now.after(secs(1));
            asked += 1;
        }
        assert_eq!(asked, UNANSWERED_MAX);
        assert_eq!(lease.due(now), Due::At(lease.valid_until()));
    }
}
