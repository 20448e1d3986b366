//! Builds and parses the names of keys and channels in each layout. The mapping is injective. In a
//! cluster, all keys of one lock share a hash slot.
//!
//! The hash tag of a name is the text between the first `{` and the next `}`. If a name contains a
//! hash tag, only this tag determines the slot.
//!
//! | layout | lock | token key | release channels |
//! |---|---|---|---|
//! | native | `NS:{KEY}`, escaped | `NS:{KEY}:token` | same as the lock |
//! | Spring | `NS:KEY` | `lock-registry:token:{LOCK}` | `NS-channel:LOCK`, `NS-channel` |
//! | Redisson | `KEY`, or `NS:KEY` with a namespace | `lock-registry:token:{LOCK}` | `redisson_lock__channel:{LOCK}` |
//!
//! `NS` is the namespace and `LOCK` is the name of the lock. `{LOCK}` is `LOCK` in braces, or
//! `=LOCK` if it already contains a hash tag. Redisson has another rule for its channels: there,
//! `{LOCK}` is `LOCK` itself if it contains an opening brace.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use registry_core::{ClaimId, InvalidKey, Key};

use crate::config::Layout;
use crate::slot::{hash_slot, hash_tag};

/// The characters that are escaped in the keys and namespaces of the native layout. A brace would
/// change the hash tag, and `%` starts an escape sequence. Escaped control characters keep the
/// names readable.
const ESCAPED_IN_KEY: &AsciiSet = &CONTROLS.add(b'%').add(b'{').add(b'}');

#[derive(Debug, Clone)]
pub(crate) struct RedisKeyNames {
    layout: Layout,
    /// The prefix of all lock names.
    prefix: String,
    /// The channel on which older versions of Spring publish all releases.
    common_channel: Option<String>,
    /// The prefix of the channels of single locks.
    channel_prefix: String,
    /// In a cluster, all keys of one lock must share a slot.
    is_cluster: bool,
}

impl RedisKeyNames {
    pub(crate) fn new(layout: Layout, namespace: &str, is_cluster: bool) -> Self {
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
        Self { layout, prefix, common_channel, channel_prefix, is_cluster }
    }

