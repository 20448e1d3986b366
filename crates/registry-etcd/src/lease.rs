//! One lease: the duration that the members granted, and how much of it is certainly left. No I/O.

use std::time::Duration;

use registry_core::Moment;

/// A lease in the cluster, which ends unless it is kept alive.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) id: i64,
    ttl: Duration,
    /// The lease lasts for its full duration from here on, at minimum.
    refreshed: Moment,
    /// A later such time, which is not proven yet.
    pending: Option<Pending>,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    refreshed: Moment,
    term: u64,
}

impl Lease {
    /// Creates a lease of duration `ttl` that was granted by a response to a request sent at
    /// `sent`.
    pub(crate) fn new(id: i64, ttl: Duration, sent: Moment) -> Self {
        Self { id, ttl, refreshed: sent, pending: None }
    }

    /// Returns the full duration of the lease.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Returns how much of the lease is certainly left.
    pub(crate) fn left(&self) -> Duration {
        self.ttl.saturating_sub(Moment::now().since(self.refreshed))
    }

    /// Returns the time until which the lease certainly lasts unless it is kept alive again.
    pub(crate) fn ends(&self) -> Moment {
        self.refreshed.after(self.ttl)
    }

    /// Returns when the lease was last kept alive, proven or not.
    pub(crate) fn latest(&self) -> Moment {
        self.pending.map_or(self.refreshed, |pending| pending.refreshed)
    }

    /// Records that a member answered, in `term`, the `LeaseKeepAlive` request sent at `sent`.
    ///
    /// The answer proves nothing yet. A leader that was suspended and replaced without noticing
    /// keeps leases alive that its successor lets expire. Unlike a write or a linearizable read,
    /// `LeaseKeepAlive` does not need a majority.
    pub(crate) fn kept_alive(&mut self, sent: Moment, ttl: Duration, term: u64) {
        self.ttl = ttl;
        self.pending = Some(Pending { refreshed: sent, term });
    }

    /// Records that a majority answered, in `term`, a request sent after the last `LeaseKeepAlive`
    /// response. If the term is the same, the leader that kept the lease alive was still leading,
    /// so the lease counts from that response's request. Any later leader gives each lease its full
    /// duration again.
    pub(crate) fn prove(&mut self, term: u64) {
        if let Some(pending) = self.pending.take_if(|pending| pending.term <= term)
            && pending.term == term
        {
            self.refreshed = pending.refreshed;
        }
    }
}

/// Returns how many seconds a lease must last for a claim of `lease`: rounded up to whole seconds,
/// plus one. In that extra second another claim can reuse the lease without keeping it alive first.
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
