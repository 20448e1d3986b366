//! The lease of one held claim: until when it can be trusted, when to renew it, why it ended. No clock, no I/O.
//!
//! Everything here is arithmetic on moments that the caller has read. The one rule that matters: time is counted
//! from *before* the request was sent, less a margin for clocks that run at different rates.

use std::time::Duration;

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
    /// The shortest lease that the store takes.
    pub(crate) shortest: Duration,
}

/// What the keeper has to do about a lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing before this moment.
    At(Moment),
    /// Ask the store for this much more time.
    Renew(Duration),
    /// Ask the store for this much time to hear whether the claim is still held.
    Look(Duration),
    /// It is over.
    Over(LostReason),
}

#[derive(Debug)]
pub(crate) struct Lease {
    // Ten thousand locks have ten thousand of these: what is not there is a moment that never comes.
    length: Span,
    shortest: Span,
    renews: bool,
    valid_until: Moment,
    renew_at: Moment,
    /// The end that no renewal moves; in the [future](Moment::FUTURE) if there is none.
    cap: Moment,
    /// Renewals in a row that were sent and not answered.
    unanswered: u32,
    /// Looks in a row that were sent and not answered. Counted apart from renewals: a hint must not use up their tries.
    unanswered_looks: u32,
    /// Looks in a row that were called for before it was time for another.
    restless: u32,
    doubt: Doubt,
    /// When to look for the first time, as long as the claim has not been confirmed; otherwise in the [future](Moment::FUTURE).
    first_look_at: Moment,
    last_is_look: bool,
    /// The last request that was answered failed, and `quiet` is the pause after that.
    last_failed: bool,
    /// When the keeper's last request left.
    last_sent_at: Moment,
    /// No request is sent: one is being waited for, or has failed, or has only just been answered.
    quiet: Pause,
}

/// Whether the claim may have ended without our knowledge, as far as the store tells by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// Nothing speaks for it.
    None,
    /// News of it came after the last request had left.
    Heard,
    /// A request that left after the news has not been answered yet.
    Asked,
}

/// A length of time in half the room of a [`Duration`].
#[derive(Debug, Clone, Copy)]
struct Span(u64);

impl Span {
    /// Some centuries at most.
    fn of(span: Duration) -> Self {
        Self(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }

    fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

/// A time in which nothing is asked. It may be cut short a little, so that much is asked together.
#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Moment,
    at_least_until: Moment,
}

impl Pause {
    const NONE: Self = Self { until: Moment::PAST, at_least_until: Moment::PAST };

    fn starting(now: Moment, span: Duration) -> Self {
        Self { until: now.after(span), at_least_until: now.after(span - TOGETHER.min(span / 2)) }
    }

