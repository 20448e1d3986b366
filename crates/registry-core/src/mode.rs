//! The mode of a claim: which other claims may hold its key.

use std::fmt;

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

    /// Returns the number of units that a claim of this mode takes. Zero if it is not `Permits`.
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
