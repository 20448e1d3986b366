//! Computes a key's cluster slot: CRC16 (XMODEM) of its hash tag or of the whole key, as in the
//! cluster specification.

use crc::{CRC_16_XMODEM, Crc};

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The number of slots of a cluster.
pub(crate) const SLOTS: usize = 16_384;

/// Returns the slot of a key.
pub(crate) fn slot(name: &str) -> u16 {
    CRC.checksum(tag(name).unwrap_or(name).as_bytes()) % 16_384
}

/// Returns the hash tag of a key: the part that alone determines its slot.
pub(crate) fn tag(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those of `CLUSTER KEYSLOT`.
    #[test]
    fn slots_are_those_of_the_servers() {
        for (name, expected) in
            [("foo", 12_182), ("{foo}bar", 12_182), ("a{}b", 13_694), ("x{y", 2_740), ("", 0)]
        {
            assert_eq!(slot(name), expected, "{name}");
        }
    }
}
