//! Writes the log to stderr, if it is enabled.

use std::borrow::Cow;
use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::exit::CliError;
use crate::output::{LogToStderr, redact_if_url};

const VARIABLE: &str = "LOCK_REGISTRY_LOG";

/// Starts the log with the directives of LOCK_REGISTRY_LOG. If the variable is not set, uses the
/// level of `-v`. Without the variable and `-v`, `lockreg` logs nothing.
pub(crate) fn start(verbose: u8) -> Result<(), CliError> {
    let directives = match std::env::var(VARIABLE) {
        Ok(directives) => directives,
        Err(std::env::VarError::NotUnicode(_)) => {
            return Err(CliError::usage(format!("{VARIABLE} is not UTF-8; set it to UTF-8 text")));
        }
        Err(std::env::VarError::NotPresent) => match verbose {
            0 => return Ok(()),
            1 => "lock_registry=warn".to_owned(),
            2 => "lock_registry=debug".to_owned(),
            _ => "lock_registry=trace".to_owned(),
        },
    };
    let filter = EnvFilter::builder().parse(&directives).map_err(|error| {
        let shown = redact_if_url(&directives);
        // The text of the error may quote a part of the URL.
        let problem = match shown {
            Cow::Borrowed(_) => error.to_string(),
            Cow::Owned(_) => "a URL instead of a filter".to_owned(),
        };
        CliError::usage(format!("{VARIABLE} is {shown:?}, {problem}; write a level such as `debug`, or `lock_registry=trace`"))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogToStderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
