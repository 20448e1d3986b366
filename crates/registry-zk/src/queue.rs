//! The queue of a lock: the contending children of its node, sorted by name. No I/O.
//!
//! A name ends in a number that the server assigned: ten digits that count all children the parent
//! ever had. The counter ends at 2³¹ − 1. From then on the servers assign that number to every new
//! child, and negative numbers to children created concurrently. See the test
//! `at_the_end_of_their_numbers_…` of the testkit. Then only the transactions that created the
//! nodes determine their order.

use registry_core::ClaimId;

use crate::config::Naming;

/// Returns the name of a claim's node without its number.
pub(crate) fn prefix(claim: ClaimId, naming: Naming) -> String {
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

/// Returns the bytes of a claim's node path in a transaction that lists it: the path and its length
/// field.
pub(crate) fn node_bytes(dir: &str, claim: ClaimId, naming: Naming) -> usize {
    LENGTH_BYTES + dir.len() + "/".len() + prefix(claim, naming).len() + NUMBER_CHARS_MAX
}

/// Returns the number of a contender with a name in the form of Curator or kazoo. Returns `None`
/// for any other child.
fn number(name: &str) -> Option<i32> {
    let after = |mark: &str| name.rfind(mark).map(|at| &name[at + mark.len()..]);
    // A name has only one of these marks directly before its number.
    [after("lock-"), after("__lock__")].into_iter().flatten().find_map(parse_number)
}

/// Parses a number in the server's format: at least ten characters, including the sign.
fn parse_number(text: &str) -> Option<i32> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_whole =
        text.len() == 10 || text == "-2147483648" || (text.len() == 11 && digits.len() == 10);
    (is_plain && is_whole).then(|| text.parse().ok()).flatten()
}

/// Returns whether a child contends for the lock.
pub(crate) fn is_contender(name: &str) -> bool {
    number(name).is_some()
}

/// Returns the nodes of a claim, by the prefix of their names. Each earlier session that the
/// servers have not ended yet can have one more.
pub(crate) fn find<'a>(children: &'a [String], prefix: &str) -> impl Iterator<Item = &'a str> {
    let is_ours = move |name: &&String| name.starts_with(prefix) && is_contender(name);
    children.iter().filter(is_ours).map(String::as_str)
}

/// The contenders for one lock, head first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Queue(Vec<String>);

/// The contenders for a lock whose counter is exhausted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutOfNumbers(Vec<String>);

impl Queue {
    /// Selects and sorts the contenders among all children.
    ///
    /// # Errors
    /// [`OutOfNumbers`] if the names do not determine the order.
    pub(crate) fn of(children: Vec<String>) -> Result<Self, OutOfNumbers> {
        let mut contenders: Vec<(i32, String)> =
            children.into_iter().filter_map(|name| Some((number(&name)?, name))).collect();
        if contenders.iter().any(|(number, _)| !(0..i32::MAX).contains(number)) {
            return Err(OutOfNumbers(contenders.into_iter().map(|(_, name)| name).collect()));
        }
        contenders.sort_unstable();
        Ok(Self(contenders.into_iter().map(|(_, name)| name).collect()))
    }

    /// Returns the head of the queue.
    pub(crate) fn first(&self) -> Option<&str> {
        self.0.first().map(String::as_str)
    }

    /// Returns the position of `name`.
    pub(crate) fn place_of(&self, name: &str) -> Standing<'_> {
        match self.0.iter().position(|other| other == name) {
            None => Standing::Absent,
            Some(0) => Standing::First,
            Some(place) => Standing::Behind { ahead: &self.0[place - 1], is_next: place == 1 },
        }
    }
}

impl OutOfNumbers {
    pub(crate) fn names(&self) -> &[String] {
        &self.0
    }

    /// Sorts the contenders by the transactions that created [`names`](Self::names). `None` is a
    /// node that no longer exists.
    pub(crate) fn by_transactions(self, made: impl IntoIterator<Item = Option<i64>>) -> Queue {
        let made = made.into_iter().zip(self.0);
        let mut there: Vec<_> = made.filter_map(|(made, name)| Some((made?, name))).collect();
        there.sort_unstable();
        Queue(there.into_iter().map(|(_, name)| name).collect())
    }
}

/// Position of a node in a queue.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Standing<'a> {
    First,
    Behind {
        /// The node directly before this one.
        ahead: &'a str,
        /// That node is the head of the queue.
        is_next: bool,
    },
    Absent,
}

const LENGTH_BYTES: usize = 4;
/// A negative number has a sign before its ten digits.
const NUMBER_CHARS_MAX: usize = 11;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(names: &[&str]) -> Queue {
        Queue::of(names.iter().map(|&name| name.to_owned()).collect()).unwrap()
    }

    fn name(number: i32) -> String {
        // The server uses `String.format("%010d", number)`.
        format!("_c_0-lock-{number:010}")
    }

    #[test]
    fn a_node_is_named_as_those_of_curator_or_of_kazoo() {
        let claim = ClaimId::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(prefix(claim, Naming::Curator), "_c_01234567-89ab-cdef-0123-456789abcdef-lock-");
        assert_eq!(prefix(claim, Naming::Kazoo), "0123456789abcdef0123456789abcdef__lock__");
    }

    #[test]
    fn a_node_counts_with_its_whole_path() {
        let claim = ClaimId::from_bits(7);
        for naming in [Naming::Curator, Naming::Kazoo] {
            let path = format!("/locks/k/{}-2147483648", prefix(claim, naming));
            assert_eq!(node_bytes("/locks/k", claim, naming), path.len() + 4);
        }
    }

    #[test]
    fn contenders_of_all_libraries_stand_in_one_line_and_other_children_in_none() {
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
    fn at_the_end_of_all_numbers_the_transactions_decide() {
        assert_eq!(name(i32::MIN), "_c_0-lock--2147483648");
        assert_eq!(name(-5), "_c_0-lock--000000005");
        for beyond in [i32::MAX, i32::MIN, -5, -1] {
            let names = vec![name(i32::MAX - 1), "other".to_owned(), name(beyond), name(7)];
            let unordered = Queue::of(names).unwrap_err();
            let contenders = [name(i32::MAX - 1), name(beyond), name(7)];
            assert_eq!(unordered.names(), contenders);
            let [first, second, third] = contenders;
            let queue = unordered.by_transactions([Some(30), Some(9), None]);
            assert_eq!(queue.0, [second, first]);
            assert_eq!(queue.place_of(&third), Standing::Absent);
        }
        queue(&[&name(i32::MAX - 1)]);
    }

    #[test]
    fn each_sees_the_one_directly_before() {
        let names = [name(7), name(8), name(9)];
        let queue = queue(&[&names[2], &names[0], &names[1]]);
        assert_eq!(queue.first(), Some(&*names[0]));
        assert_eq!(queue.place_of(&names[0]), Standing::First);
        assert_eq!(queue.place_of(&names[1]), Standing::Behind { ahead: &names[0], is_next: true });
        assert_eq!(
            queue.place_of(&names[2]),
            Standing::Behind { ahead: &names[1], is_next: false }
        );
        assert_eq!(queue.place_of("other"), Standing::Absent);
    }
}
