//! The record of one key that several claims can hold: which claims are granted, which claims wait,
//! and what a request changes.
//!
//! This is a state machine without a clock or I/O. Stores that keep one record per key load the
//! record, call one method, and write the record back in the same atomic step. Times are
//! microseconds on the store's clock.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Busy, Claim, ClaimId, Grant, Holder, Queueing, Release, Renewal};
use crate::fencing::FencingToken;
use crate::key::Key;
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};

/// The claims that hold one key or wait for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LockRecord {
    /// In the order of arrival.
    entries: Vec<RecordEntry>,
}

/// What a store must write for an attempt, from [`LockRecord::attempt`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordChange {
    /// The store writes nothing, and returns this response.
    Nothing(Attempt),
    /// The store writes this record if the stored record has not changed since it was read. It then
    /// returns this response.
    Replace(LockRecord, Attempt),
    /// The store writes a record with this new grant if the stored record has not changed since it
    /// was read.
    Grant(NewGrant),
}

/// The text of a record with a new grant, for a store that reads its clock and creates the token in
/// the same step. The store writes these parts without separators: `before`, `id_and_mode`, the end
/// of the lease, `since` or its own time, 16 zeros, the token, `rest` and `after`. See
/// [`LockRecord::to_text`] for the widths of the fields.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewGrant {
    /// The text of the entries before the new one.
    pub before: String,
    /// The fields of the new entry before `until`.
    pub id_and_mode: String,
    /// For a conversion, the time of the converted grant. `None` for any other grant.
    pub since: Option<u64>,
    /// The fields of the new entry after the token, with its `;`.
    pub rest: String,
    /// The text of the entries after the new one.
    pub after: String,
    /// The latest `until` of the other entries. Zero if there are none.
    pub until_of_others: u64,
}

/// One claim in a [`LockRecord`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordEntry {
    /// The claim.
    pub id: ClaimId,
    /// Its mode.
    pub mode: ClaimMode,
    /// The first token of the grant. `None` while the claim waits.
    pub token: Option<FencingToken>,
    /// The number of tokens that the grant reserves.
    pub token_block: u32,
    /// The time of the grant, or of the arrival in the queue.
    pub since: u64,
    /// The end of the lease, or the time at which the place in the queue expires.
    pub until: u64,
    /// The time until which an upgrade of this grant blocks new shared claims. Zero without an
    /// upgrade.
    pub upgrade_until: u64,
    /// The claim's label.
    pub label: Option<Arc<str>>,
}

impl RecordEntry {
    fn new(claim: &Claim, now: u64) -> Self {
        Self {
            id: claim.id(),
            mode: claim.mode(),
            token: None,
            token_block: claim.token_block(),
            since: now,
            until: after(now, claim.lease()),
            upgrade_until: 0,
            label: claim.label().map(Arc::from),
        }
    }

    /// Returns whether the claim is granted. Otherwise it waits.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        self.token.is_some()
    }

    /// Returns whether the lease, or the place in the queue, has not expired.
    fn is_live(&self, now: u64) -> bool {
        let is_kept_by_mutant = match self.mode {
            _ if !self.is_granted() => mutated(Mutant::ExpiredPlaceKept),
            ClaimMode::Permits { .. } => mutated(Mutant::UnitsOfDeadHolderKept),
            _ => false,
        };
        now < self.until || is_kept_by_mutant
    }

    /// Returns this grant as [`LockAdmin`](crate::LockAdmin) reports it.
    fn holder(&self, key: &Key, now: u64) -> Holder {
        Holder::new(key.clone())
            .with_mode(self.mode)
            .with_label(self.label.as_deref().map(str::to_owned))
            .with_token(self.token)
            .with_times(Some(between(self.since, now)), Some(between(now, self.until)))
    }
}

impl LockRecord {
    /// Creates a record without entries.
    #[must_use]
    pub const fn new() -> Self {
        Self { entries: Vec::new() }
    }

    /// Returns whether no claim holds the key or waits for it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the entries, in the order of their arrival.
    #[must_use]
    pub fn entries(&self) -> &[RecordEntry] {
        &self.entries
    }

