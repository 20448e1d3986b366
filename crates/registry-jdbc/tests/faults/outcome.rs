//! Evaluates a workload: the checks of the testkit, and the violations that the fault explains.

use std::collections::BTreeMap;
use std::time::Duration;

use registry_testkit::check::{Checked, check};
use registry_testkit::history::{History, RecordedGrant, ReleaseResult, Window, WriteResult};

use crate::server::HAND_OVERS;

/// The maximum delay on a busy machine until a holder notices the end of its lease.
const LATE: u64 = 2_000_000_000;

/// The result of a workload.
pub(crate) struct WorkloadOutcome {
    pub(crate) history: History,
    /// The number of holds that ended by loss.
    pub(crate) losses: u64,
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
    /// Checks that no property was violated.
    ///
    /// # Panics
    /// On the first violation.
    pub(crate) fn assert_flawless(&self) -> Checked {
        self.assert_losses_were_notified();
        self.assert_rejections_are_explained();
        let checked = check(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(checked.grants >= 20 && checked.writes >= 20, "too few events: {checked:?}");
        println!("{checked:?}, {} losses", self.losses);
        checked
    }

    /// Checks that no property was violated, except that two guards of a key may overlap in one of
    /// `windows`. The later one must be granted after the start of the window, and the earlier one
    /// must end before its end. Returns the overlaps.
    ///
    /// # Panics
    /// On the first other violation.
    pub(crate) fn assert_flawless_but_between(
        mut self,
        windows: &[(u64, u64)],
    ) -> Vec<GuardOverlap> {
        // A grant before or during a window may have released a lock that it no longer held.
        for grant in &mut self.history.grants {
            let (requested, end) = (grant.acquire.from, valid(grant).1);
            if let Some(release) = &mut grant.release
                && windows.iter().any(|(from, to)| requested <= *to && end >= *from)
            {
                release.ending = ReleaseResult::Unknown;
            }
        }
        let overlaps = overlaps(&self.history);
        for overlap in &overlaps {
            let first = &mut self.history.grants[overlap.first];
            let excused = |(from, to): &(u64, u64)| overlap.from >= *from && overlap.to <= *to;
            assert!(windows.iter().any(excused), "{overlap:?} is not in {windows:?}: {first:?}");
            // From here on the first holder had lost the lock, so its release did not free it.
            first.lost = Some(first.lost.map_or(overlap.from, |lost| lost.min(overlap.from)));
            if let Some(release) = &mut first.release {
                release.ending = ReleaseResult::Unknown;
            }
        }
        let stale = self.exclude_stale_hand_overs(windows);
        self.assert_flawless();
        if stale > 0 {
            println!("{stale} hand-overs of locks that other clients had acquired since");
        }
        for overlap in &overlaps {
            let length = Duration::from_nanos(overlap.to - overlap.from);
            println!("{}: two valid guards for {length:?}", overlap.key);
        }
        overlaps
    }

    /// Ends the grants of killed clients at the time of their death.
    pub(crate) fn with_deaths(mut self, deaths: &[(u32, u64)]) -> Self {
        for grant in &mut self.history.grants {
            let death = deaths.iter().find(|(client, _)| *client == grant.client);
            if let Some((_, at)) = death
                && grant.release.is_none()
            {
                grant.lost = Some(grant.lost.map_or(*at, |lost| lost.min(*at)));
            }
        }
        self
    }

    /// Ignores "busy" answers in `windows`: a crash or a failover may undo a release. The lock is
    /// then free at the end of its lease.
    pub(crate) fn without_busy_replies(mut self, windows: &[(u64, u64)]) -> Self {
        let is_outside = |requested: &Window| {
            !windows.iter().any(|w| requested.from <= w.1 && requested.to >= w.0)
        };
        self.history.busy.retain(|busy| is_outside(&busy.window));
        self
    }

    /// Removes stale hand-overs that ended in one of `windows`, and returns their number. A client
    /// that has not noticed a loss may hand the lock over locally, even after another client was
    /// granted it.
    fn exclude_stale_hand_overs(&mut self, windows: &[(u64, u64)]) -> usize {
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

    /// Checks that each holder was notified of its loss, at the latest at the end of its lease.
    fn assert_losses_were_notified(&self) {
        for grant in &self.history.grants {
            let until = grant.valid_until.expect("the stores have leases").saturating_add(LATE);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "no loss notification in time: {grant:?}");
        }
    }

    /// Checks that each rejected write is explained by a newer grant.
    fn assert_rejections_are_explained(&self) {
        for write in &self.history.writes {
            let newer = |grant: &RecordedGrant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteResult::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was refused without a newer token"
            );
        }
    }
}

/// The time in which the holder could assume that it held the lock.
fn valid(grant: &RecordedGrant) -> (u64, u64) {
    let released = grant.release.map(|release| release.window.from);
    let ends = [released, grant.lost, grant.valid_until];
    (grant.acquire.to, ends.into_iter().flatten().min().unwrap_or(u64::MAX))
}

/// All pairs of grants that were valid at the same time.
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
