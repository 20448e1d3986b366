//! The lease of one active grant: its validity, its renewal times, and the reason of its end.
//!
//! This module reads no clock and does no I/O. It computes with times that its caller `grant` has
//! read. The most important rule: a lease counts from the time *before* its request was sent, less
//! a margin for clocks that run at different rates.

use std::time::Duration;

use crate::clock::Moment;
use crate::error::LostReason;
use crate::mutant::{Mutant, mutated};

/// The lease that the caller requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseOptions {
    /// The lease length that an acquisition or renewal requests.
    pub(crate) length: Duration,
    /// Whether the lease renewer extends the lease.
    pub(crate) renews: bool,
    /// The maximum hold, counted from the time at which the request was sent.
    pub(crate) max_hold: Option<Duration>,
    /// The shortest lease that the store accepts.
    pub(crate) lease_min: Duration,
}

/// The next action of the lease renewer for a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Do nothing before this time.
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
    // The fields are small, because a process may hold ten thousand locks. An absent time is
    // therefore `Moment::FUTURE` instead of an `Option`.
    length: CompactDuration,
    lease_min: CompactDuration,
    renews: bool,
    valid_until: Moment,
    renew_at: Moment,
    /// The end of the lock's `max_hold`. `FUTURE` without one.
    max_hold_end: Moment,
    /// The number of consecutive renewals without a response.
    unanswered: u32,
    /// The number of consecutive verifications without a response. This count is separate, so that
    /// invalidations do not use up the attempts of renewals.
    unanswered_verifications: u32,
    /// The number of times that the interval between verifications has doubled. Reset when an
    /// invalidation arrives while no verification is needed and `pause` allows a request.
    interval_doublings: u32,
    verification: Verification,
    /// The time of one verification that is sent even without an invalidation. `FUTURE` if the
    /// store needs none, or once the store has confirmed the claim.
    first_verification_at: Moment,
    /// The last request was a verification.
    last_was_verification: bool,
    /// The last response was an error. `pause` is then the pause after this error.
    last_failed: bool,
    /// The time at which the lease renewer sent its last request.
    last_sent_at: Moment,
    /// The lease renewer sends no request during this pause. A pause follows each request, each
    /// confirmation in response to the last request, and each failure.
    pause: Pause,
}

/// The progress of the verification after an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verification {
    /// No invalidation has arrived since the store last confirmed the claim.
    NotNeeded,
    /// An invalidation has arrived, and no request was sent after it.
    Needed,
    /// A request was sent after the invalidation, and the store has not confirmed the claim yet.
    InFlight,
}

/// A duration in nanoseconds, half the size of a [`Duration`].
#[derive(Debug, Clone, Copy)]
struct CompactDuration(u64);

impl CompactDuration {
    /// Converts `span`. Saturates at about 580 years.
    fn of(span: Duration) -> Self {
        Self(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }

    fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

/// An interval without requests.
#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Moment,
    /// The earliest end of the pause, for a request that shares a call with other claims.
    may_end_at: Moment,
}

impl Pause {
    const NONE: Self = Self { until: Moment::PAST, may_end_at: Moment::PAST };

    fn starting(now: Moment, span: Duration) -> Self {
        Self { until: now.after(span), may_end_at: now.after(span - BATCH_WINDOW.min(span / 2)) }
    }

    fn forbids_request(&self, now: Moment) -> bool {
        now < self.may_end_at
    }
}

impl Lease {
    /// Creates the lease of a grant. The store granted it for the duration `granted`, in response
    /// to a request sent at `sent_at`.
    pub(crate) fn from_grant(
        options: LeaseOptions,
        sent_at: Moment,
        granted: Duration,
        now: Moment,
    ) -> Self {
        let counted_from = if mutated(Mutant::DeadlineFromReply) { now } else { sent_at };
        let mut lease = Self {
            length: CompactDuration::of(options.length),
            lease_min: CompactDuration::of(options.lease_min),
            renews: options.renews,
            valid_until: Moment::PAST,
            renew_at: Moment::PAST,
            max_hold_end: options.max_hold.map_or(Moment::FUTURE, |max| sent_at.after(max)),
            unanswered: 0,
            unanswered_verifications: 0,
            interval_doublings: 0,
            verification: Verification::NotNeeded,
            first_verification_at: Moment::FUTURE,
            last_was_verification: false,
            last_failed: false,
            last_sent_at: Moment::PAST,
            pause: Pause::NONE,
        };
        lease.extend(counted_from, granted);
        lease
    }