    /// Returns whether the layout supports records of several claims.
    pub(crate) fn supports_multi_claim_records(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Returns the Redis key that stores the lock of `key`.
    pub(crate) fn lock_name(&self, key: &Key) -> String {
        match self.layout {
            Layout::Native => {
                let capacity = self.prefix.len() + key.as_str().len() + "}".len();
                let mut lock = String::with_capacity(capacity);
                lock.push_str(&self.prefix);
                escape(key.as_str(), &mut lock);
                lock.push('}');
                lock
            }
            Layout::Spring | Layout::Redisson => format!("{}{}", self.prefix, key.as_str()),
        }
    }

    /// Returns the key that stores the newest tokens of `lock`.
    pub(crate) fn token_key(&self, lock: &str) -> String {
        match self.layout {
            Layout::Native => [lock, ":token"].concat(),
            Layout::Spring | Layout::Redisson => tagged_name(TOKEN_PREFIX, lock),
        }
    }

    /// Returns the key that stores the value block of `lock`. Only the native layout has values.
    pub(crate) fn value_key(&self, lock: &str) -> String {
        [lock, ":value"].concat()
    }

    /// Returns the key that stores the claims that wait for `lock`. Only the native layout has such
    /// keys.
    pub(crate) fn waiters_key(&self, lock: &str) -> String {
        [lock, WAITERS_SUFFIX].concat()
    }

    /// Returns the channel on which releases of `lock` are published.
    pub(crate) fn channel<'a>(&self, lock: &'a str) -> Cow<'a, str> {
        match self.layout {
            Layout::Native => lock.into(),
            Layout::Spring => format!("{}{lock}", self.channel_prefix).into(),
            Layout::Redisson => redisson_name(&self.channel_prefix, lock).into(),
        }
    }

    /// Returns the channel of all releases, if the layout has such a channel. Its messages are lock
    /// names.
    pub(crate) fn common_channel(&self) -> Option<&str> {
        self.common_channel.as_deref()
    }

    /// Returns the release channel of the lock whose name is the `message` on the common channel.
    pub(crate) fn channel_of_message(&self, message: &[u8]) -> Option<String> {
        std::str::from_utf8(message).ok().map(|lock| self.channel(lock).into_owned())
    }

    /// Returns the message that a release of `lock` publishes.
    pub(crate) fn message<'a>(&self, lock: &'a str) -> &'a str {
        match self.layout {
            Layout::Spring => lock,
            Layout::Native | Layout::Redisson => "0",
        }
    }

    /// Returns a channel of this namespace, to check the right to publish. No lock has this
    /// channel, except the key `}`: in the Spring layout, and in the Redisson layout if the
    /// namespace contains `{`.
    pub(crate) fn probe_channel(&self) -> String {
        format!("{}{}}}", self.channel_prefix, self.prefix)
    }

    /// Returns the Redis key that stores how long a client has observed the server process. The
    /// process is at least this old. The key belongs to no lock.
    pub(crate) fn process_age_key(&self) -> String {
        self.probe_channel() + ":age"
    }

    /// Returns the claim id in the format that the layout stores.
    pub(crate) fn holder_id(&self, id: ClaimId) -> String {
        let id = id.to_string();
        if self.layout == Layout::Native {
            return id;
        }
        let uuid =
            format!("{}-{}-{}-{}-{}", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]);
        match self.layout {
            // Redisson writes a client id and a thread id. This library writes the claim id as
            // client id.
            Layout::Redisson => uuid + ":1",
            Layout::Native | Layout::Spring => uuid,
        }
    }

    /// Returns an error for a key that collides with a token key, or whose names would not share a
    /// slot.
    pub(crate) fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        if self.layout == Layout::Native {
            return Ok(());
        }
        let lock = self.lock_name(key);
        if lock.starts_with(TOKEN_PREFIX) || lock.starts_with(FENCE_PREFIX) {
            return Err(InvalidKey::layout(
                "it collides with the token key of a lock or of a fenced resource; use another key",
            ));
        }
        if !self.is_cluster {
            return Ok(());
        }
        let channel_differs =
            self.layout == Layout::Redisson && hash_slot(&self.channel(&lock)) != hash_slot(&lock);
        if channel_differs || hash_slot(&self.token_key(&lock)) != hash_slot(&lock) {
            return Err(InvalidKey::layout(
                "its braces would put the keys of one lock into different slots of the cluster; use another key",
            ));
        }
        Ok(())
    }

    /// Returns the key of the lock if `name` can be the Redis key of a lock in this namespace.
    pub(crate) fn parse_key(&self, name: &str) -> Option<Key> {
        let key = name.strip_prefix(&self.prefix)?;
        if self.layout != Layout::Native {
            return Key::new(key)
                .ok()
                .filter(|_| !name.starts_with(TOKEN_PREFIX) && !name.starts_with(FENCE_PREFIX));
        }
        let key = percent_decode_str(key.strip_suffix('}')?).decode_utf8().ok()?;
        let key = Key::new(&key).ok()?;
        // Only the spelling that `lock_name` returns is a lock: `{%6B}` is not the lock of key `k`.
        (self.lock_name(&key) == name).then_some(key)
    }

    /// Returns a SCAN pattern that matches all locks of this namespace and possibly other keys.
    pub(crate) fn scan_pattern(&self) -> String {
        let mut pattern = String::new();
        for character in self.prefix.chars() {
            if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(character);
        }
        pattern + if self.layout == Layout::Native { "*}" } else { "*" }
    }

    /// Returns a SCAN pattern that matches all keys that store waiting claims of this namespace,
    /// and possibly other keys.
    pub(crate) fn waiters_scan_pattern(&self) -> String {
        self.scan_pattern() + WAITERS_SUFFIX
    }

    /// Returns the key of the lock if `name` is the Redis key that stores its waiting claims.
    pub(crate) fn parse_waiters_key(&self, name: &str) -> Option<Key> {
        self.parse_key(name.strip_suffix(WAITERS_SUFFIX)?)
    }

    /// Returns the Redis type of the value that stores a lock.
    pub(crate) const fn value_type(&self) -> &'static str {
        match self.layout {
            Layout::Native | Layout::Spring => "string",
            Layout::Redisson => "hash",
        }
    }

    /// Returns whether `record` may be a lock's record. Other programs may use Redis keys with the
    /// name of a lock.
    pub(crate) fn may_be_lock_record(&self, key: &Key, record: &[u8]) -> bool {
        let is_uuid = |id: &[u8]| {
            id.len() == 36 && id.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-')
        };
        match self.layout {
            // The name alone identifies a lock.
            Layout::Native => true,
            // The token key of a native lock in the same namespace is not a lock.
            Layout::Spring => {
                let key = key.as_str();
                let is_token_key = key.starts_with('{') && key.ends_with("}:token");
                !(is_token_key && record.iter().all(u8::is_ascii_digit))
            }
            Layout::Redisson => {
                record.get(..36).is_some_and(is_uuid)
                    && record.get(36).is_some_and(|byte| *byte == b':')
            }
        }
    }
}

