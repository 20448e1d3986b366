//! The mode of a claim: which other claims may hold its key.

use std::fmt;
use std::str::FromStr;

/// Which other claims may hold the same key at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum ClaimMode {
    /// No other claim.
    Exclusive,
    /// Any number of shared claims, and one upgradable claim.
    Shared,
    /// Any number of shared claims. The lock stays held while it is converted to exclusive.
    Upgradable,
    /// Other permits, as long as all permits together take at most `of` units.
    Permits {
        /// The units that this claim takes, at least one and at most `of`.
        take: u32,
        /// The units that the key has. All claims must state the same number.
        of: u32,
    },
}

impl ClaimMode {
    /// Returns whether two claims of these modes may hold one key at the same time. For permits,
    /// also checks that their units together do not exceed `of`.
    #[must_use]
    pub fn is_compatible(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared, Self::Shared | Self::Upgradable) | (Self::Upgradable, Self::Shared) => {
                true
            }
            (Self::Permits { take, of }, Self::Permits { take: other_take, of: other_of }) => {
                of == other_of && take.saturating_add(other_take) <= of
            }
            _ => false,
        }
    }

    /// Returns the number of units that a claim of this mode takes. Zero for modes other than
    /// `Permits`.
    #[must_use]
    pub fn units(self) -> u32 {
        match self {
            Self::Permits { take, .. } => take,
            _ => 0,
        }
    }

    /// Returns `exclusive`, `shared`, `upgradable` or `permits`: the mode without its units.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Shared => "shared",
            Self::Upgradable => "upgradable",
            Self::Permits { .. } => "permits",
        }
    }
}

/// Formats the mode as `exclusive`, `shared`, `upgradable`, or `permits 2 of 10`.
impl fmt::Display for ClaimMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permits { take, of } => write!(f, "permits {take} of {of}"),
            _ => f.write_str(self.name()),
        }
    }
}

/// Parses what `Display` writes.
impl FromStr for ClaimMode {
    type Err = InvalidClaimMode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let permits = || {
            let (take, of) = text.strip_prefix("permits ")?.split_once(" of ")?;
            Some(Self::Permits { take: take.parse().ok()?, of: of.parse().ok()? })
        };
        match text {
            "exclusive" => Ok(Self::Exclusive),
            "shared" => Ok(Self::Shared),
            "upgradable" => Ok(Self::Upgradable),
            _ => permits().ok_or(InvalidClaimMode),
        }
    }
}

/// The error for a text that is not a claim mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a claim mode; write exclusive, shared, upgradable, or permits N of M")]
#[non_exhaustive]
pub struct InvalidClaimMode;

#[cfg(test)]
mod tests {
    use super::ClaimMode;

    #[test]
    fn a_formatted_mode_is_parsed_and_other_text_is_not() {
        let permits = ClaimMode::Permits { take: 2, of: 10 };
        for mode in [ClaimMode::Exclusive, ClaimMode::Shared, ClaimMode::Upgradable, permits] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for text in ["", "permits", "permits 2", "permits -1 of 2", "Shared"] {
            assert!(text.parse::<ClaimMode>().is_err(), "{text:?}");
        }
    }
}
