//! The result of a workload: the checks of `check`, the timeliness of loss notifications, and the
//! reasons for rejected writes.
#![expect(clippy::print_stdout, reason = "figures are printed for `--nocapture`")]

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use registry_core::LostReason;

use super::{CLIENT_NUMBERS_PER_REGISTRY, RecordedLoss, WorkloadOptions};
use crate::check::{CheckCounts, check, check_queued};
use crate::history::{History, RecordedGrant, ReleaseResult, Window, WriteResult};

/// The maximum time after the next grant, in nanoseconds, in which a holder on a loaded machine may
/// notice its loss.
const LOSS_TOLERANCE: u64 = 2_000_000_000;
/// The maximum time after the end of its lease, in nanoseconds, in which a holder on a loaded
/// machine may report a loss.
const REPORT_TOLERANCE: u64 = 15_000_000_000;
/// The minimum number of grants, and of writes. A workload with fewer of them proves nothing.
const MIN_OPERATIONS: usize = 20;

/// The result of a workload.
#[derive(Debug)]
#[non_exhaustive]
pub struct WorkloadOutcome {
    /// The complete recorded history.
    pub history: History,
    /// The locks that were lost while held, in the order in which their holders were notified.
    pub losses: Vec<RecordedLoss>,
    /// The errors that callers received, except reports of a loss.
    pub errors: Vec<String>,
    /// The time that the verifier took to acquire all keys after the workload, one after the other.
    pub acquired_after: Duration,
    pub(super) options: WorkloadOptions,
    pub(super) paused_keys: Vec<String>,
}

impl WorkloadOutcome {
    /// Records that holders of `key` were paused. They may report a loss only after they resume.
    #[must_use]
    pub fn with_paused_holders_of(mut self, key: &str) -> Self {
        self.paused_keys.push(key.to_owned());
        self
    }

    /// Ends the grants of killed clients at the time of their death, except grants whose release a
    /// client has requested. `deaths` contains the client numbers and times.
    #[must_use]
    pub fn with_deaths(mut self, deaths: &[(u32, u64)]) -> Self {
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

    /// Ignores busy answers in `windows`: a crash or a failover may undo a release. The lock is
    /// then free only at the end of its lease.
    #[must_use]
    pub fn without_busy_answers_in(mut self, windows: &[Window]) -> Self {
        self.history.busy.retain(|busy| !windows.iter().any(|w| intersect(&busy.window, w)));
        self
    }

    /// Ignores busy answers to clients that blocked each other: in a quorum, each may have acquired
    /// some masters and none a majority.
    #[must_use]
    pub fn without_split_votes(mut self) -> Self {
        let before = self.history.busy.clone();
        self.history.busy.retain(|one| {
            !before.iter().any(|other| {
                other.key == one.key
                    && registry_of(other.client) != registry_of(one.client)
                    && other.window.from < one.window.to
                    && one.window.from < other.window.to
            })
        });
        self
    }

    /// Asserts that all promises were kept, with one exception: a holder may notice late that the
    /// store ended its lease, possibly after the next grant. Within two seconds of the next grant,
    /// it must notice the loss or call its release. Tokens and fenced writes must be safe.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub fn assert_guarantees_despite_late_losses(mut self) -> CheckCounts {
        let grants = self.history.grants.clone();
        for grant in &mut self.history.grants {
            let late_release =
                grant.release.filter(|release| release.result == ReleaseResult::NotHeld);
            let Some(lost) = grant.lost.or_else(|| Some(late_release?.window.from)) else {
                continue;
            };
            let newer =
                grants.iter().filter(|next| next.key == grant.key && next.token > grant.token);
            let next = newer.map(|next| next.acquire.to).min();
            // Even if the loss is reported later, a guard is not valid beyond its lease.
            let noticed = grant.valid_until.map_or(lost, |until| lost.min(until));
            if let Some(next) =
                next.filter(|next| *next < noticed && noticed - next < LOSS_TOLERANCE)
            {
                let length = Duration::from_nanos(noticed - next);
                println!("{}: two valid guards for {length:?}", grant.key);
                grant.lost = Some(next);
            }
        }
        self.assert_guarantees()
    }

    /// Asserts that all promises were kept:
    ///
    /// - Tokens increase.
    /// - No two guards of a key are valid at the same time.
    /// - Fenced writes are safe.
    /// - A busy answer means that another client may have held the lock.
    /// - Every holder that lost a lock was notified in time.
    /// - The resource rejected a write only if a newer token existed.
    ///
    /// # Panics
    /// Panics with the first broken promise, or if the history has too few grants or writes.
    pub fn assert_guarantees(&self) -> CheckCounts {
        self.assert_grants_ended_in_time();
        self.assert_rejections_were_justified();
        let check = if self.options.is_queued { check_queued } else { check };
        let checked = check(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        let is_enough = checked.grants >= MIN_OPERATIONS && checked.writes >= MIN_OPERATIONS;
        assert!(is_enough, "too few grants or writes: {checked:?}");
        println!("{self}; {checked:?}");
        checked
    }

    /// Asserts that all promises were kept, except that guards of a key may overlap within one of
    /// `windows`. Each overlap must begin and end within the window. Within `windows`, a registry
    /// may also hand over a lost grant. Returns the overlaps.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub fn assert_guarantees_except_in(mut self, windows: &[Window]) -> Vec<ValidityOverlap> {
        // A grant that overlaps a window may have released a lock that it no longer held, so its
        // release proves nothing.
        for grant in &mut self.history.grants {
            let (called, end) = (grant.acquire.from, validity_window(grant).to);
            if let Some(release) = &mut grant.release
                && windows.iter().any(|window| intersect(&Window::new(called, end), window))
            {
                release.result = ReleaseResult::Unknown;
            }
        }
        let overlaps = find_overlaps(&self.history);
        for overlap in &overlaps {
            let first = &mut self.history.grants[overlap.first];
            let at = overlap.at;
            let is_excused = windows.iter().any(|w| at.from >= w.from && at.to <= w.to);
            assert!(is_excused, "{overlap:?} is not in {windows:?}: {first:?}");
            // From this time on, the earlier grant counts as lost.
            first.lost = Some(first.lost.map_or(at.from, |lost| lost.min(at.from)));
        }
        let stale = self.remove_stale_hand_overs(windows);
        self.assert_guarantees();
        if stale > 0 {
            println!("{stale} hand-overs of locks that another client had acquired since");
        }
        for overlap in &overlaps {
            let length = Duration::from_nanos(overlap.at.to - overlap.at.from);
            println!("{}: two valid guards for {length:?}", overlap.key);
        }
        overlaps
    }