    fn lasts(&self, now: Moment) -> bool {
        now < self.at_least_until
    }
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
            length: Span::of(terms.length),
            shortest: Span::of(terms.shortest),
            renews: terms.renews,
            valid_until: Moment::PAST,
            renew_at: Moment::PAST,
            cap: terms.max_hold.map_or(Moment::FUTURE, |max| sent_at.after(max)),
            unanswered: 0,
            unanswered_looks: 0,
            restless: 0,
            doubt: Doubt::None,
            first_look_at: Moment::FUTURE,
            last_is_look: false,
            last_failed: false,
            last_sent_at: Moment::PAST,
            quiet: Pause::NONE,
        };
        lease.extend(counted_from, granted);
        lease
    }

    /// Has the claim looked after at `at`, unless it is confirmed before that.
    pub(crate) fn look_first_at(&mut self, at: Moment) {
        self.first_look_at = at;
    }

    /// The moment from which this lease must not be trusted any more.
    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    /// How long a grant or renewal lasts.
    pub(crate) fn length(&self) -> Duration {
        self.length.get()
    }

    /// Makes later renewals ask for `length`.
    pub(crate) fn set_length(&mut self, length: Duration) {
        self.length = Span::of(length);
    }

    /// What is to be done at `now`.
    pub(crate) fn due(&self, now: Moment) -> Due {
        if now >= self.valid_until {
            let at_cap = self.valid_until >= self.cap;
            return Due::Over(if at_cap { LostReason::MaxHold } else { LostReason::Expired });
        }
        if self.unanswered >= UNANSWERED_MAX {
            return Due::At(self.valid_until);
        }
        let quiet = self.quiet.lasts(now);
        let mut next = self.valid_until;
        if self.can_be_renewed() {
            if now.after(TOGETHER) >= self.renew_at && !quiet {
                return Due::Renew(self.asks(now));
            }
            next = next.min(self.renew_at.max(self.quiet.until));
        }
        if let Some(look_at) = self.look_at(now) {
            if now.after(TOGETHER) >= look_at && !quiet {
                return Due::Look(self.look_asks(now));
            }
            next = next.min(look_at.max(self.quiet.until));
        }
        Due::At(next)
    }

    /// How much time to ask for at `now`, before it is due, because others are being renewed. `None` if it is due much later: in more than a twelfth of
    /// the lease, a quarter of the time between two renewals; if it costs nothing, `together` with the others, in more than a quarter of the lease.
    pub(crate) fn joins(&self, now: Moment, together: bool) -> Option<Duration> {
        let soon = self.length() / if together { 4 } else { 12 };
        let is_soon = now.after(soon) >= self.renew_at;
        let may_join = now < self.valid_until
            && self.can_be_renewed()
            && self.unanswered == 0
            && !self.quiet.lasts(now);
        (is_soon && may_join).then(|| self.asks(now))
    }

    /// A lease that already reaches its cap cannot get better.
    fn can_be_renewed(&self) -> bool {
        self.renews && self.valid_until < self.cap
    }

    /// When to look, if there is a reason to.
    fn look_at(&self, now: Moment) -> Option<Moment> {
        let at = if self.doubt == Doubt::None { self.first_look_at } else { now };
        if at == Moment::FUTURE {
            return None;
        }
        let may_look = self.unanswered_looks < UNANSWERED_MAX
            // What ends before that anyway would be made longer by a look.
            && (self.can_be_renewed() || self.valid_until.since(now) > self.shortest.get());
        may_look.then_some(at)
    }

    /// How much time a look at `now` asks for: a renewal's where there are renewals, and otherwise as little as the store
    /// takes. Renewing never shortens, so that adds nothing to what the lease still has.
    fn look_asks(&self, now: Moment) -> Duration {
        if self.can_be_renewed() { self.asks(now) } else { self.shortest.get() }
    }

    /// How much time a renewal at `now` asks for.
    pub(crate) fn asks(&self, now: Moment) -> Duration {
        if self.cap == Moment::FUTURE {
            return self.length();
        }
        // Not below what stores take as a lease; the claim is given back at the cap in any case.
        self.length().min(covering(self.cap.since(now))).max(self.shortest.get())
    }

    /// Notes that a renewal left at `now` and when to try again if it stays unanswered. True if the one before did.
    pub(crate) fn renewal_sent(&mut self, now: Moment, answer_limit: Duration) -> bool {
        self.unanswered += 1;
        self.renew_at = now.after(answer_limit);
        self.request_sent(now, answer_limit, false);
        self.unanswered > 1
    }

    /// Notes that a look left at `now`, and so on. The renewal to come is due when it was.
    pub(crate) fn look_sent(&mut self, now: Moment, answer_limit: Duration) -> bool {
        self.unanswered_looks += 1;
        self.request_sent(now, answer_limit, true);
        self.unanswered_looks > 1
    }

    fn request_sent(&mut self, now: Moment, answer_limit: Duration, is_look: bool) {
        if self.doubt == Doubt::Heard {
            self.doubt = Doubt::Asked;
        }
        self.last_is_look = is_look;
        self.last_failed = false;
        self.last_sent_at = now;
        self.quiet = Pause::starting(now, answer_limit);
    }

    /// Notes that the store has told of a change by itself. True if that is new.
    pub(crate) fn heard(&mut self, now: Moment) -> bool {
        if self.doubt == Doubt::None && !self.quiet.lasts(now) {
            self.restless = 0;
        }
        let is_sooner = self.last_failed && self.shorten_pause(now);
        let before = std::mem::replace(&mut self.doubt, Doubt::Heard);
        before != Doubt::Heard || is_sooner
    }

    /// Shortens the pause after a failure, because the hint may mean that the store can be reached again. Hints that go on while it
    /// fails shorten it less and less.
    fn shorten_pause(&mut self, now: Moment) -> bool {
        let pause = Pause::starting(now, self.looks_apart());
        let is_shorter = pause.until < self.quiet.until;
        if is_shorter {
            self.quiet = pause;
            self.restless = self.restless.saturating_add(1);
        }
        is_shorter
    }

    /// Whether the store has told of a change and not confirmed the claim since.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.doubt != Doubt::None
    }

    /// Notes that the keeper's request of `sent_at` was answered: the claim was still held. True if the answer is one to a
    /// renewal, and false where there are only looks.
    pub(crate) fn confirmed(&mut self, sent_at: Moment) -> bool {
        self.unanswered_looks = 0;
        // The answer to an older request says nothing about what was heard since.
        if sent_at == self.last_sent_at {
            self.quiet = Pause::starting(sent_at, self.looks_apart());
            self.first_look_at = Moment::FUTURE;
            if self.doubt != Doubt::None {
                self.restless = self.restless.saturating_add(1);
            }
            if self.doubt == Doubt::Asked {
                self.doubt = Doubt::None;
            }
        }
        self.renews
    }

    /// How far apart looks are: further, the more of them were for nothing.
    fn looks_apart(&self) -> Duration {
        let longest = self.retry_pause().max(LOOKS_APART);
        LOOKS_APART.saturating_mul(1 << self.restless.min(6)).min(longest)
    }

    /// How long nothing is asked after a failure. Some dozen tries fit into the two thirds of the lease that are left then.
    pub(crate) fn retry_pause(&self) -> Duration {
        (self.length() / 20).min(Duration::from_secs(1))
    }

    /// Notes that the renewal sent at `sent_at` was answered with `granted` more time.
    pub(crate) fn renewed(&mut self, sent_at: Moment, granted: Duration) {
        // The store is alive; what it left unanswered before says nothing any more.
        self.unanswered = 0;
        self.extend(sent_at, granted);
    }

    /// Notes that the keeper's request of `sent_at` failed with an unknown outcome: the lease goes on as it was, the next try
    /// is after `pause`. True if it was one to renew.
    pub(crate) fn request_failed(&mut self, sent_at: Moment, now: Moment, pause: Duration) -> bool {
        self.unanswered = 0;
        self.unanswered_looks = 0;
        self.last_failed = true;
        self.quiet = Pause::starting(now, pause);
        // A look that fails does not bring renewals forward.
        if !self.last_is_look || sent_at != self.last_sent_at {
            self.renew_at = self.quiet.until;
        }
        self.renews
    }

    fn extend(&mut self, sent_at: Moment, granted: Duration) {
        let trusted = granted.saturating_sub(drift_margin(granted));
        let until = sent_at.after(trusted);
        // Replies may arrive out of order; an old one must not take back what a newer one gave.
        self.valid_until = self.valid_until.max(until);
        self.renew_at = self.renew_at.max(sent_at.after(granted / 3));
        self.valid_until = self.valid_until.min(self.cap);
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

/// A claim is not looked after again sooner than this, less [`TOGETHER`], and later the longer news goes on without pause: a store
/// that takes our own renewals for news must not keep us asking.
const LOOKS_APART: Duration = Duration::from_millis(20);

/// A store that swallows this many renewals in a row is not asked again before one of them is answered.
const UNANSWERED_MAX: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: LeaseTerms = LeaseTerms {
        length: Duration::from_secs(30),
        renews: true,
        max_hold: None,
        shortest: SHORTEST,
    };
    const SHORTEST: Duration = Duration::from_millis(100);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_hint_after_a_failed_look_brings_the_next_one_forward_and_a_storm_of_hints_does_not() {
        let began = Moment::PAST.after(secs(1_000));
        let mut lease = Lease::granted(TERMS, began, TERMS.length, began);
        let mut now = began.after(secs(1));
        lease.heard(now);
        let mut looks = 0;
        // A store that cannot be reached for a minute and is hinted at all the time.
        while now < began.after(secs(20)) {
            if matches!(lease.due(now), Due::Look(_) | Due::Renew(_)) {
                looks += 1;
                lease.look_sent(now, secs(3));
                lease.request_failed(now, now, secs(1));
            }
            now = now.after(Duration::from_millis(5));
            lease.heard(now);
        }
        assert!((19..40).contains(&looks), "{looks} looks in 19 s");

        let mut lease = Lease::granted(TERMS, began, TERMS.length, began);
        let now = began.after(secs(1));
        lease.heard(now);
        lease.look_sent(now, secs(3));
        lease.request_failed(now, now, secs(1));
        let later = now.after(Duration::from_millis(100));
        assert!(matches!(lease.due(later), Due::At(_)), "the pause after the failure lasts");
        assert!(lease.heard(later), "the keeper has to look at its schedule again");
        let soon = later.after(Duration::from_millis(25));
        assert!(matches!(lease.due(soon), Due::Look(_)), "the store may be back");
    }

    #[test]
    fn a_renewal_joins_others_unless_there_was_one_a_moment_ago() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        assert_eq!(lease.joins(sent.after(secs(7)), false), None, "it is due at 10");
        assert_eq!(lease.joins(sent.after(secs(8)), false), Some(secs(30)));
        assert_eq!(lease.joins(sent.after(secs(2)), true), None);
        assert_eq!(lease.joins(sent.after(secs(3)), true), Some(secs(30)));
        let now = sent.after(secs(4));
        lease.renewal_sent(now, secs(3));
        assert_eq!(lease.joins(now, true), None, "it is under way");
        lease.confirmed(now);
        lease.renewed(now, secs(30));
        assert_eq!(lease.due(now), Due::At(sent.after(secs(14))));
        let fixed = LeaseTerms { renews: false, ..TERMS };
        let lease = Lease::granted(fixed, sent, secs(30), sent);
        assert_eq!(lease.joins(sent.after(secs(9)), true), None);
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

    #[test]
    fn a_failed_request_is_not_repeated_at_once_however_short_the_lease() {
        let length = Duration::from_millis(100);
        let terms = LeaseTerms { length, ..TERMS };
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(terms, sent, length, sent);
        let first = sent.after(length / 3);
        assert_eq!(lease.due(first), Due::Renew(length));
        lease.renewal_sent(first, length / 6);
        lease.request_failed(first, first, lease.retry_pause());
        assert_eq!(lease.due(first), Due::At(first.after(length / 20)));
        assert_eq!(lease.due(first.after(length / 20)), Due::Renew(length));
    }

    #[test]
    fn news_is_looked_into_at_once_and_renewals_go_on_as_before() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        let now = sent.after(secs(1));
        assert!(lease.heard(now) && !lease.heard(now));
        assert_eq!(lease.due(now), Due::Look(secs(30)));
        lease.look_sent(now, secs(3));
        assert_eq!(lease.due(now), Due::At(now.after(secs(3))), "the answer is waited for");
        let failed_at = now.after(secs(2));
        lease.request_failed(now, failed_at, secs(1));
        assert_eq!(lease.due(failed_at), Due::At(failed_at.after(secs(1))));
        let now = failed_at.after(secs(1));
        assert_eq!(lease.due(now), Due::Look(secs(30)), "it is asked until it is answered");
        lease.look_sent(now, secs(3));
        assert!(lease.confirmed(now) && !lease.is_in_doubt());
        assert_eq!(lease.due(now), Due::At(sent.after(secs(10))), "a look is no renewal");
    }

    #[test]
    fn a_first_look_is_taken_once_and_leaves_the_claim_free_to_be_handed_over() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.look_first_at(sent.after(secs(1)));
        assert_eq!(lease.due(sent), Due::At(sent.after(secs(1))));
        let now = sent.after(secs(1));
        assert_eq!(lease.due(now), Due::Look(secs(30)));
        lease.look_sent(now, secs(3));
        assert!(!lease.is_in_doubt());
        lease.request_failed(now, now, secs(1));
        let now = now.after(secs(1));
        assert_eq!(lease.due(now), Due::Look(secs(30)), "it is asked until it is answered");
        lease.look_sent(now, secs(3));
        lease.confirmed(now);
        assert_eq!(lease.due(now.after(secs(4))), Due::At(sent.after(secs(10))));
    }

    #[test]
    fn a_renewal_is_as_good_as_a_first_look() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.look_first_at(sent.after(secs(12)));
        let now = sent.after(secs(10));
        assert_eq!(lease.due(now), Due::Renew(secs(30)));
        lease.renewal_sent(now, secs(3));
        lease.confirmed(now);
        lease.renewed(now, secs(30));
        assert_eq!(lease.due(now), Due::At(sent.after(secs(20))));
    }

    #[test]
    fn an_answer_to_an_older_request_settles_no_doubt() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.renewal_sent(sent.after(secs(10)), secs(3));
        lease.renewal_sent(sent.after(secs(13)), secs(3));
        lease.heard(sent.after(secs(14)));
        lease.renewal_sent(sent.after(secs(16)), secs(3));
        lease.confirmed(sent.after(secs(13)));
        assert!(lease.is_in_doubt());
        lease.confirmed(sent.after(secs(16)));
        assert!(!lease.is_in_doubt());
    }

    #[test]
    fn what_is_not_renewed_is_looked_after_without_being_made_longer() {
        let sent = Moment::from_bits(0);
        let fixed = LeaseTerms { renews: false, ..TERMS };
        let capped = LeaseTerms { max_hold: Some(secs(20)), ..TERMS };
        for terms in [fixed, capped] {
            let mut lease = Lease::granted(terms, sent, secs(30), sent);
            lease.heard(sent);
            assert_eq!(lease.due(sent), Due::Look(SHORTEST));
            let end = lease.valid_until();
            let near = Moment::from_bits(end.to_bits() - 50_000_000);
            assert_eq!(lease.due(near), Due::At(end), "the look would reach beyond the end");
        }
    }
}