    /// Returns the latest [`until`](RecordEntry::until) of the entries. Zero if the record is
    /// empty.
    #[must_use]
    pub fn until(&self) -> u64 {
        self.entries.iter().map(|entry| entry.until).max().unwrap_or(0)
    }

    /// Adds an entry for a grant that the store keeps outside this record, such as an exclusive
    /// grant in separate columns.
    pub fn insert(&mut self, entry: RecordEntry) {
        self.entries.push(entry);
    }

    /// Returns the entry for a grant of `claim` with this token.
    #[must_use]
    pub fn granted_entry(
        claim: &Claim,
        token: FencingToken,
        since: u64,
        until: u64,
    ) -> RecordEntry {
        RecordEntry { token: Some(token), until, ..RecordEntry::new(claim, since) }
    }

    /// Returns the first fields of the [text](Self::to_text) of a granted entry of `claim`: its id
    /// and mode. The letter of the mode is no hexadecimal digit, so this text occurs only at the
    /// start of that entry.
    #[must_use]
    pub fn entry_prefix(claim: &Claim) -> String {
        let mut record = Self::new();
        record.insert(Self::granted_entry(claim, FencingToken::MAX, 0, 0));
        let mut text = record.to_text();
        text.truncate(text::UNTIL_AT);
        text
    }

