//! One lease: what the servers have granted, and how much of it is surely left. No I/O.

use std::time::Duration;

use registry_core::Moment;

/// A lease in the servers, which ends unless it is kept alive.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) id: i64,
    ttl: Duration,
    /// It lasts for its whole time from here on, at least.
    refreshed: Moment,
    /// A later moment of which that is not proven yet.
    pending: Option<Pending>,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    refreshed: Moment,
    term: u64,
}

impl Lease {
    /// A lease that was granted for `ttl` in answer to a request that left at `sent`.
    pub(crate) fn new(id: i64, ttl: Duration, sent: Moment) -> Self {
        Self { id, ttl, refreshed: sent, pending: None }
    }

    /// How long it lasts after it was kept alive.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// How much is surely left.
    pub(crate) fn left(&self) -> Duration {
        self.ttl.saturating_sub(Moment::now().since(self.refreshed))
    }

    /// When it surely has not ended yet, if nobody keeps it alive.
    pub(crate) fn ends(&self) -> Moment {
        self.refreshed.after(self.ttl)
    }

    /// When it was last kept alive, as far as anybody has said.
    pub(crate) fn latest(&self) -> Moment {
        self.pending.map_or(self.refreshed, |pending| pending.refreshed)
    }

    /// Notes that a request of `sent` to keep it alive was answered by a member in `term`.
    ///
    /// That proves nothing yet. A leader that stood still, and has been replaced without having heard of it, keeps leases alive that
    /// the new one lets end. No majority is asked for it, unlike for a write, or for a read that tells the newest.
    pub(crate) fn kept_alive(&mut self, sent: Moment, ttl: Duration, term: u64) {
        self.ttl = ttl;
        self.pending = Some(Pending { refreshed: sent, term });
    }

    /// Notes that a majority has answered a request that left after the last answer, in `term`. In the same term it was the same
    /// leader, which was still leading: a new one gives each lease its whole time again.
    pub(crate) fn prove(&mut self, term: u64) {
        if let Some(pending) = self.pending.take_if(|pending| pending.term <= term)
            && pending.term == term
        {
            self.refreshed = pending.refreshed;
        }
    }
}

/// How long a lease must last for a claim of `lease`: in whole seconds, as etcd counts, and up to a second more, for which it can pass
/// from one claim to the next without being kept alive.
pub(crate) fn seconds(lease: Duration) -> i64 {
    let whole = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
    i64::try_from(whole).unwrap_or(i64::MAX - 1) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn a_lease_lasts_longer_than_the_claim_that_it_is_for() {
        for (lease, ttl) in [(2_000, 3), (2_001, 4), (1, 2), (30_000, 31)] {
            assert_eq!(seconds(Duration::from_millis(lease)), ttl, "{lease} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_leader_says_that_may_be_one_no_more_counts_only_when_a_majority_has_answered() {
        let mut lease = Lease::new(1, TTL, Moment::now());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(lease.left() < TTL - Duration::from_millis(10));
        lease.kept_alive(Moment::now(), TTL, 7);
        assert!(lease.left() < TTL - Duration::from_millis(10), "it is not proven");
        lease.prove(8);
        assert!(lease.left() < TTL - Duration::from_millis(10), "another leader has answered");
        lease.kept_alive(Moment::now(), TTL, 8);
        lease.prove(8);
        assert!(lease.left() > TTL - Duration::from_millis(10), "it is proven");
    }
}
