//! Parses and formats values of options.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::panic_safe::catch_panic;

/// The reason why a value is invalid, as a predicate: `is not a time; HINT`. Contains no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidValue(Cow<'static, str>);

impl InvalidValue {
    /// Creates the error from a predicate.
    #[must_use]
    pub fn new(problem: impl Into<Cow<'static, str>>) -> Self {
        Self(problem.into())
    }

    /// Creates the error of an unknown option. The error does not show the option's name, which may
    /// be part of a password in a malformed URL.
    #[must_use]
    pub fn unknown_option() -> Self {
        Self::new("is not an option of this store")
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for InvalidValue {}

/// Parses a time such as `30s`, `1500ms` or `1m 30s`. Zero may be written as `0`.
///
/// # Errors
/// [`InvalidValue`] if the text is negative, is not a time, or is a number other than `0` without a
/// unit.
pub fn parse_time(text: &str) -> Result<Duration, InvalidValue> {
    let trimmed = text.trim();
    // `humantime` accepts `0`, but no other number without a unit. It panics at one time above the
    // maximum of a `Duration`.
    let parsed = catch_panic(|| humantime::parse_duration(trimmed).ok()).flatten();
    parsed.ok_or_else(|| {
        InvalidValue::new(if trimmed.starts_with('-') {
            "is negative; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else if trimmed.parse::<f64>().is_ok_and(f64::is_finite) {
            "has no unit; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else {
            "is not a time, or is too long; write a time such as `30s`, `1500ms` or `1m 30s`"
        })
    })
}

/// Formats a time as [`parse_time`] reads it.
#[must_use]
pub fn format_time(time: Duration) -> String {
    humantime::format_duration(time).to_string()
}

/// Parses `true` or `false`; `on` and `off` mean the same.
///
/// # Errors
/// [`InvalidValue`] for any other text.
pub fn parse_switch(text: &str) -> Result<bool, InvalidValue> {
    match text {
        "true" | "on" => Ok(true),
        "false" | "off" => Ok(false),
        _ => Err(InvalidValue::new("is not a boolean; write `true` or `false`")),
    }
}

/// Parses a whole number from 0 to [`u32::MAX`].
///
/// # Errors
/// [`InvalidValue`] for a larger number and for any other text.
pub fn parse_count(text: &str) -> Result<u32, InvalidValue> {
    text.parse().map_err(|_| {
        InvalidValue::new(format!(
            "is not a whole number from 0 to {}; write a number in this range",
            u32::MAX
        ))
    })
}

/// Returns the value of the name `text` in `choices`.
///
/// # Errors
/// [`InvalidValue`] if `choices` does not have this name.
pub fn parse_choice<T: Clone>(text: &str, choices: &[(&str, T)]) -> Result<T, InvalidValue> {
    choices
        .iter()
        .find(|(name, _)| *name == text)
        .map(|(_, value)| value.clone())
        .ok_or_else(|| InvalidValue::new("is not a known value"))
}

/// Parses the path of a file. Refuses text that looks like the contents of the file.
///
/// # Errors
/// [`InvalidValue`] for empty text, for a control character, and for PEM text.
pub fn parse_path(text: &str) -> Result<PathBuf, InvalidValue> {
    if text.is_empty() {
        return Err(InvalidValue::new("is empty; write the path of a file"));
    }
    if text.chars().any(char::is_control) || text.contains("-----") {
        return Err(InvalidValue::new(
            "is not a path; save the PEM text to a file and write the path of that file",
        ));
    }
    Ok(text.into())
}

/// A text that `Debug` never shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Creates a secret from `text`.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret text.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
