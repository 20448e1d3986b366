//! Remembers since when a node has been the head of a queue in which this session waits. Only a
//! cache: a missing entry delays the next check. No I/O. Called by `recipe`.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use registry_core::Moment;

/// Heads of the queues in one session. Paths and names are stored as hashes; a collision only makes
/// a check early.
#[derive(Default)]
pub(crate) struct Heads {
    hashes: RandomState,
    by_line: HashMap<u64, Head>,
}

struct Head {
    name: u64,
    confirmed_at: Moment,
}

impl Heads {
    /// Returns whether `name` has been the known head of the queue at `dir` for `time` since it was
    /// first seen or confirmed.
    pub(crate) fn is_old(&mut self, dir: &str, name: &str, time: Duration) -> bool {
        let (line, name) = (self.hashes.hash_one(dir), self.hashes.hash_one(name));
        let now = Moment::now();
        if let Some(head) = self.by_line.get(&line)
            && head.name == name
        {
            return head.confirmed_at.after(time) <= now;
        }
        if self.by_line.len() >= LINES_MAX {
            self.by_line.retain(|_, head| head.confirmed_at.after(time * 2) > now);
        }
        if self.by_line.len() < LINES_MAX {
            self.by_line.insert(line, Head { name, confirmed_at: now });
        }
        false
    }

    /// Records that a majority has confirmed the head of the queue at `dir`.
    pub(crate) fn confirm(&mut self, dir: &str) {
        if let Some(head) = self.by_line.get_mut(&self.hashes.hash_one(dir)) {
            head.confirmed_at = Moment::now();
        }
    }
}

/// Maximum number of queues in the cache.
const LINES_MAX: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_head_is_old_when_it_was_seen_long_ago_and_not_confirmed_since() {
        let mut heads = Heads::default();
        assert!(!heads.is_old("/k", "a", TIME));
        tokio::time::advance(TIME).await;
        assert!(heads.is_old("/k", "a", TIME));
        assert!(heads.is_old("/k", "a", TIME), "until it is confirmed");
        heads.confirm("/k");
        assert!(!heads.is_old("/k", "a", TIME));
        tokio::time::advance(TIME).await;
        assert!(!heads.is_old("/k", "b", TIME), "another one");
        assert!(!heads.is_old("/other", "a", TIME), "another line");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_limited_and_makes_room() {
        let mut heads = Heads::default();
        for line in 0..LINES_MAX * 2 {
            heads.is_old(&line.to_string(), "a", TIME);
        }
        assert_eq!(heads.by_line.len(), LINES_MAX);
        tokio::time::advance(TIME * 2).await;
        assert!(heads.is_old("0", "a", TIME));
        heads.is_old("new", "a", TIME);
        assert_eq!(heads.by_line.len(), 1);
    }
}
