//! Records since when a node has been the head of a queue in which this session waits. Only a
//! cache: a missing entry delays the next check. No I/O. Called by `recipe`.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use registry_core::Moment;

/// Heads of the queues in one session. Paths and names are stored as hashes; a collision only makes
/// a check early.
#[derive(Default)]
pub(crate) struct HeadCache {
    hasher: RandomState,
    by_queue: HashMap<u64, CachedHead>,
}

struct CachedHead {
    name: u64,
    confirmed_at: Moment,
}

impl HeadCache {
    /// Returns whether `name` has been the known head of the queue at `dir` for `max_age` since it
    /// was first seen or confirmed.
    pub(crate) fn needs_confirmation(&mut self, dir: &str, name: &str, max_age: Duration) -> bool {
        let (queue, name) = (self.hasher.hash_one(dir), self.hasher.hash_one(name));
        let now = Moment::now();
        if let Some(head) = self.by_queue.get(&queue)
            && head.name == name
        {
            return head.confirmed_at.after(max_age) <= now;
        }
        if self.by_queue.len() >= QUEUES_MAX {
            self.by_queue.retain(|_, head| head.confirmed_at.after(max_age * 2) > now);
        }
        if self.by_queue.len() < QUEUES_MAX {
            self.by_queue.insert(queue, CachedHead { name, confirmed_at: now });
        }
        false
    }

    /// Records that a majority has confirmed the head of the queue at `dir`.
    pub(crate) fn confirm(&mut self, dir: &str) {
        if let Some(head) = self.by_queue.get_mut(&self.hasher.hash_one(dir)) {
            head.confirmed_at = Moment::now();
        }
    }
}

/// Maximum number of queues in the cache.
const QUEUES_MAX: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_head_needs_confirmation_after_the_maximum_age() {
        let mut head_cache = HeadCache::default();
        assert!(!head_cache.needs_confirmation("/k", "a", MAX_AGE));
        tokio::time::advance(MAX_AGE).await;
        assert!(head_cache.needs_confirmation("/k", "a", MAX_AGE));
        assert!(head_cache.needs_confirmation("/k", "a", MAX_AGE), "until it is confirmed");
        head_cache.confirm("/k");
        assert!(!head_cache.needs_confirmation("/k", "a", MAX_AGE));
        tokio::time::advance(MAX_AGE).await;
        assert!(!head_cache.needs_confirmation("/k", "b", MAX_AGE), "another head");
        assert!(!head_cache.needs_confirmation("/other", "a", MAX_AGE), "another queue");
    }

    #[tokio::test(start_paused = true)]
    async fn the_cache_is_limited_and_evicts_stale_heads() {
        let mut head_cache = HeadCache::default();
        for queue in 0..QUEUES_MAX * 2 {
            head_cache.needs_confirmation(&queue.to_string(), "a", MAX_AGE);
        }
        assert_eq!(head_cache.by_queue.len(), QUEUES_MAX);
        tokio::time::advance(MAX_AGE * 2).await;
        assert!(head_cache.needs_confirmation("0", "a", MAX_AGE));
        head_cache.needs_confirmation("new", "a", MAX_AGE);
        assert_eq!(head_cache.by_queue.len(), 1);
    }
}
