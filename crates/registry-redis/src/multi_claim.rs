//! Attempts that use the record of several claims: those of shared and upgradable claims, permits
//! and conversions, and those of exclusive claims that wait in the store or find such a record.
//!
//! [`LockRecord`] decides whether a claim is granted. The value of the lock's key is `+;`, followed
//! by the text of the record. An attempt reads the value, decides, and writes the new value if the
//! old one has not changed meanwhile. Unless the claim is exclusive or a conversion, the first
//! request of an attempt assumes that the key is free and skips the read.

use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimMode, FencingToken, Grant,
    LockRecord, NewGrant, RecordChange,
};
use std::time::Duration;

use redis::Value;

use crate::listener::last_event_seq;
use crate::record::{ExclusiveRecord, parse_pttl};
use crate::store::{
    AcquireResult, ExclusiveAttempt, RedisStore, ceil_millis, parse_integer, unexpected_response,
};

/// The value of a lock's key when a script read it.
#[derive(Debug, Clone)]
pub(crate) struct StoredValue {
    value: Vec<u8>,
    remaining_ms: i64,
    /// The server's time in us.
    now: u64,
    /// The sequence number of the last event that the listener had received before the read.
    event_seq: u64,
    /// The key was not read, and is assumed to be free.
    is_guess: bool,
}

impl StoredValue {
    /// Parses `{2, value, remaining time of the key in ms, time in us}`.
    pub(crate) fn parse(parts: &[Value], event_seq: u64) -> Result<Self, BackendError> {
        match parts {
            [Value::Int(2), Value::BulkString(value), Value::Int(remaining_ms), now] => {
                let now = parse_integer(now).and_then(|now| u64::try_from(now).ok());
                Ok(Self {
                    value: value.clone(),
                    remaining_ms: *remaining_ms,
                    now: now.ok_or_else(unexpected_response)?,
                    event_seq,
                    is_guess: false,
                })
            }
            _ => Err(unexpected_response()),
        }
    }

    /// Returns the remaining time of the key.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        parse_pttl(self.remaining_ms)
    }

    pub(crate) fn event_seq(&self) -> u64 {
        self.event_seq
    }

    fn guess(event_seq: u64) -> Self {
        Self { value: Vec::new(), remaining_ms: -2, now: 0, event_seq, is_guess: true }
    }

    /// Returns the end of an exclusive grant plus [`EXPIRY_MARGIN`], or `None` if the key has no
    /// expiry. The script that replaces the value treats a renewal that moves the end by at most
    /// this margin as no change.
    fn latest_exclusive_end(&self) -> Option<u64> {
        parse_pttl(self.remaining_ms).map(|left| self.after(left + EXPIRY_MARGIN))
    }

    fn after(&self, time: Duration) -> u64 {
        self.now.saturating_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }

    /// Returns the latest end that the script `replace_record` accepts for an exclusive grant, or 0
    /// if the key has no expiry. Empty for any other value.
    fn latest_expected_end(&self) -> String {
        if self.value.is_empty() || self.value.starts_with(PREFIX.as_bytes()) {
            return String::new();
        }
        self.latest_exclusive_end().unwrap_or(0).to_string()
    }

    /// Returns the record. Returns `None` if the value belongs to another program.
    fn record(&self) -> Result<Option<LockRecord>, BackendError> {
        if self.value.is_empty() {
            return Ok(Some(LockRecord::new()));
        }
        if let Some(record) = parse_multi_claim_record(&self.value)? {
            return Ok(Some(record));
        }
        let Some((id, token, since, label)) = ExclusiveRecord::parse_fields(&self.value) else {
            return Ok(None);
        };
        let until = self.latest_exclusive_end().unwrap_or_else(|| self.after(LEASE_WITHOUT_EXPIRY));
        let holder = Claim::new(PLACEHOLDER_KEY.with(Clone::clone), Duration::ZERO)
            .with_id(id)
            .with_label(label.map(Into::into));
        let mut record = LockRecord::new();
        record.insert(LockRecord::granted_entry(&holder, token, since, until));
        Ok(Some(record))
    }
}

thread_local! {
    /// A placeholder key for claims that are only converted to entries. Entries contain no key.
    static PLACEHOLDER_KEY: registry_core::Key =
        registry_core::Key::new("-").expect("a key of one character is valid");
}