    /// Removes the entries whose lease or place in the queue has expired. Returns whether it
    /// removed any.
    pub fn remove_expired(&mut self, now: u64) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.is_live(now));
        self.entries.len() != before
    }

    /// Decides an attempt of `claim`, as [`LockBackend::try_acquire`] describes it.
    /// `next_token` is called once if a new token is needed.
    ///
    /// # Errors
    /// The error of `next_token`. The record is then unchanged, except that expired entries are
    /// removed.
    ///
    /// [`LockBackend::try_acquire`]: crate::LockBackend::try_acquire
    pub fn acquire<E>(
        &mut self,
        claim: &Claim,
        now: u64,
        next_token: impl FnOnce() -> Result<FencingToken, E>,
    ) -> Result<Attempt, E> {
        self.remove_expired(now);
        let own_index = self.entries.iter().position(|entry| entry.id == claim.id());
        if claim.is_conversion() {
            return self.convert(own_index, claim, now, next_token);
        }
        if let Some(entry) = own_index.map(|index| &self.entries[index])
            && let Some(token) = entry.token
        {
            return Ok(Attempt::Granted(Grant::new(token, between(now, entry.until))));
        }
        if let Some(busy) = self.busy(claim, now) {
            return Ok(Attempt::Busy(self.queue(own_index, claim, now, busy)));
        }
        let token = next_token()?;
        let granted = RecordEntry { token: Some(token), ..RecordEntry::new(claim, now) };
        match own_index {
            Some(index) => self.entries[index] = granted,
            None => self.entries.push(granted),
        }
        Ok(Attempt::Granted(Grant::new(token, claim.lease())))
    }

    /// Returns whether a store can skip the write of this record after a busy attempt of `claim`.
    /// `before` is the record before the attempt.
    ///
    /// Returns true if both records are equal. Also returns true if they differ only in the expiry
    /// of the claim's place or upgrade, and by less than an eighth of the lease.
    #[must_use]
    pub fn may_skip_write(&self, before: &Self, claim: &Claim, now: u64) -> bool {
        let lease = u64::try_from(claim.lease().as_micros()).unwrap_or(u64::MAX);
        let recent_expiry = now.saturating_add(lease - lease / PLACE_EXTENSION_DIVISOR);
        let is_same = |(before, after): (&RecordEntry, &RecordEntry)| {
            let mut extended = before.clone();
            (extended.until, extended.upgrade_until) = (after.until, after.upgrade_until);
            before == after
                || before.id == claim.id()
                    && extended == *after
                    && (before.until == after.until || before.until > recent_expiry)
                    && (before.upgrade_until == after.upgrade_until
                        || before.upgrade_until > recent_expiry)
        };
        before.entries.len() == self.entries.len()
            && before.entries.iter().zip(&self.entries).all(is_same)
    }

    /// Returns what a store must write for an attempt of `claim`. `now` is a recent time of the
    /// store's clock.
    #[must_use]
    pub fn attempt(mut self, claim: &Claim, now: u64) -> RecordChange {
        self.remove_expired(now);
        let before = self.clone();
        let mut is_new = false;
        let attempt = self.acquire(claim, now, || {
            is_new = true;
            // A placeholder, because the store creates the token.
            Ok::<_, std::convert::Infallible>(FencingToken::MAX)
        });
        let Ok(attempt) = attempt;
        let own_index = self.entries.iter().position(|entry| entry.id == claim.id());
        match own_index {
            Some(index) if is_new => {
                let others = self.entries.iter().filter(|entry| entry.id != claim.id());
                let until_of_others = others.map(|entry| entry.until).max().unwrap_or(0);
                let is_conversion = claim.is_conversion();
                RecordChange::Grant(self.new_grant(index, is_conversion, until_of_others))
            }
            _ if self == before => RecordChange::Nothing(attempt),
            _ => RecordChange::Replace(self, attempt),
        }
    }

    /// Returns whether an attempt of `claim` would be busy. Changes nothing, so that a waiter can
    /// check whether a wake-up concerns it.
    #[must_use]
    pub fn is_busy(&self, claim: &Claim, now: u64) -> bool {
        if claim.is_conversion() {
            return self.has_other_grant(claim, now);
        }
        self.busy(claim, now).is_some()
    }

    /// Returns whether `claim` holds the key exclusively.
    #[must_use]
    pub fn is_held_exclusively(&self, claim: &Claim, now: u64) -> bool {
        let is_own_grant = |entry: &RecordEntry| entry.id == claim.id() && entry.is_granted();
        let is_exclusive = |entry: &RecordEntry| entry.mode == ClaimMode::Exclusive;
        self.entries.iter().any(|it| is_own_grant(it) && is_exclusive(it) && now < it.until)
    }

    /// Extends the lease of the grant of `claim`.
    pub fn renew(&mut self, claim: &Claim, now: u64) -> Renewal {
        match self.granted_mut(claim, now) {
            Some(entry) => {
                entry.until = entry.until.max(after(now, claim.lease()));
                Renewal::Renewed(between(now, entry.until))
            }
            None => Renewal::Gone,
        }
    }

    /// Removes the entry of `claim`, whether it is granted or waits. Returns the removed entry.
    /// [`release_response`](Self::release_response) converts it to the response.
    pub fn release(&mut self, claim: &Claim) -> Option<RecordEntry> {
        let index = self.entries.iter().position(|entry| entry.id == claim.id())?;
        Some(self.entries.remove(index))
    }

    /// Returns the response to a release that has removed `entry`.
    #[must_use]
    pub fn release_response(entry: Option<&RecordEntry>, now: u64) -> Release {
        match entry {
            Some(entry) if entry.is_granted() && now < entry.until => Release::Freed,
            _ => Release::NotHeld,
        }
    }

    /// Removes all grants, and keeps the waiting claims. Returns `Freed` if the lease of a grant
    /// had not ended.
    pub fn force_release(&mut self, now: u64) -> Release {
        let is_live = |entry: &RecordEntry| entry.is_granted() && now < entry.until;
        let freed = self.entries.iter().any(is_live);
        self.entries.retain(|entry| !entry.is_granted());
        if freed { Release::Freed } else { Release::NotHeld }
    }

    /// Returns the holders, in the order of their tokens.
    #[must_use]
    pub fn holders(&self, key: &Key, now: u64) -> Vec<Holder> {
        let live = |entry: &&RecordEntry| entry.is_granted() && now < entry.until;
        let mut granted: Vec<_> = self.entries.iter().filter(live).collect();
        granted.sort_by_key(|entry| entry.token);
        granted.into_iter().map(|entry| entry.holder(key, now)).collect()
    }

    /// Returns the `Busy` response to `claim`, or `None` if the claim can be granted.
    fn busy(&self, claim: &Claim, now: u64) -> Option<Busy> {
        let mode = claim.mode();
        let live = || self.entries.iter().filter(|it| it.is_live(now) && it.id != claim.id());
        let granted = || live().filter(|entry| entry.is_granted());
        if let ClaimMode::Permits { of, .. } = mode {
            let other = granted().find_map(|entry| match entry.mode {
                ClaimMode::Permits { of: other, .. } if other != of => Some(other),
                _ => None,
            });
            if let Some(other) = other {
                return Some(Busy::new().with_units_in_store(other));
            }
        }
        let mut taken = granted().fold(0_u32, |sum, entry| sum.saturating_add(entry.mode.units()));
        if mutated(Mutant::UnitsCountedTwice) {
            taken = taken.saturating_mul(2);
        }
        let blocks = |entry: &RecordEntry| match (entry.mode, mode) {
            (ClaimMode::Permits { .. }, ClaimMode::Permits { take, of }) => {
                taken.saturating_add(take) > of
            }
            (ClaimMode::Exclusive, ClaimMode::Shared) if mutated(Mutant::ReaderAlongsideWriter) => {
                false
            }
            (_, ClaimMode::Shared) if now < entry.upgrade_until => true,
            (theirs, ours) => !theirs.is_compatible(ours),
        };
        // A claim also waits behind each earlier waiting claim whose mode is incompatible. Permits
        // also wait behind earlier waiting permits.
        let before = self.entries.iter().take_while(|entry| entry.id != claim.id());
        let waiting = before.filter(|entry| entry.is_live(now) && !entry.is_granted());
        let is_ahead = |entry: &&RecordEntry| {
            entry.mode.units() > 0 && mode.units() > 0 || !entry.mode.is_compatible(mode)
        };
        let mut busy: Option<Busy> = None;
        let mut retry_at = None::<u64>;
        for entry in granted().filter(|entry| blocks(entry)) {
            retry_at = Some(match (retry_at, mode) {
                (None, _) => entry.until,
                // Enough units may be free once the first of these leases ends.
                (Some(at), ClaimMode::Permits { .. }) => at.min(entry.until),
                (Some(at), _) => at.max(entry.until),
            });
            if busy.as_ref().is_none_or(|busy| busy.holder.is_none()) {
                busy = Some(Busy::new().with_holder(entry.holder(claim.key(), now)));
            }
        }
        for entry in waiting.filter(is_ahead) {
            retry_at = Some(retry_at.map_or(entry.until, |at| at.min(entry.until)));
            busy.get_or_insert_default();
        }
        let retry_after = between(now, retry_at.unwrap_or(now));
        busy.map(|busy| busy.with_retry_after(retry_after))
    }

    /// Records the place of a busy claim, if it queues.
    fn queue(&mut self, own_index: Option<usize>, claim: &Claim, now: u64, busy: Busy) -> Busy {
        if busy.units_in_store.is_some() {
            // The caller gets an error instead of waiting.
            own_index.map(|index| self.entries.remove(index));
            return busy;
        }
        let until = after(now, claim.lease());
        if let Some(index) = own_index {
            self.entries[index].until = until;
            return busy.with_queue_entry();
        }
        let is_shared = |entry: &RecordEntry| entry.mode != ClaimMode::Exclusive;
        let joins = match claim.queueing() {
            Queueing::Join => true,
            Queueing::ExclusiveIntent => {
                claim.mode() == ClaimMode::Exclusive
                    && self.entries.iter().any(is_shared)
                    && !mutated(Mutant::WriterStarved)
            }
            Queueing::Skip => false,
        };
        if !joins {
            return busy;
        }
        self.entries.push(RecordEntry::new(claim, now));
        busy.with_queue_entry()
    }

    fn convert<E>(
        &mut self,
        own_index: Option<usize>,
        claim: &Claim,
        now: u64,
        next_token: impl FnOnce() -> Result<FencingToken, E>,
    ) -> Result<Attempt, E> {
        let has_other_grant =
            self.has_other_grant(claim, now) && !mutated(Mutant::UpgradeAlongsideReaders);
        let until = after(now, claim.lease());
        let Some(entry) = own_index.map(|index| &mut self.entries[index]) else {
            return Ok(Attempt::Gone);
        };
        let Some(mut token) = entry.token else { return Ok(Attempt::Gone) };
        let is_late = claim.token_before_conversion().is_some_and(|converted| converted != token);
        match (entry.mode, claim.mode()) {
            (ours, wanted) if ours == wanted => {}
            // This request is late: the grant was upgraded after the request was sent, and the
            // holder relies on the upgrade.
            _ if is_late => return Ok(Attempt::Gone),
            (ClaimMode::Exclusive, ClaimMode::Upgradable | ClaimMode::Shared)
            | (ClaimMode::Upgradable, ClaimMode::Shared) => {}
            (ClaimMode::Upgradable, ClaimMode::Exclusive) if !has_other_grant => {
                if !mutated(Mutant::UpgradeKeepsToken) {
                    token = next_token()?;
                }
                entry.token_block = claim.token_block();
            }
            (ClaimMode::Upgradable, ClaimMode::Exclusive) => {
                entry.upgrade_until = until;
                let id = entry.id;
                let others = self.entries.iter().filter(|it| it.is_granted() && it.id != id);
                let last = others.max_by_key(|entry| entry.until);
                let busy = last.map_or_else(Busy::new, |last| {
                    Busy::new()
                        .with_holder(last.holder(claim.key(), now))
                        .with_retry_after(between(now, last.until))
                });
                return Ok(Attempt::Busy(busy.with_queue_entry()));
            }
            // No other conversion exists. Two shared claims that wait for upgrades would deadlock.
            _ => return Ok(Attempt::Gone),
        }
        entry.mode = claim.mode();
        entry.token = Some(token);
        entry.upgrade_until = 0;
        entry.until = entry.until.max(until);
        Ok(Attempt::Granted(Grant::new(token, between(now, entry.until))))
    }

    fn has_other_grant(&self, claim: &Claim, now: u64) -> bool {
        let is_other_grant =
            |entry: &RecordEntry| entry.is_granted() && entry.id != claim.id() && now < entry.until;
        self.entries.iter().any(is_other_grant)
    }

    fn granted_mut(&mut self, claim: &Claim, now: u64) -> Option<&mut RecordEntry> {
        let is_own_grant =
            |it: &&mut RecordEntry| it.id == claim.id() && it.is_granted() && now < it.until;
        self.entries.iter_mut().find(is_own_grant)
    }
}

