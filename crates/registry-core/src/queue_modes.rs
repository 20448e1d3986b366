//! Decides which claims in a store's queue hold the key, for stores that have a queue. Uses no
//! clock and no I/O.
//!
//! A claim holds the key if it is compatible with all entries before it, whether they are granted
//! or wait. Entries are only appended, so a granted claim stays granted until its entry is removed
//! or changes its mode.
//!
//! An upgrade appends an upgrade request to the queue. The request blocks later claims. Once no
//! other claim holds the key, the store makes the upgradable claim exclusive. The same atomic step
//! must check that the entry that blocks new readers still exists. [`UpgradePosition::Grantable`]
//! contains its index.

use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};

/// An entry in the queue of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "an entry is a claim or a request to upgrade one")]
pub enum QueuedEntry {
    /// A claim that holds the key or waits for it, in its current mode.
    Claim(ClaimMode),
    /// The request to upgrade a claim that holds the key. Blocks all entries behind it.
    UpgradeRequest,
}

/// The position of a claim in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a backend must handle every position")]
pub enum QueuePosition {
    /// The claim holds the key.
    Granted,
    /// The claim waits. The entry with this index is the last one that blocks it. The entry blocks
    /// the claim until the entry is removed or changes its mode.
    Behind(usize),
    /// The claim waits for units. The removal of any earlier entry may free enough units.
    TooFewUnits,
    /// The held permits state this number of units, and the claim states another number. The
    /// claim's entry must be removed.
    UnitsMismatch(u32),
}

/// Whether an upgrade can be granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "an upgrade waits or does not")]
pub enum UpgradePosition {
    /// No other claim holds the key, and none will while the upgradable claim and the entry with
    /// this index exist.
    Grantable(usize),
    /// Other claims hold the key too. The last of them has this index.
    Behind(usize),
    /// The queue contains no entry that blocks new readers. The upgrade request must be added
    /// first.
    ReadersNotBlocked,
}

/// Returns the position of a claim of this mode behind the entries `before`, first entry first.
#[must_use]
pub fn queue_position(before: &[QueuedEntry], mode: ClaimMode) -> QueuePosition {
    let mut summary = Summary::default();
    for entry in before {
        if let (
            QueuedEntry::Claim(held @ ClaimMode::Permits { of, .. }),
            ClaimMode::Permits { of: stated, .. },
        ) = (*entry, mode)
            && of != stated
            && summary.grants(held)
        {
            return QueuePosition::UnitsMismatch(of);
        }
        summary.add(*entry);
    }
    match before.iter().rposition(|entry| entry.blocks(mode)) {
        Some(nearest) => QueuePosition::Behind(nearest),
        None if summary.grants(mode) => QueuePosition::Granted,
        None => QueuePosition::TooFewUnits,
    }
}

/// Returns whether each entry holds the key, in the order of `entries`.
#[must_use]
pub fn granted_entries(entries: &[QueuedEntry]) -> Vec<bool> {
    let mut summary = Summary::default();
    let is_granted = |entry: &QueuedEntry| {
        let granted = match *entry {
            QueuedEntry::Claim(mode) => summary.grants(mode),
            QueuedEntry::UpgradeRequest => false,
        };
        summary.add(*entry);
        granted
    };
    entries.iter().map(is_granted).collect()
}

/// Returns the position of an upgrade of the upgradable claim with the index `claim_index`, which
/// holds the key.
///
/// A waiting reader does not delay the upgrade: the upgraded claim blocks this reader too.
#[must_use]
pub fn upgrade_position(entries: &[QueuedEntry], claim_index: usize) -> UpgradePosition {
    let granted = granted_entries(entries);
    let is_ignored = |index: usize| {
        entries[index] == QueuedEntry::Claim(ClaimMode::Shared)
            && mutated(Mutant::QueuedUpgradeAlongsideReaders)
    };
    let holds = |&index: &usize| index != claim_index && granted[index] && !is_ignored(index);
    if let Some(other) = (0..entries.len()).rfind(holds) {
        return UpgradePosition::Behind(other);
    }
    let blocks_readers =
        |index: &usize| *index != claim_index && entries[*index].blocks(ClaimMode::Shared);
    match (0..entries.len()).find(blocks_readers) {
        Some(blocking) => UpgradePosition::Grantable(blocking),
        None => UpgradePosition::ReadersNotBlocked,
    }
}

