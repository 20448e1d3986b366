//! The current and past holds of each key, as the snapshots showed them.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use lock_registry::{FencingToken, Holder, Key};
use serde::Serialize;

/// A hold of a key, from its grant to the last snapshot that showed it. A snapshot does not show a
/// hand-over within a process, which continues the recorded hold. An upgrade takes a new token, so
/// it ends the recorded hold and begins another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ObservedHold {
    #[serde(skip)]
    pub(crate) key: Key,
    pub(crate) label: Option<String>,
    pub(crate) token: Option<FencingToken>,
    pub(crate) mode: String,
    /// The time of the grant in milliseconds since 1970. If the store does not report it, the time
    /// of the first snapshot that showed the hold.
    pub(crate) began_ms: u64,
    /// The time of the last snapshot that showed the hold, in milliseconds since 1970.
    pub(crate) last_seen_ms: u64,
    /// Whether a later snapshot did not show the hold.
    pub(crate) ended: bool,
}

/// The holds of all keys. A hold that begins and ends between two snapshots is not recorded.
#[derive(Debug, Default)]
pub(crate) struct History {
    open: HashMap<(Key, Option<FencingToken>, Option<String>), ObservedHold>,
    /// Sorted by their ends, oldest first.
    ended: VecDeque<ObservedHold>,
    ended_bytes: usize,
}

/// The limits of the number of ended holds, and of the bytes of their keys and labels. Beyond a
/// limit, the holds that ended first are removed.
const ENDED_MAX: usize = 20_000;
const ENDED_BYTES_MAX: usize = 16 << 20;

/// The maximum number of holds in one answer.
const ANSWER_MAX: usize = 500;

impl History {
    /// Records the holders of a snapshot that was taken at `at_ms`. Ends the open holds that
    /// `holders` does not contain. (ZooKeeper omits a key whose queue changed during each of
    /// several reads.)
    pub(crate) fn record(&mut self, holders: &[Holder], at_ms: u64) {
        let mut before = std::mem::take(&mut self.open);
        for holder in holders {
            let identity = (holder.key.clone(), holder.token, holder.label.clone());
            let held_for = holder.held_for.map_or(0, crate::output::whole_millis);
            let mut hold = before.remove(&identity).unwrap_or_else(|| ObservedHold {
                key: holder.key.clone(),
                label: holder.label.clone(),
                token: holder.token,
                mode: String::new(),
                began_ms: at_ms.saturating_sub(held_for),
                last_seen_ms: at_ms,
                ended: false,
            });
            // A downgrade changes the mode during the hold.
            hold.mode = holder.mode.to_string();
            hold.last_seen_ms = at_ms;
            self.open.insert(identity, hold);
        }
        for mut hold in before.into_values() {
            hold.ended = true;
            self.ended_bytes += hold.text_bytes();
            self.ended.push_back(hold);
        }
        while self.ended.len() > ENDED_MAX || self.ended_bytes > ENDED_BYTES_MAX {
            let Some(oldest) = self.ended.pop_front() else { break };
            self.ended_bytes -= oldest.text_bytes();
        }
    }

    /// Returns the recorded holds of `key`, sorted by their beginnings. If there are more than
    /// [`ANSWER_MAX`], the newest open holds have priority, then those that ended last.
    pub(crate) fn of(&self, key: &Key) -> Vec<ObservedHold> {
        let began = |hold: &&ObservedHold| (hold.began_ms, hold.token);
        let mut open: Vec<_> = self.open.values().filter(|hold| hold.key == *key).collect();
        open.sort_by_key(|hold| Reverse(began(hold)));
        let ended = self.ended.iter().rev().filter(|hold| hold.key == *key);
        let mut holds: Vec<_> = open.into_iter().chain(ended).take(ANSWER_MAX).collect();
        holds.sort_by_key(began);
        holds.into_iter().cloned().collect()
    }
}

impl ObservedHold {
    fn text_bytes(&self) -> usize {
        self.key.as_str().len() + self.label.as_ref().map_or(0, String::len)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn holder(key: &str, token: u64, held_for_ms: u64) -> Holder {
        Holder::new(Key::new(key).unwrap())
            .with_token(FencingToken::new(token))
            .with_times(Some(Duration::from_millis(held_for_ms)), None)
    }

    #[test]
    fn a_hold_lasts_from_its_grant_to_the_last_snapshot_that_shows_it() {
        let mut history = History::default();
        history.record(&[holder("a", 1, 500), holder("b", 2, 0)], 10_000);
        history.record(&[holder("a", 1, 1_500)], 11_000);
        history.record(&[holder("a", 3, 100)], 12_000);
        let times: Vec<_> = (history.of(&Key::new("a").unwrap()).iter())
            .map(|hold| (hold.began_ms, hold.last_seen_ms, hold.ended))
            .collect();
        assert_eq!(times, [(9_500, 11_000, true), (11_900, 12_000, false)]);
        assert!(history.of(&Key::new("b").unwrap())[0].ended);
        assert_eq!(history.of(&Key::new("c").unwrap()), []);
    }

    #[test]
    fn the_number_and_the_bytes_of_ended_holds_are_limited() {
        let mut history = History::default();
        for token in 1..=ENDED_MAX as u64 + 10 {
            history.record(&[holder("a", token, 0)], token);
        }
        assert_eq!((history.ended.len(), history.ended[0].began_ms), (ENDED_MAX, 10));
        let answer = history.of(&Key::new("a").unwrap());
        let newest = ENDED_MAX as u64 + 10;
        assert_eq!((answer.len(), answer[ANSWER_MAX - 1].began_ms), (ANSWER_MAX, newest));
        let open: Vec<_> =
            (1..=ANSWER_MAX as u64 + 100).map(|token| holder("b", token, token)).collect();
        history.record(&open, 1_000_000);
        let answer = history.of(&Key::new("b").unwrap());
        assert_eq!((answer.len(), answer[0].began_ms), (ANSWER_MAX, 1_000_000 - ANSWER_MAX as u64));
        let long = "x".repeat(4_000);
        for token in 1..=ENDED_BYTES_MAX as u64 / 4_000 + 10 {
            history.record(&[holder(&long, token, 0)], token);
        }
        assert!(
            history.ended_bytes <= ENDED_BYTES_MAX && history.ended_bytes > ENDED_BYTES_MAX / 2
        );
        assert_eq!(
            history.ended_bytes,
            history.ended.iter().map(ObservedHold::text_bytes).sum::<usize>()
        );
    }
}
