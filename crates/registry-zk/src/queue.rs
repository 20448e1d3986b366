//! The queue of a lock: the contending children of its node, sorted by name. No I/O.
//!
//! A name ends in a sequence number that the server assigned. The number has ten digits and counts
//! all children that the parent ever had. The counter stops at 2³¹ − 1. From then on, each new
//! child gets this number. Children that are created concurrently may get negative numbers. Only
//! the transactions that created the nodes then determine the order. The tests of
//! `registry-testkit` check this behaviour of the servers.
//!
//! With [`Naming::Curator`] and [`Naming::Kazoo`], the name of a claim that is not exclusive
//! contains its mode before `-lock-` or `__lock__`. The mode is `-s` (shared), `-u` (upgradable),
//! `-pTAKE-OF` (permits), or `-q` for the request to upgrade the claim. Other programs treat each
//! of these nodes as an exclusive contender.

use registry_core::{ClaimId, ClaimMode, QueuedEntry};

use crate::layout::Naming;

const EXCLUSIVE: QueuedEntry = QueuedEntry::Claim(ClaimMode::Exclusive);

/// Returns the name of a claim's node without its number.
pub(crate) fn node_prefix(claim: ClaimId, naming: Naming, entry: QueuedEntry) -> String {
    let (claim, mode) = (claim_prefix(claim, naming), mode_suffix(entry));
    match naming {
        Naming::Curator => format!("{claim}{mode}-lock-"),
        // The data of the node states the mode.
        Naming::CuratorSemaphore => format!("{claim}-lock-"),
        Naming::Kazoo => format!("{claim}{mode}__lock__"),
        Naming::CuratorReadWrite => {
            let is_reader = entry == QueuedEntry::Claim(ClaimMode::Shared);
            format!("{claim}-{}", if is_reader { READER } else { WRITER })
        }
    }
}

/// Returns the beginning of the names of all nodes of a claim.
pub(crate) fn claim_prefix(claim: ClaimId, naming: Naming) -> String {
    let id = claim.to_string();
    match naming {
        Naming::Curator | Naming::CuratorReadWrite | Naming::CuratorSemaphore => format!(
            "{CURATOR_START}{}-{}-{}-{}-{}",
            &id[..8],
            &id[8..12],
            &id[12..16],
            &id[16..20],
            &id[20..]
        ),
        Naming::Kazoo => id,
    }
}

fn mode_suffix(entry: QueuedEntry) -> String {
    match entry {
        QueuedEntry::Claim(ClaimMode::Shared) => "-s".to_owned(),
        QueuedEntry::Claim(ClaimMode::Upgradable) => "-u".to_owned(),
        QueuedEntry::Claim(ClaimMode::Permits { take, of }) => format!("-p{take}-{of}"),
        QueuedEntry::UpgradeRequest => "-q".to_owned(),
        QueuedEntry::Claim(_) => String::new(),
    }
}

/// Returns the maximum bytes of the paths of a claim's nodes in a transaction: each path and its
/// length field.
pub(crate) fn node_bytes(dir: &str, claim: ClaimId, naming: Naming, entry: QueuedEntry) -> usize {
    let prefix = node_prefix(claim, naming, entry);
    let path_bytes =
        |dir: &str| LENGTH_BYTES + dir.len() + "/".len() + prefix.len() + NUMBER_CHARS_MAX;
    match (naming, entry) {
        (Naming::CuratorSemaphore, QueuedEntry::Claim(mode)) => {
            let units = usize::try_from(mode.units()).unwrap_or(usize::MAX);
            // The name of a unit is one byte longer.
            path_bytes(dir).saturating_add(units.saturating_mul(path_bytes(&leases_of(dir)) + 1))
        }
        _ => path_bytes(dir),
    }
}

/// Returns the parent of the units in Curator's semaphore, given the node of its queue.
pub(crate) fn leases_of(queue: &str) -> String {
    let key = queue.strip_suffix(QUEUE).unwrap_or(queue);
    format!("{key}{LEASES}")
}

