//! Builds and parses the names of a lock's keys in each layout.
//!
//! | layout | queue of a lock | entry in it |
//! |---|---|---|
//! | native | `NAMESPACE/KEY/`, both percent-encoded | `NAMESPACE/KEY/LEASE`, the lease id in hexadecimal |
//! | etcdctl | `NAMESPACE/KEY/`, or `KEY/` without a namespace | the same |
//!
//! In the native layout, the entry of each claim has a tombstone `NAMESPACE/KEY!LEASE`, outside the
//! queue: if an entry ends without a release, its tombstone remains and delays the next grant. An
//! upgrade request has none. The value block of a key is `NAMESPACE/KEY=value`. The etcdctl layout
//! has no tombstones and no value blocks, and escapes nothing.
//!
//! Every key below a queue's prefix is an entry of that queue. Therefore no lock's name may begin
//! with another lock's name and a slash.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use registry_core::{InvalidKey, Key};

use crate::config::Layout;

/// The characters that the native layout escapes: all except ASCII letters, digits and five
/// characters that are common in keys.
const ESCAPED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b':').remove(b'~');

#[derive(Debug, Clone)]
pub(crate) struct EtcdKeyNames {
    layout: Layout,
    /// The prefix of all names.
    prefix: String,
}

impl EtcdKeyNames {
    pub(crate) fn new(layout: Layout, namespace: &str) -> Self {
        let prefix = match layout {
            Layout::Native => escape(namespace) + "/",
            Layout::Etcdctl if namespace.is_empty() => String::new(),
            Layout::Etcdctl => format!("{namespace}/"),
        };
        Self { layout, prefix }
    }

    /// Returns the prefix of all names of this namespace. In the etcdctl layout without a
    /// namespace, the prefix is empty and matches all keys of the cluster.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the prefix of all entries in the queue of `key`.
    pub(crate) fn queue_prefix(&self, key: &Key) -> Vec<u8> {
        let key = match self.layout {
            Layout::Native => escape(key.as_str()),
            Layout::Etcdctl => key.as_str().to_owned(),
        };
        [&*self.prefix, &key, "/"].concat().into_bytes()
    }

    /// Returns the name of the entry in `queue` with this lease.
    pub(crate) fn entry_name(queue: &[u8], lease: i64) -> Vec<u8> {
        [queue, format!("{lease:x}").as_bytes()].concat()
    }

