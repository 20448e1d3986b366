//! Which of a cluster's slots a key is in: CRC16 (XMODEM) of its tag or of all of it, as the cluster specification has it.

use crc::{CRC_16_XMODEM, Crc};

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// How many slots there are.
pub(crate) const SLOTS: usize = 16_384;

/// The slot of a key.
pub(crate) fn slot(name: &str) -> u16 {
    CRC.checksum(tag(name).unwrap_or(name).as_bytes()) % 16_384
}

/// The part of a key that alone decides on its slot, if it has one.
pub(crate) fn tag(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `CLUSTER KEYSLOT` says.
    #[test]
    fn slots_are_those_of_the_servers() {
        for (name, expected) in
            [("foo", 12_182), ("{foo}bar", 12_182), ("a{}b", 13_694), ("x{y", 2_740), ("", 0)]
        {
            assert_eq!(slot(name), expected, "{name}");
        }
    }
}
