//! The lease of one held claim: how long it is valid, when to renew it, why it ended. No clock, no
//! I/O.
//!
//! Everything here is arithmetic on times that the caller has read. Called by `held`. The most
//! important rule: a lease counts from *before* the request was sent, less a margin for clocks that
//! run at different rates.

use std::time::Duration;

use crate::clock::Moment;
use crate::error::LostReason;
use crate::mutant::{Mutant, mutated};

/// The lease that the holder requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseTerms {
    /// The length of a grant or renewal.
    pub(crate) length: Duration,
    /// Whether the lease renewer extends it.
    pub(crate) renews: bool,
    /// The maximum hold, counted from the grant.
    pub(crate) max_hold: Option<Duration>,
    /// The shortest lease that the store accepts.
    pub(crate) shortest: Duration,
}

/// What the lease renewer must do for a lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing before this time.
    At(Moment),
    /// Request a lease of this length.
    Renew(Duration),
    /// Request a lease of this length, to verify that the claim is still held.
    Verify(Duration),
    /// The lease is over.
    Over(LostReason),
}

#[derive(Debug)]
pub(crate) struct Lease {
    // A process may hold ten thousand locks, so this type is small: an absent time is
    // `Moment::FUTURE`, not an `Option`.
    length: Span,
    shortest: Span,
    renews: bool,
    valid_until: Moment,
    renew_at: Moment,
    /// The end that no renewal changes; in the [future](Moment::FUTURE) if there is none.
    cap: Moment,
    /// The number of consecutive renewals without a response.
    unanswered: u32,
    /// The number of consecutive verifications without a response. Counted separately:
    /// invalidations must not use up the tries of renewals.
    unanswered_verifications: u32,
    /// The number of consecutive verifications caused by invalidations without a quiet interval in
    /// between.
    consecutive_invalidations: u32,
    suspect: Suspect,
    /// When to verify the claim for the first time, until it is confirmed; then in the
    /// [future](Moment::FUTURE).
    first_verification_at: Moment,
    last_is_verification: bool,
    /// The last response was an error, and `quiet` is the pause after it.
    last_failed: bool,
    /// When the lease renewer sent its last request.
    last_sent_at: Moment,
    /// The pause without requests: one is in flight, has failed, or has just been answered.
    quiet: Pause,
}

/// Whether an invalidation suggests that the claim has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Suspect {
    /// No invalidation is open.
    None,
    /// An invalidation arrived after the last request was sent.
    Invalidated,
    /// A request was sent after the invalidation and has no response yet.
    Sent,
}

/// A duration in half the size of a [`Duration`].
#[derive(Debug, Clone, Copy)]
struct Span(u64);