    /// Schedules a verification at `at`. A confirmation before `at` cancels the verification.
    pub(crate) fn schedule_first_verification(&mut self, at: Moment) {
        self.first_verification_at = at;
    }

    /// Returns the end of the lease. From this time on, another client may hold the key.
    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    /// Returns the lease length that renewals request, before the limit of `max_hold`.
    pub(crate) fn length(&self) -> Duration {
        self.length.get()
    }

    /// Makes later renewals request `length`.
    pub(crate) fn set_length(&mut self, length: Duration) {
        self.length = CompactDuration::of(length);
    }

    /// Returns the action that is due at `now`.
    pub(crate) fn due(&self, now: Moment) -> Due {
        if now >= self.valid_until {
            let is_max_hold = self.valid_until >= self.max_hold_end;
            return Due::Over(if is_max_hold { LostReason::MaxHold } else { LostReason::Expired });
        }
        if self.unanswered >= UNANSWERED_MAX {
            return Due::At(self.valid_until);
        }
        let must_pause = self.pause.forbids_request(now);
        let mut next = self.valid_until;
        if self.can_be_renewed() {
            if now.after(BATCH_WINDOW) >= self.renew_at && !must_pause {
                return Due::Renew(self.requested_lease(now));
            }
            next = next.min(self.renew_at.max(self.pause.until));
        }
        if let Some(verification_due) = self.verification_due(now) {
            if now.after(BATCH_WINDOW) >= verification_due && !must_pause {
                return Due::Verify(self.verification_lease(now));
            }
            next = next.min(verification_due.max(self.pause.until));
        }
        Due::At(next)
    }

    /// Returns the lease to request in a call at `now` that renews other claims. Returns `None` if
    /// this claim is not due soon, or must not be renewed now.
    ///
    /// "Soon" is a twelfth of the lease: a quarter of the renewal interval. If the call renews the
    /// [whole shard](crate::RenewalPolicy::renews_whole_shard), "soon" is a quarter of the lease.
    pub(crate) fn batch_renewal_lease(
        &self,
        now: Moment,
        renews_whole_shard: bool,
    ) -> Option<Duration> {
        let soon = self.length() / if renews_whole_shard { 4 } else { 12 };
        let is_soon = now.after(soon) >= self.renew_at;
        let may_join = now < self.valid_until
            && self.can_be_renewed()
            && self.unanswered == 0
            && !self.pause.forbids_request(now);
        (is_soon && may_join).then(|| self.requested_lease(now))
    }

    /// Returns whether a renewal can extend the lease: automatic renewal is on, and the lease ends
    /// before its `max_hold`.
    fn can_be_renewed(&self) -> bool {
        self.renews && self.valid_until < self.max_hold_end
    }

    /// Returns the time of the next verification, if the claim needs one.
    fn verification_due(&self, now: Moment) -> Option<Moment> {
        let at = if self.verification == Verification::NotNeeded {
            self.first_verification_at
        } else {
            now
        };
        if at == Moment::FUTURE {
            return None;
        }
        let may_verify = self.unanswered_verifications < UNANSWERED_MAX
            // A claim that cannot be renewed is verified with `lease_min`. The remaining lease must
            // be longer than `lease_min`, so that the verification does not extend the lease.
            && (self.can_be_renewed() || self.valid_until.since(now) > self.lease_min.get());
        may_verify.then_some(at)
    }

    /// Returns the lease that a verification at `now` requests.
    fn verification_lease(&self, now: Moment) -> Duration {
        if self.can_be_renewed() { self.requested_lease(now) } else { self.lease_min.get() }
    }