/// Returns the entry that a contender's name states. Every contender of another program is
/// exclusive, except readers in Curator. The data of the node states the present mode of a claim
/// that was converted.
pub(crate) fn parse_queued_entry(name: &str) -> QueuedEntry {
    let Some(Contender { prefix, marker, .. }) = parse_contender(name) else { return EXCLUSIVE };
    match marker {
        READER => return QueuedEntry::Claim(ClaimMode::Shared),
        WRITER => return EXCLUSIVE,
        _ => {}
    }
    let claim_bytes = if prefix.starts_with(CURATOR_START) { CURATOR_BYTES } else { KAZOO_BYTES };
    let Some((claim, mode)) = prefix.split_at_checked(claim_bytes) else { return EXCLUSIVE };
    let id = claim.strip_prefix(CURATOR_START).unwrap_or(claim);
    if !id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
        return EXCLUSIVE;
    }
    let permits = || {
        let (take, of) = mode.strip_prefix("-p")?.split_once('-')?;
        Some(ClaimMode::Permits { take: take.parse().ok()?, of: of.parse().ok()? })
    };
    match mode {
        "-s" => QueuedEntry::Claim(ClaimMode::Shared),
        "-u" => QueuedEntry::Claim(ClaimMode::Upgradable),
        "-q" => QueuedEntry::UpgradeRequest,
        _ => permits().map_or(EXCLUSIVE, QueuedEntry::Claim),
    }
}

/// The parts of a contender's name.
struct Contender<'a> {
    /// The text before the marker: the claim and its mode, or the text of another program.
    prefix: &'a str,
    /// The text directly before the number. It identifies the recipe.
    marker: &'static str,
    number: i32,
}

/// Returns the parts of a name in the form of Curator or kazoo. Returns `None` for any other child.
fn parse_contender(name: &str) -> Option<Contender<'_>> {
    // A name with `-lock-` also matches `lock-`, so `MARKERS` lists `-lock-` first. Otherwise at
    // most one marker matches.
    MARKERS.into_iter().find_map(|marker| {
        let at = name.rfind(marker)?;
        let number = parse_number(&name[at + marker.len()..])?;
        Some(Contender { prefix: &name[..at], marker, number })
    })
}

/// Returns the number of a contender. Returns `None` if `name` is not a contender in the recipe of
/// `naming`.
fn sequence_number(name: &str, naming: Naming) -> Option<i32> {
    let contender = parse_contender(name)?;
    let is_read_write = [READER, WRITER].contains(&contender.marker);
    (is_read_write == (naming == Naming::CuratorReadWrite)).then_some(contender.number)
}

/// Parses a number in the server's format: ten characters, which may begin with a sign, or a sign
/// and ten digits.
fn parse_number(text: &str) -> Option<i32> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_decimal = digits.bytes().all(|byte| byte.is_ascii_digit());
    let has_expected_length = text.len() == 10 || (text.len() == 11 && digits.len() == 10);
    (is_decimal && has_expected_length).then(|| text.parse().ok()).flatten()
}

/// Returns whether a child contends for the lock in one of the recipes.
pub(crate) fn is_contender(name: &str) -> bool {
    parse_contender(name).is_some()
}

/// Returns the nodes of a claim, including its upgrade request. Some may belong to earlier sessions
/// that the servers have not ended yet.
pub(crate) fn claim_nodes(
    children: &[String],
    claim: ClaimId,
    naming: Naming,
) -> impl Iterator<Item = &str> {
    let prefix = claim_prefix(claim, naming);
    let is_of_claim = move |name: &&String| name.starts_with(&prefix) && is_contender(name);
    children.iter().filter(is_of_claim).map(String::as_str)
}

/// The contenders for one lock, head first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ContenderQueue {
    names: Vec<String>,
    /// Whether the names determine no order and identify no node: a claim's new node can have the
    /// name of its deleted node.
    is_sequence_exhausted: bool,
}

/// The unsorted contenders for a lock whose sequence numbers are exhausted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SequenceExhausted(Vec<String>);

impl ContenderQueue {
    /// Selects and sorts the contenders in the recipe of `naming` among all children.
    ///
    /// # Errors
    /// [`SequenceExhausted`] if the names do not determine the order.
    pub(crate) fn from_children(
        children: Vec<String>,
        naming: Naming,
    ) -> Result<Self, SequenceExhausted> {
        let mut contenders: Vec<(i32, String)> = children
            .into_iter()
            .filter_map(|name| Some((sequence_number(&name, naming)?, name)))
            .collect();
        if contenders.iter().any(|(number, _)| !(0..i32::MAX).contains(number)) {
            return Err(SequenceExhausted(contenders.into_iter().map(|(_, name)| name).collect()));
        }
        contenders.sort_unstable();
        let names = contenders.into_iter().map(|(_, name)| name).collect();
        Ok(Self { names, is_sequence_exhausted: false })
    }