impl QueuedEntry {
    /// Returns whether this entry blocks every later claim of this mode, even if units are free.
    fn blocks(self, mode: ClaimMode) -> bool {
        match (self, mode) {
            (Self::Claim(ClaimMode::Permits { of, .. }), ClaimMode::Permits { of: stated, .. }) => {
                of != stated
            }
            (Self::Claim(earlier), _) => !earlier.is_compatible(mode),
            (Self::UpgradeRequest, _) => true,
        }
    }
}

/// The modes and units of the entries before a claim, whether they are granted or wait.
#[derive(Default)]
struct Summary {
    exclusive: bool,
    shared: bool,
    upgradable: bool,
    /// The number of units that the first permit states.
    of: Option<u32>,
    /// A later permit states another number.
    units_differ: bool,
    /// The units that all permits take.
    taken: u64,
}

impl Summary {
    /// Returns whether a claim of this mode behind the entries is granted.
    fn grants(&self, mode: ClaimMode) -> bool {
        match mode {
            _ if self.exclusive => false,
            ClaimMode::Exclusive => !self.shared && !self.upgradable && self.of.is_none(),
            ClaimMode::Shared => self.of.is_none(),
            ClaimMode::Upgradable => !self.upgradable && self.of.is_none(),
            ClaimMode::Permits { take, of } => {
                !self.shared
                    && !self.upgradable
                    && !self.units_differ
                    && self.of.is_none_or(|other| other == of)
                    && (self.taken + u64::from(take) <= u64::from(of)
                        || mutated(Mutant::QueuedUnitsNotSummed))
            }
        }
    }