    /// Returns whether claims may have other modes than exclusive. Peers of the etcdctl layout
    /// support only exclusive claims.
    pub(crate) fn has_modes(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Returns whether entries have tombstones. The etcdctl layout has no tombstones: other
    /// programs write none, and users may have permissions for the queue only.
    pub(crate) fn has_tombstones(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Returns the prefix of all tombstones of `queue`, if entries have tombstones.
    pub(crate) fn tombstone_prefix(&self, queue: &[u8]) -> Option<Vec<u8>> {
        let lock = queue.strip_suffix(b"/").filter(|_| self.has_tombstones())?;
        // No key contains an unescaped `!`.
        Some([lock, b"!"].concat())
    }

    /// Returns the name of the tombstone of `entry`, if entries have tombstones.
    pub(crate) fn tombstone_name(&self, entry: &[u8]) -> Option<Vec<u8>> {
        let end = entry.iter().rposition(|&byte| byte == b'/')? + 1;
        let (queue, lease) = entry.split_at(end);
        Some([&*self.tombstone_prefix(queue)?, lease].concat())
    }

    /// Returns the name of the value block of `key`. It is outside of the queue and of the
    /// tombstones: no key contains an unescaped `=`.
    pub(crate) fn value_name(&self, key: &Key) -> Vec<u8> {
        let mut name = self.queue_prefix(key);
        name.pop();
        name.extend_from_slice(b"=value");
        name
    }

    /// Refuses a key whose queue would be inside another lock's queue.
    pub(crate) fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        if self.layout == Layout::Etcdctl && key.as_str().contains('/') {
            return Err(InvalidKey::layout(
                "the part before the slash may be the key of another lock, whose queue would contain \
                 the entries of this one; use that part as the namespace",
            ));
        }
        Ok(())
    }

    /// Returns the lock's key if `name` is the name of a queue entry in this namespace.
    pub(crate) fn parse_key(&self, name: &[u8]) -> Option<Key> {
        let name = std::str::from_utf8(name).ok()?.strip_prefix(&self.prefix)?;
        let (key, lease) = name.rsplit_once('/')?;
        let is_hex_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if lease.is_empty() || lease.len() > 16 || !lease.bytes().all(is_hex_digit) {
            return None;
        }
        let key = match self.layout {
            Layout::Native => percent_decode_str(key).decode_utf8().ok()?.into_owned(),
            Layout::Etcdctl => key.to_owned(),
        };
        let parsed = Key::new(&key).ok()?;
        self.check_key(&parsed).ok()?;
        // Only the encoding that `queue_prefix` returns is a valid name.
        self.queue_prefix(&parsed)
            .strip_suffix(b"/")?
            .ends_with(name.rsplit_once('/')?.0.as_bytes())
            .then_some(parsed)
    }
}

/// Returns the first key after all keys with `prefix`, as etcd expects the end of a range.
pub(crate) fn prefix_end(prefix: &[u8]) -> Vec<u8> {
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

fn escape(text: &str) -> String {
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
        fn an_entry_name_is_parsed_to_its_key(text in ".{1,40}", namespace in ".{1,10}", lease: i64) {
            let names = EtcdKeyNames::new(Layout::Native, &namespace);
            let key = key(&text);
            let entry = EtcdKeyNames::entry_name(&names.queue_prefix(&key), lease);
            prop_assert_eq!(names.parse_key(&entry), Some(key));
            let value = names.value_name(&names.parse_key(&entry).unwrap());
            prop_assert_eq!(names.parse_key(&value), None);
            let tombstone = names.tombstone_name(&entry).unwrap();
            prop_assert_eq!(names.parse_key(&tombstone), None);
            let has_prefix = tombstone.starts_with(names.prefix().as_bytes());
            prop_assert!(has_prefix, "a permission for the prefix suffices");
        }

        #[test]
        fn no_queue_is_inside_another(one in "[a/%.]{1,6}", other in "[a/%.]{1,6}") {
            for layout in [Layout::Native, Layout::Etcdctl] {
                let names = EtcdKeyNames::new(layout, "n");
                let (one, other) = (key(&one), key(&other));
                if one != other && names.check_key(&one).is_ok() && names.check_key(&other).is_ok() {
                    let (one, other) = (names.queue_prefix(&one), names.queue_prefix(&other));
                    prop_assert!(!one.starts_with(&other));
                    if let Some(tombstone_prefix) = names.tombstone_prefix(&other) {
                        prop_assert!(!one.starts_with(&tombstone_prefix));
                        let other_prefix = names.tombstone_prefix(&one).unwrap();
                        prop_assert!(!other_prefix.starts_with(&tombstone_prefix));
                    }
                }
            }
        }
    }

    #[test]
    fn names_are_equal_to_those_of_etcdctl() {
        let names = EtcdKeyNames::new(Layout::Etcdctl, "");
        assert_eq!(
            EtcdKeyNames::entry_name(&names.queue_prefix(&key("orders")), 0x1a2b),
            b"orders/1a2b"
        );
        let names = EtcdKeyNames::new(Layout::Etcdctl, "/locks");
        assert_eq!(names.queue_prefix(&key("orders")), b"/locks/orders/");
        assert_eq!(names.tombstone_name(b"/locks/orders/1f"), None);
        assert!(names.check_key(&key("a/b")).is_err());
        assert_eq!(names.parse_key(b"/locks/a/b/1"), None);
        assert_eq!(names.parse_key(b"/locks/a/config"), None);
        assert_eq!(names.parse_key(b"/locks/a/1f"), Some(key("a")));
    }

    #[test]
    fn namespaces_share_no_names() {
        let queue =
            |namespace| EtcdKeyNames::new(Layout::Native, namespace).queue_prefix(&key("a"));
        assert!(!queue("x/y").starts_with(&queue("x")));
        assert_eq!(queue("shop 1"), b"shop%201/a/");
    }

    #[test]
    fn a_tombstone_is_outside_the_queue() {
        let names = EtcdKeyNames::new(Layout::Native, "shop");
        let entry = EtcdKeyNames::entry_name(&names.queue_prefix(&key("a/b!c")), 0x1f);
        assert_eq!(entry, b"shop/a%2Fb%21c/1f");
        assert_eq!(names.tombstone_name(&entry).unwrap(), b"shop/a%2Fb%21c!1f");
    }

    #[test]
    fn the_end_of_a_range_is_after_all_keys_of_the_range() {
        assert_eq!(prefix_end(b"a/"), b"a0");
        assert_eq!(prefix_end(b"a\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
        assert_eq!(prefix_end(b""), b"\0");
    }
}