/// The expiry of a place or an upgrade is written again when the lease divided by this number has
/// passed since the last write.
const PLACE_EXTENSION_DIVISOR: u64 = 8;

fn after(now: u64, time: Duration) -> u64 {
    now.saturating_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

fn between(from: u64, to: u64) -> Duration {
    Duration::from_micros(to.saturating_sub(from))
}

/// The text of an entry: fields of fixed width, then the label as hexadecimal digits, and `;`. The
/// fixed widths let a script in the store find and change a field by its position.
mod text {
    use super::{
        Arc, ClaimId, ClaimMode, FencingToken, InvalidRecord, LockRecord, NewGrant, RecordEntry,
    };

    impl LockRecord {
        /// Returns the record as text. [`parse`](Self::parse) reads it.
        ///
        /// Each entry has these fields, without separators:
        ///
        /// | field | text |
        /// |---|---|
        /// | id of the claim | 32 hexadecimal digits |
        /// | mode | `x` exclusive, `s` shared, `u` upgradable, `p` permits; in upper case for a claim that waits |
        /// | `until`, `since`, `upgrade_until` | 16 decimal digits each |
        /// | token | 19 decimal digits, all zero for a claim that waits |
        /// | token block, units that the claim takes, units of the key | 10 decimal digits each |
        /// | label | two hexadecimal digits for each byte |
        /// | end | `;` |
        #[must_use]
        pub fn to_text(&self) -> String {
            self.entries.iter().map(RecordEntry::to_text).collect()
        }

        /// Parses the text of a record.
        ///
        /// # Errors
        /// [`InvalidRecord`] if it is not what [`to_text`](Self::to_text) returns.
        pub fn parse(text: &str) -> Result<Self, InvalidRecord> {
            let entries = text.split_terminator(';').map(RecordEntry::parse);
            let entries = entries.collect::<Option<_>>().ok_or(InvalidRecord)?;
            if text.is_empty() || text.ends_with(';') {
                Ok(Self { entries })
            } else {
                Err(InvalidRecord)
            }
        }
    }

    impl LockRecord {
        /// Returns the text before and after the fields that a store fills in for the entry at
        /// `index`.
        pub(super) fn new_grant(
            &self,
            index: usize,
            is_conversion: bool,
            until_of_others: u64,
        ) -> NewGrant {
            let text = |entries: &[RecordEntry]| entries.iter().map(RecordEntry::to_text).collect();
            let entry = self.entries[index].to_text();
            NewGrant {
                before: text(&self.entries[..index]),
                id_and_mode: entry[..UNTIL_AT].to_owned(),
                since: is_conversion.then_some(self.entries[index].since),
                rest: entry[BLOCK_AT..].to_owned(),
                after: text(&self.entries[index + 1..]),
                until_of_others,
            }
        }
    }

    /// The position of `until` in an entry.
    pub(super) const UNTIL_AT: usize = 33;
    /// The position of the token block in an entry.
    const BLOCK_AT: usize = UNTIL_AT + 3 * 16 + 19;

    impl RecordEntry {
        fn to_text(&self) -> String {
            let (letter, take, of) = match self.mode {
                ClaimMode::Exclusive => ('x', 0, 0),
                ClaimMode::Shared => ('s', 0, 0),
                ClaimMode::Upgradable => ('u', 0, 0),
                ClaimMode::Permits { take, of } => ('p', take, of),
            };
            let letter = if self.is_granted() { letter } else { letter.to_ascii_uppercase() };
            let label = self.label.iter().flat_map(|label| label.bytes());
            let label: String = label.map(|byte| format!("{byte:02x}")).collect();
            let token = self.token.map_or(0, FencingToken::get);
            format!(
                "{}{letter}{:016}{:016}{:016}{token:019}{:010}{take:010}{of:010}{label};",
                self.id, self.until, self.since, self.upgrade_until, self.token_block
            )
        }

        /// Parses an entry without its `;`.
        fn parse(text: &str) -> Option<Self> {
            let mut rest = text;
            let mut field = |width: usize| {
                let (field, after) = rest.split_at_checked(width)?;
                rest = after;
                Some(field)
            };
            let id: ClaimId = field(32)?.parse().ok()?;
            let letter = field(1)?;
            let [until, since, upgrade_until] =
                [number(field(16)?)?, number(field(16)?)?, number(field(16)?)?];
            let token = FencingToken::new(number(field(19)?)?)?;
            let token_block = u32::try_from(number(field(10)?)?).ok()?;
            let take = u32::try_from(number(field(10)?)?).ok()?;
            let of = u32::try_from(number(field(10)?)?).ok()?;
            let mode = match letter.to_ascii_lowercase().as_str() {
                "x" => ClaimMode::Exclusive,
                "s" => ClaimMode::Shared,
                "u" => ClaimMode::Upgradable,
                "p" => ClaimMode::Permits { take, of },
                _ => return None,
            };
            let is_granted = letter.bytes().all(|letter| letter.is_ascii_lowercase());
            let label = match rest {
                "" => None,
                digits => Some(Arc::from(label(digits)?.as_str())),
            };
            Some(Self {
                id,
                mode,
                token: is_granted.then_some(token),
                token_block,
                since,
                until,
                upgrade_until,
                label,
            })
        }
    }

    fn number(digits: &str) -> Option<u64> {
        let is_decimal = digits.bytes().all(|digit| digit.is_ascii_digit());
        if is_decimal { digits.parse().ok() } else { None }
    }

    fn label(digits: &str) -> Option<String> {
        let pairs = digits.as_bytes().chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
            u8::from_str_radix(pair, 16).ok()
        });
        String::from_utf8(pairs.collect::<Option<_>>()?).ok()
    }
}