    /// Returns the names of all contenders, head first.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the index of `name`.
    pub(crate) fn position_of(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
    }

    /// Returns whether the sequence numbers are exhausted.
    pub(crate) fn is_sequence_exhausted(&self) -> bool {
        self.is_sequence_exhausted
    }
}

impl SequenceExhausted {
    pub(crate) fn names(&self) -> &[String] {
        &self.0
    }

    /// Sorts the contenders by the transactions that created [`names`](Self::names), given in the
    /// same order. `None` stands for a node that no longer exists.
    pub(crate) fn sort_by_transaction(
        self,
        czxids: impl IntoIterator<Item = Option<i64>>,
    ) -> ContenderQueue {
        let czxids = czxids.into_iter().zip(self.0);
        let mut existing: Vec<_> =
            czxids.filter_map(|(czxid, name)| Some((czxid?, name))).collect();
        existing.sort_unstable();
        let names = existing.into_iter().map(|(_, name)| name).collect();
        ContenderQueue { names, is_sequence_exhausted: true }
    }
}

/// The child of a key's node that contains the queue of Curator's semaphore.
pub(crate) const QUEUE: &str = "locks";
/// The child of a key's node that contains the taken units of Curator's semaphore.
pub(crate) const LEASES: &str = "leases";
/// The markers of Curator's readers-writer lock.
const READER: &str = "__READ__";
const WRITER: &str = "__WRIT__";
const MARKERS: [&str; 5] = ["-lock-", "lock-", "__lock__", READER, WRITER];
/// The start of the names of Curator's nodes. `CURATOR_BYTES` counts this start and the id.
const CURATOR_START: &str = "_c_";
const CURATOR_BYTES: usize = 39;
/// The bytes of the id in the names of kazoo's nodes.
const KAZOO_BYTES: usize = 32;
const LENGTH_BYTES: usize = 4;
/// A negative number has a sign before its ten digits.
const NUMBER_CHARS_MAX: usize = 11;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(names: &[&str]) -> ContenderQueue {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        ContenderQueue::from_children(names, Naming::Curator).unwrap()
    }

    fn name(number: i32) -> String {
        // The server uses `String.format("%010d", number)`.
        format!("_c_0-lock-{number:010}")
    }

    #[test]
    fn node_names_have_the_form_of_curator_or_kazoo() {
        let claim = ClaimId::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(
            node_prefix(claim, Naming::Curator, EXCLUSIVE),
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-"
        );
        assert_eq!(
            node_prefix(claim, Naming::Kazoo, EXCLUSIVE),
            "0123456789abcdef0123456789abcdef__lock__"
        );
    }

    #[test]
    fn the_mode_of_a_claim_is_in_the_name_of_its_node() {
        let claim = ClaimId::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        let most = ClaimMode::Permits { take: u32::MAX, of: u32::MAX };
        for naming in [Naming::Curator, Naming::Kazoo] {
            for entry in [
                EXCLUSIVE,
                QueuedEntry::Claim(ClaimMode::Shared),
                QueuedEntry::Claim(ClaimMode::Upgradable),
                QueuedEntry::Claim(ClaimMode::Permits { take: 2, of: 10 }),
                QueuedEntry::Claim(most),
                QueuedEntry::UpgradeRequest,
            ] {
                let prefix = node_prefix(claim, naming, entry);
                for number in ["0000000001", "-2147483648"] {
                    let name = format!("{prefix}{number}");
                    assert_eq!(parse_queued_entry(&name), entry, "{name}");
                    let children = [name.clone(), "other-lock-0000000002".to_owned()];
                    assert!(claim_nodes(&children, claim, naming).eq([&*name]), "{name}");
                    assert!(claim_nodes(&children, ClaimId::from_bits(1), naming).eq([""; 0]));
                }
            }
        }
    }

    #[test]
    fn a_readers_writer_lock_of_curator_has_only_its_own_contenders() {
        let claim = ClaimId::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        let naming = Naming::CuratorReadWrite;
        let [reader, writer] = [ClaimMode::Shared, ClaimMode::Exclusive].map(|mode| {
            let entry = QueuedEntry::Claim(mode);
            let name = node_prefix(claim, naming, entry) + "0000000007";
            assert_eq!(parse_queued_entry(&name), entry, "{name}");
            name
        });
        assert_eq!(reader, "_c_01234567-89ab-cdef-0123-456789abcdef-__READ__0000000007");
        assert_eq!(writer, "_c_01234567-89ab-cdef-0123-456789abcdef-__WRIT__0000000007");
        // After a downgrade in Curator, the reader has the number of the writer.
        let mutex = "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000001".to_owned();
        let children = vec![writer.clone(), mutex, "other".to_owned(), reader.clone()];
        assert!(claim_nodes(&children, claim, naming).any(|name| name == reader));
        let queue = ContenderQueue::from_children(children, naming).unwrap();
        assert_eq!(queue.names(), [reader, writer]);
    }

    #[test]
    fn contenders_of_other_programs_are_exclusive() {
        for name in [
            "lock-0000000003",
            "-s-lock-0000000003",
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000002",
            "_c_01234567-89ab-cdef-0123-456789abcdef-x-lock-0000000002",
            "_c_01234567-89ab-cdef-0123-456789abcdef-p1-lock-0000000002",
            "the-id-of-another-program-123456-s-lock-0000000002",
            "ffffffffffffffffffffffffffffffff__lock__0000000001",
            "ffffffffffffffffffffffffffffffff__lock__",
        ] {
            assert_eq!(parse_queued_entry(name), EXCLUSIVE, "{name}");
        }
    }

    #[test]
    fn node_bytes_include_the_whole_path() {
        let claim = ClaimId::from_bits(7);
        for naming in [Naming::Curator, Naming::Kazoo] {
            for entry in [EXCLUSIVE, QueuedEntry::UpgradeRequest] {
                let path = format!("/locks/k/{}-2147483648", node_prefix(claim, naming, entry));
                assert_eq!(node_bytes("/locks/k", claim, naming, entry), path.len() + 4);
            }
        }
    }

    #[test]
    fn node_bytes_of_permits_in_curator_include_all_units() {
        let (claim, naming) = (ClaimId::from_bits(7), Naming::CuratorSemaphore);
        let bytes = |mode| node_bytes("/k/locks", claim, naming, QueuedEntry::Claim(mode));
        let unit = format!("/k/leases/{}-lease--2147483648", claim_prefix(claim, naming));
        let exclusive = bytes(ClaimMode::Exclusive);
        let permits = bytes(ClaimMode::Permits { take: 3, of: 5 });
        assert_eq!(permits, exclusive + 3 * (unit.len() + 4));
    }

    #[test]
    fn a_queue_contains_the_contenders_of_all_libraries_and_no_other_children() {
        let curator = "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000002";
        let kazoo = "ffffffffffffffffffffffffffffffff__lock__0000000001";
        let plain = "lock-0000000003";
        let children = [
            plain,
            curator,
            kazoo,
            "-foo",
            "0-child",
            "x-lock-1",
            "x-lock-00000000004",
            "x__rlock__0000000000",
            "_c_01234567-89ab-cdef-0123-456789abcdef-__READ__0000000000",
            "_c_01234567-89ab-cdef-0123-456789abcdef-__WRIT__0000000000",
            "_c_0-latch-0000000000",
            "lock-000000000x",
            "lock-",
            "__lock__",
            "",
        ];
        assert_eq!(queue(&children).names, [kazoo, curator, plain]);
    }

    #[test]
    fn transactions_determine_the_order_when_the_sequence_numbers_are_exhausted() {
        assert_eq!(name(i32::MIN), "_c_0-lock--2147483648");
        assert_eq!(name(-5), "_c_0-lock--000000005");
        for beyond in [i32::MAX, i32::MIN, -5, -1] {
            let names = vec![name(i32::MAX - 1), "other".to_owned(), name(beyond), name(7)];
            let unordered = ContenderQueue::from_children(names, Naming::Curator).unwrap_err();
            let contenders = [name(i32::MAX - 1), name(beyond), name(7)];
            assert_eq!(unordered.names(), contenders);
            let [first, second, third] = contenders;
            let queue = unordered.sort_by_transaction([Some(30), Some(9), None]);
            assert_eq!(queue.names, [second, first]);
            assert_eq!(queue.position_of(&third), None);
            assert!(queue.is_sequence_exhausted());
        }
        assert!(!queue(&[&name(i32::MAX - 1)]).is_sequence_exhausted());
    }

    #[test]
    fn contenders_are_in_the_order_of_their_numbers() {
        let names = [name(7), name(8), name(9)];
        let queue = queue(&[&names[2], &names[0], &names[1]]);
        assert_eq!(queue.names(), names);
        assert_eq!(queue.position_of(&names[1]), Some(1));
        assert_eq!(queue.position_of("other"), None);
    }
}
