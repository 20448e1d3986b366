//! The key of a lock: non-empty UTF-8 text of limited length. Backends encode it for their stores.

use std::fmt;
use std::sync::Arc;

/// The name of one lock.
///
/// A key is non-empty UTF-8 of at most [`Key::BYTES_MAX`] bytes. Every character is allowed,
/// including NUL and `/`. Two keys are the same lock only if their bytes are equal: keys are not
/// trimmed, case-folded or normalised. Cloning is cheap.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The length of the longest key, in bytes.
    pub const BYTES_MAX: usize = 4_096;

    /// Validates `key` and copies it.
    ///
    /// # Errors
    /// [`InvalidKey`] when `key` is empty or longer than [`Key::BYTES_MAX`].
    pub fn new(key: &str) -> Result<Self, InvalidKey> {
        match key.len() {
            0 => Err(InvalidKey::Empty),
            1..=Self::BYTES_MAX => Ok(Self(key.into())),
            bytes => Err(InvalidKey::TooLong { bytes }),
        }
    }

    /// Returns the text of the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for Key {
    type Error = InvalidKey;

    fn try_from(key: &str) -> Result<Self, InvalidKey> {
        Self::new(key)
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

// `obtain` looks up the local lock of a key by `&str`.
impl std::borrow::Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Quotes and escapes the key, so that a malicious key cannot forge a log line.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Key {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Key {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::new(&text).map_err(serde::de::Error::custom)
    }
}

/// The reason why a text cannot be the key of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The key is empty.
    #[error("a lock key must not be empty; pass a name")]
    Empty,
    /// The key is longer than [`Key::BYTES_MAX`].
    #[error(
        "a lock key has at most {max} bytes, this one has {bytes}; shorten the key, or use its hash",
        max = Key::BYTES_MAX
    )]
    #[non_exhaustive]
    TooLong {
        /// The length of the text, in bytes.
        bytes: usize,
    },
    /// The store's layout cannot store this key without a conflict with other keys or records.
    #[error("this layout cannot hold the key: {reason}")]
    #[non_exhaustive]
    Layout {
        /// The reason, with a hint: `CAUSE; HINT`.
        reason: &'static str,
    },
}

impl InvalidKey {
    /// Creates [`InvalidKey::Layout`] with this reason.
    #[must_use]
    pub const fn layout(reason: &'static str) -> Self {
        Self::Layout { reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_is_allowed_and_length_is_bounded() {
        for odd in ["/", "..", "\0", "'", "\"", "🔒", "\u{202e}abc", " ", "\n", &"x".repeat(4_096)]
        {
            assert_eq!(Key::new(odd).unwrap().as_str(), odd);
        }
        assert_eq!(Key::new(""), Err(InvalidKey::Empty));
        assert_eq!(Key::new(&"x".repeat(4_097)), Err(InvalidKey::TooLong { bytes: 4_097 }));
    }

    #[test]
    fn debug_escapes_characters_that_could_forge_a_log_line() {
        assert_eq!(format!("{:?}", Key::new("a\nb\u{202e}").unwrap()), r#""a\nb\u{202e}""#);
    }
}
