//! The options that every store takes: one table of names, one function to read each from text, one place that checks
//! ranges. Where the text comes from is decided in `config`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use registry_core::{Capabilities, ConfigError, LockOptions, RegistryBuilder};

use crate::config::RegistryConfig;
use crate::nearest::nearest;
use crate::store_url::UrlText;

/// What one source (the URL, a file, the environment, code) says. What it does not say is left to the next source.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layer {
    pub(crate) url: Option<UrlText>,
    pub(crate) namespace: Option<String>,
    pub(crate) lease: Option<Duration>,
    pub(crate) renew: Option<bool>,
    pub(crate) poll: Option<Duration>,
    pub(crate) handoff: Option<u32>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) label: Option<String>,
    pub(crate) layout: Option<Layout>,
    pub(crate) busy_timeout: Option<Duration>,
    pub(crate) purge_after: Option<Duration>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) token_memory: Option<Duration>,
}

/// One option: its name, the schemes of the stores that know it, and how it is read and shown.
pub(crate) struct OptionRow {
    pub(crate) name: &'static str,
    only: &'static [&'static str],
    read: Read,
    show: Show,
}

/// Every option there is, in the order in which people want to read them. `url` is the one that no URL can hold.
#[rustfmt::skip]
pub(crate) static OPTIONS: &[OptionRow] = &[
    row("url",             ALL,    |l, t| put(&mut l.url, Ok(UrlText::new(t))),             |l| l.url.as_ref().map(ToString::to_string)),
    row("namespace",       ALL,    |l, t| put(&mut l.namespace, Ok(t.into())),              |l| l.namespace.clone()),
    row("lease",           ALL,    |l, t| put(&mut l.lease, duration(t)),                   |l| l.lease.map(shown)),
    row("renew",           ALL,    |l, t| put(&mut l.renew, switch(t)),                     |l| l.renew.map(|on| on.to_string())),
    row("poll",            ALL,    |l, t| put(&mut l.poll, duration(t)),                    |l| l.poll.map(shown)),
    row("handoff",         ALL,    |l, t| put(&mut l.handoff, count(t)),                    |l| l.handoff.map(|n| n.to_string())),
    row("timeout",         ALL,    |l, t| put(&mut l.timeout, duration(t)),                 |l| l.timeout.map(shown)),
    row("label",           ALL,    |l, t| put(&mut l.label, Ok(t.into())),                  |l| l.label.clone()),
    row("layout",          ALL,    |l, t| put(&mut l.layout, layout(t)),                    |l| l.layout.map(|l| l.to_string())),
    row("busy_timeout",    SQLITE, |l, t| put(&mut l.busy_timeout, duration(t)),            |l| l.busy_timeout.map(shown)),
    row("purge_after",     SQLITE, |l, t| put(&mut l.purge_after, duration(t)),             |l| l.purge_after.map(shown)),
    row("connect_timeout", REDIS,  |l, t| put(&mut l.connect_timeout, duration(t)),         |l| l.connect_timeout.map(shown)),
    row("token_memory",    REDIS,  |l, t| put(&mut l.token_memory, duration(t)),            |l| l.token_memory.map(shown)),
];

type Read = fn(&mut Layer, &str) -> Result<(), Problem>;
type Show = fn(&Layer) -> Option<String>;

const fn row(
    name: &'static str,
    only: &'static [&'static str],
    read: Read,
    show: Show,
) -> OptionRow {
    OptionRow { name, only, read, show }
}

/// Known to every store.
const ALL: &[&str] = &[];
const SQLITE: &[&str] = &["sqlite"];
const REDIS: &[&str] = &["redis", "rediss"];

impl OptionRow {
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        OPTIONS.iter().find(|row| row.name == name)
    }

    /// Whether `value` says something about the option that anybody may see.
    pub(crate) fn is_harmless(&self, value: &str) -> bool {
        // Plain, because a text can be anything; readable, because it may be no value at all but what is left of a password.
        let plain = |c: char| c.is_alphanumeric() || "-._/ ".contains(c);
        self.name != "url"
            && value.chars().all(plain)
            && (self.read)(&mut Layer::default(), value).is_ok()
    }

    /// The option's value in `layer`, free of secrets; `None` if `layer` does not set it.
    pub(crate) fn shown_in(&self, layer: &Layer) -> Option<String> {
        (self.show)(layer)
    }
}

