//! The fencing token: a number by which a resource rejects writes of a previous holder.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

/// A number that grows with every grant of one key.
///
/// Send the token with each write to the protected resource. The resource rejects a token that is
/// smaller than its largest token so far. Once a later holder has written, the resource thus
/// rejects the writes of a holder that was paused beyond its lease.
///
/// The tokens of the grants of one key strictly grow across clients, expiry, release and restart.
/// The exception is a store without [`Capabilities::fencing`](crate::Capabilities::fencing). A
/// token fits into 63 bits, so that a signed database column can store it. Tokens of different keys
/// are not comparable.
///
/// The idea is Chubby's sequencer (Burrows, OSDI 2006) and Kleppmann's fencing token (2016).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct FencingToken(
    /// The token plus one, so that an `Option` of a token is no larger than a token.
    NonZeroU64,
);

impl FencingToken {
    /// The largest token, `i64::MAX`.
    pub const MAX: Self = Self::from_63_bits(i64::MAX as u64);

    /// Creates the token for a number that fits into 63 bits.
    const fn from_63_bits(token: u64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(token))
    }

    /// Creates a token from its number. Returns `None` if the number does not fit into 63 bits.
    #[must_use]
    pub const fn new(token: u64) -> Option<Self> {
        if token > Self::MAX.get() { None } else { Some(Self::from_63_bits(token)) }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get() - 1
    }

    /// Returns the token `steps` after this one, or `None` past [`FencingToken::MAX`].
    #[must_use]
    pub const fn checked_add(self, steps: u64) -> Option<Self> {
        match self.get().checked_add(steps) {
            Some(token) => Self::new(token),
            None => None,
        }
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.get()
    }
}

impl TryFrom<u64> for FencingToken {
    type Error = InvalidToken;

    fn try_from(token: u64) -> Result<Self, Self::Error> {
        Self::new(token).ok_or(InvalidToken)
    }
}

/// Parses the decimal number that `Display` writes.
impl FromStr for FencingToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<u64>().map_err(|_| InvalidToken)?.try_into()
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        // The cast cannot wrap, because every constructor limits the number to 63 bits.
        token.get() as Self
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = InvalidToken;

    fn try_from(token: i64) -> Result<Self, Self::Error> {
        u64::try_from(token).map(Self::from_63_bits).map_err(|_| InvalidToken)
    }
}

/// The error for a number or text that is not a fencing token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a fencing token; a token is an integer from 0 to {max}", max = FencingToken::MAX)]
#[non_exhaustive]
pub struct InvalidToken;

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.get(), f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FencingToken").field(&self.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_63_bits_is_a_token_and_is_returned_unchanged() {
        for number in [0, 1, i64::MAX as u64 - 1, i64::MAX as u64] {
            let token = FencingToken::new(number).unwrap();
            assert_eq!((token.get(), u64::from(token)), (number, number));
            assert_eq!(FencingToken::try_from(i64::from(token)), Ok(token));
            assert_eq!(format!("{token} {token:?}"), format!("{number} FencingToken({number})"));
        }
        assert_eq!(FencingToken::MAX.get(), i64::MAX as u64);
        assert_eq!(FencingToken::new(1 << 63), None);
        assert_eq!(FencingToken::MAX.checked_add(1), None);
        assert!(FencingToken::try_from(-1_i64).is_err());
        assert_eq!("17".parse(), Ok(FencingToken::try_from(17_u64).unwrap()));
        for text in ["", "-1", "x", "9223372036854775808"] {
            assert_eq!(text.parse::<FencingToken>(), Err(InvalidToken), "{text}");
        }
        assert!(FencingToken::new(1) < FencingToken::new(2));
    }

    #[test]
    fn an_optional_token_is_no_larger_than_a_token() {
        assert_eq!(size_of::<Option<FencingToken>>(), 8);
    }
}
