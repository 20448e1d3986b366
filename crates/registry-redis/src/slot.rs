//! Which of a cluster's slots a key is in: CRC16 (XMODEM) of its tag or of all of it, as the cluster specification has it.

use crc::{CRC_16_XMODEM, Crc};

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// How many slots there are.
pub(crate) const SLOTS: usize = 16_384;

/// The slot of a key.
pub(crate) fn slot(name: &str) -> u16 {
    let tag = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty())
        .unwrap_or(name);
    CRC.checksum(tag.as_bytes()) % 16_384
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