/// Parses the record of several claims. Returns `None` for any other value.
pub(crate) fn parse_multi_claim_record(value: &[u8]) -> Result<Option<LockRecord>, BackendError> {
    let Some(entries) = value.strip_prefix(PREFIX.as_bytes()) else { return Ok(None) };
    let record = std::str::from_utf8(entries).ok().and_then(|text| LockRecord::parse(text).ok());
    record.map(Some).ok_or_else(|| {
        BackendError::new(
            BackendErrorKind::Protocol,
            "redis: the record of the lock is corrupt; break the lock to remove it",
        )
    })
}

impl RedisStore {
    /// Tries to acquire the lock in the mode of `claim`.
    pub(crate) async fn try_acquire_in_mode(
        &self,
        claim: &Claim,
    ) -> Result<AttemptResult, BackendError> {
        let mut stored = None;
        let is_plain_exclusive = claim.mode() == ClaimMode::Exclusive && !claim.is_conversion();
        if is_plain_exclusive {
            match self.try_acquire(claim, None).await? {
                ExclusiveAttempt::FoundRecord(value) => stored = Some(value),
                ExclusiveAttempt::Decided(AcquireResult::Busy { .. })
                    if claim.joins_queue() && self.names.supports_multi_claim_records() => {}
                ExclusiveAttempt::Decided(result) => return Ok(AttemptResult::Exclusive(result)),
            }
        }
        let assumes_free = !is_plain_exclusive && !claim.is_conversion();
        // The box keeps this large future out of exclusive attempts, which are most attempts.
        Box::pin(self.try_acquire_entry(claim, stored, assumes_free)).await
    }

    /// Attempts to grant `claim` in the record of several claims. If `assumes_free`, the first
    /// request assumes that the key is free.
    async fn try_acquire_entry(
        &self,
        claim: &Claim,
        mut stored: Option<StoredValue>,
        assumes_free: bool,
    ) -> Result<AttemptResult, BackendError> {
        let lock = self.names.lock_name(claim.key());
        if stored.is_none() && assumes_free {
            stored = Some(StoredValue::guess(last_event_seq()));
        }
        for _ in 0..WRITE_ATTEMPTS_MAX {
            let seen = match stored.take() {
                Some(seen) => seen,
                None => self.read_value(&lock).await?,
            };
            let Some(record) = seen.record()? else {
                let busy = Busy::new();
                let busy = match seen.remaining() {
                    Some(left) => busy.with_retry_after(left),
                    None => busy,
                };
                return Ok(AttemptResult::FromRecord(Attempt::Busy(busy), seen.event_seq));
            };
            // A claim that waits for permits blocks the permits behind it even if enough units are
            // free. In other modes, the grant of a queued claim blocks the same claims as before.
            let had_permit_entry = matches!(claim.mode(), ClaimMode::Permits { .. })
                && record.entries().iter().any(|entry| entry.id == claim.id());
            let unchanged = self.durability.is_required().then(|| record.clone());
            let written = match record.attempt(claim, seen.now) {
                RecordChange::Nothing(_) if seen.is_guess => continue,
                RecordChange::Nothing(attempt) => match unchanged {
                    // The record is written again, so that `WAIT` and `WAITAOF` cover a grant whose
                    // response was lost.
                    Some(record) if matches!(attempt, Attempt::Granted(_)) => {
                        self.replace(claim, &lock, &seen, &record, attempt).await?
                    }
                    _ => return Ok(AttemptResult::FromRecord(attempt, seen.event_seq)),
                },
                RecordChange::Replace(record, attempt) => {
                    self.replace(claim, &lock, &seen, &record, attempt).await?
                }
                RecordChange::Grant(grant) => {
                    self.add_grant(claim, &lock, &seen, &grant, had_permit_entry).await?
                }
                _ => return Err(unexpected_response()),
            };
            match written {
                Written::Yes(attempt) => {
                    return Ok(AttemptResult::FromRecord(attempt, seen.event_seq));
                }
                Written::No(changed) => stored = Some(changed),
            }
        }
        let message = format!(
            "redis: other clients changed the lock during each of {WRITE_ATTEMPTS_MAX} attempts; retry"
        );
        Err(BackendError::transient(message).as_refused())
    }

    async fn read_value(&self, lock: &str) -> Result<StoredValue, BackendError> {
        let event_seq = last_event_seq();
        // No key matches the expected end -1, so the script writes nothing and returns the current
        // value.
        let call = self.scripts.replace_record.call([lock]).arg("").arg("").arg(1).arg(-1);
        match self.connections.run(self.slot(lock), &call).await? {
            Value::Array(parts) => StoredValue::parse(&parts, event_seq),
            _ => Err(unexpected_response()),
        }
    }