    /// Returns the lease that a renewal at `now` requests.
    pub(crate) fn requested_lease(&self, now: Moment) -> Duration {
        if self.max_hold_end == Moment::FUTURE {
            return self.length();
        }
        // The store accepts no lease below `lease_min`. The engine releases the claim at its
        // `max_hold` in any case.
        self.length().min(lease_covering(self.max_hold_end.since(now))).max(self.lease_min.get())
    }

    /// Records a renewal sent at `now`. Without a response, the lease renewer repeats the renewal
    /// after `operation_timeout`. Returns true if the previous renewal had no response.
    pub(crate) fn on_renewal_sent(&mut self, now: Moment, operation_timeout: Duration) -> bool {
        self.unanswered += 1;
        self.renew_at = now.after(operation_timeout);
        self.on_request_sent(now, operation_timeout, false);
        self.unanswered > 1
    }

    /// Records a verification sent at `now`, as [`on_renewal_sent`](Self::on_renewal_sent) does for
    /// a renewal. The time of the next renewal does not change.
    pub(crate) fn on_verification_sent(
        &mut self,
        now: Moment,
        operation_timeout: Duration,
    ) -> bool {
        self.unanswered_verifications += 1;
        self.on_request_sent(now, operation_timeout, true);
        self.unanswered_verifications > 1
    }

    fn on_request_sent(&mut self, now: Moment, operation_timeout: Duration, is_verification: bool) {
        if self.verification == Verification::Needed {
            self.verification = Verification::InFlight;
        }
        self.last_was_verification = is_verification;
        self.last_failed = false;
        self.last_sent_at = now;
        self.pause = Pause::starting(now, operation_timeout);
    }

    /// Records an invalidation. Returns true if the claim must be rescheduled.
    pub(crate) fn on_invalidated(&mut self, now: Moment) -> bool {
        if self.verification == Verification::NotNeeded && !self.pause.forbids_request(now) {
            self.interval_doublings = 0;
        }
        let is_sooner = self.last_failed && self.shorten_pause(now);
        let before = std::mem::replace(&mut self.verification, Verification::Needed);
        before != Verification::Needed || is_sooner
    }

    /// Shortens the pause after a failure, because an invalidation may mean that the store is
    /// reachable again. Each further invalidation shortens the pause less. Returns false if the
    /// pause is already shorter.
    fn shorten_pause(&mut self, now: Moment) -> bool {
        let pause = Pause::starting(now, self.verification_interval());
        let is_shorter = pause.until < self.pause.until;
        if is_shorter {
            self.pause = pause;
            self.interval_doublings = self.interval_doublings.saturating_add(1);
        }
        is_shorter
    }

    /// Returns whether an invalidation has arrived since the store last confirmed the claim.
    pub(crate) fn is_suspect(&self) -> bool {
        self.verification != Verification::NotNeeded
    }

    /// Records that the response to the lease renewer's request of `sent_at` confirmed the claim.
    /// Returns whether the claim is renewed automatically. If so, the response also extends the
    /// lease.
    pub(crate) fn on_confirmed(&mut self, sent_at: Moment) -> bool {
        self.unanswered_verifications = 0;
        // The response to an older request says nothing about a later invalidation.
        if sent_at == self.last_sent_at {
            self.pause = Pause::starting(sent_at, self.verification_interval());
            self.first_verification_at = Moment::FUTURE;
            if self.verification != Verification::NotNeeded {
                self.interval_doublings = self.interval_doublings.saturating_add(1);
            }
            if self.verification == Verification::InFlight {
                self.verification = Verification::NotNeeded;
            }
        }
        self.renews
    }

    /// Returns the minimum time between verifications. It doubles with each of
    /// `interval_doublings`, up to a limit.
    fn verification_interval(&self) -> Duration {
        let longest = self.retry_pause().max(VERIFICATION_INTERVAL_MIN);
        VERIFICATION_INTERVAL_MIN.saturating_mul(1 << self.interval_doublings.min(6)).min(longest)
    }

    /// Returns the pause after a failed request. At least a dozen attempts fit into the remaining
    /// two thirds of the lease.
    pub(crate) fn retry_pause(&self) -> Duration {
        (self.length() / 20).min(Duration::from_secs(1))
    }

