//! Writes the log to stderr, if it is enabled.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::exit::CliError;
use crate::output::LogToStderr;

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
        CliError::usage(format!("{VARIABLE} is {directives:?}, {error}; write a level such as `debug`, or `lock_registry=trace`"))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogToStderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