/// The error for a text that is not a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this text is not the record of a lock; another program may have changed it")]
#[non_exhaustive]
pub struct InvalidRecord;

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(mode: ClaimMode) -> Claim {
        Claim::new(Key::new("k").unwrap(), Duration::from_secs(10)).with_mode(mode)
    }

    fn tokens() -> impl FnMut() -> Result<FencingToken, ()> {
        let mut last = 0;
        move || {
            last += 1;
            FencingToken::new(last).ok_or(())
        }
    }

    #[test]
    fn a_record_is_parsed_from_its_text() {
        let mut record = LockRecord::new();
        let mut next_token = tokens();
        let label: Option<Arc<str>> = Some("a;b ü".into());
        for claim in [
            claim(ClaimMode::Shared).with_label(label),
            claim(ClaimMode::Upgradable),
            claim(ClaimMode::Exclusive).with_queueing(Queueing::Join),
            claim(ClaimMode::Permits { take: 2, of: 5 }).with_queueing(Queueing::Join),
        ] {
            _ = record.acquire(&claim, 7_000_000, &mut next_token).unwrap();
        }
        let text = record.to_text();
        assert_eq!(LockRecord::parse(&text), Ok(record));
        assert_eq!(LockRecord::parse(""), Ok(LockRecord::new()));
        for damaged in [&text[1..], &text[..text.len() - 1], "x;", &text.replace('s', "q")] {
            assert_eq!(LockRecord::parse(damaged), Err(InvalidRecord));
        }
    }

    #[test]
    fn a_store_can_fill_in_the_times_and_the_token_of_a_new_grant() {
        let label: Option<Arc<str>> = Some("reader".into());
        let (first, second) =
            (claim(ClaimMode::Shared), claim(ClaimMode::Shared).with_label(label));
        let mut record = LockRecord::new();
        _ = record.acquire(&first, 5, tokens()).unwrap();
        let RecordChange::Grant(grant) = record.clone().attempt(&second, 6) else {
            panic!("readers share the key")
        };
        let NewGrant { before, id_and_mode, since, rest, after, until_of_others } = grant;
        assert_eq!((since, until_of_others), (None, 10_000_005));
        let text =
            format!("{before}{id_and_mode}{:016}{:016}{:016}{:019}{rest}{after}", 77, 7, 0, 9);
        let filled = LockRecord::parse(&text).unwrap();
        let entry = filled.entries().last().unwrap();
        assert_eq!((entry.until, entry.since, entry.token.unwrap().get()), (77, 7, 9));
        assert_eq!(entry.label.as_deref(), Some("reader"));
        assert_eq!(filled.entries()[0], record.entries()[0]);
        let writer = claim(ClaimMode::Exclusive);
        assert!(matches!(record.attempt(&writer, 6), RecordChange::Nothing(Attempt::Busy(_))));
    }

    #[test]
    fn a_waiting_exclusive_claim_blocks_new_readers_and_lapses() {
        let mut record = LockRecord::new();
        let mut next_token = tokens();
        let writer = claim(ClaimMode::Exclusive).with_queueing(Queueing::ExclusiveIntent);
        let (first, second) = (claim(ClaimMode::Shared), claim(ClaimMode::Shared));
        let mut attempt = |claim: &Claim, now| record.acquire(claim, now, &mut next_token).unwrap();
        assert!(matches!(attempt(&first, 0), Attempt::Granted(_)));
        assert!(matches!(attempt(&writer, 1), Attempt::Busy(busy) if busy.is_queued));
        assert!(matches!(attempt(&second, 2), Attempt::Busy(busy) if !busy.is_queued));
        assert!(matches!(attempt(&second, 10_000_001), Attempt::Granted(_)));
    }
}