    /// Records that the renewal sent at `sent_at` was granted for `granted`.
    pub(crate) fn on_renewed(&mut self, sent_at: Moment, granted: Duration) {
        // The store responds, so earlier renewals without a response no longer count.
        self.unanswered = 0;
        self.extend(sent_at, granted);
    }

    /// Records that the lease renewer's request of `sent_at` failed. The lease is unchanged, and
    /// the next attempt follows after `pause`. Returns whether the claim is renewed automatically.
    pub(crate) fn on_request_failed(
        &mut self,
        sent_at: Moment,
        now: Moment,
        pause: Duration,
    ) -> bool {
        self.unanswered = 0;
        self.unanswered_verifications = 0;
        self.last_failed = true;
        self.pause = Pause::starting(now, pause);
        // A failed verification does not move the next renewal.
        if !self.last_was_verification || sent_at != self.last_sent_at {
            self.renew_at = self.pause.until;
        }
        self.renews
    }

    fn extend(&mut self, sent_at: Moment, granted: Duration) {
        let trusted = granted.saturating_sub(drift_margin(granted));
        let until = sent_at.after(trusted);
        // Responses may arrive out of order. An old response must not shorten the lease.
        self.valid_until = self.valid_until.max(until);
        self.renew_at = self.renew_at.max(sent_at.after(granted / 3));
        self.valid_until = self.valid_until.min(self.max_hold_end);
    }
}

/// Returns the margin to subtract from a lease: 1 % plus 2 ms, as in Redlock (redis.io,
/// "Distributed locks"). The clocks of the store and of this host may run at different rates.
pub(crate) fn drift_margin(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// Returns a lease that, less its margin, is at least as long as `span`.
pub(crate) fn lease_covering(span: Duration) -> Duration {
    span.saturating_add(span / 50).saturating_add(Duration::from_millis(4))
}

/// The time by which a renewal or verification may be sent early. Claims that are due within this
/// time share one call.
pub(crate) const BATCH_WINDOW: Duration = Duration::from_millis(10);

/// The minimum time between two verifications of a claim, before [`BATCH_WINDOW`] is subtracted.
///
/// The interval grows while invalidations continue. Otherwise, a store that reports renewals as
/// changes would cause an endless loop.
const VERIFICATION_INTERVAL_MIN: Duration = Duration::from_millis(20);

/// The maximum number of consecutive renewals without a response. Verifications have a limit of the
/// same size. At the limit, the lease renewer waits for a response before it sends the next one.
const UNANSWERED_MAX: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: LeaseOptions = LeaseOptions {
        length: Duration::from_secs(30),
        renews: true,
        max_hold: None,
        lease_min: LEASE_MIN,
    };
    const LEASE_MIN: Duration = Duration::from_millis(100);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn an_invalidation_after_a_failed_verification_shortens_the_pause_once() {
        let start = Moment::PAST.after(secs(1_000));
        let mut lease = Lease::from_grant(OPTIONS, start, OPTIONS.length, start);
        let mut now = start.after(secs(1));
        lease.on_invalidated(now);
        let mut verifications = 0;
        // The store is unreachable, and invalidations arrive without a pause.
        while now < start.after(secs(20)) {
            if matches!(lease.due(now), Due::Verify(_) | Due::Renew(_)) {
                verifications += 1;
                lease.on_verification_sent(now, secs(3));
                lease.on_request_failed(now, now, secs(1));
            }
            now = now.after(Duration::from_millis(5));
            lease.on_invalidated(now);
        }
        assert!((19..40).contains(&verifications), "{verifications} verifications in 19 s");

        let mut lease = Lease::from_grant(OPTIONS, start, OPTIONS.length, start);
        let now = start.after(secs(1));
        lease.on_invalidated(now);
        lease.on_verification_sent(now, secs(3));
        lease.on_request_failed(now, now, secs(1));
        let later = now.after(Duration::from_millis(100));
        assert!(matches!(lease.due(later), Due::At(_)), "the pause after the failure lasts");
        assert!(lease.on_invalidated(later), "the lease renewer must check its schedule again");
        let soon = later.after(Duration::from_millis(25));
        assert!(matches!(lease.due(soon), Due::Verify(_)), "the store may be back");
    }

    #[test]
    fn a_renewal_joins_a_batch_unless_one_has_just_been_sent() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        assert_eq!(
            lease.batch_renewal_lease(sent.after(secs(7)), false),
            None,
            "the renewal is due at 10"
        );
        assert_eq!(lease.batch_renewal_lease(sent.after(secs(8)), false), Some(secs(30)));
        assert_eq!(lease.batch_renewal_lease(sent.after(secs(2)), true), None);
        assert_eq!(lease.batch_renewal_lease(sent.after(secs(3)), true), Some(secs(30)));
        let now = sent.after(secs(4));
        lease.on_renewal_sent(now, secs(3));
        assert_eq!(lease.batch_renewal_lease(now, true), None, "the renewal is in flight");
        lease.on_confirmed(now);
        lease.on_renewed(now, secs(30));
        assert_eq!(lease.due(now), Due::At(sent.after(secs(14))));
        let fixed = LeaseOptions { renews: false, ..OPTIONS };
        let lease = Lease::from_grant(fixed, sent, secs(30), sent);
        assert_eq!(lease.batch_renewal_lease(sent.after(secs(9)), true), None);
    }

