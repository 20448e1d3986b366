//! The value of a queue entry: the readable text `CLAIM SINCE HOST LABEL`. Peers write an empty
//! value.
//!
//! The value is this text only for an exclusive claim whose token is the revision that created the
//! key. Every other value begins with one word and a space. The word is `s` (shared), `u`
//! (upgradable), `pTAKE/OF` (permits), `x` (exclusive) or `q` (the request to upgrade the claim).
//! `:TOKEN` follows the word if the token of the claim is not the revision that created the key.
//! The conditions of `txn` depend on the order of these letters.
//!
//! A claim that gets its token only when it is granted has `z` before its word: `zs`, `zu`,
//! `zpTAKE/OF` or `zx`. A claim that is not shared has this `z` if it was enqueued behind an
//! upgradable claim or an upgraded one. Every claim has it if it was enqueued behind another claim
//! with a `z`. The upgradable claim may be upgraded before the waiting claim is granted. The token
//! of the upgrade is then larger than the revision that created the waiting claim's key. Every
//! upgrade writes a `z` before the word of each waiting claim whose token is smaller than that of
//! the upgrade.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use registry_core::{Claim, ClaimId, ClaimMode, FencingToken, Holder, Key, QueuedEntry};

use crate::proto::KeyValue;

/// Returns the record of a claim that is enqueued now.
pub(crate) fn encode(claim: &Claim, host: &str) -> Vec<u8> {
    encode_as(QueuedEntry::Claim(claim.mode()), claim, host)
}

/// Returns `record` with `z` before its word, for a claim whose token is taken at its grant.
pub(crate) fn without_token(record: &[u8], mode: ClaimMode) -> Vec<u8> {
    let word: &[u8] = if mode == ClaimMode::Exclusive { b"zx " } else { b"z" };
    [word, record].concat()
}

/// Returns the record of a waiting claim with `z` before its word: its token is then taken at the
/// grant. Returns `None` for an upgrade request, an entry of another program, or an entry whose
/// token is not its creation revision.
pub(crate) fn record_without_token(entry: &KeyValue) -> Option<Vec<u8>> {
    let EntryRecord { entry: queued, id, token, .. } = EntryRecord::of(entry);
    match (queued, id) {
        (QueuedEntry::Claim(mode), Some(_)) if token == entry.create_revision => {
            Some(without_token(&entry.value, mode))
        }
        _ => None,
    }
}

/// Returns the record of the request to upgrade a claim.
pub(crate) fn encode_request(claim: &Claim, host: &str) -> Vec<u8> {
    encode_as(QueuedEntry::UpgradeRequest, claim, host)
}

fn encode_as(entry: QueuedEntry, claim: &Claim, host: &str) -> Vec<u8> {
    let (word, label) = (mode_word(entry, None), claim.label().unwrap_or_default());
    format!("{word}{} {} {host} {label}", claim.id(), now_ms()).into_bytes()
}

/// Returns the record of an entry whose claim is converted to `mode` and has this token.
pub(crate) fn convert(entry: &KeyValue, mode: ClaimMode, token: i64) -> Vec<u8> {
    let token = Some(token).filter(|token| *token != entry.create_revision);
    let text = EntryRecord::of(entry).text;
    [mode_word(QueuedEntry::Claim(mode), token).as_bytes(), text.as_bytes()].concat()
}

/// Returns the beginning of the record of an exclusive grant with this token.
pub(crate) fn exclusive_grant_prefix(id: ClaimId, token: i64, create_revision: i64) -> Vec<u8> {
    let token = Some(token).filter(|token| *token != create_revision);
    format!("{}{id} ", mode_word(QueuedEntry::Claim(ClaimMode::Exclusive), token)).into_bytes()
}

/// Returns the first word of a record and a space. Empty for an exclusive claim if `token` is
/// `None`: its token is then the creation revision.
fn mode_word(entry: QueuedEntry, token: Option<i64>) -> String {
    let word = match entry {
        QueuedEntry::Claim(ClaimMode::Shared) => "s".to_owned(),
        QueuedEntry::Claim(ClaimMode::Upgradable) => "u".to_owned(),
        QueuedEntry::Claim(ClaimMode::Permits { take, of }) => format!("p{take}/{of}"),
        QueuedEntry::UpgradeRequest => "q".to_owned(),
        QueuedEntry::Claim(_) if token.is_none() => return String::new(),
        QueuedEntry::Claim(_) => "x".to_owned(),
    };
    match token {
        Some(token) => format!("{word}:{token} "),
        None => word + " ",
    }
}

/// The record of a queue entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryRecord<'a> {
    pub(crate) entry: QueuedEntry,
    /// The claim. `None` for an entry of another program.
    pub(crate) id: Option<ClaimId>,
    /// The token of the claim, if it is granted. Zero if the token is not taken yet.
    pub(crate) token: i64,
    /// The record without the word of the mode. Empty for an entry of another program.
    text: &'a str,
}

