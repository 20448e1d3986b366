//! Computes until when a session is certain to exist. Contains arithmetic on times and no I/O.
//! `session` calls this module.
//!
//! The leader expires a session if it learns of no activity for the session time-out. Other servers
//! report the activity of their clients to the leader in batches, twice per tick. A response to
//! request B does not prove that the leader knows of B. It proves that the leader knows of an
//! earlier request A, if B was sent at least [`report_delay_max`] after the response to A. This
//! delay is a quarter of the time-out. It is at least half a tick if the session has at least two
//! ticks, which is the servers' default minimum.
//!
//! The time at which a request arrives at the server is unknown, but it is before the response. The
//! delay therefore counts from the response. A network or a server can delay requests until they
//! arrive together. Requests that may have arrived together prove nothing about each other.
//!
//! A partitioned leader continues to answer for some time, while the other servers may elect
//! another leader. Only writes that a majority has committed therefore count here. Any later leader
//! starts after these writes, and then grants each session its full time-out.

use std::time::Duration;

use registry_core::Moment;

/// The known validity of one session.
#[derive(Debug)]
pub(crate) struct SessionValidity {
    timeout: Duration,
    /// The writes that a majority has committed, oldest first.
    committed_writes: Vec<CommittedWrite>,
    /// The leader has learnt of activity in the session that took place at this time or later.
    confirmed_at: Moment,
}

/// A write that a majority has committed.
#[derive(Debug)]
struct CommittedWrite {
    sent_at: Moment,
    response_at: Moment,
}

/// Returns the maximum delay until the leader learns of activity in a session of this time-out. The
/// result is at least half a tick if the session has at least two ticks, which is the servers'
/// default minimum.
fn report_delay_max(timeout: Duration) -> Duration {
    timeout / 4
}

impl SessionValidity {
    /// Returns the validity of a session that was requested at `requested_at`. The leader itself
    /// creates the session, so this activity needs no report.
    pub(crate) fn new(timeout: Duration, requested_at: Moment) -> Self {
        Self { timeout, committed_writes: Vec::new(), confirmed_at: requested_at }
    }

    /// Records that a majority has committed a write sent at `sent_at`, whose response arrived at
    /// `response_at`.
    pub(crate) fn record_majority_response(&mut self, sent_at: Moment, response_at: Moment) {
        let report_delay_max = report_delay_max(self.timeout);
        let is_reported =
            |write: &CommittedWrite| write.response_at.after(report_delay_max) <= sent_at;
        if let Some(reported) = self.committed_writes.iter().rposition(is_reported) {
            self.confirmed_at = self.confirmed_at.max(self.committed_writes[reported].sent_at);
            // The older writes give no additional proof.
            self.committed_writes.drain(..=reported);
        }
        let spacing = self.timeout / WRITE_SPACING_DIVISOR;
        // Writes that closely follow a recorded write are skipped, which keeps the list short.
        if self.committed_writes.last().is_none_or(|last| last.sent_at.after(spacing) <= sent_at) {
            self.committed_writes.push(CommittedWrite { sent_at, response_at });
        }
    }

    /// Returns how long the session is certain to exist after `now`.
    pub(crate) fn remaining(&self, now: Moment) -> Duration {
        self.confirmed_at.after(self.timeout).since(now)
    }
}

/// The minimum interval between two recorded writes is the time-out divided by this number.
const WRITE_SPACING_DIVISOR: u32 = 40;

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_new_session_is_valid_from_its_request() {
        let start = Moment::now();
        let validity = SessionValidity::new(TIMEOUT, start);
        assert_eq!(validity.remaining(start.after(secs(1))), secs(19));
        assert_eq!(validity.remaining(start.after(secs(21))), Duration::ZERO);
    }

    #[test]
    fn a_response_proves_the_writes_that_were_reported_before_it() {
        let start = Moment::now();
        let mut validity = SessionValidity::new(TIMEOUT, start);
        let at = |n: u64| start.after(secs(n));
        validity.record_majority_response(at(4), at(4));
        assert_eq!(
            validity.remaining(at(4)),
            secs(16),
            "a response proves nothing about its own request"
        );
        validity.record_majority_response(at(8), at(8));
        assert_eq!(
            validity.remaining(at(8)),
            secs(12),
            "the request was sent within the report delay"
        );
        validity.record_majority_response(at(9), at(9));
        assert_eq!(
            validity.remaining(at(9)),
            secs(15),
            "the leader knows of the request sent at 4 s"
        );
        validity.record_majority_response(at(7), at(9));
        assert_eq!(
            validity.remaining(at(9)),
            secs(15),
            "an older request does not shorten the validity"
        );
    }

    #[test]
    fn requests_that_arrived_together_prove_nothing_about_each_other() {
        let start = Moment::now();
        let mut validity = SessionValidity::new(TIMEOUT, start);
        let at = |n: u64| start.after(secs(n));
        // The network delays the requests. A server may have received all requests at 8 s and
        // reported none yet.
        for sent_at in [1, 3, 5, 7] {
            validity.record_majority_response(at(sent_at), at(8));
        }
        assert_eq!(
            validity.remaining(at(8)),
            secs(12),
            "the validity starts with the request for the session"
        );
        validity.record_majority_response(at(12), at(12));
        assert_eq!(
            validity.remaining(at(12)),
            secs(8),
            "the request was sent within the report delay"
        );
        validity.record_majority_response(at(13), at(13));
        assert_eq!(
            validity.remaining(at(13)),
            secs(14),
            "the leader knows of the request sent at 7 s"
        );
    }

    #[test]
    fn regular_writes_keep_more_than_half_of_the_time_out_valid() {
        let start = Moment::now();
        let mut validity = SessionValidity::new(TIMEOUT, start);
        for round in 1..500_u64 {
            let now = start.after(secs(2 * round));
            // Each response arrives after a twentieth of the time-out.
            let response = |sent_at: Moment| sent_at.after(secs(1));
            assert!(
                validity.remaining(response(now)) > TIMEOUT / 2,
                "{:?}",
                validity.remaining(response(now))
            );
            // Further writes between two rounds have no effect.
            for n in 0..200 {
                let sent_at = now.after(Duration::from_millis(n));
                validity.record_majority_response(sent_at, response(sent_at));
            }
            assert!(validity.committed_writes.len() <= 12, "{}", validity.committed_writes.len());
        }
    }
}