    /// A registry that has not noticed its loss may hand the lock over between its callers, even
    /// after another registry was granted it. Removes such grants if the newer grant and their end
    /// are in one of `windows`, and returns their number.
    fn remove_stale_hand_overs(&mut self, windows: &[Window]) -> usize {
        let hand_overs = u64::from(self.options.hand_overs);
        let before = self.history.grants.clone();
        self.history.grants.retain(|grant| {
            let of_key = || before.iter().filter(|other| other.key == grant.key);
            let (token, ended) = (grant.token.unwrap_or(0), validity_window(grant).to);
            let handed_over = |newer: &RecordedGrant| {
                of_key().any(|first| {
                    let first_token = first.token.unwrap_or(0);
                    registry_of(first.client) == registry_of(grant.client)
                        && (first_token + 1..=first_token + hand_overs).contains(&token)
                        && first.acquire.from < newer.acquire.to
                })
            };
            let in_window = |newer: &RecordedGrant| {
                windows.iter().any(|w| newer.acquire.to >= w.from && ended <= w.to)
            };
            let mut newer = of_key()
                .filter(|newer| newer.token > grant.token && newer.acquire.to < grant.acquire.from);
            !newer.any(|newer| handed_over(newer) && in_window(newer))
        });
        before.len() - self.history.grants.len()
    }

    /// Returns the reasons for which locks of the long-held keys were lost.
    #[must_use]
    pub fn long_held_losses(&self) -> Vec<LostReason> {
        let long_held =
            self.losses.iter().filter(|loss| self.options.long_held.contains(&loss.key));
        long_held.map(|loss| loss.reason).collect()
    }

    /// Asserts that each holder released its lock or noticed the loss by the end of its lease, plus
    /// a tolerance.
    fn assert_grants_ended_in_time(&self) {
        let is_paused =
            |grant: &&RecordedGrant| self.paused_keys.iter().any(|key| **key == *grant.key);
        for grant in self.history.grants.iter().filter(|grant| !is_paused(grant)) {
            let until = grant.valid_until.expect("the stores under test have leases");
            let until = until.saturating_add(REPORT_TOLERANCE);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "the loss was not reported in time: {grant:?}");
        }
    }

    /// Asserts that the resource rejected a write only if a newer token existed.
    fn assert_rejections_were_justified(&self) {
        for write in &self.history.writes {
            let newer = |grant: &RecordedGrant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteResult::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was rejected, and no grant has a newer token"
            );
        }
    }
}

/// Two guards of one key that were valid at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValidityOverlap {
    /// The key.
    pub key: String,
    /// The time of the overlap.
    pub at: Window,
    /// The index of the earlier grant in the history.
    first: usize,
}

/// Returns the number of the registry of a client.
fn registry_of(client: u32) -> u32 {
    client / CLIENT_NUMBERS_PER_REGISTRY
}

/// Returns whether two windows have a time in common.
fn intersect(one: &Window, other: &Window) -> bool {
    one.from <= other.to && one.to >= other.from
}

/// Returns the window in which the holder could believe that it held the lock.
fn validity_window(grant: &RecordedGrant) -> Window {
    let released = grant.release.map(|release| release.window.from);
    let ends = [released, grant.lost, grant.valid_until];
    let from = grant.acquire.to;
    Window::new(from, ends.into_iter().flatten().min().unwrap_or(u64::MAX).max(from))
}

/// Returns all pairs of guards that were valid at the same time.
fn find_overlaps(history: &History) -> Vec<ValidityOverlap> {
    let mut by_key: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, grant) in history.grants.iter().enumerate() {
        by_key.entry(&grant.key).or_default().push(index);
    }
    let mut found = Vec::new();
    for (key, mut grants) in by_key {
        grants.sort_by_key(|grant| validity_window(&history.grants[*grant]).from);
        for (position, &first) in grants.iter().enumerate() {
            let end = validity_window(&history.grants[first]).to;
            let later =
                grants[position + 1..].iter().map(|&later| validity_window(&history.grants[later]));
            let overlapping = later.take_while(|later| later.from < end);
            let overlapping = overlapping.filter(|later| later.from < later.to);
            found.extend(overlapping.map(|later| ValidityOverlap {
                key: key.to_owned(),
                at: Window::new(later.from, end.min(later.to)),
                first,
            }));
        }
    }
    found
}

/// Formats the figures on one line.
impl fmt::Display for WorkloadOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} grants, {} losses, {} errors, all keys acquired after {:?}",
            self.history.grants.len(),
            self.losses.len(),
            self.errors.len(),
            self.acquired_after,
        )
    }
}