    /// Replaces the value `seen` by `record`, unless another client has changed it.
    async fn replace(
        &self,
        claim: &Claim,
        lock: &str,
        seen: &StoredValue,
        record: &LockRecord,
        attempt: Attempt,
    ) -> Result<Written, BackendError> {
        let event_seq = last_event_seq();
        let text =
            if record.is_empty() { String::new() } else { PREFIX.to_owned() + &record.to_text() };
        let ttl = Duration::from_micros(record.until().saturating_sub(seen.now));
        let mut call = self.scripts.replace_record.call([lock]);
        call = call
            .arg(&seen.value[..])
            .arg(text)
            .arg(ceil_millis(ttl) + 1)
            .arg(seen.latest_expected_end());
        let is_granted = matches!(attempt, Attempt::Granted(_));
        // A claim that states other units than the held permits has lost its place in the queue.
        let has_lost_place =
            matches!(&attempt, Attempt::Busy(busy) if busy.units_in_store.is_some());
        if is_granted || has_lost_place {
            // A granted attempt is a downgrade, withdraws an upgrade, or writes an earlier grant
            // again. Except in the last case, other claims may then be granted.
            call = self.with_release_message(call, lock);
        }
        let slot = self.slot(lock);
        let response = if is_granted {
            self.run_grant(slot, &call, claim).await?
        } else {
            self.connections.run(slot, &call).await?
        };
        match response {
            Value::Array(parts) if parts == [Value::Int(1)] => Ok(Written::Yes(attempt)),
            Value::Array(parts) => StoredValue::parse(&parts, event_seq).map(Written::No),
            _ => Err(unexpected_response()),
        }
    }

    /// Replaces the value `seen` by a record with a new grant, unless another client has changed
    /// it. `wakes_waiters`: other claims may be granted after the change.
    async fn add_grant(
        &self,
        claim: &Claim,
        lock: &str,
        seen: &StoredValue,
        grant: &NewGrant,
        wakes_waiters: bool,
    ) -> Result<Written, BackendError> {
        let event_seq = last_event_seq();
        let mut call = self
            .scripts
            .add_grant
            .call([lock, &self.names.token_key(lock)])
            .arg(&seen.value[..])
            .arg(&grant.before)
            .arg(&grant.id_and_mode)
            .arg(&grant.rest)
            .arg(&grant.after)
            .arg(ceil_millis(claim.lease()))
            .arg(claim.token_block())
            .arg(self.token_ttl_ms(claim))
            .arg(grant.until_of_others)
            .arg(grant.since.map_or_else(String::new, |since| format!("{since:016}")));
        if wakes_waiters {
            call = self.with_release_message(call, lock);
        }
        let Value::Array(parts) = self.run_grant(self.slot(lock), &call, claim).await? else {
            return Err(unexpected_response());
        };
        match &parts[..] {
            [Value::Int(1), token, Value::Int(remaining)] => {
                let token =
                    parse_integer(token).and_then(|token| FencingToken::try_from(token).ok());
                let lease = parse_pttl(*remaining).unwrap_or_else(|| claim.lease());
                let token = token.ok_or_else(unexpected_response)?;
                Ok(Written::Yes(Attempt::Granted(Grant::new(token, lease.min(claim.lease())))))
            }
            _ => StoredValue::parse(&parts, event_seq).map(Written::No),
        }
    }
}

/// The result of an attempt in any mode.
pub(crate) enum AttemptResult {
    /// The key has no record of several claims.
    Exclusive(AcquireResult),
    /// The response of an attempt on a record of several claims, and the sequence number of the
    /// last event before it.
    FromRecord(Attempt, u64),
}

/// The outcome of a conditional write.
enum Written {
    Yes(Attempt),
    /// The stored value differs from the expected value. Contains the stored value.
    No(StoredValue),
}

/// The prefix of a record of several claims. The record of an exclusive claim never has it.
const PREFIX: &str = "+;";
/// The maximum number of attempts if other clients change the value between a read and a write.
const WRITE_ATTEMPTS_MAX: u32 = 100;
/// The tolerance for the end of an exclusive grant when `replace_record` compares it. The script
/// rounds times to milliseconds.
const EXPIRY_MARGIN: Duration = Duration::from_millis(3);
/// The assumed remaining lease of a key whose expiry another client has removed.
const LEASE_WITHOUT_EXPIRY: Duration = Duration::from_secs(24 * 60 * 60);
