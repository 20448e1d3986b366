//! How Spring Integration's `JdbcLockRegistry` stores a lock: table, region, key and owner. This
//! module contains no SQL.

use std::time::Duration;

use md5::{Digest as _, Md5};
use registry_core::{ClaimId, Key};

/// The table of a Spring Integration `JdbcLockRegistry` (`DefaultLockRepository`) with which locks
/// are shared.
///
/// A Spring peer and this program exclude each other if they use the same table, region and version
/// of the table ([`v6`](Self::v6) or [`v7`](Self::v7)). With `v6`, they must also use the same time
/// to live. Note:
///
/// - Spring checks the end of a lock by its own host's clock, and this program by the server's
///   clock. A Spring host whose clock is ahead acquires locks too early. Keep the clocks
///   synchronised, and use leases much longer than the clock difference.
/// - The table contains a UUID instead of the key. A key with the form of a UUID is stored in lower
///   case. Any other key is converted as by Java's `UUID.nameUUIDFromBytes`. So a key and its UUID
///   are the same lock. Two UUIDs that differ only in case are also the same lock.
/// - Rows are deleted at release. Fencing tokens, labels and keys are in the native tables of this
///   program. A lock that Spring holds has no token and no label, and is listed by its UUID. The
///   UUID is also a valid key of the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpringTable {
    pub(crate) version: SpringVersion,
    prefix: String,
    region: String,
}

/// The version of Spring Integration that uses the table. It determines how a row stores the end of
/// its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpringVersion {
    /// A row contains the start of the lock. Each reader adds its own time to live.
    V6 { ttl: Duration },
    /// A row contains the end of the lock.
    V7,
}

impl SpringTable {
    /// Returns the table `INT_LOCK` of Spring Integration 7, region `DEFAULT`. A row contains the
    /// end of its lock.
    #[must_use]
    pub fn v7() -> Self {
        Self::with_version(SpringVersion::V7)
    }

    /// Returns the table `INT_LOCK` of Spring Integration 6 and before, region `DEFAULT`. A row
    /// contains the start of its lock, and each reader adds its own time to live.
    ///
    /// `ttl` must equal the peers' `timeToLive`, to the millisecond; Spring's default is 10 s.
    /// Otherwise one side would acquire locks that the other side holds. Leases may differ from
    /// `ttl`: the row then contains a start that yields the correct end. This program writes UTC,
    /// like Spring 6.0 to 6.1.7, and from 6.5.9 on. All other versions before 7 write the local
    /// time: with them, Java's default time zone must be UTC, or a key can have two holders.
    #[must_use]
    pub fn v6(ttl: Duration) -> Self {
        Self::with_version(SpringVersion::V6 { ttl })
    }

    fn with_version(version: SpringVersion) -> Self {
        Self { version, prefix: "INT_".to_owned(), region: "DEFAULT".to_owned() }
    }

    /// Sets the prefix of the table name, which is followed by `LOCK`. It may begin with a schema
    /// and a dot. Default: `INT_`.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the region. Locks of different regions are independent, even if their keys are equal.
    /// Default: `DEFAULT`.
    #[must_use]
    pub fn with_region(mut self, region: impl Into<String>) -> Self {
        self.region = region.into();
        self
    }

    pub(crate) fn region(&self) -> &str {
        &self.region
    }

    /// Returns the table's schema, if the prefix contains a schema, and the table's name.
    pub(crate) fn schema_and_name(&self) -> (Option<&str>, String) {
        match self.prefix.split_once('.') {
            Some((schema, prefix)) => (Some(schema), format!("{prefix}LOCK")),
            None => (None, format!("{}LOCK", self.prefix)),
        }
    }