impl Span {
    /// Saturates at some centuries.
    fn of(span: Duration) -> Self {
        Self(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }

    fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

/// An interval without requests. It may end slightly early, so that several claims share one call.
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
    /// Creates the lease that the store granted for `granted`, in response to a request sent at
    /// `sent_at`.
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
            unanswered_verifications: 0,
            consecutive_invalidations: 0,
            suspect: Suspect::None,
            first_verification_at: Moment::FUTURE,
            last_is_verification: false,
            last_failed: false,
            last_sent_at: Moment::PAST,
            quiet: Pause::NONE,
        };
        lease.extend(counted_from, granted);
        lease
    }

    /// Schedules a verification at `at`, unless the claim is confirmed before.
    pub(crate) fn verify_first_at(&mut self, at: Moment) {
        self.first_verification_at = at;
    }

    /// Returns the time from which this lease must not be trusted any more.
    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    /// Returns the length of a grant or renewal.
    pub(crate) fn length(&self) -> Duration {
        self.length.get()
    }

    /// Makes later renewals request `length`.
    pub(crate) fn set_length(&mut self, length: Duration) {
        self.length = Span::of(length);
    }

    /// Returns what must be done at `now`.
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
                return Due::Renew(self.requested_lease(now));
            }
            next = next.min(self.renew_at.max(self.quiet.until));
        }
        if let Some(verification_due) = self.verification_due(now) {
            if now.after(TOGETHER) >= verification_due && !quiet {
                return Due::Verify(self.verification_lease(now));
            }
            next = next.min(verification_due.max(self.quiet.until));
        }
        Due::At(next)
    }

    /// Returns the lease to request at `now`, in a call that renews other claims, if this claim is
    /// due soon. "Soon" means within a twelfth of the lease, which is a quarter of the renewal
    /// interval. If one more claim costs nothing (`together`), it means within a quarter of the
    /// lease.
    pub(crate) fn joins(&self, now: Moment, together: bool) -> Option<Duration> {
        let soon = self.length() / if together { 4 } else { 12 };
        let is_soon = now.after(soon) >= self.renew_at;
        let may_join = now < self.valid_until
            && self.can_be_renewed()
            && self.unanswered == 0
            && !self.quiet.lasts(now);
        (is_soon && may_join).then(|| self.requested_lease(now))
    }

    /// Returns false if the lease already reaches its cap, which no renewal can extend.
    fn can_be_renewed(&self) -> bool {
        self.renews && self.valid_until < self.cap
    }

    /// Returns when to verify the claim, if there is a reason to.
    fn verification_due(&self, now: Moment) -> Option<Moment> {
        let at = if self.suspect == Suspect::None { self.first_verification_at } else { now };
        if at == Moment::FUTURE {
            return None;
        }
        let may_look = self.unanswered_verifications < UNANSWERED_MAX
            // A verification requests the shortest lease, which would extend one that ends before
            // that.
            && (self.can_be_renewed() || self.valid_until.since(now) > self.shortest.get());
        may_look.then_some(at)
    }

    /// Returns the lease that a verification at `now` requests: that of a renewal if the claim can
    /// be renewed, otherwise the shortest that the store accepts. The latter does not change the
    /// end of the lease, because a renewal never shortens it.
    fn verification_lease(&self, now: Moment) -> Duration {
        if self.can_be_renewed() { self.requested_lease(now) } else { self.shortest.get() }
    }

    /// Returns the lease that a renewal at `now` requests.
    pub(crate) fn requested_lease(&self, now: Moment) -> Duration {
        if self.cap == Moment::FUTURE {
            return self.length();
        }
        // Not less than the store accepts; the claim is released at the cap in any case.
        self.length().min(covering(self.cap.since(now))).max(self.shortest.get())
    }

    /// Records a renewal sent at `now`, and when to retry it without a response. Returns true if
    /// the previous one had no response.
    pub(crate) fn renewal_sent(&mut self, now: Moment, operation_timeout: Duration) -> bool {
        self.unanswered += 1;
        self.renew_at = now.after(operation_timeout);
        self.request_sent(now, operation_timeout, false);
        self.unanswered > 1
    }

    /// Records a verification sent at `now`, as [`renewal_sent`](Self::renewal_sent) does for a
    /// renewal. The next renewal is due as before.
    pub(crate) fn verification_sent(&mut self, now: Moment, operation_timeout: Duration) -> bool {
        self.unanswered_verifications += 1;
        self.request_sent(now, operation_timeout, true);
        self.unanswered_verifications > 1
    }

    fn request_sent(&mut self, now: Moment, operation_timeout: Duration, is_verification: bool) {
        if self.suspect == Suspect::Invalidated {
            self.suspect = Suspect::Sent;
        }
        self.last_is_verification = is_verification;
        self.last_failed = false;
        self.last_sent_at = now;
        self.quiet = Pause::starting(now, operation_timeout);
    }

    /// Records an invalidation. Returns true if the claim must be rescheduled.
    pub(crate) fn invalidated(&mut self, now: Moment) -> bool {
        if self.suspect == Suspect::None && !self.quiet.lasts(now) {
            self.consecutive_invalidations = 0;
        }
        let is_sooner = self.last_failed && self.shorten_pause(now);
        let before = std::mem::replace(&mut self.suspect, Suspect::Invalidated);
        before != Suspect::Invalidated || is_sooner
    }

    /// Shortens the pause after a failure, because the invalidation may mean that the store is
    /// reachable again. If invalidations continue while the store fails, they shorten it less and
    /// less.
    fn shorten_pause(&mut self, now: Moment) -> bool {
        let pause = Pause::starting(now, self.verifications_apart());
        let is_shorter = pause.until < self.quiet.until;
        if is_shorter {
            self.quiet = pause;
            self.consecutive_invalidations = self.consecutive_invalidations.saturating_add(1);
        }
        is_shorter
    }

    /// Returns whether an invalidation arrived and the claim has not been confirmed since.
    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect != Suspect::None
    }

    /// Records that the response to the lease renewer's request of `sent_at` confirmed the claim.
    /// Returns true if this extends the lease, and false if the claim is only verified and never
    /// renewed.
    pub(crate) fn confirmed(&mut self, sent_at: Moment) -> bool {
        self.unanswered_verifications = 0;
        // The response to an older request does not settle a later invalidation.
        if sent_at == self.last_sent_at {
            self.quiet = Pause::starting(sent_at, self.verifications_apart());
            self.first_verification_at = Moment::FUTURE;
            if self.suspect != Suspect::None {
                self.consecutive_invalidations = self.consecutive_invalidations.saturating_add(1);
            }
            if self.suspect == Suspect::Sent {
                self.suspect = Suspect::None;
            }
        }
        self.renews
    }

    /// Returns the minimum time between verifications. It doubles with each superfluous one, up to
    /// a limit.
    fn verifications_apart(&self) -> Duration {
        let longest = self.retry_pause().max(VERIFICATIONS_APART);
        VERIFICATIONS_APART.saturating_mul(1 << self.consecutive_invalidations.min(6)).min(longest)
    }

    /// Returns the pause after a failed request. About a dozen tries fit into the remaining two
    /// thirds of the lease.
    pub(crate) fn retry_pause(&self) -> Duration {
        (self.length() / 20).min(Duration::from_secs(1))
    }

    /// Records that the renewal sent at `sent_at` was granted for `granted`.
    pub(crate) fn renewed(&mut self, sent_at: Moment, granted: Duration) {
        // The store responds again, so earlier renewals without a response do not count any more.
        self.unanswered = 0;
        self.extend(sent_at, granted);
    }

    /// Records that the lease renewer's request of `sent_at` failed with an unknown outcome. The
    /// lease is unchanged, and the next try follows after `pause`. Returns true if the claim is
    /// renewed, not only verified.
    pub(crate) fn request_failed(&mut self, sent_at: Moment, now: Moment, pause: Duration) -> bool {
        self.unanswered = 0;
        self.unanswered_verifications = 0;
        self.last_failed = true;
        self.quiet = Pause::starting(now, pause);
        // A verification that fails does not make the next renewal due earlier.
        if !self.last_is_verification || sent_at != self.last_sent_at {
            self.renew_at = self.quiet.until;
        }
        self.renews
    }

    fn extend(&mut self, sent_at: Moment, granted: Duration) {
        let trusted = granted.saturating_sub(drift_margin(granted));
        let until = sent_at.after(trusted);
        // Replies may arrive out of order; an old one must not undo the effect of a newer one.
        self.valid_until = self.valid_until.max(until);
        self.renew_at = self.renew_at.max(sent_at.after(granted / 3));
        self.valid_until = self.valid_until.min(self.cap);
    }
}