/// Where the value of an option comes from, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// A method of [`RegistryConfig`](crate::RegistryConfig).
    Code,
    /// A `LOCK_REGISTRY_*` variable.
    Environment,
    /// TOML, or a section of the application's own configuration.
    File,
    /// The query of the store URL.
    Url,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Code => "the code",
            Self::Environment => "the environment",
            Self::File => "the configuration file",
            Self::Url => "the store URL",
        })
    }
}

impl Origin {
    /// What people call `option` in a message.
    fn names(self, option: &str) -> String {
        match self {
            Self::Environment => variable(option),
            other => format!("option {option:?} in {other}"),
        }
    }
}

/// The environment variable that sets `option`.
pub(crate) fn variable(option: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", option.to_ascii_uppercase())
}

pub(crate) const VARIABLE_PREFIX: &str = "LOCK_REGISTRY_";

impl Layer {
    /// Reads one option of `origin` from text. In a URL there is no `url`.
    pub(crate) fn read(
        &mut self,
        origin: Origin,
        name: &str,
        value: &str,
    ) -> Result<(), ConfigError> {
        match OptionRow::find(name) {
            Some(row) if !(origin == Origin::Url && row.name == "url") => {
                self.read_row(row, origin, value)
            }
            _ => Err(unknown_option(origin, name)),
        }
    }

    /// Reads one option from the environment variable of this name, prefix and all.
    #[cfg(feature = "config")]
    pub(crate) fn read_variable(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        // Compared as a whole: a variable in lower case would count for one program and not for the next.
        match OPTIONS.iter().find(|row| variable(row.name) == name) {
            Some(row) => self.read_row(row, Origin::Environment, value),
            None => Err(unknown_variable(name)),
        }
    }

    fn read_row(
        &mut self,
        row: &OptionRow,
        origin: Origin,
        value: &str,
    ) -> Result<(), ConfigError> {
        let wrong =
            |problem: &str| ConfigError::Invalid(format!("{} {problem}", origin.names(row.name)));
        if row.shown_in(self).is_some() {
            return Err(wrong("is given twice"));
        }
        (row.read)(self, value).map_err(|Problem(problem)| match origin {
            // Part of a password that was not percent-encoded can stand anywhere in a URL. A number that has lost its unit helps.
            Origin::Url if value.parse::<f64>().is_err() => {
                wrong(&format!("has a value {problem}"))
            }
            _ => wrong(&format!("is {value:?}, {problem}")),
        })
    }