impl<'a> EntryRecord<'a> {
    /// Decodes an entry. An entry of another program is exclusive.
    pub(crate) fn of(entry: &'a KeyValue) -> Self {
        let created = entry.create_revision;
        let exclusive = QueuedEntry::Claim(ClaimMode::Exclusive);
        let unknown = Self { entry: exclusive, id: None, token: created, text: "" };
        let Ok(value) = std::str::from_utf8(&entry.value) else { return unknown };
        if let Some(id) = parse_claim_id(value) {
            return Self { id: Some(id), text: value, ..unknown };
        }
        let decode = || {
            let (word, text) = value.split_once(' ')?;
            let (word, token) = match word.split_once(':') {
                Some((word, token)) => (word, token.parse().ok()?),
                None => match word.strip_prefix('z') {
                    Some(word) => (word, NO_TOKEN),
                    None => (word, created),
                },
            };
            let entry = match word {
                "s" => QueuedEntry::Claim(ClaimMode::Shared),
                "u" => QueuedEntry::Claim(ClaimMode::Upgradable),
                "x" => exclusive,
                "q" => QueuedEntry::UpgradeRequest,
                _ => {
                    let (take, of) = word.strip_prefix('p')?.split_once('/')?;
                    let (take, of) = (take.parse().ok()?, of.parse().ok()?);
                    QueuedEntry::Claim(ClaimMode::Permits { take, of })
                }
            };
            Some(Self { entry, id: Some(parse_claim_id(text)?), token, text })
        };
        decode().unwrap_or(unknown)
    }

    /// Returns whether the token of the claim is taken at its grant.
    pub(crate) fn needs_token(&self) -> bool {
        self.token == NO_TOKEN
    }

    /// Returns whether this is the entry of the claim `id`. Returns false for the request to
    /// upgrade this claim.
    pub(crate) fn is_claim(&self, id: ClaimId) -> bool {
        self.id == Some(id) && self.entry != QueuedEntry::UpgradeRequest
    }

    /// Returns whether this is the request to upgrade the claim `id`.
    pub(crate) fn is_request_of(&self, id: ClaimId) -> bool {
        self.id == Some(id) && self.entry == QueuedEntry::UpgradeRequest
    }
}

/// Returns whether the entry belongs to the claim `id`.
pub(crate) fn belongs_to(entry: &KeyValue, id: ClaimId) -> bool {
    EntryRecord::of(entry).is_claim(id)
}

/// Parses the claim id that is the first word of `text`.
fn parse_claim_id(text: &str) -> Option<ClaimId> {
    text.split_once(' ')?.0.parse().ok()
}

/// Returns the holder of `key`, given its entry. A record of another program contains no label and
/// no time.
pub(crate) fn decode_holder(key: Key, entry: &KeyValue, remaining: Option<Duration>) -> Holder {
    let record = EntryRecord::of(entry);
    let fields = decode_since_and_label(record.text);
    let mode = match record.entry {
        QueuedEntry::Claim(mode) => mode,
        QueuedEntry::UpgradeRequest => ClaimMode::Exclusive,
    };
    // Includes the wait in the queue, because the record states when the claim was enqueued. The
    // result depends on the wall clocks of two hosts, so it is only displayed.
    let held_for = fields.and_then(|(since, _)| now_ms().checked_sub(since));
    Holder::new(key)
        .with_mode(mode)
        .with_label(fields.and_then(|(_, label)| label).map(str::to_owned))
        .with_token(FencingToken::try_from(record.token).ok().filter(|_| !record.needs_token()))
        .with_times(held_for.map(Duration::from_millis), remaining)
}

/// Returns the time at which the claim was enqueued, and the label.
fn decode_since_and_label(text: &str) -> Option<(u64, Option<&str>)> {
    let mut fields = text.splitn(4, ' ');
    let since = fields.nth(1)?.parse().ok()?;
    Some((since, fields.nth(1).filter(|label| !label.is_empty())))
}

