//! Maps keys to node paths. Each key has one node, named after it; the children of that node are in
//! `queue`.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use registry_core::{InvalidKey, Key};

use crate::config::{Layout, ZkConfig};

/// The node paths of all keys of one backend.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Parent of all keys, without a trailing slash. Empty for the root of the tree.
    base: String,
    layout: Layout,
}

impl Paths {
    pub(crate) fn new(config: &ZkConfig) -> Self {
        let chroot = config.chroot.as_deref().unwrap_or_default();
        let root = config.root();
        let root = if root == "/" { "" } else { root };
        let base = match config.layout {
            Layout::Native => {
                format!("{chroot}{root}/{}", encoded(config.namespace()))
            }
            // Curator also places its namespaces above the root path.
            Layout::Curator => match &config.namespace {
                Some(namespace) => format!("{chroot}/{}{root}", encoded(namespace)),
                None => format!("{chroot}{root}"),
            },
        };
        Self { base, layout: config.layout }
    }

    /// Returns the parent of all keys.
    pub(crate) fn base(&self) -> &str {
        if self.base.is_empty() { "/" } else { &self.base }
    }

    /// Returns whether keys would be below `/zookeeper`, which the servers use themselves.
    pub(crate) fn are_the_servers(&self) -> bool {
        self.base.split('/').nth(1) == Some("zookeeper")
    }

    /// Returns the node of `key`.
    pub(crate) fn of(&self, key: &Key) -> String {
        match self.layout {
            Layout::Native => format!("{}/{}", self.base, encoded(key.as_str())),
            Layout::Curator => format!("{}/{key}", self.base),
        }
    }

    /// Returns the key of a node, from its path relative to the base.
    pub(crate) fn key_of(&self, below: &str) -> Option<Key> {
        let key = match self.layout {
            Layout::Native => {
                let key = percent_decode_str(below).decode_utf8().ok()?.into_owned();
                // A foreign node can decode to a key whose own node has another name.
                (encoded(&key) == below).then_some(key)?
            }
            Layout::Curator => below.to_owned(),
        };
        Key::new(&key).ok()
    }

    /// Returns whether keys may be below other keys.
    pub(crate) fn are_nested(&self) -> bool {
        self.layout == Layout::Curator
    }

    /// Refuses keys that are not valid paths, or that would contend for another key's lock.
    pub(crate) fn check(&self, key: &Key) -> Result<(), InvalidKey> {
        match self.layout {
            Layout::Native => Ok(()),
            Layout::Curator => check_path(key.as_str(), self.base.is_empty()),
        }
    }
}

fn check_path(key: &str, at_top: bool) -> Result<(), InvalidKey> {
    if key.chars().any(|c| !is_allowed(c)) {
        return Err(InvalidKey::layout("it has a character that no path of ZooKeeper can have"));
    }
    for (n, part) in key.split('/').enumerate() {
        if part.is_empty() {
            return Err(InvalidKey::layout("it begins or ends with `/`, or has two in a row"));
        }
        if part == "." || part == ".." {
            return Err(InvalidKey::layout("it has `.` or `..` as a part of its path"));
        }
        if n == 0 && at_top && part == "zookeeper" {
            return Err(InvalidKey::layout("`/zookeeper` belongs to the servers"));
        }
        // Curator treats every child of a lock's node as a contender. It sorts by the text after
        // `lock-`, or by the whole name. A permanent child must not sort before a number, or no
        // contender would ever be the head. Numbers begin with `1` only after 10⁹ children, and
        // never with `3`.
        if n > 0 && part.starts_with(|first: char| first <= '0') {
            return Err(InvalidKey::layout(
                "what follows `/` begins with `0`, or a sign that sorts before it: to Curator it would be the first in line for the lock \
                 of what comes before",
            ));
        }
        if n > 0 && part.contains("lock") {
            return Err(InvalidKey::layout(
                "what follows `/` has the word `lock` in it, as those have who stand in line for the lock of what comes before",
            ));
        }
    }
    Ok(())
}

/// Returns whether the server accepts `c` in a path. The server checks UTF-16 units, and characters
/// beyond the first 65,536 have two surrogates.
fn is_allowed(c: char) -> bool {
    !matches!(u32::from(c), 0..=0x1f | 0x7f..=0x9f | 0xd800..=0xf8ff | 0xfff0..)
}

/// Encodes a text as the name of one node: injective, readable, and never `.` or `..`.
pub(crate) fn encoded(text: &str) -> String {
    match text {
        "." => "%2E".to_owned(),
        ".." => "%2E%2E".to_owned(),
        text => utf8_percent_encode(text, TO_BE_ENCODED).to_string(),
    }
}

/// Returns whether `path` is valid: absolute, with no empty, `.` or `..` part.
pub(crate) fn is_path(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|parts| {
        parts
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && part.chars().all(is_allowed))
    })
}

/// ASCII characters to encode. Non-ASCII characters are always encoded.
const TO_BE_ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'/');

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn paths(layout: Layout) -> Paths {
        Paths::new(&ZkConfig::new("h/app").unwrap().with_layout(layout))
    }

    #[test]
    fn native_keys_are_one_readable_node_each() {
        let paths = paths(Layout::Native);
        for (text, path) in [
            ("orders", "orders"),
            ("orders/42", "orders%2F42"),
            (".", "%2E"),
            ("..", "%2E%2E"),
            ("a b%", "a%20b%25"),
            ("\0", "%00"),
        ] {
            assert_eq!(paths.of(&key(text)), format!("/app/lock-registry/default/{path}"));
            assert_eq!(paths.key_of(path), Some(key(text)));
        }
        assert_eq!(paths.key_of("a b"), None, "no node of ours");
        assert_eq!(paths.key_of("%2f"), None, "no node of ours");
    }

    #[test]
    fn keys_of_curator_are_paths_and_those_that_harm_others_are_refused() {
        let paths = paths(Layout::Curator);
        assert_eq!(paths.of(&key("a/b")), "/app/SpringIntegration-LockRegistry/a/b");
        for fine in ["a", "0", "-foo", "a/b", "a/ä", "a/42", "lock-1", "a b", "zookeeper"] {
            assert_eq!(paths.check(&key(fine)), Ok(()), "{fine:?}");
            assert!(is_path(&paths.of(&key(fine))), "{fine:?}");
        }
        for bad in [
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
            "a\0",
            "a\n",
            "🔒",
            "\u{f000}",
        ] {
            assert!(paths.check(&key(bad)).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn every_key_is_a_path_of_its_own_that_is_read_back(one in ".{1,60}", other in ".{1,60}") {
            let paths = paths(Layout::Native);
            let path = paths.of(&key(&one));
            prop_assert!(is_path(&path), "{path:?}");
            prop_assert_eq!(path == paths.of(&key(&other)), one == other);
            let name = path.rsplit('/').next().unwrap();
            prop_assert_eq!(paths.key_of(name), Some(key(&one)));
        }
    }
}
