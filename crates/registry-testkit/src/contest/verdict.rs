//! What is to be said of a contest: the checks of the testkit, and that nobody was told too late or refused without a reason.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use registry_core::LostReason;

use super::Loss;
use crate::check::{Checked, check_in_line};
use crate::history::{Ending, Grant, History, Window, WriteAnswer};

/// How late a holder may hear of the end of its lease on a machine that has other things to do.
const LATE: u64 = 2_000_000_000;
/// A contest with fewer grants, or writes, has shown nothing.
const LITTLE: usize = 20;

/// What a contest has left.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// All that was recorded.
    pub history: History,
    /// Holds that ended against their holders' will, in the order in which these heard of it.
    pub losses: Vec<Loss>,
    /// What callers were told of the trouble.
    pub errors: Vec<String>,
    /// How long a newcomer took to take all keys, one after the other.
    pub taken_after: Duration,
    pub(super) steady: Vec<String>,
    pub(super) stopped: Vec<String>,
}

impl Outcome {
    /// Says that holders of `key` were stopped for a while, and may have heard of a loss as late as they went on.
    #[must_use]
    pub fn with_stopped_holders_of(mut self, key: &str) -> Self {
        self.stopped.push(key.to_owned());
        self
    }

    /// All promises were kept: tokens grow, no two guards of a key were valid at once, fenced writes are safe, whoever lost a lock heard of it,
    /// and nobody was refused but for somebody newer.
    ///
    /// # Panics
    /// With the first promise that was not kept, or when too little has happened.
    pub fn assert_flawless(&self) -> Checked {
        self.losses_were_told();
        self.writes_were_refused_with_reason();
        let checked =
            check_in_line(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        let is_much = checked.grants >= LITTLE && checked.writes >= LITTLE;
        assert!(is_much, "that was too little: {checked:?}");
        checked
    }

    /// All promises were kept, but that two guards of a key may have been valid at once in one of `windows`: the later one was granted
    /// after its beginning, and the earlier one had ended by its end. Tells where that was so.
    ///
    /// # Panics
    /// With the first promise that was not kept.
    pub fn assert_flawless_but_between(mut self, windows: &[Window]) -> Vec<Overlap> {
        // Who was granted a lock before, or was about to be told so, may have given back what was not his any more.
        for grant in &mut self.history.grants {
            let (asked, end) = (grant.acquire.from, valid(grant).to);
            if let Some(release) = &mut grant.release
                && windows.iter().any(|window| asked <= window.to && end >= window.from)
            {
                release.ending = Ending::Unknown;
            }
        }
        let overlaps = overlaps(&self.history);
        for overlap in &overlaps {
            let first = &mut self.history.grants[overlap.first];
            let at = overlap.at;
            let is_excused = windows.iter().any(|w| at.from >= w.from && at.to <= w.to);
            assert!(is_excused, "{overlap:?} is not in {windows:?}: {first:?}");
            // From here on its holder was wrong.
            first.lost = Some(first.lost.map_or(at.from, |lost| lost.min(at.from)));
        }
        self.assert_flawless();
        overlaps
    }

    /// The losses of holders that meant to hold for good.
    #[must_use]
    pub fn steady_losses(&self) -> Vec<LostReason> {
        let steady = self.losses.iter().filter(|loss| self.steady.contains(&loss.key));
        steady.map(|loss| loss.reason).collect()
    }

    /// Whoever lost a lock heard of it, by the end of its lease at the latest.
    fn losses_were_told(&self) {
        let is_stopped = |grant: &&Grant| self.stopped.iter().any(|key| **key == *grant.key);
        for grant in self.history.grants.iter().filter(|grant| !is_stopped(grant)) {
            let until = grant.valid_until.map_or(u64::MAX, |until| until.saturating_add(LATE));
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "not told in time: {grant:?}");
        }
    }

    /// Nobody was refused but for somebody newer.
    fn writes_were_refused_with_reason(&self) {
        for write in &self.history.writes {
            let newer = |grant: &Grant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteAnswer::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was refused, and nobody had a newer token"
            );
        }
    }
}

/// Two guards of one key that were valid at once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overlap {
    /// The key.
    pub key: String,
    /// When.
    pub at: Window,
    /// The earlier one of them, among the grants of the history.
    first: usize,
}

/// When the holder could believe that it held the lock.
fn valid(grant: &Grant) -> Window {
    let released = grant.release.map(|release| release.window.from);
    let ends = [released, grant.lost, grant.valid_until];
    let from = grant.acquire.to;
    Window::new(from, ends.into_iter().flatten().min().unwrap_or(u64::MAX).max(from))
}

/// All pairs of guards that were valid at once.
fn overlaps(history: &History) -> Vec<Overlap> {
    let mut by_key: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, grant) in history.grants.iter().enumerate() {
        by_key.entry(&grant.key).or_default().push(number);
    }
    let mut found = Vec::new();
    for (key, mut grants) in by_key {
        grants.sort_by_key(|grant| valid(&history.grants[*grant]).from);
        for (at, &first) in grants.iter().enumerate() {
            let end = valid(&history.grants[first]).to;
            let later = grants[at + 1..].iter().map(|&later| valid(&history.grants[later]));
            let at_once = later.take_while(|later| later.from < end);
            let at_once = at_once.filter(|later| later.from < later.to);
            found.extend(at_once.map(|later| Overlap {
                key: key.to_owned(),
                at: Window::new(later.from, end.min(later.to)),
                first,
            }));
        }
    }
    found
}

/// One line of figures.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} grants, {} losses, {} errors, all keys taken after {:?}",
            self.history.grants.len(),
            self.losses.len(),
            self.errors.len(),
            self.taken_after,
        )
    }
}