/// Returns the host name, percent-encoded, or `-` if it is unknown.
pub(crate) fn host_name() -> String {
    let kernel_name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = kernel_name
        .or_else(|| std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME")).ok());
    let name = name.unwrap_or_default();
    let name = utf8_percent_encode(name.trim(), HOST_ESCAPED).to_string();
    if name.is_empty() { "-".to_owned() } else { name }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// The lower limit of the records of shared claims. Their upper limit is `UPGRADABLE_FROM`.
pub(crate) const SHARED_FROM: &[u8] = b"s";
/// The lower limit of the records of upgradable claims.
pub(crate) const UPGRADABLE_FROM: &[u8] = b"u";
/// The upper limit of the records of upgradable claims.
pub(crate) const UPGRADABLE_END: &[u8] = b"v";
/// The lower limit of the records of claims whose token is taken at their grant.
pub(crate) const WITHOUT_TOKEN_FROM: &[u8] = b"z";
/// The token of a claim whose token is taken at its grant. No revision is zero.
const NO_TOKEN: i64 = 0;
/// The escaped characters: all characters that do not occur in host names.
const HOST_ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_record_decodes_to_its_holder() {
        let claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(5));
        let claim = claim.with_label(Some("a label of three\n\0".into()));
        let record = encode(&claim, "host-1");
        assert!(record.starts_with(claim.id().to_string().as_bytes()));
        let entry = KeyValue { create_revision: 7, value: record, ..KeyValue::default() };
        let belongs_to = |id| belongs_to(&entry, id);
        assert!(belongs_to(claim.id()) && !belongs_to(ClaimId::random()));
        let holder = decode_holder(claim.key().clone(), &entry, None);
        assert_eq!(holder.label.as_deref(), Some("a label of three\n\0"));
        assert_eq!(holder.token, FencingToken::new(7));
        assert!(holder.held_for.is_some());
    }

    #[test]
    fn a_record_keeps_its_fields_through_conversions() {
        let claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(5));
        let claim = claim.with_label(Some("p1/2 of x".into()));
        for mode in [
            ClaimMode::Exclusive,
            ClaimMode::Shared,
            ClaimMode::Upgradable,
            ClaimMode::Permits { take: 2, of: 10 },
        ] {
            let value = encode(&claim.clone().with_mode(mode), "host");
            let mut entry = KeyValue { create_revision: 7, value, ..KeyValue::default() };
            for (to, token) in [(mode, 7), (ClaimMode::Exclusive, 9), (ClaimMode::Shared, 9)] {
                entry.value = convert(&entry, to, token);
                let record = EntryRecord::of(&entry);
                assert_eq!((record.entry, record.token), (QueuedEntry::Claim(to), token));
                assert!(record.is_claim(claim.id()) && !record.is_request_of(claim.id()));
                let holder = decode_holder(claim.key().clone(), &entry, None);
                assert_eq!((holder.mode, holder.label.as_deref()), (to, claim.label()));
            }
        }
        for mode in [
            ClaimMode::Exclusive,
            ClaimMode::Shared,
            ClaimMode::Upgradable,
            ClaimMode::Permits { take: 2, of: 10 },
        ] {
            let value = without_token(&encode(&claim.clone().with_mode(mode), "host"), mode);
            assert!(&*value > WITHOUT_TOKEN_FROM);
            let mut entry = KeyValue { create_revision: 7, value, ..KeyValue::default() };
            let record = EntryRecord::of(&entry);
            assert!(record.needs_token() && record.is_claim(claim.id()));
            assert_eq!(record.entry, QueuedEntry::Claim(mode));
            assert_eq!(decode_holder(claim.key().clone(), &entry, None).token, None);
            entry.value = convert(&entry, mode, 9);
            let record = EntryRecord::of(&entry);
            assert_eq!((record.entry, record.token), (QueuedEntry::Claim(mode), 9));
        }
        let value = encode_request(&claim, "host");
        let request = KeyValue { value, ..KeyValue::default() };
        assert!(EntryRecord::of(&request).is_request_of(claim.id()));
        assert!(!belongs_to(&request, claim.id()));
    }

    #[test]
    fn the_letters_of_shared_modes_are_between_those_of_all_others() {
        let claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(5));
        let is_shared = |value: &[u8]| (SHARED_FROM..UPGRADABLE_FROM).contains(&value);
        let is_shared_or_upgradable = |value: &[u8]| (SHARED_FROM..UPGRADABLE_END).contains(&value);
        for (mode, shared, shared_or_upgradable) in [
            (ClaimMode::Exclusive, false, false),
            (ClaimMode::Shared, true, true),
            (ClaimMode::Upgradable, false, true),
            (ClaimMode::Permits { take: 1, of: 1 }, false, false),
        ] {
            let value = encode(&claim.clone().with_mode(mode), "host");
            assert_eq!(is_shared(&value), shared);
            assert_eq!(is_shared_or_upgradable(&value), shared_or_upgradable);
            let entry = KeyValue { value, ..KeyValue::default() };
            let upgraded = convert(&entry, ClaimMode::Exclusive, 9);
            assert!(!is_shared_or_upgradable(&upgraded) && !is_shared(&upgraded));
        }
        for value in [encode_request(&claim, "host"), Vec::new()] {
            assert!(!is_shared_or_upgradable(&value) && !is_shared(&value));
        }
    }

    #[test]
    fn a_record_of_another_program_has_no_label_and_no_time() {
        for record in [&b""[..], b"x", b"\xff\xfe", b"1 2 3 4", b"000102030405060708090a0b0c0d0e0f"]
        {
            let entry = KeyValue { value: record.to_vec(), ..KeyValue::default() };
            let holder = decode_holder(Key::new("k").unwrap(), &entry, None);
            assert_eq!((holder.label, holder.held_for), (None, None));
            assert!(!belongs_to(
                &entry,
                ClaimId::from_bits(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f)
            ));
        }
    }

    #[test]
    fn a_host_name_is_one_word() {
        let host = host_name();
        assert!(!host.is_empty() && !host.contains(' '), "{host:?}");
    }
}
