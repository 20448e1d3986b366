//! Until when a session certainly lives. Arithmetic on moments; no I/O.
//!
//! The leader ends a session when it has heard nothing of it for the session's time-out. It hears of the clients of other servers only by
//! what those tell it, together, twice a tick: so an answer proves only that what had *arrived* at a server a good while before it was asked
//! for had been told to the leader. That while is [`told_within`] the leader's rhythm, whatever its tick: the shortest session that a server
//! grants is two ticks, unless somebody has set it up otherwise. When a request has arrived is not known, only that it was before its answer:
//! what a network or a server has held up for long may arrive together, and then one says nothing of the other.
//!
//! A leader that has lost the others in silence goes on answering for a while as if nothing had happened, and meanwhile those may have
//! another one. So only what a majority has written down counts here: whoever leads later begins later, and grants each session its whole
//! time-out from then on.

use std::time::Duration;

use registry_core::Moment;

/// What is known of the life of one session.
#[derive(Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    /// Writes that a majority has made, the oldest first.
    answered: Vec<Written>,
    /// The leader has heard of the session at this moment or later.
    heard_at: Moment,
}

/// A write that a majority has made.
#[derive(Debug)]
struct Written {
    sent_at: Moment,
    answered_at: Moment,
}

/// In how long the leader has heard of what happened in a session of this time-out: at least half a tick.
fn told_within(timeout: Duration) -> Duration {
    timeout / 4
}

impl Proof {
    /// A session that was asked for at `asked_at`: it is the leader that makes it.
    pub(crate) fn new(timeout: Duration, asked_at: Moment) -> Self {
        Self { timeout, answered: Vec::new(), heard_at: asked_at }
    }

    /// Notes that a majority has written down what left at `sent_at`, as was heard at `answered_at`.
    pub(crate) fn answered(&mut self, sent_at: Moment, answered_at: Moment) {
        let told_within = told_within(self.timeout);
        let is_told = |written: &Written| written.answered_at.after(told_within) <= sent_at;
        if let Some(told) = self.answered.iter().rposition(is_told) {
            self.heard_at = self.heard_at.max(self.answered[told].sent_at);
            // What is older has nothing more to say.
            self.answered.drain(..=told);
        }
        let apart = self.timeout / APART;
        // One in a while is enough, and keeps the list short.
        if self.answered.last().is_none_or(|last| last.sent_at.after(apart) <= sent_at) {
            self.answered.push(Written { sent_at, answered_at });
        }
    }

    /// How long from `now` the session certainly lives.
    pub(crate) fn left(&self, now: Moment) -> Duration {
        self.heard_at.after(self.timeout).since(now)
    }
}

/// Requests that are closer together than this part of the time-out count as one.
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
        // Held up on their way: a server may have heard of all of them at 8, and have told nobody yet.
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
            // Answers take a twentieth of the time-out.
            let answer = |sent_at: Moment| sent_at.after(secs(1));
            assert!(proof.left(answer(now)) > TIMEOUT / 2, "{:?}", proof.left(answer(now)));
            // Others in between change nothing.
            for n in 0..200 {
                let sent_at = now.after(Duration::from_millis(n));
                proof.answered(sent_at, answer(sent_at));
            }
            assert!(proof.answered.len() <= 12, "{}", proof.answered.len());
        }
    }
}
