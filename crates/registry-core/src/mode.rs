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
    /// Any number of shared claims. Can be converted to exclusive without a release in between.
    Upgradable,
    /// Other permits, as long as not more than `of` units are taken in all.
    Permits {
        /// The units that this claim takes, at least one and at most `of`.
        take: u32,
        /// The units that the key has. All claims must state the same number.
        of: u32,
    },
}

impl ClaimMode {
    /// Returns whether one claim of each mode may hold a key together. For permits, this also
    /// checks that the units of the two fit.
    #[must_use]
    pub fn is_compatible(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared, Self::Shared | Self::Upgradable) | (Self::Upgradable, Self::Shared) => {
                true
            }
            (Self::Permits { take, of }, Self::Permits { take: others, of: other_of }) => {
                of == other_of && take.saturating_add(others) <= of
            }
            _ => false,
        }
    }

    /// Returns the units that a claim of this mode takes. Zero if the mode is not `Permits`.
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
