//! Parses and formats the values of options, for all sources.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use registry_core::ConfigError;

use crate::nearest::nearest;

/// Description of an invalid value, as the end of a sentence about it. Does not repeat the value.
#[derive(Debug)]
pub(crate) struct Problem(pub(crate) String);

pub(crate) fn duration(text: &str) -> Result<Duration, Problem> {
    time(text).map_err(|problem| Problem(problem.to_owned()))
}

pub(crate) fn switch(text: &str) -> Result<bool, Problem> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Problem("which is no answer; write `true` or `false`".to_owned())),
    }
}

pub(crate) fn count(text: &str) -> Result<u32, Problem> {
    text.parse().map_err(|_| {
        Problem(format!("which is no count; write a whole number from 0 to {}", u32::MAX))
    })
}

/// Formats a time for people.
pub(crate) fn shown(span: Duration) -> String {
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
/// # use lock_registry::parse_duration;
/// assert_eq!(parse_duration("1m 30s")?, Duration::from_secs(90));
/// assert!(parse_duration("90").is_err());
/// # Ok::<(), lock_registry::ConfigError>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration, ConfigError> {
    time(text).map_err(|problem| ConfigError::Invalid(format!("{text:?}, {problem}")))
}

/// Parses a time, or returns what is wrong with it.
fn time(text: &str) -> Result<Duration, &'static str> {
    let trimmed = text.trim();
    // `humantime` accepts a bare `0`, the only number without a unit.
    humantime::parse_duration(trimmed).map_err(|_| {
        if trimmed.starts_with('-') {
            "which is negative; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else if trimmed.parse::<f64>().is_ok() {
            "which has no unit; write a time such as `30s`, `1500ms` or `1m 30s`"
        } else {
            "which is no time; write a time such as `30s`, `1500ms` or `1m 30s`"
        }
    })
}

/// Parses one of a few words. `what` names the set of words.
pub(crate) fn choice<T: Copy>(text: &str, what: &str, words: &[(&str, T)]) -> Result<T, Problem> {
    if let Some((_, meant)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*meant);
    }
    let near = nearest(text, words.iter().map(|(word, _)| *word))
        .map_or_else(|| "; there".to_owned(), |near| format!("; did you mean `{near}`? There"));
    let known: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
    Err(Problem(format!("which is no {what}{near} are {}", known.join(", "))))
}

/// Parses the path of a file. Refuses text that looks like the contents of the file.
pub(crate) fn path(text: &str) -> Result<PathBuf, Problem> {
    if text.is_empty() {
        return Err(Problem("which names no file".to_owned()));
    }
    if text.chars().any(char::is_control) || text.contains("-----") {
        return Err(Problem(
            "which is no path of a file; write what it holds into a file, and the path of that here"
                .to_owned(),
        ));
    }
    Ok(text.into())
}

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret text.
    pub(crate) fn told(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

/// Replaces a secret in output.
pub(crate) const HIDDEN: &str = "***";
