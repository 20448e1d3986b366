//! A broken promise, and the text of the operations that prove it.

use std::fmt;
use std::sync::Arc;

use registry_core::ClaimMode;

use crate::history::{
    ConversionResult, History, RecordedAttempt, RecordedGrant, RecordedWrite, ReleaseResult,
    Window, WriteResult,
};

/// The promises of locks that a history can prove broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Promise {
    /// Two grants of a key never have the same token.
    TokensAreUnique,
    /// The holders of a key that exclude each other follow each other in the order of their tokens.
    HoldersFollowTokens,
    /// Two guards of a key are never valid at the same time if their modes exclude each other.
    ValidGuardsAreCompatible,
    /// The permits of a key never take more units than it has.
    UnitsFit,
    /// A resource never accepts a token older than one that it has already accepted.
    WritesNeverGoBack,
    /// A replaced holder cannot write, even before its successor has written.
    ReplacedHoldersCannotWrite,
    /// "Busy" means that another client holds the lock.
    BusyMeansHeld,
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TokensAreUnique => "two grants of a key never have the same token",
            Self::HoldersFollowTokens => {
                "holders that exclude each other follow each other in the order of their tokens"
            }
            Self::ValidGuardsAreCompatible => {
                "two guards of a key that exclude each other are never valid at the same time"
            }
            Self::UnitsFit => "the permits of a key never take more units than it has",
            Self::WritesNeverGoBack => "a resource never accepts an older token than before",
            Self::ReplacedHoldersCannotWrite => "a holder that was replaced cannot write",
            Self::BusyMeansHeld => "\"busy\" means that another client holds the lock",
        })
    }
}

/// A broken promise. Its text contains the key, the reason and the operations, with times relative
/// to the start of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The promise.
    pub promise: Promise,
    /// The key of the lock.
    pub key: Arc<str>,
    /// The reason why it is broken.
    pub why: String,
    /// The operations that prove it, usually two.
    pub operations: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lock {:?} broke the promise that {}: {}", self.key, self.promise, self.why)?;
        self.operations.iter().try_for_each(|operation| write!(f, "\n  {operation}"))
    }
}

impl std::error::Error for Violation {}

/// Formats times and operations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Describer {
    start: u64,
}

impl Describer {
    pub(super) fn new(history: &History) -> Self {
        Self { start: history.start() }
    }

    pub(super) fn time(self, at: u64) -> String {
        if at == u64::MAX {
            return "never".into();
        }
        let since = i128::from(at) - i128::from(self.start);
        format!(
            "{}{}.{:09} s",
            if since < 0 { "-" } else { "+" },
            since.abs() / NANOS,
            since.abs() % NANOS
        )
    }

    fn window(self, window: Window) -> String {
        match window.to {
            u64::MAX => format!("called {}, never answered", self.time(window.from)),
            to => format!("called {}, answered {}", self.time(window.from), self.time(to)),
        }
    }

    pub(super) fn grant(self, grant: &RecordedGrant) -> String {
        let mut text = format!("client {} acquired {}", grant.client, token(grant.token));
        if grant.mode != ClaimMode::Exclusive {
            text += &format!(" as {}", grant.mode);
        }
        text += &format!(" ({})", self.window(grant.acquire));
        for conversion in &grant.conversions {
            text += &match conversion.result {
                ConversionResult::Granted(new) => {
                    format!(", made it {} with {}", conversion.mode, token(new))
                }
                ConversionResult::Refused => format!(", could not make it {}", conversion.mode),
                ConversionResult::Unknown => {
                    format!(", made it {} with an unknown outcome", conversion.mode)
                }
            };
            text += &format!(" ({})", self.window(conversion.window));
        }
        if let Some(until) = grant.valid_until {
            text += &format!(", valid until {}", self.time(until));
        }
        if let Some(lost) = grant.lost {
            text += &format!(", reported as lost {}", self.time(lost));
        }
        match &grant.release {
            None => text += ", never released",
            Some(release) => {
                text += match release.result {
                    ReleaseResult::Freed => ", released",
                    ReleaseResult::NotHeld => ", released after its loss",
                    ReleaseResult::Unknown => ", released with an unknown outcome",
                };
                text += &format!(" ({})", self.window(release.window));
            }
        }
        text
    }

    pub(super) fn attempt(self, attempt: &RecordedAttempt) -> String {
        let mode = match attempt.mode {
            ClaimMode::Exclusive => String::new(),
            mode => format!(" as {mode}"),
        };
        let window = self.window(attempt.window);
        format!("client {} tried to acquire{mode} ({window})", attempt.client)
    }

    pub(super) fn write(self, write: &RecordedWrite) -> String {
        let answer = match write.answer {
            WriteResult::Accepted => "accepted",
            WriteResult::Rejected => "rejected",
            WriteResult::Unknown => "with an unknown outcome",
        };
        let window = self.window(write.window);
        format!("client {} wrote with token {}, {answer} ({window})", write.client, write.token)
    }
}

const NANOS: i128 = 1_000_000_000;

fn token(token: Option<u64>) -> String {
    token.map_or_else(|| "without a token".into(), |token| format!("token {token}"))
}
