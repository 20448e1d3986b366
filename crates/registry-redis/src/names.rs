//! What the keys and channels of a lock are called in the servers, in each layout. Injective, and in a cluster all keys of one lock share
//! a slot.
//!
//! A slot is that of the text between the first `{` of a name and the first `}` after it, if there is any.
//!
//! | layout | lock | its newest tokens | channels of its release |
//! |---|---|---|---|
//! | native | `NAMESPACE:{KEY}`, escaped | `NAMESPACE:{KEY}:token` | as the lock |
//! | Spring | `NAMESPACE:KEY` | `lock-registry:token:{NAMESPACE:KEY}` | `NAMESPACE-channel:NAMESPACE:KEY`, `NAMESPACE-channel` |
//! | Redisson | `KEY` or `NAMESPACE:KEY` | `lock-registry:token:{LOCK}` | `redisson_lock__channel:{LOCK}` |
//!
//! The braces are left out around a name that has a tag itself; in Redisson's channels, as there, around one that has any opening brace.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use registry_core::{ClaimId, InvalidKey, Key};

use crate::config::Layout;
use crate::slot::{slot, tag};

/// Escaped in a key: what would end the tag, and the escape itself. Control characters, because people read these names.
const IN_KEY: &AsciiSet = &CONTROLS.add(b'%').add(b'{').add(b'}');

#[derive(Debug, Clone)]
pub(crate) struct Names {
    layout: Layout,
    /// What all locks' names begin with.
    prefix: String,
    /// The channel of all releases, as older versions of Spring have it.
    common_channel: Option<String>,
    /// What the names of all other channels begin with.
    channel_prefix: String,
    /// Names must share a slot.
    sharded: bool,
}

impl Names {
    pub(crate) fn new(layout: Layout, namespace: &str, sharded: bool) -> Self {
        let (prefix, channel_prefix, common_channel) = match layout {
            Layout::Native => (escaped(namespace) + ":{", String::new(), None),
            Layout::Spring => (
                format!("{namespace}:"),
                format!("{namespace}-channel:"),
                Some(format!("{namespace}-channel")),
            ),
            Layout::Redisson if namespace.is_empty() => {
                (String::new(), REDISSON_CHANNEL.to_owned(), None)
            }
            Layout::Redisson => (format!("{namespace}:"), REDISSON_CHANNEL.to_owned(), None),
        };
        Self { layout, prefix, common_channel, channel_prefix, sharded }
    }

    /// The key of the lock itself.
    pub(crate) fn lock(&self, key: &Key) -> String {
        match self.layout {
            Layout::Native => {
                let room = self.prefix.len() + key.as_str().len() + "}".len();
                let mut lock = String::with_capacity(room);
                lock.push_str(&self.prefix);
                escape(key.as_str(), &mut lock);
                lock.push('}');
                lock
            }
            Layout::Spring | Layout::Redisson => format!("{}{}", self.prefix, key.as_str()),
        }
    }

    /// The key of the newest tokens of `lock`.
    pub(crate) fn token(&self, lock: &str) -> String {
        match self.layout {
            Layout::Native => [lock, ":token"].concat(),
            Layout::Spring | Layout::Redisson => beside(TOKENS, lock),
        }
    }

