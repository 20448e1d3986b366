//! Maps keys to node paths. Each key has one node, which is named after the key. `queue` handles
//! the children of this node.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use registry_core::{InvalidKey, Key};

use crate::layout::Layout;
use crate::queue::{LEASES, QUEUE};

/// The node paths of all keys of one backend.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Parent of all keys, without a trailing slash. Empty for the root of the tree.
    base: String,
    layout: Layout,
    /// True for the recipe of Curator's semaphore, in which the queue is a child of the key's node.
    is_curator_semaphore: bool,
}

impl Paths {
    pub(crate) fn new(base: String, layout: Layout) -> Self {
        Self { base, layout, is_curator_semaphore: false }
    }

    /// Sets whether the paths follow the recipe of Curator's semaphore.
    pub(crate) fn with_semaphore(mut self, is_curator_semaphore: bool) -> Self {
        self.is_curator_semaphore = is_curator_semaphore;
        self
    }

    /// Returns whether a key's node has the children of Curator's semaphore.
    pub(crate) fn is_curator_semaphore(&self) -> bool {
        self.is_curator_semaphore
    }

    /// Returns the node whose children contend for `key`.
    pub(crate) fn queue_path(&self, key: &Key) -> String {
        let node = self.node_path(key);
        if self.is_curator_semaphore { format!("{node}/{QUEUE}") } else { node }
    }

    /// Returns the parent of all keys.
    pub(crate) fn base(&self) -> &str {
        if self.base.is_empty() { "/" } else { &self.base }
    }

    /// Returns whether keys would be below `/zookeeper`, which the servers use themselves.
    pub(crate) fn is_reserved(&self) -> bool {
        self.base.split('/').nth(1) == Some("zookeeper")
    }

    /// Returns the node of `key`.
    pub(crate) fn node_path(&self, key: &Key) -> String {
        match self.layout {
            Layout::Native => format!("{}/{}", self.base, encode(key.as_str())),
            Layout::Curator => format!("{}/{key}", self.base),
        }
    }

    /// Returns the node of the value block of `key`. Only [`Layout::Native`] has value blocks. No
    /// key has this node, because each `%` in the name of a key's node is followed by two
    /// hexadecimal digits.
    pub(crate) fn value_path(&self, key: &Key) -> String {
        self.node_path(key) + "%value"
    }

    /// Returns the key of a node, from its path relative to the base.
    pub(crate) fn parse_key(&self, relative_path: &str) -> Option<Key> {
        let key = match self.layout {
            Layout::Native => {
                let key = percent_decode_str(relative_path).decode_utf8().ok()?.into_owned();
                // The name of another program's node can decode to a key whose node has a different
                // name.
                (encode(&key) == relative_path).then_some(key)?
            }
            Layout::Curator => relative_path.to_owned(),
        };
        Key::new(&key).ok()
    }

    /// Returns whether keys may be below other keys.
    pub(crate) fn has_nested_keys(&self) -> bool {
        self.layout == Layout::Curator
    }

    /// Refuses keys that are not valid paths, or that would contend for another key's lock.
    pub(crate) fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        match self.layout {
            Layout::Native => Ok(()),
            Layout::Curator => {
                check_curator_key(key.as_str(), self.base.is_empty(), self.is_curator_semaphore)
            }
        }
    }
}

fn check_curator_key(
    key: &str,
    base_is_root: bool,
    is_curator_semaphore: bool,
) -> Result<(), InvalidKey> {
    if key.chars().any(|c| !is_path_char(c)) {
        return Err(InvalidKey::layout(
            "it contains a character that ZooKeeper does not allow in paths; use another key",
        ));
    }
    for (n, segment) in key.split('/').enumerate() {
        if segment.is_empty() {
            return Err(InvalidKey::layout(
                "it begins or ends with `/`, or contains `//`; use another key",
            ));
        }
        if segment == "." || segment == ".." {
            return Err(InvalidKey::layout(
                "it has `.` or `..` as a path segment; use another key",
            ));
        }
        if n == 0 && base_is_root && segment == "zookeeper" {
            return Err(InvalidKey::layout(
                "`/zookeeper` is reserved for the servers; use another key",
            ));
        }
        // Curator treats every child of a lock's node as a contender. It sorts the children by the
        // text after `lock-`, or by the whole name. If a permanent child sorts before the numbers,
        // no contender is ever the head. The numbers have ten digits. The first digit is `0` for
        // the first 10⁹ children, and at most `2` later. A segment that begins with `3` or a larger
        // character therefore always sorts after them. A segment that begins with `1` or `2` does
        // so only for the first 10⁹ children.
        if n > 0 && segment.starts_with(|first: char| first <= '0') {
            return Err(InvalidKey::layout(
                "a segment after `/` begins with `0` or a character that sorts before it: Curator would treat it as the holder of the parent \
                 key's lock; use another key",
            ));
        }
        if n > 0 && is_curator_semaphore && segment == LEASES {
            return Err(InvalidKey::layout(
                "a segment after `/` is `leases`, like the node that contains the parent key's permits; use another key",
            ));
        }
        if n > 0 && ["lock", "__READ__", "__WRIT__"].iter().any(|part| segment.contains(part)) {
            return Err(InvalidKey::layout(
                "a segment after `/` contains `lock`, `__READ__` or `__WRIT__`, like the nodes that contend for the parent key's lock; use another key",
            ));
        }
    }
    Ok(())
}

