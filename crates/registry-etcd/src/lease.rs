//! One lease: the duration that the members granted, and its guaranteed remaining time. No I/O.

use std::time::Duration;

use registry_core::Moment;

/// A lease in the cluster. The members expire the lease unless a client extends it.
#[derive(Debug, Clone)]
pub(crate) struct EtcdLease {
    pub(crate) id: i64,
    /// The guaranteed duration. Zero if it is unknown.
    ttl: Duration,
    /// The lease lasts at least for `ttl` from this time on.
    extended_at: Moment,
    /// The last extension, if no majority has confirmed it yet.
    unconfirmed: Option<UnconfirmedExtension>,
}

#[derive(Debug, Clone, Copy)]
struct UnconfirmedExtension {
    extended_at: Moment,
    ttl: Duration,
    term: u64,
}

impl EtcdLease {
    /// Creates a lease of duration `ttl` that was granted by a response to a request sent at
    /// `sent_at`. A `ttl` of zero means that the duration is unknown.
    pub(crate) fn new(id: i64, ttl: Duration, sent_at: Moment) -> Self {
        Self { id, ttl, extended_at: sent_at, unconfirmed: None }
    }

    /// Returns the full duration of the lease by the last response, confirmed or not. Returns zero
    /// if the duration is unknown.
    pub(crate) fn ttl(&self) -> Duration {
        self.unconfirmed.map_or(self.ttl, |unconfirmed| unconfirmed.ttl)
    }

    /// Returns the guaranteed remaining time of the lease.
    pub(crate) fn remaining(&self) -> Duration {
        self.ttl.saturating_sub(Moment::now().since(self.extended_at))
    }

    /// Returns the earliest time at which the lease may expire without a further extension.
    pub(crate) fn expires_at(&self) -> Moment {
        self.extended_at.after(self.ttl)
    }

    /// Returns when the lease was last extended, confirmed or not.
    pub(crate) fn last_extended(&self) -> Moment {
        self.unconfirmed.map_or(self.extended_at, |unconfirmed| unconfirmed.extended_at)
    }

    /// Records a response, in `term`, to the `LeaseKeepAlive` request sent at `sent_at`.
    ///
    /// The response alone guarantees nothing, because `LeaseKeepAlive` does not need a majority. A
    /// suspended leader that resumes may not know its successor yet. It then still extends leases,
    /// but the successor lets them expire.
    pub(crate) fn record_extension(&mut self, sent_at: Moment, ttl: Duration, term: u64) {
        self.unconfirmed = Some(UnconfirmedExtension { extended_at: sent_at, ttl, term });
    }

    /// Records a response of a majority, in `term`, to a request sent after the last
    /// `LeaseKeepAlive` response. If the terms are equal, the leader that extended the lease was
    /// still the leader. The extension then counts, even if the leader changes later: a new leader
    /// restarts each lease with its full duration.
    pub(crate) fn record_majority_response(&mut self, term: u64) {
        if let Some(unconfirmed) = self.unconfirmed.take_if(|unconfirmed| unconfirmed.term <= term)
            && unconfirmed.term == term
        {
            self.extended_at = unconfirmed.extended_at;
            self.ttl = unconfirmed.ttl;
        }
    }
}

/// Returns the duration in seconds of the etcd lease for a claim's `lease`: rounded up to whole
/// seconds, plus one. For this additional second, the etcd lease still lasts long enough for the
/// next claim of the same duration, which reuses it without an extension.
pub(crate) fn ttl_seconds(lease: Duration) -> i64 {
    let whole = lease.as_secs() + u64::from(lease.subsec_nanos() > 0);
    i64::try_from(whole).unwrap_or(i64::MAX - 1) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn a_lease_lasts_longer_than_its_claim() {
        for (lease, ttl) in [(2_000, 3), (2_001, 4), (1, 2), (30_000, 31)] {
            assert_eq!(ttl_seconds(Duration::from_millis(lease)), ttl, "{lease} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_extension_counts_only_after_a_majority_response_in_the_same_term() {
        let mut lease = EtcdLease::new(1, TTL, Moment::now());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(lease.remaining() < TTL - Duration::from_millis(10));
        lease.record_extension(Moment::now(), TTL, 7);
        assert!(lease.remaining() < TTL - Duration::from_millis(10), "it is not confirmed");
        lease.record_majority_response(8);
        assert!(
            lease.remaining() < TTL - Duration::from_millis(10),
            "the confirmation is of another term"
        );
        lease.record_extension(Moment::now(), TTL, 8);
        lease.record_majority_response(8);
        assert!(lease.remaining() > TTL - Duration::from_millis(10), "it is confirmed");
    }

    #[tokio::test(start_paused = true)]
    async fn an_unconfirmed_extension_of_a_lease_of_unknown_duration_does_not_count() {
        let mut lease = EtcdLease::new(1, Duration::ZERO, Moment::now());
        lease.record_extension(Moment::now(), TTL, 7);
        assert_eq!((lease.remaining(), lease.ttl()), (Duration::ZERO, TTL), "it is not confirmed");
        lease.record_majority_response(8);
        assert_eq!(
            (lease.remaining(), lease.ttl()),
            (Duration::ZERO, Duration::ZERO),
            "the confirmation is of another term"
        );
        lease.record_extension(Moment::now(), TTL, 8);
        lease.record_majority_response(8);
        assert!(lease.remaining() > TTL - Duration::from_millis(10), "it is confirmed");
    }
}
