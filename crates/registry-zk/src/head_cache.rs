//! Records when a majority last checked the nodes that block the waiters of one session. No I/O.
//! `blockers` calls this module.
//!
//! Each entry has a key: the path of the queue for its head, or the path of the node for any other
//! blocking node. The entry stores the node's name and the time of its last majority check. The
//! first sighting counts as a check.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use registry_core::Moment;

/// The heads of the queues in one session. The cache stores hashes of paths and names. A collision
/// only makes a check early or late.
#[derive(Default)]
pub(crate) struct HeadCache {
    hasher: RandomState,
    by_queue: HashMap<u64, CachedHead>,
}

struct CachedHead {
    name: u64,
    checked_at: Moment,
}

impl HeadCache {
    /// Records the head `name` of the queue at `dir`, if the cache does not contain it. Returns
    /// whether a majority check of this head is due: the last one is older than `max_age`, or the
    /// head does not fit into the cache.
    pub(crate) fn observe_head(&mut self, dir: &str, name: &str, max_age: Duration) -> bool {
        let (queue, name) = (self.hasher.hash_one(dir), self.hasher.hash_one(name));
        let now = Moment::now();
        let is_cached = match self.by_queue.get(&queue) {
            Some(head) if head.name == name => return head.checked_at.after(max_age) <= now,
            cached => cached.is_some(),
        };
        if !is_cached && self.by_queue.len() >= QUEUES_MAX {
            let retention = RETENTION_MIN.max(max_age * 2);
            self.by_queue.retain(|_, head| head.checked_at.after(retention) > now);
            if self.by_queue.len() >= QUEUES_MAX {
                return true;
            }
        }
        self.by_queue.insert(queue, CachedHead { name, checked_at: now });
        false
    }

    /// Records that a majority has just confirmed the head of the queue at `dir`.
    pub(crate) fn record_majority_check(&mut self, dir: &str) {
        if let Some(head) = self.by_queue.get_mut(&self.hasher.hash_one(dir)) {
            head.checked_at = Moment::now();
        }
    }
}

/// Maximum number of queues in the cache.
const QUEUES_MAX: usize = 16 * 1024;

/// A full cache keeps a head for at least this time. This is longer than the time between two reads
/// of the queue by one waiter. Otherwise the waiter could insert its head again and again, and
/// never have it checked.
const RETENTION_MIN: Duration = Duration::from_secs(180);

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_head_needs_a_majority_check_after_the_maximum_age() {
        let mut head_cache = HeadCache::default();
        assert!(!head_cache.observe_head("/k", "a", MAX_AGE));
        tokio::time::advance(MAX_AGE).await;
        assert!(head_cache.observe_head("/k", "a", MAX_AGE));
        assert!(head_cache.observe_head("/k", "a", MAX_AGE), "until it is confirmed");
        head_cache.record_majority_check("/k");
        assert!(!head_cache.observe_head("/k", "a", MAX_AGE));
        tokio::time::advance(MAX_AGE).await;
        assert!(!head_cache.observe_head("/k", "b", MAX_AGE), "another head");
        assert!(!head_cache.observe_head("/other", "a", MAX_AGE), "another queue");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_cache_evicts_stale_heads_and_has_new_ones_checked() {
        let mut head_cache = HeadCache::default();
        for queue in 0..QUEUES_MAX {
            assert!(!head_cache.observe_head(&queue.to_string(), "a", MAX_AGE));
        }
        assert!(head_cache.observe_head("new", "a", MAX_AGE), "it does not fit");
        assert!(!head_cache.observe_head("1", "b", MAX_AGE), "it replaces another head");
        assert_eq!(head_cache.by_queue.len(), QUEUES_MAX);
        tokio::time::advance(MAX_AGE * 2).await;
        assert!(head_cache.observe_head("new", "a", MAX_AGE), "all heads are kept");
        tokio::time::advance(RETENTION_MIN - MAX_AGE * 2).await;
        assert!(head_cache.observe_head("0", "a", MAX_AGE));
        assert!(!head_cache.observe_head("new", "a", MAX_AGE));
        assert_eq!(head_cache.by_queue.len(), 1);
    }
}