/// Returns whether the server accepts `c` in a path. The server checks UTF-16 units and rejects
/// surrogates. It therefore rejects all characters beyond the first 65,536.
fn is_path_char(c: char) -> bool {
    !matches!(u32::from(c), 0..=0x1f | 0x7f..=0x9f | 0xd800..=0xf8ff | 0xfff0..)
}

/// Encodes a text as the name of one node: injective, readable, and never `.` or `..`.
pub(crate) fn encode(text: &str) -> String {
    match text {
        "." => "%2E".to_owned(),
        ".." => "%2E%2E".to_owned(),
        text => utf8_percent_encode(text, ENCODED_CHARS).to_string(),
    }
}

/// Returns whether `path` is valid: absolute, without empty, `.` or `..` segments, and without
/// rejected characters.
pub(crate) fn is_valid_path(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|segments| {
        segments
            .split('/')
            .all(|segment| !matches!(segment, "" | "." | "..") && segment.chars().all(is_path_char))
    })
}

/// The ASCII characters that are encoded. Non-ASCII characters are always encoded.
const ENCODED_CHARS: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'/');

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::ZkConfig;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn paths(layout: Layout) -> Paths {
        ZkConfig::new("h/app").unwrap().with_layout(layout).paths()
    }

    #[test]
    fn each_native_key_is_one_readable_node() {
        let paths = paths(Layout::Native);
        for (text, path) in [
            ("orders", "orders"),
            ("orders/42", "orders%2F42"),
            (".", "%2E"),
            ("..", "%2E%2E"),
            ("a b%", "a%20b%25"),
            ("\0", "%00"),
        ] {
            assert_eq!(paths.node_path(&key(text)), format!("/app/lock-registry/default/{path}"));
            assert_eq!(paths.parse_key(path), Some(key(text)));
        }
        assert_eq!(paths.parse_key("a b"), None, "not an encoded name");
        assert_eq!(paths.parse_key("%2f"), None, "not an encoded name");
    }

    #[test]
    fn curator_keys_are_paths_and_conflicting_keys_are_refused() {
        let paths = paths(Layout::Curator);
        assert_eq!(paths.node_path(&key("a/b")), "/app/SpringIntegration-LockRegistry/a/b");
        for valid in ["a", "0", "-foo", "a/b", "a/ä", "a/42", "lock-1", "a b", "zookeeper"] {
            assert_eq!(paths.check_key(&key(valid)), Ok(()), "{valid:?}");
            assert!(is_valid_path(&paths.node_path(&key(valid))), "{valid:?}");
        }
        for invalid in [
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "a/.",
            "a/..",
            "a/0",
            "a/-x",
            "a/+1",
            "a/01",
            "a/!",
            "a/x-lock-0000000001",
            "a/__lock__1",
            "a/x__READ__",
            "a/__WRIT__1",
            "a\0",
            "a\n",
            "🔒",
            "\u{f000}",
        ] {
            assert!(paths.check_key(&key(invalid)).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn a_curator_namespace_is_used_as_it_is() {
        let config = ZkConfig::new("h/app").unwrap().with_layout(Layout::Curator);
        let paths = config.with_namespace("apps/my ä").paths();
        assert_eq!(paths.node_path(&key("k")), "/app/apps/my ä/SpringIntegration-LockRegistry/k");
    }

    #[test]
    fn only_a_semaphore_refuses_a_key_at_the_parent_of_its_units() {
        assert_eq!(paths(Layout::Curator).check_key(&key("a/leases")), Ok(()));
        let semaphore = paths(Layout::Curator).with_semaphore(true);
        for invalid in ["a/leases", "a/leases/b", "a/locks"] {
            assert!(semaphore.check_key(&key(invalid)).is_err(), "{invalid:?}");
        }
        for valid in ["leases", "a/releases"] {
            assert_eq!(semaphore.check_key(&key(valid)), Ok(()), "{valid:?}");
        }
    }

    proptest! {
        #[test]
        fn each_key_has_its_own_path_that_decodes_to_the_key(one in ".{1,60}", other in ".{1,60}") {
            let paths = paths(Layout::Native);
            let path = paths.node_path(&key(&one));
            prop_assert!(is_valid_path(&path), "{path:?}");
            prop_assert_eq!(path == paths.node_path(&key(&other)), one == other);
            let name = path.rsplit('/').next().unwrap();
            prop_assert_eq!(paths.parse_key(name), Some(key(&one)));
            let value = paths.value_path(&key(&one));
            prop_assert!(is_valid_path(&value), "{value:?}");
            prop_assert_eq!(paths.parse_key(value.rsplit('/').next().unwrap()), None);
        }
    }
}