    /// Checks every value, and that the store of the scheme `store` knows each option that is set.
    pub(crate) fn check(&self, origin: Origin, store: &str) -> Result<(), ConfigError> {
        for row in OPTIONS.iter().filter(|row| row.shown_in(self).is_some()) {
            if let Some(only) = row.only.first()
                && !row.only.contains(&store)
            {
                return Err(ConfigError::Invalid(format!(
                    "{} is for {only} stores, and the store is {store}",
                    origin.names(row.name)
                )));
            }
        }
        let wrong = |option: &str, problem: String| {
            Err(ConfigError::Invalid(format!("{} {problem}", origin.names(option))))
        };
        let spans = [
            ("lease", self.lease, Capabilities::LEASE_MIN, Capabilities::LEASE_MAX),
            ("poll", self.poll, RegistryBuilder::POLL_MIN, RegistryBuilder::POLL_MAX),
            ("timeout", self.timeout, RegistryBuilder::TIMEOUT_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("busy_timeout", self.busy_timeout, Duration::ZERO, RegistryBuilder::TIMEOUT_MAX),
            ("purge_after", self.purge_after, Duration::ZERO, DAYS_MAX),
            ("connect_timeout", self.connect_timeout, REDIS_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("token_memory", self.token_memory, REDIS_MIN, DAYS_MAX),
        ];
        for (option, given, min, max) in spans {
            match given {
                Some(given) if given < min => {
                    return wrong(
                        option,
                        format!("is {}, less than the least, {}", shown(given), shown(min)),
                    );
                }
                Some(given) if given > max => {
                    return wrong(
                        option,
                        format!("is {}, more than the most, {}", shown(given), shown(max)),
                    );
                }
                _ => {}
            }
        }
        match self.handoff {
            Some(handoff) if handoff > RegistryBuilder::HANDOFF_MAX => {
                return wrong(
                    "handoff",
                    format!("is {handoff}, more than the most, {}", RegistryBuilder::HANDOFF_MAX),
                );
            }
            _ => {}
        }
        if REDIS.contains(&store) && self.namespace.as_deref() == Some("") {
            return wrong("namespace", "is empty; in Redis every name begins with it".to_owned());
        }
        let texts = [
            ("namespace", &self.namespace, RegistryConfig::NAMESPACE_BYTES_MAX),
            ("label", &self.label, LockOptions::LABEL_BYTES_MAX),
        ];
        for (option, given, bytes_max) in texts {
            match given {
                Some(text) if text.len() > bytes_max => {
                    return wrong(
                        option,
                        format!("has {} bytes, more than {bytes_max}", text.len()),
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }
}

const DAYS_MAX: Duration = LockOptions::WAIT_MAX;
const REDIS_MIN: Duration = Duration::from_millis(10);

fn unknown_option(origin: Origin, name: &str) -> ConfigError {
    let names = OPTIONS
        .iter()
        .map(|row| row.name)
        .filter(|name| !(origin == Origin::Url && *name == "url"));
    let known = names.clone().collect::<Vec<_>>().join(", ");
    ConfigError::unknown(
        "option",
        printable_name(name),
        origin.to_string(),
        nearest(name, names),
        known,
    )
}

#[cfg(feature = "config")]
fn unknown_variable(name: &str) -> ConfigError {
    let names: Vec<String> = OPTIONS.iter().map(|row| variable(row.name)).collect();
    let near = nearest(name, names.iter().map(String::as_str));
    ConfigError::unknown("variable", name, Origin::Environment.to_string(), near, names.join(", "))
}

/// `name` if it looks like one. A password with an unescaped `?` and `=` does not.
fn printable_name(name: &str) -> &str {
    let plain =
        name.len() <= 40 && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    if plain { name } else { "(not shown)" }
}

/// What is wrong with a value, as the rest of a sentence about it. Does not repeat it.
#[derive(Debug)]
struct Problem(String);

fn put<T>(place: &mut Option<T>, value: Result<T, Problem>) -> Result<(), Problem> {
    *place = Some(value?);
    Ok(())
}

fn duration(text: &str) -> Result<Duration, Problem> {
    time(text).map_err(|problem| Problem(problem.to_owned()))
}

fn switch(text: &str) -> Result<bool, Problem> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Problem("which is no answer; write `true` or `false`".to_owned())),
    }
}

fn count(text: &str) -> Result<u32, Problem> {
    text.parse().map_err(|_| {
        Problem(format!("which is no count; write a whole number from 0 to {}", u32::MAX))
    })
}

fn layout(text: &str) -> Result<Layout, Problem> {
    text.parse().map_err(|_| Problem(NO_LAYOUT.to_owned()))
}

/// A time as people write it.
fn shown(span: Duration) -> String {
    humantime::format_duration(span).to_string()
}

/// Reads a time such as `30s`, `1500ms` or `1m 30s`, as every option, variable and command line of this project does.
///
/// # Errors
/// [`ConfigError::Invalid`] when it has no unit, is negative or is not a time at all.
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

/// Reads a time, or tells what is wrong with it.
fn time(text: &str) -> Result<Duration, &'static str> {
    let trimmed = text.trim();
    // It reads a bare `0`, the one number that needs no unit.
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

/// How a store lays out its records.
///
/// Other layouts, those of peers in other languages, come with the stores that share them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// This project's own.
    #[default]
    Native,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
        })
    }
}

impl FromStr for Layout {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "native" => Ok(Self::Native),
            _ => Err(ConfigError::Invalid(format!("{text:?}, {NO_LAYOUT}"))),
        }
    }
}

