//! Computes until when a session is certain to exist. Arithmetic on times; no I/O. Called by
//! `session`.
//!
//! The leader expires a session after it has learned of no activity for the session time-out. Other
//! servers report the activity of their clients to the leader in batches, twice per tick. A
//! response therefore proves nothing about its own request. It proves that the leader knows of
//! earlier requests: those that were answered at least [`told_within`] before this request was
//! sent. That delay covers any tick, because the shortest session that servers grant by default is
//! two ticks.
//!
//! The arrival time of a request is unknown; it only precedes the response. The delay therefore
//! counts from the response. A network or a server can delay requests so that they arrive together;
//! such requests prove nothing about each other.
//!
//! A partitioned leader continues to answer for a while, and the other servers may have elected
//! another leader. Only writes that a majority has committed count here. Any later leader starts
//! after them, and grants each session its full time-out from then on.

use std::time::Duration;

use registry_core::Moment;

/// The known validity of one session.
#[derive(Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    /// Writes that a majority has committed, oldest first.
    answered: Vec<Written>,
    /// The leader learned of activity in the session at this time or later.
    heard_at: Moment,
}

/// A write that a majority has committed.
#[derive(Debug)]
struct Written {
    sent_at: Moment,
    answered_at: Moment,
}

/// Returns the maximum delay until the leader learns of activity in a session of this time-out: at
/// least half a tick.
fn told_within(timeout: Duration) -> Duration {
    timeout / 4
}

impl Proof {
    /// Returns the validity of a session that was requested at `asked_at`. The leader creates the
    /// session itself, so it knows of it from then on.
    pub(crate) fn new(timeout: Duration, asked_at: Moment) -> Self {
        Self { timeout, answered: Vec::new(), heard_at: asked_at }
    }

    /// Records that a majority has committed a write sent at `sent_at`, whose response arrived at
    /// `answered_at`.
    pub(crate) fn answered(&mut self, sent_at: Moment, answered_at: Moment) {
        let told_within = told_within(self.timeout);
        let is_told = |written: &Written| written.answered_at.after(told_within) <= sent_at;
        if let Some(told) = self.answered.iter().rposition(is_told) {
            self.heard_at = self.heard_at.max(self.answered[told].sent_at);
            // Older writes prove nothing more.
            self.answered.drain(..=told);
        }
        let apart = self.timeout / APART;
        // Skips writes that follow closely, which keeps the list short.
        if self.answered.last().is_none_or(|last| last.sent_at.after(apart) <= sent_at) {
            self.answered.push(Written { sent_at, answered_at });
        }
    }

    /// Returns how long after `now` the session is certain to exist.
    pub(crate) fn left(&self, now: Moment) -> Duration {
        self.heard_at.after(self.timeout).since(now)
    }
}

/// Writes closer together than this fraction of the time-out count as one.
const APART: u32 = 40;

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_new_session_counts_from_when_it_was_asked_for() {
        let start = Moment::now();
        let proof = Proof::new(TIMEOUT, start);
        assert_eq!(proof.left(start.after(secs(1))), secs(19));
        assert_eq!(proof.left(start.after(secs(21))), Duration::ZERO);
    }

    #[test]
    fn an_answer_proves_what_the_leader_must_have_been_told_by_then() {
        let start = Moment::now();
        let mut proof = Proof::new(TIMEOUT, start);
        let at = |n: u64| start.after(secs(n));
        proof.answered(at(4), at(4));
        assert_eq!(proof.left(at(4)), secs(16), "what it says of itself it cannot prove");
        proof.answered(at(8), at(8));
        assert_eq!(proof.left(at(8)), secs(12), "4 s are too close");
        proof.answered(at(9), at(9));
        assert_eq!(proof.left(at(9)), secs(15), "the leader has heard of the request of 4");
        proof.answered(at(7), at(9));
        assert_eq!(proof.left(at(9)), secs(15), "older answers take nothing back");
    }

    #[test]
    fn requests_that_arrived_together_say_nothing_of_each_other() {
        let start = Moment::now();
        let mut proof = Proof::new(TIMEOUT, start);
        let at = |n: u64| start.after(secs(n));
        // Delayed on the way: a server may have received all of them at 8 s and reported none yet.
        for sent_at in [1, 3, 5, 7] {
            proof.answered(at(sent_at), at(8));
        }
        assert_eq!(proof.left(at(8)), secs(12), "the session as it was asked for");
        proof.answered(at(12), at(12));
        assert_eq!(proof.left(at(12)), secs(8), "4 s are too close");
        proof.answered(at(13), at(13));
        assert_eq!(proof.left(at(13)), secs(14), "the leader has heard of the request of 7");
    }

    #[test]
    fn with_a_steady_pulse_more_than_half_of_the_time_out_is_certain_at_any_time() {
        let start = Moment::now();
        let mut proof = Proof::new(TIMEOUT, start);
        for round in 1..500_u64 {
            let now = start.after(secs(2 * round));
            // A response takes a twentieth of the time-out.
            let answer = |sent_at: Moment| sent_at.after(secs(1));
            assert!(proof.left(answer(now)) > TIMEOUT / 2, "{:?}", proof.left(answer(now)));
            // Further writes in between have no effect.
            for n in 0..200 {
                let sent_at = now.after(Duration::from_millis(n));
                proof.answered(sent_at, answer(sent_at));
            }
            assert!(proof.answered.len() <= 12, "{}", proof.answered.len());
        }
    }
}