/// Returns the margin to subtract from a lease because the store's clock and ours may run at
/// different rates: 1 % and 2 ms, as in the description of Redlock (redis.io, "Distributed locks").
pub(crate) fn drift_margin(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// Returns a lease that is valid for all of `span` in spite of the margin.
pub(crate) fn covering(span: Duration) -> Duration {
    span.saturating_add(span / 50).saturating_add(Duration::from_millis(4))
}

/// A renewal may start this much early, so that claims that are due at about the same time share
/// one call.
pub(crate) const TOGETHER: Duration = Duration::from_millis(10);

/// The minimum time between two verifications of a claim, less [`TOGETHER`]. It grows while
/// invalidations continue: a store that reports our own renewals as changes must not cause an
/// endless loop.
const VERIFICATIONS_APART: Duration = Duration::from_millis(20);

/// After this many consecutive renewals without a response, no more are sent until one of them is
/// answered.
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
    fn an_invalidation_after_a_failed_verification_shortens_the_pause_once() {
        let began = Moment::PAST.after(secs(1_000));
        let mut lease = Lease::granted(TERMS, began, TERMS.length, began);
        let mut now = began.after(secs(1));
        lease.invalidated(now);
        let mut looks = 0;
        // The store is unreachable, and invalidations arrive all the time.
        while now < began.after(secs(20)) {
            if matches!(lease.due(now), Due::Verify(_) | Due::Renew(_)) {
                looks += 1;
                lease.verification_sent(now, secs(3));
                lease.request_failed(now, now, secs(1));
            }
            now = now.after(Duration::from_millis(5));
            lease.invalidated(now);
        }
        assert!((19..40).contains(&looks), "{looks} looks in 19 s");

        let mut lease = Lease::granted(TERMS, began, TERMS.length, began);
        let now = began.after(secs(1));
        lease.invalidated(now);
        lease.verification_sent(now, secs(3));
        lease.request_failed(now, now, secs(1));
        let later = now.after(Duration::from_millis(100));
        assert!(matches!(lease.due(later), Due::At(_)), "the pause after the failure lasts");
        assert!(lease.invalidated(later), "the lease renewer must check its schedule again");
        let soon = later.after(Duration::from_millis(25));
        assert!(matches!(lease.due(soon), Due::Verify(_)), "the store may be back");
    }

    #[test]
    fn a_renewal_joins_a_batch_unless_one_has_just_been_sent() {
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
    fn a_late_reply_to_an_old_request_never_shortens_the_lease() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.renewed(sent.after(secs(10)), secs(30));
        let until = lease.valid_until();
        lease.renewed(sent.after(secs(1)), secs(30));
        assert_eq!(lease.valid_until(), until);
    }

    #[test]
    fn renewals_never_exceed_max_hold_whose_end_is_the_reason_of_the_loss() {
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
    fn a_lease_without_renewal_is_never_renewed() {
        let terms = LeaseTerms { renews: false, ..TERMS };
        let sent = Moment::from_bits(0);
        let lease = Lease::granted(terms, sent, secs(30), sent);
        assert_eq!(lease.due(sent.after(secs(20))), Due::At(lease.valid_until()));
    }

    #[test]
    fn a_store_that_does_not_respond_receives_a_bounded_number_of_renewals() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        let mut now = sent.after(secs(10));
        let mut requests = 0;
        while let Due::Renew(_) = lease.due(now) {
            lease.renewal_sent(now, secs(1));
            now = now.after(secs(1));
            requests += 1;
        }
        assert_eq!(requests, UNANSWERED_MAX);
        assert_eq!(lease.due(now), Due::At(lease.valid_until()));
    }

    #[test]
    fn a_failed_request_is_repeated_after_a_pause_however_short_the_lease() {
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
    fn invalidations_are_verified_at_once_and_renewals_continue() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        let now = sent.after(secs(1));
        assert!(lease.invalidated(now) && !lease.invalidated(now));
        assert_eq!(lease.due(now), Due::Verify(secs(30)));
        lease.verification_sent(now, secs(3));
        assert_eq!(lease.due(now), Due::At(now.after(secs(3))), "the answer is waited for");
        let failed_at = now.after(secs(2));
        lease.request_failed(now, failed_at, secs(1));
        assert_eq!(lease.due(failed_at), Due::At(failed_at.after(secs(1))));
        let now = failed_at.after(secs(1));
        assert_eq!(lease.due(now), Due::Verify(secs(30)), "it is sent until there is a response");
        lease.verification_sent(now, secs(3));
        assert!(lease.confirmed(now) && !lease.is_suspect());
        assert_eq!(lease.due(now), Due::At(sent.after(secs(10))), "a verification is no renewal");
    }

    #[test]
    fn a_first_verification_is_sent_once_and_does_not_exclude_hand_over() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.verify_first_at(sent.after(secs(1)));
        assert_eq!(lease.due(sent), Due::At(sent.after(secs(1))));
        let now = sent.after(secs(1));
        assert_eq!(lease.due(now), Due::Verify(secs(30)));
        lease.verification_sent(now, secs(3));
        assert!(!lease.is_suspect());
        lease.request_failed(now, now, secs(1));
        let now = now.after(secs(1));
        assert_eq!(lease.due(now), Due::Verify(secs(30)), "it is sent until there is a response");
        lease.verification_sent(now, secs(3));
        lease.confirmed(now);
        assert_eq!(lease.due(now.after(secs(4))), Due::At(sent.after(secs(10))));
    }

    #[test]
    fn a_renewal_replaces_the_first_verification() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.verify_first_at(sent.after(secs(12)));
        let now = sent.after(secs(10));
        assert_eq!(lease.due(now), Due::Renew(secs(30)));
        lease.renewal_sent(now, secs(3));
        lease.confirmed(now);
        lease.renewed(now, secs(30));
        assert_eq!(lease.due(now), Due::At(sent.after(secs(20))));
    }

    #[test]
    fn a_response_to_an_older_request_does_not_verify_the_claim() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::granted(TERMS, sent, secs(30), sent);
        lease.renewal_sent(sent.after(secs(10)), secs(3));
        lease.renewal_sent(sent.after(secs(13)), secs(3));
        lease.invalidated(sent.after(secs(14)));
        lease.renewal_sent(sent.after(secs(16)), secs(3));
        lease.confirmed(sent.after(secs(13)));
        assert!(lease.is_suspect());
        lease.confirmed(sent.after(secs(16)));
        assert!(!lease.is_suspect());
    }

    #[test]
    fn a_lease_without_renewal_is_verified_without_extension() {
        let sent = Moment::from_bits(0);
        let fixed = LeaseTerms { renews: false, ..TERMS };
        let capped = LeaseTerms { max_hold: Some(secs(20)), ..TERMS };
        for terms in [fixed, capped] {
            let mut lease = Lease::granted(terms, sent, secs(30), sent);
            lease.invalidated(sent);
            assert_eq!(lease.due(sent), Due::Verify(SHORTEST));
            let end = lease.valid_until();
            let near = Moment::from_bits(end.to_bits() - 50_000_000);
            assert_eq!(
                lease.due(near),
                Due::At(end),
                "the verification would reach beyond the end"
            );
        }
    }
}
