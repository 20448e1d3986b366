//! The result of a workload: the checkers of the testkit, and which violations the fault explains.

use std::collections::BTreeMap;
use std::time::Duration;

use registry_core::LostReason;
use registry_testkit::check::{Checked, check};
use registry_testkit::history::{History, RecordedGrant, ReleaseResult, WriteResult};

use super::workload::{HAND_OVERS, LockLoss};

/// How late a holder may be notified of the end of its lease on a busy machine, in nanoseconds.
const NOTIFY_DELAY_MAX: u64 = 2_000_000_000;

/// The result of a workload.
pub(crate) struct WorkloadOutcome {
    pub(crate) history: History,
    /// Holds that ended without a release, in the order of their loss notifications.
    pub(crate) losses: Vec<LockLoss>,
    /// The errors that callers received.
    pub(crate) errors: Vec<String>,
    /// How long a new client took to acquire all keys, one after the other.
    pub(crate) acquired_after: Duration,
}

/// Two guards of one key that were valid at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuardOverlap {
    pub(crate) key: String,
    pub(crate) from: u64,
    pub(crate) to: u64,
    first: usize,
}

impl WorkloadOutcome {
    /// Asserts that no guarantee was violated.
    ///
    /// # Panics
    /// Panics with the first violation.
    pub(crate) fn assert_correct(&self) -> Checked {
        self.assert_losses_notified();
        self.assert_refusals_justified();
        let checked = check(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(checked.grants >= 20 && checked.writes >= 20, "too few operations: {checked:?}");
        println!(
            "{checked:?}, {} losses, {} errors, all keys acquired after {:?}",
            self.losses.len(),
            self.errors.len(),
            self.acquired_after,
        );
        checked
    }

    /// Removes `Busy` responses to clients that blocked each other: in a quorum, each may have
    /// acquired some masters and none a majority.
    pub(crate) fn without_split_votes(mut self) -> Self {
        let before = self.history.busy.clone();
        self.history.busy.retain(|one| {
            !before.iter().any(|other| {
                other.key == one.key
                    && other.client / 100 != one.client / 100
                    && other.window.from < one.window.to
                    && one.window.from < other.window.to
            })
        });
        self
    }

    /// Asserts that no guarantee was violated, except that two guards of a key may overlap within
    /// one of `windows`. The later guard was granted after the window's start, and the earlier one
    /// ended before the window's end. Returns the overlaps.
    ///
    /// # Panics
    /// Panics with the first violation.
    pub(crate) fn assert_correct_outside(mut self, windows: &[(u64, u64)]) -> Vec<GuardOverlap> {
        let overlaps = overlaps(&self.history);
        // A holder within a window may have released a lock that it no longer had.
        for grant in &mut self.history.grants {
            let (requested_at, end) = (grant.acquire.from, valid(grant).1);
            if let Some(release) = &mut grant.release
                && windows.iter().any(|(from, to)| requested_at <= *to && end >= *from)
            {
                release.ending = ReleaseResult::Unknown;
            }
        }
        for overlap in &overlaps {
            let first = &mut self.history.grants[overlap.first];
            let is_allowed = |(from, to): &(u64, u64)| overlap.from >= *from && overlap.to <= *to;
            assert!(windows.iter().any(is_allowed), "{overlap:?} is not in {windows:?}: {first:?}");
            // From here on the holder had lost the lock, so its release freed nothing.
            first.lost = Some(first.lost.map_or(overlap.from, |lost| lost.min(overlap.from)));
            if let Some(release) = &mut first.release {
                release.ending = ReleaseResult::Unknown;
            }
        }
        let stale = self.remove_stale_hand_overs(windows);
        self.assert_correct();
        if stale > 0 {
            println!("{stale} hand-overs of locks that another client had held since");
        }
        for overlap in &overlaps {
            let length = Duration::from_nanos(overlap.to - overlap.from);
            println!("{}: two valid guards for {length:?}", overlap.key);
        }
        overlaps
    }

    /// A client that has not detected its loss may hand the lock over between its callers, even
    /// after another client held it. Removes these grants if they ended within one of `windows`,
    /// and returns their number.
    fn remove_stale_hand_overs(&mut self, windows: &[(u64, u64)]) -> usize {
        let before = self.history.grants.clone();
        self.history.grants.retain(|grant| {
            let of_key = || before.iter().filter(|other| other.key == grant.key);
            let (token, ended) = (grant.token.unwrap_or(0), valid(grant).1);
            let handed_over = |newer: &RecordedGrant| {
                of_key().any(|first| {
                    let first_token = first.token.unwrap_or(0);
                    first.client / 100 == grant.client / 100
                        && (first_token + 1..=first_token + u64::from(HAND_OVERS)).contains(&token)
                        && first.acquire.from < newer.acquire.to
                })
            };
            let in_window = |newer: &RecordedGrant| {
                windows.iter().any(|w| newer.acquire.to >= w.0 && ended <= w.1)
            };
            let mut newer = of_key()
                .filter(|newer| newer.token > grant.token && newer.acquire.to < grant.acquire.from);
            !newer.any(|newer| handed_over(newer) && in_window(newer))
        });
        before.len() - self.history.grants.len()
    }

    /// Asserts that every loss was reported, at the latest at the end of the lease.
    fn assert_losses_notified(&self) {
        for grant in &self.history.grants {
            let until =
                grant.valid_until.expect("Redis has leases").saturating_add(NOTIFY_DELAY_MAX);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "not notified in time: {grant:?}");
        }
    }

    /// Asserts that a write was refused only if a newer token existed.
    fn assert_refusals_justified(&self) {
        for write in &self.history.writes {
            let newer = |grant: &RecordedGrant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteResult::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was refused, but no newer token exists"
            );
        }
    }

    /// Returns the reasons of the losses of steady keys.
    pub(crate) fn steady_losses(&self) -> Vec<LostReason> {
        let steady = self.losses.iter().filter(|loss| loss.key.starts_with("steady"));
        steady.map(|loss| loss.reason).collect()
    }
}

/// Returns the time span in which the holder could rely on the lock.
fn valid(grant: &RecordedGrant) -> (u64, u64) {
    let released = grant.release.map(|release| release.window.from);
    let ends = [released, grant.lost, grant.valid_until];
    (grant.acquire.to, ends.into_iter().flatten().min().unwrap_or(u64::MAX))
}

/// Returns all pairs of guards that were valid at the same time.
fn overlaps(history: &History) -> Vec<GuardOverlap> {
    let mut by_key: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, grant) in history.grants.iter().enumerate() {
        by_key.entry(&grant.key).or_default().push(number);
    }
    let mut found = Vec::new();
    for (key, mut grants) in by_key {
        grants.sort_by_key(|grant| valid(&history.grants[*grant]).0);
        for (at, &first) in grants.iter().enumerate() {
            let (_, to) = valid(&history.grants[first]);
            let later = grants[at + 1..].iter().map(|&later| valid(&history.grants[later]));
            let at_once = later.take_while(|(from, _)| *from < to);
            found.extend(at_once.filter(|(from, until)| from < until).map(|(from, until)| {
                GuardOverlap { key: key.to_owned(), from, to: to.min(until), first }
            }));
        }
    }
    found
}