    #[test]
    fn a_lease_counts_from_before_the_request_less_the_margin() {
        let sent = Moment::from_bits(0);
        let lease = Lease::from_grant(OPTIONS, sent, secs(30), sent.after(secs(5)));
        assert_eq!(lease.valid_until(), sent.after(secs(30) - drift_margin(secs(30))));
        assert_eq!(lease.due(sent.after(secs(5))), Due::At(sent.after(secs(10))));
        assert_eq!(lease.due(sent.after(secs(10))), Due::Renew(secs(30)));
        assert_eq!(lease.due(sent.after(secs(30))), Due::Over(LostReason::Expired));
    }

    #[test]
    fn a_late_response_to_an_old_request_never_shortens_the_lease() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        lease.on_renewed(sent.after(secs(10)), secs(30));
        let until = lease.valid_until();
        lease.on_renewed(sent.after(secs(1)), secs(30));
        assert_eq!(lease.valid_until(), until);
    }

    #[test]
    fn renewals_end_at_max_hold_which_is_then_the_reason_of_the_loss() {
        let options = LeaseOptions { max_hold: Some(secs(40)), ..OPTIONS };
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(options, sent, secs(30), sent);
        assert_eq!(lease.due(sent.after(secs(20))), Due::Renew(lease_covering(secs(20))));
        lease.on_renewed(sent.after(secs(20)), secs(30));
        assert_eq!(lease.valid_until(), sent.after(secs(40)));
        assert_eq!(lease.due(sent.after(secs(39))), Due::At(sent.after(secs(40))));
        assert_eq!(lease.due(sent.after(secs(40))), Due::Over(LostReason::MaxHold));
    }

    #[test]
    fn a_lease_without_renewal_is_never_renewed() {
        let options = LeaseOptions { renews: false, ..OPTIONS };
        let sent = Moment::from_bits(0);
        let lease = Lease::from_grant(options, sent, secs(30), sent);
        assert_eq!(lease.due(sent.after(secs(20))), Due::At(lease.valid_until()));
    }

    #[test]
    fn a_store_that_does_not_respond_receives_a_bounded_number_of_renewals() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        let mut now = sent.after(secs(10));
        let mut requests = 0;
        while let Due::Renew(_) = lease.due(now) {
            lease.on_renewal_sent(now, secs(1));
            now = now.after(secs(1));
            requests += 1;
        }
        assert_eq!(requests, UNANSWERED_MAX);
        assert_eq!(lease.due(now), Due::At(lease.valid_until()));
    }

    #[test]
    fn a_failed_request_is_repeated_after_a_pause_even_if_the_lease_is_short() {
        let length = Duration::from_millis(100);
        let options = LeaseOptions { length, ..OPTIONS };
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(options, sent, length, sent);
        let first = sent.after(length / 3);
        assert_eq!(lease.due(first), Due::Renew(length));
        lease.on_renewal_sent(first, length / 6);
        lease.on_request_failed(first, first, lease.retry_pause());
        assert_eq!(lease.due(first), Due::At(first.after(length / 20)));
        assert_eq!(lease.due(first.after(length / 20)), Due::Renew(length));
    }

    #[test]
    fn invalidations_are_verified_at_once_and_renewals_continue() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        let now = sent.after(secs(1));
        assert!(lease.on_invalidated(now) && !lease.on_invalidated(now));
        assert_eq!(lease.due(now), Due::Verify(secs(30)));
        lease.on_verification_sent(now, secs(3));
        assert_eq!(
            lease.due(now),
            Due::At(now.after(secs(3))),
            "the lease renewer waits for the response"
        );
        let failed_at = now.after(secs(2));
        lease.on_request_failed(now, failed_at, secs(1));
        assert_eq!(lease.due(failed_at), Due::At(failed_at.after(secs(1))));
        let now = failed_at.after(secs(1));
        assert_eq!(
            lease.due(now),
            Due::Verify(secs(30)),
            "a verification is repeated until it has a response"
        );
        lease.on_verification_sent(now, secs(3));
        assert!(lease.on_confirmed(now) && !lease.is_suspect());
        assert_eq!(
            lease.due(now),
            Due::At(sent.after(secs(10))),
            "a verification does not replace the renewal"
        );
    }

    #[test]
    fn a_first_verification_is_sent_once_and_does_not_make_the_claim_suspect() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        lease.schedule_first_verification(sent.after(secs(1)));
        assert_eq!(lease.due(sent), Due::At(sent.after(secs(1))));
        let now = sent.after(secs(1));
        assert_eq!(lease.due(now), Due::Verify(secs(30)));
        lease.on_verification_sent(now, secs(3));
        assert!(!lease.is_suspect());
        lease.on_request_failed(now, now, secs(1));
        let now = now.after(secs(1));
        assert_eq!(
            lease.due(now),
            Due::Verify(secs(30)),
            "a verification is repeated until it has a response"
        );
        lease.on_verification_sent(now, secs(3));
        lease.on_confirmed(now);
        assert_eq!(lease.due(now.after(secs(4))), Due::At(sent.after(secs(10))));
    }

    #[test]
    fn a_renewal_replaces_the_first_verification() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        lease.schedule_first_verification(sent.after(secs(12)));
        let now = sent.after(secs(10));
        assert_eq!(lease.due(now), Due::Renew(secs(30)));
        lease.on_renewal_sent(now, secs(3));
        lease.on_confirmed(now);
        lease.on_renewed(now, secs(30));
        assert_eq!(lease.due(now), Due::At(sent.after(secs(20))));
    }

    #[test]
    fn a_response_to_an_older_request_does_not_verify_the_claim() {
        let sent = Moment::from_bits(0);
        let mut lease = Lease::from_grant(OPTIONS, sent, secs(30), sent);
        lease.on_renewal_sent(sent.after(secs(10)), secs(3));
        lease.on_renewal_sent(sent.after(secs(13)), secs(3));
        lease.on_invalidated(sent.after(secs(14)));
        lease.on_renewal_sent(sent.after(secs(16)), secs(3));
        lease.on_confirmed(sent.after(secs(13)));
        assert!(lease.is_suspect());
        lease.on_confirmed(sent.after(secs(16)));
        assert!(!lease.is_suspect());
    }

    #[test]
    fn a_lease_without_renewal_is_verified_without_extension() {
        let sent = Moment::from_bits(0);
        let fixed = LeaseOptions { renews: false, ..OPTIONS };
        let limited = LeaseOptions { max_hold: Some(secs(20)), ..OPTIONS };
        for options in [fixed, limited] {
            let mut lease = Lease::from_grant(options, sent, secs(30), sent);
            lease.on_invalidated(sent);
            assert_eq!(lease.due(sent), Due::Verify(LEASE_MIN));
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
