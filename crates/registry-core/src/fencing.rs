//! The fencing token: the number that lets a resource refuse a holder that has been replaced.

use std::fmt;

/// A number that grows with every grant of one key.
///
/// Give it along with each write to the protected resource and let the resource refuse a token that is
/// older than the newest it has seen: then a holder that was paused beyond its lease can do no harm.
/// Tokens of one key strictly grow over clients, expiry, release and restart. They fit into 63 bits, so
/// that they survive a signed column. Tokens of different keys say nothing about each other.
///
/// The idea is Chubby's sequencer (Burrows, OSDI 2006) and Kleppmann's fencing token (2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct FencingToken(u64);

impl FencingToken {
    /// The largest token, `i64::MAX`.
    pub const MAX: Self = Self(i64::MAX as u64);

    /// Makes a token of its number; `None` when it does not fit into 63 bits.
    #[must_use]
    pub const fn new(token: u64) -> Option<Self> {
        if token > Self::MAX.0 { None } else { Some(Self(token)) }
    }

    /// The number itself.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The token `steps` after this one, or `None` past [`FencingToken::MAX`].
    #[must_use]
    pub const fn checked_add(self, steps: u64) -> Option<Self> {
        match self.0.checked_add(steps) {
            Some(token) => Self::new(token),
            None => None,
        }
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

impl TryFrom<u64> for FencingToken {
    type Error = &'static str;

    fn try_from(token: u64) -> Result<Self, Self::Error> {
        Self::new(token).ok_or("a fencing token fits into 63 bits")
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        // Cannot wrap: every constructor keeps the number within 63 bits.
        token.0 as Self
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = std::num::TryFromIntError;

    fn try_from(token: i64) -> Result<Self, Self::Error> {
        u64::try_from(token).map(Self)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
