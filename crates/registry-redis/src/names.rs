//! What the keys of a lock are called in the server. Injective, and all keys of one lock share a cluster slot.
//!
//! `NAMESPACE:{KEY}` is the lock, `NAMESPACE:{KEY}:token` its newest token, and `NAMESPACE:{KEY}` also the channel that tells of its release.
//! In a cluster the slot is that of the text between the first `{` and the first `}` after it, which is why braces in
//! namespace and key are written as percent signs and digits; the rest stays readable.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use registry_core::Key;

/// Escaped in a key: what would end the tag, and the escape itself. Control characters, because people read these names.
const IN_KEY: &AsciiSet = &CONTROLS.add(b'%').add(b'{').add(b'}');

#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// Up to and including the brace that opens the tag.
    prefix: String,
}

impl Names {
    pub(crate) fn new(namespace: &str) -> Self {
        Self { prefix: format!("{}:{{", escaped(namespace)) }
    }

    /// The key of the lock itself, which is also the channel of its releases.
    pub(crate) fn lock(&self, key: &Key) -> String {
        format!("{}{}}}", self.prefix, escaped(key.as_str()))
    }

    /// A channel of this namespace that no lock has.
    pub(crate) fn probe(&self) -> String {
        self.prefix.clone() + "}"
    }

    /// The key of the newest token.
    pub(crate) fn token(&self, key: &Key) -> String {
        self.lock(key) + ":token"
    }

    /// The lock's key, if `name` is the name of a lock in this namespace.
    pub(crate) fn key(&self, name: &str) -> Option<Key> {
        let key = name.strip_prefix(&self.prefix)?.strip_suffix('}')?;
        let key = percent_decode_str(key).decode_utf8().ok()?;
        let key = Key::new(&key).ok()?;
        // Only names as we write them.
        (self.lock(&key) == name).then_some(key)
    }

    /// A pattern for SCAN that matches all locks of this namespace, and perhaps other keys.
    pub(crate) fn pattern(&self) -> String {
        let mut pattern = String::new();
        for character in self.prefix.chars() {
            if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(character);
        }
        pattern + "*}"
    }
}

fn escaped(text: &str) -> String {
    // Everything that is not ASCII would be escaped too; it is harmless and should be readable.
    text.chars()
        .map(|character| {
            if character.is_ascii() {
                utf8_percent_encode(character.encode_utf8(&mut [0; 4]), IN_KEY).to_string()
            } else {
                character.to_string()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    #[test]
    fn names_are_pinned() {
        let names = Names::new("lock-registry");
        for (given, name) in [
            ("orders/42", "lock-registry:{orders/42}"),
            ("{a}b", "lock-registry:{%7Ba%7Db}"),
            ("100%", "lock-registry:{100%25}"),
            ("a\0\n", "lock-registry:{a%00%0A}"),
            ("Schlüssel 🔑", "lock-registry:{Schlüssel 🔑}"),
        ] {
            assert_eq!(names.lock(&key(given)), name);
            assert_eq!(names.token(&key(given)), format!("{name}:token"));
        }
        assert_eq!(Names::new("a{b}:*").lock(&key("k")), "a%7Bb%7D:*:{k}");
        assert_eq!(Names::new("a*b").pattern(), r"a\*b:{*}");
    }

    #[test]
    fn only_names_of_locks_are_read_as_such() {
        let names = Names::new("n");
        for name in ["n:{k}:token", "n:{k", "m:{k}", "n:{}", "n:{%6B}", "n:{a{b}", "k"] {
            assert_eq!(names.key(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn a_name_tells_its_key_and_no_other(text in ".{1,40}", namespace in ".{1,10}") {
            let names = Names::new(&namespace);
            let name = names.lock(&key(&text));
            prop_assert_eq!(names.key(&name), Some(key(&text)));
            // The cluster's rule: the text between the first brace that opens and the first one after it that closes.
            let tag = name.split_once('{').and_then(|(_, rest)| rest.split_once('}')).unwrap();
            prop_assert!(!tag.0.is_empty() && tag.1.is_empty());
        }

        #[test]
        fn locks_of_different_namespaces_have_different_names(
            a in ".{1,10}", b in ".{1,10}", key_a in ".{1,10}", key_b in ".{1,10}",
        ) {
            let same = a == b && key_a == key_b;
            let (one, other) = (Names::new(&a).lock(&key(&key_a)), Names::new(&b).lock(&key(&key_b)));
            prop_assert_eq!(one == other, same);
        }
    }
}
