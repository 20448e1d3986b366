//! Computes the cluster slot of a key, as in the cluster specification: CRC16 (XMODEM) of its hash
//! tag or of the whole key.

use crc::{CRC_16_XMODEM, Crc};

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The number of slots of a cluster.
pub(crate) const SLOT_COUNT: usize = 16_384;

/// Returns the slot of a key.
pub(crate) fn hash_slot(name: &str) -> u16 {
    CRC.checksum(hash_tag(name).unwrap_or(name).as_bytes()) % 16_384
}

/// Returns the hash tag of a key, if any. Only this part of the key determines the slot.
pub(crate) fn hash_tag(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('{')?;
    let (hash_tag, _) = rest.split_once('}')?;
    (!hash_tag.is_empty()).then_some(hash_tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those of `CLUSTER KEYSLOT`.
    #[test]
    fn slots_match_cluster_keyslot() {
        for (name, expected) in
            [("foo", 12_182), ("{foo}bar", 12_182), ("a{}b", 13_694), ("x{y", 2_740), ("", 0)]
        {
            assert_eq!(hash_slot(name), expected, "{name}");
        }
    }
}