const NO_LAYOUT: &str = "which is no layout of this release; it has `native`";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Layer, ConfigError> {
        let mut layer = Layer::default();
        layer.read(Origin::Url, name, value)?;
        layer.check(Origin::Url, "sqlite")?;
        Ok(layer)
    }

    #[test]
    fn every_option_is_read_and_shown() {
        for (name, value) in [
            ("namespace", "shop"),
            ("lease", "1m 30s"),
            ("renew", "false"),
            ("poll", "250ms"),
            ("handoff", "0"),
            ("timeout", "3s"),
            ("label", "nightly ünïcode"),
            ("layout", "native"),
            ("busy_timeout", "1s"),
            ("purge_after", "1h"),
        ] {
            let layer = read(name, value).unwrap();
            assert_eq!(OptionRow::find(name).unwrap().shown_in(&layer).as_deref(), Some(value));
        }
    }

    #[test]
    fn a_bad_value_is_refused_with_its_option_and_a_way_out() {
        for (name, value, hint) in [
            ("lease", "0s", "less than the least, 100ms"),
            ("lease", "1ms", "less than the least, 100ms"),
            ("lease", "100years", "more than the most, 1day"),
            ("lease", "-5s", "negative"),
            ("lease", "30", "no unit"),
            ("lease", "", "no time"),
            ("lease", "soon", "`30s`"),
            ("lease", "99999999999999999999years", "no time"),
            ("poll", "0s", "less than the least"),
            ("timeout", "2h", "more than the most"),
            ("renew", "yes", "`true` or `false`"),
            ("handoff", "-1", "whole number"),
            ("handoff", "4294967296", "whole number"),
            ("handoff", "10001", "more than the most"),
            ("layout", "spring", "it has `native`"),
            ("label", &"x".repeat(1_025), "1025 bytes"),
        ] {
            let error = read(name, value).unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains(name), "{name}={value}: {error}");
        }
    }

    #[test]
    fn a_bad_value_is_repeated_unless_it_stands_in_a_url() {
        for name in ["lease", "renew", "handoff", "layout"] {
            let told =
                |origin, value| Layer::default().read(origin, name, value).unwrap_err().to_string();
            assert!(!told(Origin::Url, "secret").contains("secret"));
            assert!(told(Origin::File, "secret").contains("is \"secret\", which is no "));
            assert!(told(Origin::Url, "1.5").contains("is \"1.5\", which "));
        }
    }

    #[test]
    fn an_unknown_name_is_told_the_nearest() {
        let told = |origin, name| match Layer::default().read(origin, name, "1s").unwrap_err() {
            ConfigError::Unknown { given, nearest, .. } => (given, nearest),
            other => panic!("{other:?}"),
        };
        assert_eq!(told(Origin::Url, "leese"), ("leese".to_owned(), "lease".to_owned()));
        assert_eq!(told(Origin::File, "pol"), ("pol".to_owned(), "poll".to_owned()));
        assert_eq!(told(Origin::Url, "x@y z").0, "(not shown)");
        assert!(Layer::default().read(Origin::Url, "url", "memory:").is_err());
    }

    #[test]
    fn an_option_of_another_store_is_refused() {
        let layer = read("purge_after", "1h").unwrap();
        let error = layer.check(Origin::Environment, "memory").unwrap_err().to_string();
        assert_eq!(
            error,
            "LOCK_REGISTRY_PURGE_AFTER is for sqlite stores, and the store is memory"
        );
    }

    #[test]
    fn the_options_of_redis_are_for_both_of_its_schemes() {
        for (option, value) in [("connect_timeout", "500ms"), ("token_memory", "2days")] {
            let mut layer = Layer::default();
            layer.read(Origin::Url, option, value).unwrap();
            layer.check(Origin::Url, "redis").unwrap();
            layer.check(Origin::Url, "rediss").unwrap();
            assert_eq!(OptionRow::find(option).unwrap().shown_in(&layer).as_deref(), Some(value));
            let error = layer.check(Origin::File, "sqlite").unwrap_err().to_string();
            assert!(error.contains("is for redis stores, and the store is sqlite"), "{error}");
        }
        for (option, value, hint) in [
            ("connect_timeout", "1ms", "less than the least, 10ms"),
            ("connect_timeout", "2h", "more than the most, 1h"),
            ("token_memory", "0s", "less than the least, 10ms"),
            ("token_memory", "2years", "more than the most"),
            ("namespace", "", "is empty"),
        ] {
            let mut layer = Layer::default();
            layer.read(Origin::Url, option, value).unwrap();
            let error = layer.check(Origin::Url, "rediss").unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains(option), "{option}={value}: {error}");
        }
    }

    #[test]
    fn an_option_given_twice_is_refused() {
        let mut layer = Layer::default();
        layer.read(Origin::Url, "lease", "5s").unwrap();
        assert!(layer.read(Origin::Url, "lease", "5s").unwrap_err().to_string().contains("twice"));
    }
}