/// Returns the key under which this library stores data about `name`. Both keys share a slot,
/// unless `name` has a closing brace and no hash tag. The equals sign distinguishes `{a}` from `a`.
pub(crate) fn tagged_name(prefix: &str, name: &str) -> String {
    match hash_tag(name) {
        Some(_) => format!("{prefix}={name}"),
        None => format!("{prefix}{{{name}}}"),
    }
}

/// Returns the name under which Redisson stores data about `name`.
fn redisson_name(prefix: &str, name: &str) -> String {
    if name.contains('{') { format!("{prefix}{name}") } else { format!("{prefix}{{{name}}}") }
}

const WAITERS_SUFFIX: &str = ":waiters";
/// The prefix of token keys in the layouts of other libraries.
const TOKEN_PREFIX: &str = "lock-registry:token:";
/// The prefix of the token keys of fenced resources.
pub(crate) const FENCE_PREFIX: &str = "lock-registry:fence:";
const REDISSON_CHANNEL: &str = "redisson_lock__channel:";

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    escape(text, &mut escaped);
    escaped
}

fn escape(text: &str, escaped: &mut String) {
    // `utf8_percent_encode` would also escape non-ASCII text. Such text needs no escape and stays
    // readable.
    for piece in text.split_inclusive(|character: char| !character.is_ascii()) {
        let ascii = piece.trim_end_matches(|character: char| !character.is_ascii());
        escaped.extend(utf8_percent_encode(ascii, ESCAPED_IN_KEY));
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

    fn native(namespace: &str) -> RedisKeyNames {
        RedisKeyNames::new(Layout::Native, namespace, true)
    }

    #[test]
    fn lock_names_have_the_documented_format() {
        let names = native("lock-registry");
        for (text, name) in [
            ("orders/42", "lock-registry:{orders/42}"),
            ("{a}b", "lock-registry:{%7Ba%7Db}"),
            ("100%", "lock-registry:{100%25}"),
            ("a\0\n", "lock-registry:{a%00%0A}"),
            ("Schlüssel 🔑", "lock-registry:{Schlüssel 🔑}"),
        ] {
            assert_eq!(names.lock_name(&key(text)), name);
            assert_eq!(names.token_key(&names.lock_name(&key(text))), format!("{name}:token"));
        }
        assert_eq!(native("a{b}:*").lock_name(&key("k")), "a%7Bb%7D:*:{k}");
        assert_eq!(native("a*b").scan_pattern(), r"a\*b:{*}");
    }

    #[test]
    fn a_name_with_a_hash_tag_shares_no_key_with_another_name() {
        let foreign = RedisKeyNames::new(Layout::Redisson, "", true);
        assert_eq!(foreign.token_key("a"), "lock-registry:token:{a}");
        assert_eq!(foreign.token_key("{a}"), "lock-registry:token:={a}");
        assert_eq!(foreign.token_key("x{a}"), "lock-registry:token:=x{a}");
    }

    #[test]
    fn only_lock_names_are_parsed_as_locks() {
        let names = native("n");
        for name in ["n:{k}:token", "n:{k", "m:{k}", "n:{}", "n:{%6B}", "n:{a{b}", "k"] {
            assert_eq!(names.parse_key(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn a_lock_name_maps_back_to_its_key(text in ".{1,40}", namespace in ".{1,10}") {
            let names = native(&namespace);
            let name = names.lock_name(&key(&text));
            prop_assert_eq!(names.parse_key(&name), Some(key(&text)));
            // In a cluster, the hash tag is the text between the first `{` and the next `}`.
            let tag = name.split_once('{').and_then(|(_, rest)| rest.split_once('}')).unwrap();
            prop_assert!(!tag.0.is_empty() && tag.1.is_empty());
        }

        #[test]
        fn locks_of_different_namespaces_have_different_names(
            a in ".{1,10}", b in ".{1,10}", key_a in ".{1,10}", key_b in ".{1,10}",
        ) {
            let same = a == b && key_a == key_b;
            let (one, other) = (native(&a).lock_name(&key(&key_a)), native(&b).lock_name(&key(&key_b)));
            prop_assert_eq!(one == other, same);
        }
    }
}
