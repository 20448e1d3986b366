//! The value of a queue entry: the readable text `CLAIM SINCE HOST LABEL`. Peers write an empty
//! value.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use registry_core::{Claim, ClaimId, FencingToken, Holder, Key};

use crate::proto::KeyValue;

/// Returns the record of a claim that is enqueued now.
pub(crate) fn encode(claim: &Claim, host: &str) -> Vec<u8> {
    let label = claim.label().unwrap_or_default();
    format!("{} {} {host} {label}", claim.id(), now_ms()).into_bytes()
}

/// Returns whether the record belongs to the claim `id`.
pub(crate) fn belongs_to(record: &[u8], id: ClaimId) -> bool {
    record.get(..ID_LENGTH).is_some_and(|written| written == id.to_string().as_bytes())
        && record.get(ID_LENGTH) == Some(&b' ')
}

/// Returns the holder of `key`, given the first entry of its queue. A record of another program
/// contains no label and no time.
pub(crate) fn decode_holder(
    key: Key,
    first_entry: &KeyValue,
    remaining: Option<Duration>,
) -> Holder {
    let fields = decode(&first_entry.value);
    // The result depends on the wall clocks of two hosts, so it is only displayed.
    let held_for = fields.and_then(|(since, _)| now_ms().checked_sub(since));
    Holder::new(key)
        .with_label(fields.and_then(|(_, label)| label).map(str::to_owned))
        .with_token(fencing_token(first_entry))
        .with_times(held_for.map(Duration::from_millis), remaining)
}

/// Returns a holder's fencing token: the creation revision of its key.
pub(crate) fn fencing_token(first_entry: &KeyValue) -> Option<FencingToken> {
    FencingToken::try_from(first_entry.create_revision).ok()
}

/// Returns the time at which the claim was enqueued, and the label.
fn decode(record: &[u8]) -> Option<(u64, Option<&str>)> {
    let mut fields = std::str::from_utf8(record).ok()?.splitn(4, ' ');
    let id = fields.next()?;
    if id.len() != ID_LENGTH || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let since = fields.next()?.parse().ok()?;
    Some((since, fields.nth(1).filter(|label| !label.is_empty())))
}

/// Returns the host name without spaces.
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

/// The escaped characters: all characters that do not occur in host names.
const HOST_ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');
const ID_LENGTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_record_decodes_to_its_holder() {
        let claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(5));
        let claim = claim.with_label(Some("a label of three\n\0".into()));
        let record = encode(&claim, "host-1");
        assert!(belongs_to(&record, claim.id()) && !belongs_to(&record, ClaimId::random()));
        let first_entry = KeyValue { create_revision: 7, value: record, ..KeyValue::default() };
        let holder = decode_holder(claim.key().clone(), &first_entry, None);
        assert_eq!(holder.label.as_deref(), Some("a label of three\n\0"));
        assert_eq!(holder.token, FencingToken::new(7));
        assert!(holder.held_for.is_some());
    }

    #[test]
    fn a_record_of_another_program_has_no_label_and_no_time() {
        for record in [&b""[..], b"x", b"\xff\xfe", b"1 2 3 4", b"000102030405060708090a0b0c0d0e0f"]
        {
            let first_entry = KeyValue { value: record.to_vec(), ..KeyValue::default() };
            let holder = decode_holder(Key::new("k").unwrap(), &first_entry, None);
            assert_eq!((holder.label, holder.held_for), (None, None));
            assert!(!belongs_to(
                record,
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
