//! The failures of `lockreg`: their exit statuses and texts. The library has already removed
//! secrets from its errors.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use lock_registry::config::InvalidOption;
use lock_registry::{ConfigError, LockError};

/// The result of the command is negative: the key is not locked (`show`, `break`) or has no value
/// block (`value`), or there is a warning (`doctor --strict`).
pub(crate) const NEGATIVE_RESULT: u8 = 1;
/// The lock was not acquired in time. `EX_TEMPFAIL` of sysexits.h.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// The lock was lost while it was held.
pub(crate) const LOST: u8 = 76;

/// An invalid command line or environment variable: `EX_USAGE`.
pub(crate) const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
/// A bug in `lockreg`: `EX_SOFTWARE`.
pub(crate) const INTERNAL: u8 = 70;
/// The operating system refused an operation that normally succeeds: `EX_OSERR`.
pub(crate) const OS: u8 = 71;
const OUTPUT: u8 = 74;
const COMMAND_NOT_EXECUTABLE: u8 = 126;
/// The status of shells for a command that does not exist.
const COMMAND_NOT_FOUND: u8 = 127;

/// Returns the status that a shell reports for a process that was ended by signal `number`.
pub(crate) fn status_of_signal(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

/// A failure of `lockreg`.
#[derive(Debug)]
pub(crate) enum CliError {
    /// The command line is invalid. The text contains a hint.
    Usage(String),
    Config(ConfigError),
    Lock(LockError),
    /// The store did not confirm the record of a tick in time after a termination signal.
    Unconfirmed {
        key: String,
    },
    /// The command of `run` or `elect` is not a program, or this user may not execute it.
    CommandNotExecutable(String),
    CommandNotFound(String),
    /// The directory of the default store cannot be created.
    Directory {
        directory: PathBuf,
        source: io::Error,
    },
    /// `lockreg serve` cannot listen on its address, for example because the port is in use.
    Listen {
        address: SocketAddr,
        source: io::Error,
    },
    /// The operating system refused an operation that normally succeeds.
    Os {
        what: &'static str,
        source: io::Error,
    },
    /// A write to stdout failed, for example because it is closed or full.
    Output(io::Error),
}

impl CliError {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    pub(crate) fn os(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { what, source }
    }

    /// Returns the exit status of this failure.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            Self::Config(ConfigError::Open { .. } | ConfigError::NoRuntime) => UNAVAILABLE,
            // The configuration is invalid. This is found before any lock is acquired.
            Self::Config(_) => USAGE,
            Self::Lock(LockError::InvalidKey(_) | LockError::InvalidOption(_)) => USAGE,
            Self::Lock(LockError::Lost { .. }) => LOST,
            Self::Lock(_) | Self::Unconfirmed { .. } | Self::Directory { .. } => UNAVAILABLE,
            Self::CommandNotExecutable(_) => COMMAND_NOT_EXECUTABLE,
            Self::CommandNotFound(_) => COMMAND_NOT_FOUND,
            Self::Os { .. } | Self::Listen { .. } => OS,
            // The reader has closed stdout, which is not a failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::Output(_) => OUTPUT,
        }
    }

    /// Returns whether `lockreg` ends without reporting this failure.
    pub(crate) fn is_silent(&self) -> bool {
        self.status() == 0
    }

    /// Returns the texts of this failure and its causes, outermost first.
    pub(crate) fn chain(&self) -> Vec<String> {
        error_chain(self)
    }
}

/// Returns the texts of `error` and its causes. Omits a cause if the previous text contains its
/// text.
pub(crate) fn error_chain(error: &dyn StdError) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !texts.last().is_some_and(|previous| previous.contains(&text)) {
            texts.push(text);
        }
        next = error.source();
    }
    texts
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message)
            | Self::CommandNotExecutable(message)
            | Self::CommandNotFound(message) => f.write_str(message),
            Self::Config(ConfigError::NotBuiltIn { scheme, feature, .. }) => write!(
                f,
                "this lockreg was built without {scheme} stores; run `cargo install registry-cli --features {feature}`"
            ),
            Self::Config(error) => fmt::Display::fmt(error, f),
            Self::Lock(LockError::InvalidOption(invalid)) => {
                let InvalidOption { option, given, problem, .. } = invalid;
                write!(f, "--{} is {given}, which {problem}", option.replace('_', "-"))
            }
            // The store name in the error is the same for all modes, so this text names the mode.
            Self::Lock(LockError::Unsupported {
                capability: "inspect",
                store: store @ ("postgres" | "mysql"),
                ..
            }) => write!(
                f,
                "{store} with mode=session does not record holders, so locks cannot be shown, listed or broken; use mode=lease or mode=row"
            ),
            Self::Lock(error) => fmt::Display::fmt(error, f),
            Self::Unconfirmed { key } => write!(
                f,
                "the record of the tick on {key:?} was not confirmed in time after a signal; the tick may be recorded or not"
            ),
            Self::Directory { directory, .. } => {
                write!(
                    f,
                    "cannot create the directory {directory:?} for the default store; check its permissions"
                )
            }
            Self::Listen { address, .. } => {
                write!(f, "cannot listen on {address}; choose another address with --listen")
            }
            Self::Os { what, .. } => f.write_str(what),
            Self::Output(_) => f.write_str(
                "write to stdout failed; check that its target is open and has free space",
            ),
        }
    }
}

impl StdError for CliError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Usage(_)
            | Self::Unconfirmed { .. }
            | Self::CommandNotExecutable(_)
            | Self::CommandNotFound(_) => None,
            Self::Config(error) => error.source(),
            Self::Lock(LockError::InvalidOption(_)) => None,
            Self::Lock(error) => error.source(),
            Self::Directory { source, .. }
            | Self::Listen { source, .. }
            | Self::Os { source, .. }
            | Self::Output(source) => Some(source),
        }
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<LockError> for CliError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_printed_once() {
        let io = io::Error::new(io::ErrorKind::NotFound, "gone");
        let failure = CliError::Os { what: "cannot start", source: io };
        assert_eq!(failure.chain(), ["cannot start", "gone"]);
    }

    #[test]
    fn a_signal_has_the_status_that_a_shell_reports() {
        assert_eq!(
            (status_of_signal(2), status_of_signal(15), status_of_signal(9)),
            (130, 143, 137)
        );
    }
}
