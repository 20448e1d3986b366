//! The queue of a lock: the contending children of its node, sorted by name. No I/O.
//!
//! A name ends in a sequence number that the server assigned. The number has ten digits and counts
//! all children that the parent ever had. The counter ends at 2³¹ − 1. After that, the servers
//! assign this number to every new child, and negative numbers to children created concurrently.
//! Only the transactions that created the nodes then determine the order. The tests of
//! `registry-testkit` check this behaviour of the servers.

use registry_core::ClaimId;

use crate::layout::Naming;

/// Returns the name of a claim's node without its number.
pub(crate) fn node_prefix(claim: ClaimId, naming: Naming) -> String {
    let id = claim.to_string();
    match naming {
        Naming::Curator => format!(
            "_c_{}-{}-{}-{}-{}-lock-",
            &id[..8],
            &id[8..12],
            &id[12..16],
            &id[16..20],
            &id[20..]
        ),
        Naming::Kazoo => format!("{id}__lock__"),
    }
}

/// Returns the maximum bytes of a claim's node path in a transaction: the path and its length
/// field.
pub(crate) fn node_bytes(dir: &str, claim: ClaimId, naming: Naming) -> usize {
    LENGTH_BYTES + dir.len() + "/".len() + node_prefix(claim, naming).len() + NUMBER_CHARS_MAX
}

/// Returns the number of a contender with a name in the form of Curator or kazoo. Returns `None`
/// for any other child.
fn sequence_number(name: &str) -> Option<i32> {
    let after = |marker: &str| name.rfind(marker).map(|at| &name[at + marker.len()..]);
    // Only one of these markers is directly before the number of a name.
    [after("lock-"), after("__lock__")].into_iter().flatten().find_map(parse_number)
}

/// Parses a number in the server's format: at least ten characters, including the sign.
fn parse_number(text: &str) -> Option<i32> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_decimal = digits.bytes().all(|byte| byte.is_ascii_digit());
    let has_expected_length =
        text.len() == 10 || text == "-2147483648" || (text.len() == 11 && digits.len() == 10);
    (is_decimal && has_expected_length).then(|| text.parse().ok()).flatten()
}

/// Returns whether a child contends for the lock.
pub(crate) fn is_contender(name: &str) -> bool {
    sequence_number(name).is_some()
}

/// Returns the nodes whose names begin with the claim's `node_prefix`. Each earlier session that
/// the servers have not ended yet can have another node of the claim.
pub(crate) fn claim_nodes<'a>(
    children: &'a [String],
    node_prefix: &str,
) -> impl Iterator<Item = &'a str> {
    let is_of_claim = move |name: &&String| name.starts_with(node_prefix) && is_contender(name);
    children.iter().filter(is_of_claim).map(String::as_str)
}

/// The contenders for one lock, head first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ContenderQueue(Vec<String>);

/// The unsorted contenders for a lock whose sequence numbers are exhausted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SequenceExhausted(Vec<String>);

impl ContenderQueue {
    /// Selects and sorts the contenders among all children.
    ///
    /// # Errors
    /// [`SequenceExhausted`] if the names do not determine the order.
    pub(crate) fn from_children(children: Vec<String>) -> Result<Self, SequenceExhausted> {
        let mut contenders: Vec<(i32, String)> =
            children.into_iter().filter_map(|name| Some((sequence_number(&name)?, name))).collect();
        if contenders.iter().any(|(number, _)| !(0..i32::MAX).contains(number)) {
            return Err(SequenceExhausted(contenders.into_iter().map(|(_, name)| name).collect()));
        }
        contenders.sort_unstable();
        Ok(Self(contenders.into_iter().map(|(_, name)| name).collect()))
    }

    /// Returns the head of the queue.
    pub(crate) fn head(&self) -> Option<&str> {
        self.0.first().map(String::as_str)
    }

    /// Returns the position of `name`.
    pub(crate) fn position_of(&self, name: &str) -> QueuePosition<'_> {
        match self.0.iter().position(|other| other == name) {
            None => QueuePosition::Absent,
            Some(0) => QueuePosition::Head,
            Some(index) => QueuePosition::Behind {
                predecessor: &self.0[index - 1],
                is_predecessor_head: index == 1,
            },
        }
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
        ContenderQueue(existing.into_iter().map(|(_, name)| name).collect())
    }
}

/// Position of a node in a queue.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum QueuePosition<'a> {
    Head,
    Behind {
        /// The node directly before this one.
        predecessor: &'a str,
        /// The predecessor is the head of the queue.
        is_predecessor_head: bool,
    },
    Absent,
}

const LENGTH_BYTES: usize = 4;
/// A negative number has a sign before its ten digits.
const NUMBER_CHARS_MAX: usize = 11;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(names: &[&str]) -> ContenderQueue {
        ContenderQueue::from_children(names.iter().map(|&name| name.to_owned()).collect()).unwrap()
    }

    fn name(number: i32) -> String {
        // The server uses `String.format("%010d", number)`.
        format!("_c_0-lock-{number:010}")
    }

    #[test]
    fn node_names_have_the_form_of_curator_or_kazoo() {
        let claim = ClaimId::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(
            node_prefix(claim, Naming::Curator),
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-"
        );
        assert_eq!(node_prefix(claim, Naming::Kazoo), "0123456789abcdef0123456789abcdef__lock__");
    }

    #[test]
    fn node_bytes_include_the_whole_path() {
        let claim = ClaimId::from_bits(7);
        for naming in [Naming::Curator, Naming::Kazoo] {
            let path = format!("/locks/k/{}-2147483648", node_prefix(claim, naming));
            assert_eq!(node_bytes("/locks/k", claim, naming), path.len() + 4);
        }
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
            "_c_0-latch-0000000000",
            "lock-000000000x",
            "lock-",
            "__lock__",
            "",
        ];
        assert_eq!(queue(&children).0, [kazoo, curator, plain]);
    }

    #[test]
    fn transactions_determine_the_order_when_the_sequence_numbers_are_exhausted() {
        assert_eq!(name(i32::MIN), "_c_0-lock--2147483648");
        assert_eq!(name(-5), "_c_0-lock--000000005");
        for beyond in [i32::MAX, i32::MIN, -5, -1] {
            let names = vec![name(i32::MAX - 1), "other".to_owned(), name(beyond), name(7)];
            let unordered = ContenderQueue::from_children(names).unwrap_err();
            let contenders = [name(i32::MAX - 1), name(beyond), name(7)];
            assert_eq!(unordered.names(), contenders);
            let [first, second, third] = contenders;
            let queue = unordered.sort_by_transaction([Some(30), Some(9), None]);
            assert_eq!(queue.0, [second, first]);
            assert_eq!(queue.position_of(&third), QueuePosition::Absent);
        }
        queue(&[&name(i32::MAX - 1)]);
    }

    #[test]
    fn each_node_has_its_predecessor() {
        let names = [name(7), name(8), name(9)];
        let queue = queue(&[&names[2], &names[0], &names[1]]);
        assert_eq!(queue.head(), Some(&*names[0]));
        assert_eq!(queue.position_of(&names[0]), QueuePosition::Head);
        assert_eq!(
            queue.position_of(&names[1]),
            QueuePosition::Behind { predecessor: &names[0], is_predecessor_head: true }
        );
        assert_eq!(
            queue.position_of(&names[2]),
            QueuePosition::Behind { predecessor: &names[1], is_predecessor_head: false }
        );
        assert_eq!(queue.position_of("other"), QueuePosition::Absent);
    }
}