    fn add(&mut self, entry: QueuedEntry) {
        match entry {
            QueuedEntry::UpgradeRequest | QueuedEntry::Claim(ClaimMode::Exclusive) => {
                self.exclusive = true;
            }
            QueuedEntry::Claim(ClaimMode::Shared) => self.shared = true,
            QueuedEntry::Claim(ClaimMode::Upgradable) => self.upgradable = true,
            QueuedEntry::Claim(ClaimMode::Permits { take, of }) => {
                self.units_differ |= *self.of.get_or_insert(of) != of;
                self.taken += u64::from(take);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: QueuedEntry = QueuedEntry::Claim(ClaimMode::Exclusive);
    const S: QueuedEntry = QueuedEntry::Claim(ClaimMode::Shared);
    const U: QueuedEntry = QueuedEntry::Claim(ClaimMode::Upgradable);
    const R: QueuedEntry = QueuedEntry::UpgradeRequest;

    fn p(take: u32, of: u32) -> QueuedEntry {
        QueuedEntry::Claim(ClaimMode::Permits { take, of })
    }

    fn position(before: &[QueuedEntry], entry: QueuedEntry) -> QueuePosition {
        let QueuedEntry::Claim(mode) = entry else { panic!("an upgrade request has no position") };
        queue_position(before, mode)
    }

    #[test]
    fn a_claim_is_granted_if_all_before_it_are_compatible() {
        use QueuePosition::{Behind, Granted};
        for (before, entry, expected) in [
            (&[][..], X, Granted),
            (&[S][..], X, Behind(0)),
            (&[S, S, U], X, Behind(2)),
            (&[S, S, U], S, Granted),
            (&[S, S], U, Granted),
            (&[S, U, S], U, Behind(1)),
            (&[S, X, S], S, Behind(1)),
            (&[S, X, X, S], S, Behind(2)),
            (&[U, R], S, Behind(1)),
            (&[X, S], p(1, 3), Behind(1)),
            (&[p(1, 3)], S, Behind(0)),
            (&[p(1, 3)], X, Behind(0)),
        ] {
            assert_eq!(position(before, entry), expected, "{entry:?} behind {before:?}");
        }
    }

    #[test]
    fn permits_are_granted_in_order_while_their_units_fit() {
        use QueuePosition::{Behind, Granted, TooFewUnits, UnitsMismatch};
        for (before, entry, expected) in [
            (&[p(2, 5)][..], p(3, 5), Granted),
            (&[p(2, 5)], p(4, 5), TooFewUnits),
            // The second permit waits, and the third permit does not overtake it.
            (&[p(2, 5), p(4, 5)], p(1, 5), TooFewUnits),
            (&[p(2, 5)], p(1, 4), UnitsMismatch(5)),
            (&[X, p(2, 5)], p(1, 4), Behind(1)),
            (&[p(u32::MAX, u32::MAX), p(u32::MAX, u32::MAX)], p(1, u32::MAX), TooFewUnits),
        ] {
            assert_eq!(position(before, entry), expected, "{entry:?} behind {before:?}");
        }
    }

    #[test]
    fn an_upgrade_waits_for_readers_that_hold_and_for_no_others() {
        use UpgradePosition::{Behind, Grantable, ReadersNotBlocked};
        for (entries, claim_index, expected) in [
            (&[U][..], 0, ReadersNotBlocked),
            (&[U, R][..], 0, Grantable(1)),
            (&[S, U, R], 1, Behind(0)),
            (&[U, S, R], 0, Behind(1)),
            (&[U, R, S], 0, Grantable(1)),
            // The reader waits for the exclusive claim, which waits for the upgradable claim.
            (&[U, X, S, R], 0, Grantable(1)),
            (&[U, S, X, S, R], 0, Behind(1)),
            (&[U, U, S, R], 0, Behind(2)),
        ] {
            assert_eq!(upgrade_position(entries, claim_index), expected, "{entries:?}");
        }
    }

    /// Returns all queues of at most five entries.
    fn all_queues() -> Vec<Vec<QueuedEntry>> {
        let kinds = [X, S, U, R, p(1, 4), p(2, 4), p(1, 5)];
        let mut queues = vec![Vec::new()];
        let mut last = queues.clone();
        for _ in 0..5 {
            let longer = last.iter().flat_map(|queue: &Vec<_>| {
                kinds.iter().map(move |kind| queue.iter().copied().chain([*kind]).collect())
            });
            last = longer.collect::<Vec<Vec<_>>>();
            queues.extend_from_slice(&last);
        }
        queues
    }

    #[test]
    fn all_claims_that_hold_are_compatible() {
        for queue in all_queues() {
            let granted = granted_entries(&queue);
            let mut held = Vec::new();
            for (index, entry) in queue.iter().enumerate() {
                let QueuedEntry::Claim(mode) = *entry else {
                    assert!(!granted[index], "{queue:?}");
                    continue;
                };
                let position = queue_position(&queue[..index], mode);
                assert_eq!(position == QueuePosition::Granted, granted[index], "{queue:?}");
                if granted[index] {
                    assert!(held.iter().all(|other| mode.is_compatible(*other)), "{queue:?}");
                    held.push(mode);
                }
            }
            assert!(held.iter().map(|mode| mode.units()).sum::<u32>() <= 5, "{queue:?}");
            assert_eq!(held.is_empty(), queue.first().is_none_or(|first| *first == R));
        }
    }

    #[test]
    fn an_upgraded_claim_holds_alone_whichever_others_leave() {
        for queue in all_queues() {
            let granted = granted_entries(&queue);
            for upgraded in (0..queue.len()).filter(|index| queue[*index] == U && granted[*index]) {
                let UpgradePosition::Grantable(blocking) = upgrade_position(&queue, upgraded)
                else {
                    continue;
                };
                for leaving in 0..1_u32 << queue.len() {
                    let stays = |index: usize| leaving & (1 << index) == 0;
                    if !stays(upgraded) || !stays(blocking) {
                        continue;
                    }
                    // Before and after the claim becomes exclusive.
                    for mode in [U, X] {
                        let kept = (0..queue.len()).filter(|index| stays(*index));
                        let kept =
                            kept.map(|index| if index == upgraded { mode } else { queue[index] });
                        let kept: Vec<_> = kept.collect();
                        let holders = granted_entries(&kept).into_iter().filter(|it| *it).count();
                        assert_eq!(holders, 1, "{kept:?} of {queue:?}");
                    }
                }
            }
        }
    }
}
