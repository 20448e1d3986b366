//! Parses and formats the values of options, for all sources.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use registry_core::ConfigError;

use crate::suggestion::suggest;

/// Why a value is invalid, as a predicate: `is not a time; HINT`. Does not contain the value.
#[derive(Debug)]
pub(crate) struct InvalidValue(pub(crate) String);

pub(crate) fn parse_time(text: &str) -> Result<Duration, InvalidValue> {
    parse_with_unit(text).map_err(|problem| InvalidValue(problem.to_owned()))
}

pub(crate) fn parse_bool(text: &str) -> Result<bool, InvalidValue> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(InvalidValue("is not a boolean; write `true` or `false`".to_owned())),
    }
}

pub(crate) fn parse_u32(text: &str) -> Result<u32, InvalidValue> {
    text.parse().map_err(|_| {
        InvalidValue(format!(
            "is not a number in range; write a whole number from 0 to {}",
            u32::MAX
        ))
    })
}

/// Formats a time for messages.
pub(crate) fn format_duration(span: Duration) -> String {
    humantime::format_duration(span).to_string()
}

/// Parses a time such as `30s`, `1500ms` or `1m 30s`. All options, variables and command lines of
/// this project use this format.
///
/// # Errors
/// [`ConfigError::Invalid`] if the text has no unit, is negative or is not a time.
///
/// # Examples
/// ```
/// # use std::time::Duration;
/// # use lock_registry::config::parse_duration;
/// assert_eq!(parse_duration("1m 30s")?, Duration::from_secs(90));
/// assert!(parse_duration("90").is_err());
/// # Ok::<(), lock_registry::ConfigError>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration, ConfigError> {
    parse_with_unit(text)
        .map_err(|problem| ConfigError::Invalid(format!("the time {text:?} {problem}")))
}

/// Parses a time, or returns why it is invalid.
fn parse_with_unit(text: &str) -> Result<Duration, &'static str> {
    let trimmed = text.trim();
    // `humantime` accepts a bare `0`, the only number without a unit.
    humantime::parse_duration(trimmed).map_err(|_| {
        if trimmed.starts_with('-') {
            "is negative; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else if trimmed.parse::<f64>().is_ok() {
            "has no unit; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else {
            "is not a time; write a time such as `30s`, `1500ms` or `1m 30s`"
        }
    })
}

/// Parses one of the names in `choices`. `what` describes the set in the error.
pub(crate) fn parse_choice<T: Copy>(
    text: &str,
    what: &str,
    choices: &[(&str, T)],
) -> Result<T, InvalidValue> {
    if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
        return Ok(*value);
    }
    let hint = suggest(text, choices.iter().map(|(name, _)| *name))
        .map_or_else(String::new, |name| format!("did you mean `{name}`? "));
    let known: Vec<String> = choices.iter().map(|(name, _)| format!("`{name}`")).collect();
    Err(InvalidValue(format!("is not a known {what}; {hint}known values: {}", known.join(", "))))
}

/// Parses the path of a file. Refuses text that looks like the contents of the file.
pub(crate) fn parse_path(text: &str) -> Result<PathBuf, InvalidValue> {
    if text.is_empty() {
        return Err(InvalidValue("is empty; write the path of a file".to_owned()));
    }
    if text.chars().any(char::is_control) || text.contains("-----") {
        return Err(InvalidValue(
            "is not a path; save the PEM text to a file and write the path of that file".to_owned(),
        ));
    }
    Ok(text.into())
}

/// A text that `Debug` never shows.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret text.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

/// Replaces a secret in output.
pub(crate) const REDACTED: &str = "***";