    /// Checks these settings without I/O. The error is the text for the first invalid setting.
    pub(crate) fn check(&self) -> Result<(), String> {
        let is_word = |text: &str, may_be_empty: bool| {
            (may_be_empty || !text.is_empty())
                && text.len() <= WORD_BYTES_MAX
                && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                && !text.starts_with(|c: char| c.is_ascii_digit())
        };
        let parts = self.prefix.split_once('.');
        if !parts.map_or_else(
            || is_word(&self.prefix, true),
            |(a, b)| is_word(a, false) && is_word(b, true),
        ) {
            return Err(format!(
                "the prefix {:?} of Spring's table must have at most {WORD_BYTES_MAX} ASCII letters, digits and underscores, and no leading digit, after an optional schema and a dot",
                self.prefix
            ));
        }
        // Every collation distinguishes these characters, apart from the case of letters.
        let is_unambiguous =
            |c: char| c.is_ascii_graphic() && !matches!(c, '\'' | '"' | '`' | '\\' | '$');
        if self.region.is_empty()
            || self.region.len() > REGION_BYTES_MAX
            || !self.region.chars().all(is_unambiguous)
        {
            return Err(format!(
                "the region {:?} must have 1 to {REGION_BYTES_MAX} ASCII characters without spaces, quotes, backslashes and dollar signs",
                self.region
            ));
        }
        match self.version {
            SpringVersion::V6 { ttl } if ttl < TTL_MIN || ttl > TTL_MAX => {
                Err(format!("the time to live of {ttl:?} is not between {TTL_MIN:?} and 366 days"))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the value of the column `LOCK_KEY`. A key in the usual form of a UUID stays a UUID. Any
/// other key is converted as by Java's `UUID.nameUUIDFromBytes`: its MD5 hash with the bits of
/// version 3. RFC 4122 differs: it also hashes a namespace.
pub(crate) fn lock_key(key: &Key) -> String {
    if is_uuid(key.as_str()) {
        return key.as_str().to_ascii_lowercase();
    }
    let mut hash: [u8; 16] = Md5::digest(key.as_str()).into();
    hash[6] = hash[6] & 0x0f | 0x30;
    hash[8] = hash[8] & 0x3f | 0x80;
    uuid(&hash)
}

/// Returns the value of the column `CLIENT_ID`. Each claim is its own owner.
pub(crate) fn client_id(id: ClaimId) -> String {
    uuid(&id.to_bytes())
}

/// Returns the usual form of a UUID.
pub(crate) fn uuid(bytes: &[u8; 16]) -> String {
    let digits = u128::from_be_bytes(*bytes);
    let digits = format!("{digits:032x}");
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// Returns whether `client` is the `CLIENT_ID` of this claim.
pub(crate) fn is_client_id_of(client: Option<&str>, claim: Option<&[u8]>) -> bool {
    let claim = claim.and_then(|claim| <[u8; 16]>::try_from(claim).ok());
    claim.is_some_and(|claim| client == Some(uuid(&claim).as_str()))
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// The length of Spring's column `REGION`.
const REGION_BYTES_MAX: usize = 100;
const WORD_BYTES_MAX: usize = 50;
/// The default pause between two attempts of `JdbcLockRegistry`.
pub(crate) const PEER_POLL: Duration = Duration::from_millis(100);
const TTL_MIN: Duration = Duration::from_millis(100);
const TTL_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The finding of `lockreg doctor` for every Spring table.
pub(crate) const CLOCK_WARNING: &str = "locks are shared with Spring, whose programs check the end of a lock by their own hosts' clocks; keep these clocks synchronised";

impl SpringTable {
    /// Checks that the table on the server is of this version. The error is the text for a
    /// [`BackendError`](registry_core::BackendError).
    pub(crate) fn check_version(&self, table: &str, has_end_column: bool) -> Result<(), String> {
        match (self.version, has_end_column) {
            (SpringVersion::V7, false) => Err(format!(
                "the table {table} has no column EXPIRED_AFTER: it belongs to Spring Integration 6 or before (`spring=v6`)"
            )),
            (SpringVersion::V6 { .. }, true) => Err(format!(
                "the table {table} has a column EXPIRED_AFTER: it belongs to Spring Integration 7 (`spring=v7`)"
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock_key_of(text: &str) -> String {
        lock_key(&Key::new(text).unwrap())
    }

    #[test]
    fn lock_keys_equal_those_of_java() {
        // `UUIDConverter.getUUID(key).toString()` with JDK 17. The UUID of an empty key is checked
        // separately, because empty keys are invalid.
        for (key, uuid) in [
            ("foo", "acbd18db-4cc2-385c-adef-654fccc4a4d8"),
            ("bar", "37b51d19-4a75-33e4-9b56-f6524f2d51f2"),
            ("1", "c4ca4238-a0b9-3382-8dcc-509a6f75849b"),
            ("order:42", "d978d567-2fe1-37dc-b580-4df0b784b958"),
            ("ключ", "c3657b66-c60a-3072-92aa-e11f07b04ae7"),
        ] {
            assert_eq!(lock_key_of(key), uuid, "{key}");
        }
        let mut empty_key_hash: [u8; 16] = Md5::digest("").into();
        empty_key_hash[6] = empty_key_hash[6] & 0x0f | 0x30;
        empty_key_hash[8] = empty_key_hash[8] & 0x3f | 0x80;
        assert_eq!(uuid(&empty_key_hash), "d41d8cd9-8f00-3204-a980-0998ecf8427e");
    }

    #[test]
    fn a_uuid_key_is_used_in_lower_case() {
        let lower_case = "acbd18db-4cc2-385c-adef-654fccc4a4d8";
        assert_eq!(lock_key_of(lower_case), lower_case);
        assert_eq!(lock_key_of("ACBD18DB-4cc2-385C-adef-654fccc4a4d8"), lower_case);
        for other in [
            "acbd18db4cc2385cadef654fccc4a4d8",
            "{acbd18db-4cc2-385c-adef-654fccc4a4d8}",
            "acbd18db-4cc2-385c-adef-654fccc4a4dg",
            "acbd18d-b4cc2-385c-adef-654fccc4a4d8",
        ] {
            assert_ne!(lock_key_of(other), other, "{other}");
            assert!(is_uuid(&lock_key_of(other)));
        }
    }

    #[test]
    fn a_claim_is_an_owner_of_36_characters() {
        let id = ClaimId::from_bits(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(client_id(id), "01234567-89ab-cdef-0011-223344556677");
        assert!(is_client_id_of(Some(&client_id(id)), Some(&id.to_bytes())));
        assert!(!is_client_id_of(None, Some(&id.to_bytes())));
        assert!(!is_client_id_of(
            Some("01234567-89ab-cdef-0011-223344556678"),
            Some(&id.to_bytes())
        ));
        assert!(!is_client_id_of(Some(&client_id(id)), None));
    }

    #[test]
    fn ambiguous_table_and_region_names_are_refused() {
        let table = SpringTable::v7();
        assert_eq!(table.schema_and_name(), (None, "INT_LOCK".to_owned()));
        for prefix in ["", "MY_", "app.INT_", "app."] {
            table.clone().with_prefix(prefix).check().unwrap();
        }
        for prefix in ["a b", "x;--", "a.b.c", ".x", "1a", "é", "a'"] {
            table.clone().with_prefix(prefix).check().unwrap_err();
        }
        for region in ["", "a b", "a'b", "a\\b", "é", "a$1", &"x".repeat(101)] {
            table.clone().with_region(region).check().unwrap_err();
        }
        table.with_region("eu/west-1:a").check().unwrap();
        SpringTable::v6(Duration::ZERO).check().unwrap_err();
        SpringTable::v6(Duration::from_secs(10)).check().unwrap();
    }
}
