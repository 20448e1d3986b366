//! The id of a lock's row. A key may be longer than a server's index permits, so rows are found by
//! a hash.

use registry_core::Key;
use sha2::{Digest as _, Sha256};

/// The SHA-256 hash of namespace and key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RowId([u8; 32]);

impl RowId {
    pub(crate) fn new(namespace: &str, key: &Key) -> Self {
        // The length prefix ensures that different pairs yield different bytes.
        let length = u64::try_from(namespace.len()).unwrap_or(u64::MAX);
        let hash = Sha256::new()
            .chain_update(length.to_be_bytes())
            .chain_update(namespace)
            .chain_update(key.as_str());
        Self(hash.finalize().into())
    }

    /// Returns the id of the native row for lock `name` of another program's table. `region_scope`
    /// identifies the table and region. The id never equals the id of a native lock.
    pub(crate) fn for_foreign_lock(region_scope: &str, name: &str) -> Self {
        let length = u64::try_from(region_scope.len()).unwrap_or(u64::MAX);
        let hash = Sha256::new()
            // No namespace has this length.
            .chain_update(u64::MAX.to_be_bytes())
            .chain_update(length.to_be_bytes())
            .chain_update(region_scope)
            .chain_update(name);
        Self(hash.finalize().into())
    }

    /// Returns a short hash of a namespace, for uses in which a collision is harmless.
    #[cfg(feature = "postgres")]
    pub(crate) fn namespace_hash(namespace: &str) -> [u8; 8] {
        let mut short = [0; 8];
        short.copy_from_slice(&Sha256::digest(namespace)[..8]);
        short
    }

    /// Returns the key of the PostgreSQL advisory lock that a session takes for this lock.
    #[cfg(feature = "postgres")]
    pub(crate) fn advisory_lock_key(self) -> i64 {
        let mut number = [0; 8];
        number.copy_from_slice(&self.0[..8]);
        i64::from_be_bytes(number)
    }

    /// Returns the key of the PostgreSQL advisory lock by which a transaction shows that it holds
    /// this lock. After a collision, a free key may be reported as held. No key is granted twice.
    #[cfg(feature = "postgres")]
    pub(crate) fn holder_lock_key(self) -> i64 {
        let mut key = [0; 8];
        key.copy_from_slice(&self.0[8..16]);
        i64::from_be_bytes(key)
    }

    pub(crate) const fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns 64 hexadecimal digits: the name of the named lock in MariaDB and MySQL.
    #[cfg(feature = "mysql")]
    pub(crate) fn hex(self) -> String {
        use std::fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// Returns a short id for notifications. A collision costs only a check of the lock.
    #[cfg(feature = "postgres")]
    pub(crate) fn notification_id(self) -> [u8; 16] {
        let mut short = [0; 16];
        short.copy_from_slice(&self.0[..16]);
        short
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_ids_are_the_same_in_all_versions() {
        let hex = |namespace, key| {
            let id = RowId::new(namespace, &Key::new(key).unwrap());
            id.bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        // sha256 of: 00 00 00 00 00 00 00 07 "default" "orders/42"
        assert_eq!(hex("default", "orders/42"), GOLDEN);
        assert_ne!(hex("a", "bc"), hex("ab", "c"));
    }

    const GOLDEN: &str = "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff";
}
