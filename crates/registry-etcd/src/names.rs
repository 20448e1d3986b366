//! Builds and parses the names of a lock's keys in each layout.
//!
//! | layout | queue of a lock | entry in it |
//! |---|---|---|
//! | native | `NAMESPACE/KEY/`, both percent-encoded | `NAMESPACE/KEY/LEASE`, in hexadecimal |
//! | etcdctl | `NAMESPACE/KEY/`, or `KEY/` without a namespace | the same |
//!
//! In the native layout each entry has a tombstone, `NAMESPACE/KEY!LEASE`, outside the queue. The
//! etcdctl layout escapes nothing.
//!
//! Every key below a queue's prefix is an entry of that queue. Therefore no lock's name may begin
//! with another lock's name and a slash.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use registry_core::{InvalidKey, Key};

use crate::config::Layout;

/// Escaped in the native layout: all characters except those that remain readable.
const ESCAPED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b':').remove(b'~');

#[derive(Debug, Clone)]
pub(crate) struct Names {
    layout: Layout,
    /// The prefix of all names.
    prefix: String,
}

impl Names {
    pub(crate) fn new(layout: Layout, namespace: &str) -> Self {
        let prefix = match layout {
            Layout::Native => escaped(namespace) + "/",
            Layout::Etcdctl if namespace.is_empty() => String::new(),
            Layout::Etcdctl => format!("{namespace}/"),
        };
        Self { layout, prefix }
    }

    /// Returns the prefix of all names of this namespace. It is empty if that means all keys of the
    /// cluster.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the prefix of all entries in the queue of `key`.
    pub(crate) fn queue(&self, key: &Key) -> Vec<u8> {
        let key = match self.layout {
            Layout::Native => escaped(key.as_str()),
            Layout::Etcdctl => key.as_str().to_owned(),
        };
        [&*self.prefix, &key, "/"].concat().into_bytes()
    }

    /// Returns the name of the entry in `queue` with this lease.
    pub(crate) fn place(queue: &[u8], lease: i64) -> Vec<u8> {
        [queue, format!("{lease:x}").as_bytes()].concat()
    }

    /// Returns whether entries have tombstones. Peers write none, and their users may have rights
    /// for the queue only.
    pub(crate) fn have_traces(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Returns the prefix of all tombstones of `queue`, if entries have tombstones.
    pub(crate) fn traces(&self, queue: &[u8]) -> Option<Vec<u8>> {
        let lock = queue.strip_suffix(b"/").filter(|_| self.have_traces())?;
        // No key contains an unescaped `!`.
        Some([lock, b"!"].concat())
    }

    /// Returns the name of the tombstone of the entry `place`.
    pub(crate) fn trace(&self, place: &[u8]) -> Option<Vec<u8>> {
        let end = place.iter().rposition(|&byte| byte == b'/')? + 1;
        let (queue, lease) = place.split_at(end);
        Some([&*self.traces(queue)?, lease].concat())
    }

    /// Refuses a key whose queue would be inside another lock's queue.
    pub(crate) fn check(&self, key: &Key) -> Result<(), InvalidKey> {
        if self.layout == Layout::Etcdctl && key.as_str().contains('/') {
            return Err(InvalidKey::layout(
                "with a slash it would stand in the queue of the lock that is named like the part before it, and block that; put that \
                 part into the namespace",
            ));
        }
        Ok(())
    }

    /// Returns the lock's key if `name` is the name of a queue entry in this namespace.
    pub(crate) fn key(&self, name: &[u8]) -> Option<Key> {
        let name = std::str::from_utf8(name).ok()?.strip_prefix(&self.prefix)?;
        let (key, lease) = name.rsplit_once('/')?;
        let digits = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if lease.is_empty() || lease.len() > 16 || !lease.bytes().all(digits) {
            return None;
        }
        let key = match self.layout {
            Layout::Native => percent_decode_str(key).decode_utf8().ok()?.into_owned(),
            Layout::Etcdctl => key.to_owned(),
        };
        let known = Key::new(&key).ok()?;
        self.check(&known).ok()?;
        // Accept only the spelling that `queue` produces.
        self.queue(&known)
            .strip_suffix(b"/")?
            .ends_with(name.rsplit_once('/')?.0.as_bytes())
            .then_some(known)
    }
}

/// Returns the first key after all keys with `prefix`, as etcd expects the end of a range.
pub(crate) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys.
    vec![0]
}

fn escaped(text: &str) -> String {
    utf8_percent_encode(text, ESCAPED).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    proptest! {
        #[test]
        fn a_name_tells_its_key(text in ".{1,40}", namespace in ".{1,10}", lease: i64) {
            let names = Names::new(Layout::Native, &namespace);
            let key = key(&text);
            let place = Names::place(&names.queue(&key), lease);
            prop_assert_eq!(names.key(&place), Some(key));
            let trace = names.trace(&place).unwrap();
            prop_assert_eq!(names.key(&trace), None);
            prop_assert!(trace.starts_with(names.prefix().as_bytes()), "whoever may lock may write it");
        }

        #[test]
        fn no_queue_is_part_of_another(one in "[a/%.]{1,6}", other in "[a/%.]{1,6}") {
            for layout in [Layout::Native, Layout::Etcdctl] {
                let names = Names::new(layout, "n");
                let (one, other) = (key(&one), key(&other));
                if one != other && names.check(&one).is_ok() && names.check(&other).is_ok() {
                    let (one, other) = (names.queue(&one), names.queue(&other));
                    prop_assert!(!one.starts_with(&other));
                    if let Some(traces) = names.traces(&other) {
                        prop_assert!(!one.starts_with(&traces));
                        prop_assert!(!names.traces(&one).unwrap().starts_with(&traces));
                    }
                }
            }
        }
    }

    #[test]
    fn names_are_those_of_etcdctl() {
        let names = Names::new(Layout::Etcdctl, "");
        assert_eq!(Names::place(&names.queue(&key("orders")), 0x1a2b), b"orders/1a2b");
        let names = Names::new(Layout::Etcdctl, "/locks");
        assert_eq!(names.queue(&key("orders")), b"/locks/orders/");
        assert_eq!(names.trace(b"/locks/orders/1f"), None);
        assert!(names.check(&key("a/b")).is_err());
        assert_eq!(names.key(b"/locks/a/b/1"), None);
        assert_eq!(names.key(b"/locks/a/config"), None);
        assert_eq!(names.key(b"/locks/a/1f"), Some(key("a")));
    }

    #[test]
    fn namespaces_share_no_names() {
        let queue = |namespace| Names::new(Layout::Native, namespace).queue(&key("a"));
        assert!(!queue("x/y").starts_with(&queue("x")));
        assert_eq!(queue("shop 1"), b"shop%201/a/");
    }

    #[test]
    fn a_trace_stands_beside_the_queue() {
        let names = Names::new(Layout::Native, "shop");
        let place = Names::place(&names.queue(&key("a/b!c")), 0x1f);
        assert_eq!(place, b"shop/a%2Fb%21c/1f");
        assert_eq!(names.trace(&place).unwrap(), b"shop/a%2Fb%21c!1f");
    }

    #[test]
    fn the_end_of_a_range_comes_after_all_that_is_in_it() {
        assert_eq!(end_of(b"a/"), b"a0");
        assert_eq!(end_of(b"a\xff"), b"b");
        assert_eq!(end_of(b"\xff"), b"\0");
        assert_eq!(end_of(b""), b"\0");
    }
}
