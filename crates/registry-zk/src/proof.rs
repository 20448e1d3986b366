//! Until when a session certainly lives. Arithmetic on moments; no I/O.
//!
//! The leader ends a session when it has heard nothing of it for the session's time-out. It hears of the clients of other servers only by
//! what those tell it, together, twice a tick: so an answer proves only that what happened a good while *before* had been told to it. That
//! while is [`told_within`] the leader's rhythm, whatever its tick: the shortest session that a server grants is two ticks, unless somebody
//! has set it up otherwise.
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
    /// When writes left that a majority has made, the oldest first.
    answered: Vec<Moment>,
    /// The leader has heard of the session at this moment or later.
    heard_at: Moment,
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

    /// Notes that a majority has written down what left at `sent_at`.
    pub(crate) fn answered(&mut self, sent_at: Moment) {
        let told =
            self.answered.iter().rposition(|at| at.after(told_within(self.timeout)) <= sent_at);
        if let Some(told) = told {
            self.heard_at = self.heard_at.max(self.answered[told]);
            // What is older has nothing more to say.
            self.answered.drain(..=told);
        }
        let apart = self.timeout / APART;
        // One in a while is enough, and keeps the list short.
        if self.answered.last().is_none_or(|last| last.after(apart) <= sent_at) {
            self.answered.push(sent_at);
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
        proof.answered(at(4));
        assert_eq!(proof.left(at(4)), secs(16), "what it says of itself it cannot prove");
        proof.answered(at(8));
        assert_eq!(proof.left(at(8)), secs(12), "4 s are too close");
        proof.answered(at(9));
        assert_eq!(proof.left(at(9)), secs(15), "the leader has heard of the request of 4");
        proof.answered(at(7));
        assert_eq!(proof.left(at(9)), secs(15), "older answers take nothing back");
    }

    #[test]
    fn with_a_steady_pulse_more_than_half_of_the_time_out_is_certain_at_any_time() {
        let start = Moment::now();
        let mut proof = Proof::new(TIMEOUT, start);
        for beat in 1..500_u64 {
            let now = start.after(secs(2 * beat));
            assert!(proof.left(now) > TIMEOUT * 11 / 20, "{:?} at beat {beat}", proof.left(now));
            // Others in between change nothing.
            proof.answered(now);
            for n in 1..200 {
                proof.answered(now.after(Duration::from_millis(n)));
            }
            assert!(proof.answered.len() <= 12, "{}", proof.answered.len());
        }
    }
}
