//! One node's view of its cluster, and the slot of a key.

use std::collections::BTreeMap;
use std::io;

use super::{SLOTS, query_text};
use crate::redis::server::RedisServer;

/// The cluster as one node sees it.
#[derive(Debug)]
pub(super) struct ClusterView(Vec<NodeInfo>);

/// One line of `CLUSTER NODES`.
#[derive(Debug)]
pub(super) struct NodeInfo {
    pub(super) id: String,
    flags: String,
    /// The id of the master that this node replicates.
    pub(super) master: Option<String>,
    /// Of two nodes that claim the same slot, the one with the larger epoch owns it.
    pub(super) epoch: u64,
    /// The first and the last slot of each range.
    slots: Vec<(u16, u16)>,
}

impl ClusterView {
    pub(super) async fn query(server: &RedisServer) -> io::Result<Self> {
        Ok(Self::parse(&query_text(server, &["CLUSTER", "NODES"]).await?))
    }

    fn parse(lines: &str) -> Self {
        Self(lines.lines().filter_map(NodeInfo::parse).collect())
    }

    pub(super) fn members(&self) -> impl Iterator<Item = &NodeInfo> {
        self.0.iter()
    }

    pub(super) fn member(&self, id: &str) -> Option<&NodeInfo> {
        self.0.iter().find(|member| member.id == id)
    }

    pub(super) fn myself(&self) -> Option<&NodeInfo> {
        self.0.iter().find(|member| member.has_flag("myself"))
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&NodeInfo> {
        let has = |&(first, last): &(u16, u16)| (first..=last).contains(&slot);
        self.0.iter().find(|member| member.slots.iter().any(has))
    }

    /// Returns the owner of each slot range, to compare it with other views.
    pub(super) fn owners(&self) -> BTreeMap<(u16, u16), String> {
        let ranges = |member: &NodeInfo| {
            let id = member.id.clone();
            member.slots.clone().into_iter().map(move |range| (range, id.clone()))
        };
        self.0.iter().flat_map(ranges).collect()
    }
}

impl NodeInfo {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let id = words.next()?.to_owned();
        let _addr = words.next()?;
        let flags = words.next()?.to_owned();
        let master = words.next().filter(|word| *word != "-").map(ToOwned::to_owned);
        let (_ping, _pong) = (words.next()?, words.next()?);
        let epoch = words.next()?.parse().ok()?;
        let _link = words.next()?;
        // Slots in migration also appear in brackets. They count only for the node that still has
        // them in a range.
        let slots = words.filter(|word| !word.starts_with('[')).filter_map(|word| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            Some((first.parse().ok()?, last.parse().ok()?))
        });
        Some(Self { id, flags, master, epoch, slots: slots.collect() })
    }

    fn has_flag(&self, flag: &str) -> bool {
        self.flags.split(',').any(|other| other == flag)
    }

    /// Returns whether the node's address is known and its handshake is complete.
    pub(super) fn is_met(&self) -> bool {
        !self.has_flag("handshake") && !self.has_flag("noaddr")
    }
}

/// Returns the slot of a key. If the key has text in its first braces, only that text counts.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|&byte| byte == b'{')?;
        let rest = &key[open + 1..];
        let length = rest.iter().position(|&byte| byte == b'}')?;
        (length > 0).then(|| &rest[..length])
    };
    crc16(tag().unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_of_a_key_is_that_of_its_tag() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!((slot_of(b"foo"), slot_of(b"bar")), (12_182, 5_061));
        assert_eq!(slot_of(b"{foo}.token"), slot_of(b"foo"));
        assert_eq!(slot_of(b"a{foo}{bar}"), slot_of(b"foo"));
        assert_eq!(slot_of(b"{}foo"), crc16(b"{}foo") % SLOTS);
        assert_eq!(slot_of(b"{foo"), crc16(b"{foo") % SLOTS);
    }

    #[test]
    fn a_view_is_parsed_from_cluster_nodes() {
        let view = ClusterView::parse(
            "aa 127.0.0.1:7001@17001 myself,master - 0 0 5 connected 0-5459 5461 [5460->-bb]\n\
             bb 127.0.0.1:7002@17002,host master - 0 1 6 connected 5462-16383\n\
             cc 127.0.0.1:7003@17003 slave,fail aa 0 1 5 disconnected\n\
             dd 127.0.0.1:7004@17004 handshake - 0 0 0 connected\n",
        );
        assert_eq!(view.members().count(), 4);
        assert_eq!(view.myself().unwrap().epoch, 5);
        let owner = |slot| view.owner(slot).map(|owner| &*owner.id);
        assert_eq!((owner(5_459), owner(5_460), owner(5_461)), (Some("aa"), None, Some("aa")));
        assert_eq!(owner(16_383), Some("bb"));
        assert_eq!(view.owners().len(), 3);
        assert_eq!(view.member("cc").unwrap().master.as_deref(), Some("aa"));
        assert!(view.member("cc").unwrap().is_met() && !view.member("dd").unwrap().is_met());
    }
}
