//! Parses the value of a lock's key in the native layout: the readable text
//! `CLAIM TOKEN SINCE LABEL`. In a quorum, a dot and a round follow the token.

use std::time::Duration;

use registry_core::{ClaimId, FencingToken, Holder, Key};

/// The record of a lock. A field is `None` if it is unknown, for example because another program
/// wrote the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExclusiveRecord {
    pub(crate) token: Option<FencingToken>,
    since_us: Option<i64>,
    label: Option<String>,
}

impl ExclusiveRecord {
    /// Parses a record. For a value of another program, only the `token` can be `Some`.
    ///
    /// The token is a separate argument, because not every layout stores it in the record.
    pub(crate) fn parse(bytes: &[u8], token: Option<i64>) -> Self {
        let token = token.and_then(|token| FencingToken::try_from(token).ok());
        let foreign = Self { token, since_us: None, label: None };
        let Ok(text) = std::str::from_utf8(bytes) else { return foreign };
        let mut fields = text.splitn(4, ' ');
        let claim = fields.next().unwrap_or_default();
        if claim.len() != 32 || !claim.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return foreign;
        }
        let number = |field: Option<&str>| field.and_then(|field| field.parse::<i64>().ok());
        let since_us = number(fields.nth(1));
        let label = fields.next().filter(|label| !label.is_empty()).map(str::to_owned);
        Self { token, since_us, label }
    }

    /// Parses the claim, the token, the time of the grant in us, and the label. Returns `None` for
    /// a value of another program.
    pub(crate) fn parse_fields(
        bytes: &[u8],
    ) -> Option<(ClaimId, FencingToken, u64, Option<String>)> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (claim, rest) = text.split_at_checked(32)?;
        let token = rest.trim_start().split([' ', '.']).next()?.parse().ok()?;
        let record = Self::parse(bytes, None);
        let since = u64::try_from(record.since_us?).ok()?;
        Some((claim.parse().ok()?, FencingToken::new(token)?, since, record.label))
    }

    /// Returns the holder of `key`. `now_us` is the time on the server's clock.
    pub(crate) fn holder(self, key: Key, now_us: i64, remaining_ms: i64) -> Holder {
        let held_for = self.since_us.map(|since| micros(now_us.saturating_sub(since)));
        Holder::new(key)
            .with_label(self.label)
            .with_token(self.token)
            .with_times(held_for, parse_pttl(remaining_ms))
    }
}

/// Converts the result of PTTL. Returns `None` for a missing key and for a key without an expiry.
pub(crate) fn parse_pttl(remaining_ms: i64) -> Option<Duration> {
    u64::try_from(remaining_ms).ok().map(Duration::from_millis)
}

fn micros(us: i64) -> Duration {
    Duration::from_micros(u64::try_from(us).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_parsed() {
        let record = ExclusiveRecord::parse(
            b"000102030405060708090a0b0c0d0e0f 17 5 a label of three",
            Some(17),
        );
        assert_eq!(record.token, FencingToken::new(17));
        assert_eq!(record.label.as_deref(), Some("a label of three"));
        let holder = record.holder(Key::new("k").unwrap(), 1_000_005, 250);
        assert_eq!(holder.held_for, Some(Duration::from_secs(1)));
        assert_eq!(holder.lease_left, Some(Duration::from_millis(250)));
    }

    #[test]
    fn a_value_of_another_program_has_no_fields() {
        for bytes in
            [&b""[..], b"x", b"\xff\xfe", b"1 2 3 4", b"zz0102030405060708090a0b0c0d0e0f 1 1 "]
        {
            let record = ExclusiveRecord::parse(bytes, None);
            assert_eq!((record.token, record.since_us, record.label), (None, None, None));
        }
    }
}
