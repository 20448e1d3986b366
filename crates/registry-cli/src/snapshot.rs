//! Snapshots of all holders and waiters of a namespace, for the commands that show them
//! continuously.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use lock_registry::modes::WaitingClaim;
use lock_registry::{FencingToken, Holder, Key, LockError, Registry};

/// The holders and waiters of all keys, read concurrently.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) holders: Vec<Holder>,
    /// Empty if the store does not list waiters.
    pub(crate) waiters: Vec<WaitingClaim>,
    /// The time at which the requests were sent.
    pub(crate) taken_at: Instant,
}

impl Snapshot {
    pub(crate) async fn take(registry: &Registry) -> Result<Self, LockError> {
        let taken_at = Instant::now();
        let waiters = async {
            if registry.capabilities().waiters {
                registry.list_waiters().await
            } else {
                Ok(Vec::new())
            }
        };
        let (holders, waiters) = tokio::try_join!(registry.list(), waiters)?;
        Ok(Self { holders, waiters, taken_at })
    }

    /// Returns the time since this snapshot was taken.
    pub(crate) fn age(&self) -> Duration {
        self.taken_at.elapsed()
    }
}

/// Counts the grants that successive snapshots show. A lock that is granted and released between
/// two snapshots is not counted.
#[derive(Debug, Default)]
pub(crate) struct GrantCounter {
    previous: HashSet<(Key, Option<FencingToken>)>,
    /// The times of the snapshots within [`RATE_SPAN`], each with the number of new grants.
    recent: VecDeque<(Instant, usize)>,
}

impl GrantCounter {
    pub(crate) fn record(&mut self, snapshot: &Snapshot) {
        let grants: HashSet<_> =
            snapshot.holders.iter().map(|holder| (holder.key.clone(), holder.token)).collect();
        // The grants of the first snapshot may be old.
        let new =
            if self.recent.is_empty() { 0 } else { grants.difference(&self.previous).count() };
        self.previous = grants;
        self.recent.push_back((snapshot.taken_at, new));
        while self.recent.len() > 1
            && self
                .recent
                .front()
                .is_some_and(|(at, _)| snapshot.taken_at.saturating_duration_since(*at) > RATE_SPAN)
        {
            self.recent.pop_front();
        }
    }

    /// Returns the new grants per second within [`RATE_SPAN`]. Returns zero if fewer than two
    /// snapshots are within this time.
    pub(crate) fn per_second(&self) -> f64 {
        let (Some((first, _)), Some((last, _))) = (self.recent.front(), self.recent.back()) else {
            return 0.0;
        };
        let span = last.saturating_duration_since(*first).as_secs_f64();
        let grants: usize = self.recent.iter().skip(1).map(|(_, grants)| grants).sum();
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
        let grants = grants as f64;
        if span > 0.0 { grants / span } else { 0.0 }
    }
}

const RATE_SPAN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_grants_that_are_new_in_a_snapshot_are_counted() {
        let start = Instant::now();
        let snapshot = |seconds: u64, tokens: &[u64]| Snapshot {
            holders: (tokens.iter())
                .map(|token| {
                    Holder::new(Key::new("orders/42").unwrap())
                        .with_token(FencingToken::new(*token))
                })
                .collect(),
            waiters: Vec::new(),
            taken_at: start + Duration::from_secs(seconds),
        };
        let mut counter = GrantCounter::default();
        for (seconds, tokens, rate) in [
            (0, &[7_u64, 8][..], 0.0),
            (1, &[7, 8], 0.0),
            (2, &[8, 9], 0.5),
            (4, &[10], 0.5),
            (30, &[11], 0.0),
        ] {
            counter.record(&snapshot(seconds, tokens));
            assert!((counter.per_second() - rate).abs() < 1e-9, "after {seconds} s");
        }
    }
}