    /// The channel on which those who wait for `lock` hear of its release.
    pub(crate) fn channel<'a>(&self, lock: &'a str) -> Cow<'a, str> {
        match self.layout {
            Layout::Native => lock.into(),
            Layout::Spring => format!("{}{lock}", self.channel_prefix).into(),
            Layout::Redisson => as_redisson(&self.channel_prefix, lock).into(),
        }
    }

    /// The channel on which some hear of all releases; the message is the name of the lock.
    pub(crate) fn common_channel(&self) -> Option<&str> {
        self.common_channel.as_deref()
    }

    /// The channel of a lock that was named in a message on the common channel.
    pub(crate) fn meant_by(&self, message: &[u8]) -> Option<String> {
        std::str::from_utf8(message).ok().map(|lock| self.channel(lock).into_owned())
    }

    /// What is said of the release of `lock`.
    pub(crate) fn message<'a>(&self, lock: &'a str) -> &'a str {
        match self.layout {
            Layout::Spring => lock,
            Layout::Native | Layout::Redisson => "0",
        }
    }

    /// A channel of this namespace that no lock has.
    pub(crate) fn probe(&self) -> String {
        format!("{}{}}}", self.channel_prefix, self.prefix)
    }

    /// A key of this namespace that no lock has: for how long a server's process was seen.
    pub(crate) fn age(&self) -> String {
        self.probe() + ":age"
    }

    /// How a claim is written down.
    pub(crate) fn claim(&self, id: ClaimId) -> String {
        let id = id.to_string();
        if self.layout == Layout::Native {
            return id;
        }
        let uuid =
            format!("{}-{}-{}-{}-{}", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]);
        match self.layout {
            // An instance and one of its threads: here an instance per claim.
            Layout::Redisson => uuid + ":1",
            Layout::Native | Layout::Spring => uuid,
        }
    }

    /// Refuses a key whose names would not share a slot.
    pub(crate) fn check(&self, key: &Key) -> Result<(), InvalidKey> {
        if self.layout == Layout::Native {
            return Ok(());
        }
        let lock = self.lock(key);
        if lock.starts_with(TOKENS) || lock.starts_with(FENCES) {
            return Err(InvalidKey::layout("it would take the name of another lock's tokens"));
        }
        if !self.sharded {
            return Ok(());
        }
        let told = self.layout == Layout::Redisson && slot(&self.channel(&lock)) != slot(&lock);
        if told || slot(&self.token(&lock)) != slot(&lock) {
            return Err(InvalidKey::layout(
                "its braces would put the keys of one lock into different slots of the cluster",
            ));
        }
        Ok(())
    }

    /// The lock's key, if `name` is the name of a lock in this namespace.
    pub(crate) fn key(&self, name: &str) -> Option<Key> {
        let key = name.strip_prefix(&self.prefix)?;
        if self.layout != Layout::Native {
            return Key::new(key)
                .ok()
                .filter(|_| !name.starts_with(TOKENS) && !name.starts_with(FENCES));
        }
        let key = percent_decode_str(key.strip_suffix('}')?).decode_utf8().ok()?;
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
        pattern + if self.layout == Layout::Native { "*}" } else { "*" }
    }

    /// The type of a lock's key.
    pub(crate) const fn kind(&self) -> &'static str {
        match self.layout {
            Layout::Native | Layout::Spring => "string",
            Layout::Redisson => "hash",
        }
    }

    /// Whether `record` can be that of the holder of `key`; of other keys with such a name nothing is known.
    pub(crate) fn is_holder(&self, key: &Key, record: &[u8]) -> bool {
        let uuid = |id: &[u8]| {
            id.len() == 36 && id.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-')
        };
        match self.layout {
            // The name is enough.
            Layout::Native => true,
            // The newest token of a native lock in the same namespace is no lock.
            Layout::Spring => {
                let key = key.as_str();
                let is_token_key = key.starts_with('{') && key.ends_with("}:token");
                !(is_token_key && record.iter().all(u8::is_ascii_digit))
            }
            Layout::Redisson => {
                record.get(..36).is_some_and(uuid)
                    && record.get(36).is_some_and(|byte| *byte == b':')
            }
        }
    }
}

/// A name of ours for what belongs to `name`; it shares its slot unless that has a closing brace and no tag.
pub(crate) fn beside(prefix: &str, name: &str) -> String {
    if tag(name).is_some() { format!("{prefix}{name}") } else { format!("{prefix}{{{name}}}") }
}

/// What Redisson calls what belongs to `name`.
fn as_redisson(prefix: &str, name: &str) -> String {
    if name.contains('{') { format!("{prefix}{name}") } else { format!("{prefix}{{{name}}}") }
}

/// What the names of newest tokens begin with, in the layouts of others.
const TOKENS: &str = "lock-registry:token:";
/// What the names of the newest tokens of resources begin with.
pub(crate) const FENCES: &str = "lock-registry:fence:";
const REDISSON_CHANNEL: &str = "redisson_lock__channel:";

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    escape(text, &mut escaped);
    escaped
}

fn escape(text: &str, escaped: &mut String) {
    // Everything that is not ASCII would be escaped too; it is harmless and should be readable.
    for piece in text.split_inclusive(|character: char| !character.is_ascii()) {
        let ascii = piece.trim_end_matches(|character: char| !character.is_ascii());
        escaped.extend(utf8_percent_encode(ascii, IN_KEY));
        escaped.push_str(&piece[ascii.len()..]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn native(namespace: &str) -> Names {
        Names::new(Layout::Native, namespace, true)
    }

    #[test]
    fn names_are_pinned() {
        let names = native("lock-registry");
        for (given, name) in [
            ("orders/42", "lock-registry:{orders/42}"),
            ("{a}b", "lock-registry:{%7Ba%7Db}"),
            ("100%", "lock-registry:{100%25}"),
            ("a\0\n", "lock-registry:{a%00%0A}"),
            ("Schlüssel 🔑", "lock-registry:{Schlüssel 🔑}"),
        ] {
            assert_eq!(names.lock(&key(given)), name);
            assert_eq!(names.token(&names.lock(&key(given))), format!("{name}:token"));
        }
        assert_eq!(native("a{b}:*").lock(&key("k")), "a%7Bb%7D:*:{k}");
        assert_eq!(native("a*b").pattern(), r"a\*b:{*}");
    }

    #[test]
    fn only_names_of_locks_are_read_as_such() {
        let names = native("n");
        for name in ["n:{k}:token", "n:{k", "m:{k}", "n:{}", "n:{%6B}", "n:{a{b}", "k"] {
            assert_eq!(names.key(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn a_name_tells_its_key_and_no_other(text in ".{1,40}", namespace in ".{1,10}") {
            let names = native(&namespace);
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
            let (one, other) = (native(&a).lock(&key(&key_a)), native(&b).lock(&key(&key_b)));
            prop_assert_eq!(one == other, same);
        }
    }
}
