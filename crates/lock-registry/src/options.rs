//! This module declares the engine's options and finds every option by name. `Options` holds option
//! values as text. The precedence of the sources is in `config`.

use std::fmt;

use registry_core::config::{OptionRow, Secret, StoreKind, Values};
use registry_core::{ConfigError, LockOptions, RegistryBuilder};

use crate::config::{Layout, redact_url};
use crate::scheme;
use crate::suggestion::suggest;

/// The default rows of the options that all stores have. A store's own row of the same name
/// replaces the default row.
static DEFAULT_ROWS: &[OptionRow] = &[
    OptionRow::new(
        "url",
        Values::Secret { non_secret_values: &[], syntax: "the URL of a store" },
        "none: required",
        "the location of the lock store",
    ),
    OptionRow::namespace("none"),
    OptionRow::LEASE,
    OptionRow::new(
        "renew",
        Values::Switch,
        "`true`",
        "whether the lease of a held lock is renewed",
    ),
    OptionRow::POLL,
    OptionRow::new(
        "handoff",
        Values::Count { min: 0, max: RegistryBuilder::HANDOFF_MAX },
        "64 in the first 20 ms after the grant, then 32",
        "maximum consecutive hand-overs of a lock within this process; a grant reserves a token for each of them",
    ),
    OptionRow::new(
        "fair",
        Values::Switch,
        "`false`",
        "whether waiters of all processes get a lock in the order of their arrival",
    ),
    OptionRow::new(
        "waiters",
        Values::Switch,
        "`true`",
        "whether a waiter registers in the store after a second, so that it can be listed; no effect on ZooKeeper and etcd",
    ),
    OptionRow::TIMEOUT,
    OptionRow::new(
        "label",
        Values::Text { bytes_max: LockOptions::LABEL_BYTES_MAX },
        "none",
        "text shown to other clients that ask for the holder of a lock",
    ),
    OptionRow::layout(&Layout::NAMES),
];

/// Returns the default row of the option `name`. A store may replace this row.
pub(crate) fn default_row(name: &str) -> Option<&'static OptionRow> {
    DEFAULT_ROWS.iter().find(|row| row.name == name)
}

/// Returns the rows of all options: the default rows, then the rows of each store in the order of
/// the schemes. A name may have several rows.
fn all_rows() -> impl Iterator<Item = &'static OptionRow> {
    DEFAULT_ROWS.iter().chain(scheme::stores().flat_map(StoreKind::rows))
}

/// Returns any row of the option `name`. All rows of one name have the same value type.
fn any_row(name: &str) -> Option<&'static OptionRow> {
    all_rows().find(|row| row.name == name)
}

/// Returns whether a store of this build has the option `name`.
pub(crate) fn is_known(name: &str) -> bool {
    any_row(name).is_some()
}

/// Returns the names of all options, each once.
pub(crate) fn names() -> Vec<&'static str> {
    let mut names = Vec::new();
    for row in all_rows() {
        if !names.contains(&row.name) {
            names.push(row.name);
        }
    }
    names
}

/// The source of an option's value. The sources are ordered from strongest to weakest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// A method of [`RegistryConfig`](crate::RegistryConfig).
    Code,
    /// The program's command line, by
    /// [`RegistryConfig::with_argument`](crate::RegistryConfig::with_argument).
    CommandLine,
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
            Self::CommandLine => "the command line",
            Self::Environment => "the environment",
            Self::File => "the configuration file",
            Self::Url => "the store URL",
        })
    }
}

impl Origin {
    /// Returns the error for an option of this source. `problem` is a predicate, such as "is set
    /// twice".
    pub(crate) fn invalid_option(self, option: &str, problem: &str) -> ConfigError {
        let option = match self {
            Self::CommandLine => format!("--{}", option.replace('_', "-")),
            Self::Environment => variable(option),
            other => format!("option {option:?} in {other}"),
        };
        ConfigError::Invalid(format!("{option} {problem}"))
    }
}

/// Returns the environment variable that sets `option`.
pub(crate) fn variable(option: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", option.to_ascii_uppercase())
}

pub(crate) const VARIABLE_PREFIX: &str = "LOCK_REGISTRY_";

/// Option values as text, in the order in which they were set: those of one source, or the merged
/// result. [`Options::set`] checks
/// the syntax of a value. [`Options::replace`] checks nothing. The range depends on the store, so
/// `config` checks it later.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options(Vec<(&'static str, Secret)>);

impl Options {
    /// Returns the options and their values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, value)| (*name, value.expose()))
    }

    /// Returns the value of `option`.
    pub(crate) fn get(&self, option: &str) -> Option<&str> {
        self.iter().find(|(name, _)| *name == option).map(|(_, value)| value)
    }

    /// Sets an option without any check. A later call replaces the value.
    pub(crate) fn replace(&mut self, option: &'static str, value: impl Into<String>) {
        self.0.retain(|(name, _)| *name != option);
        self.0.push((option, Secret::new(value)));
    }

    /// Sets one option from the text of `origin`. A URL cannot contain the option `url`.
    pub(crate) fn set(
        &mut self,
        origin: Origin,
        name: &str,
        value: &str,
    ) -> Result<(), ConfigError> {
        match any_row(name) {
            Some(row) if !(origin == Origin::Url && row.name == "url") => {
                self.set_row(row, origin, value)
            }
            _ => Err(unknown_option(origin, name)),
        }
    }

    /// Sets one option from an environment variable, named with its prefix.
    #[cfg(feature = "config")]
    pub(crate) fn set_variable(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        // Names are case-sensitive, like the prefix: `LOCK_REGISTRY_lease` is unknown.
        match all_rows().find(|row| variable(row.name) == name) {
            Some(row) => self.set_row(row, Origin::Environment, value),
            None => Err(unknown_variable(name)),
        }
    }

    fn set_row(
        &mut self,
        row: &'static OptionRow,
        origin: Origin,
        value: &str,
    ) -> Result<(), ConfigError> {
        if self.get(row.name).is_some() {
            return Err(origin.invalid_option(row.name, "is set twice; set it once"));
        }
        if let Some(problem) = syntax_error(row, value) {
            let is_hidden = row.is_secret() || matches!(row.values, Values::Path);
            // A value in a URL may be part of a password that was not percent-encoded, so the error
            // hides it. A number is shown nevertheless: usually it is a time without a unit.
            let is_hidden = is_hidden || (origin == Origin::Url && value.parse::<f64>().is_err());
            let problem = if is_hidden {
                format!("has a value that {problem}")
            } else {
                format!("is {value:?}, which {problem}")
            };
            return Err(origin.invalid_option(row.name, &problem));
        }
        self.0.push((row.name, Secret::new(value)));
        Ok(())
    }
}

/// Returns the reason why `value` does not have the syntax of the option. For a misspelt value of a
/// choice, the text suggests the most similar value.
pub(crate) fn syntax_error(row: &OptionRow, value: &str) -> Option<String> {
    let problem = row.check_syntax(value).err()?.to_string();
    let Values::Choice { names, .. } = row.values else { return Some(problem) };
    let Some(nearest) = suggest(value, names.iter().copied()) else { return Some(problem) };
    Some(problem.replacen("; ", &format!("; did you mean `{nearest}`? "), 1))
}

/// Returns whether messages may show `value` of the option `name`.
pub(crate) fn is_safe_to_show(name: &str, value: &str) -> bool {
    // An invalid value without special characters may be the rest of a password. The syntax must
    // therefore be valid too.
    let is_plain = |c: char| c.is_alphanumeric() || "-._/ ".contains(c);
    any_row(name).is_some_and(|row| {
        !row.is_secret() && value.chars().all(is_plain) && row.check_syntax(value).is_ok()
    })
}

/// Returns the value of the option `name` without secrets.
pub(crate) fn redacted(name: &str, value: &str) -> String {
    match any_row(name) {
        _ if name == "url" => redact_url(value),
        Some(row) => row.non_secret_value(value).unwrap_or_else(|| REDACTED.to_owned()),
        None => REDACTED.to_owned(),
    }
}

/// The text that replaces a secret in output.
pub(crate) const REDACTED: &str = "***";

/// Returns a description of the stores that have the option `name`, for messages.
pub(crate) fn describe_stores_with(name: &str) -> String {
    // The primary schemes of the stores that have the option with all their schemes.
    let mut schemes = Vec::new();
    // The descriptions of the stores that have the option with some of their schemes.
    let mut descriptions = Vec::new();
    for store in scheme::stores() {
        for row in store.rows().filter(|row| row.name == name) {
            match row.stores {
                None => schemes.push(scheme::primary_scheme(store)),
                Some(part) if !descriptions.contains(&part.to_owned()) => {
                    descriptions.push(part.to_owned())
                }
                Some(_) => {}
            }
        }
    }
    if !schemes.is_empty() {
        descriptions.insert(0, format!("{} stores", joined_list(&schemes)));
    }
    joined_list(&descriptions)
}

/// Formats a list: `a, b and c`.
fn joined_list(items: &[impl AsRef<str>]) -> String {
    let items: Vec<&str> = items.iter().map(AsRef::as_ref).collect();
    match &*items {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => items.concat(),
    }
}

fn unknown_option(origin: Origin, name: &str) -> ConfigError {
    let names = names();
    let names = names.iter().copied().filter(|name| !(origin == Origin::Url && *name == "url"));
    let known = names.clone().collect::<Vec<_>>().join(", ");
    ConfigError::unknown(
        "option",
        printable_name(name),
        origin.to_string(),
        suggest(name, names),
        known,
    )
}

#[cfg(feature = "config")]
fn unknown_variable(name: &str) -> ConfigError {
    let known: Vec<String> = names().into_iter().map(variable).collect();
    // The names are compared without the prefix, which would make all names similar.
    let option = name.strip_prefix(VARIABLE_PREFIX).unwrap_or(name);
    let suggestion = suggest(option, names().into_iter()).map(variable);
    let source = Origin::Environment.to_string();
    ConfigError::unknown("variable", name, source, suggestion.as_deref(), known.join(", "))
}

/// Returns `name` if it looks like an option. Returns `(not shown)` for any other name, because it
/// may be part of an unescaped password.
fn printable_name(name: &str) -> &str {
    let is_plain =
        name.len() <= 40 && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    if is_plain { name } else { "(not shown)" }
}

/// One line of the table of options.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OptionDescription {
    /// The option's name in URLs and files.
    pub name: &'static str,
    /// The environment variable.
    pub variable: String,
    /// The stores to which this line applies. `all` means all stores without a line of their own
    /// for this option.
    pub stores: String,
    /// The default, as Markdown text.
    pub default: &'static str,
    /// The values, as Markdown text.
    pub values: String,
    /// What the option does, as Markdown text.
    pub help: &'static str,
}

/// Returns the options of all stores in this build. An option has several lines if its default, its
/// values or its help text depend on the store.
#[must_use]
pub fn describe_options() -> Vec<OptionDescription> {
    let mut lines: Vec<OptionDescription> = Vec::new();
    for name in names() {
        let start = lines.len();
        let mut add = |row: &'static OptionRow, stores: String| {
            let values = row.describe_values();
            let is_same = |line: &&mut OptionDescription| {
                line.default == row.default && line.values == values && line.help == row.help
            };
            match lines[start..].iter_mut().find(is_same) {
                Some(line) if line.stores == ALL || line.stores.contains(&stores) => {}
                Some(line) => line.stores = format!("{}, {stores}", line.stores),
                None => lines.push(OptionDescription {
                    name,
                    variable: variable(name),
                    stores,
                    default: row.default,
                    values,
                    help: row.help,
                }),
            }
        };
        let has_row = |store: &StoreKind| store.rows().any(|row| row.name == name);
        if let Some(row) = default_row(name)
            && !scheme::stores().all(has_row)
        {
            add(row, ALL.to_owned());
        }
        for store in scheme::stores() {
            for row in store.rows().filter(|row| row.name == name) {
                let stores = row.stores.map_or_else(
                    || scheme::primary_scheme(store),
                    |stores| stores.strip_suffix(" stores").unwrap_or(stores),
                );
                add(row, stores.to_owned());
            }
        }
    }
    lines
}

const ALL: &str = "all";

/// Returns a valid value of the option.
#[cfg(test)]
pub(crate) fn example_value(row: &OptionRow) -> String {
    match row.values {
        Values::Time { max, .. } => registry_core::config::format_time(max),
        Values::Switch => "true".to_owned(),
        Values::Count { min, .. } => min.to_string(),
        Values::Choice { names, .. } => names[0].to_owned(),
        Values::Secret { non_secret_values: [name, ..], .. } => (*name).to_owned(),
        _ => "/text".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(
        feature = "sqlite",
        feature = "postgres",
        feature = "mysql",
        feature = "redis",
        feature = "zk",
        feature = "etcd"
    ))]
    mod with_all_stores {
        use super::*;

        /// The options whose values are secret, or contain secrets, in some store.
        const SECRETS: &[&str] =
            &["sentinel_user", "sentinel_password", "key", "listen", "acl", "auth"];

        #[test]
        fn every_option_is_parsed_and_formatted() {
            let is_shown = |name: &&str| *name != "url" && !SECRETS.contains(name);
            for name in names().into_iter().filter(is_shown) {
                let value = example_value(any_row(name).unwrap());
                let mut options = Options::default();
                options.set(Origin::Url, name, &value).unwrap();
                assert_eq!(redacted(name, options.get(name).unwrap()), value, "{name}");
            }
            for (name, value) in [("label", "nightly ünïcode"), ("lease", "1m 30s")] {
                let mut options = Options::default();
                options.set(Origin::Url, name, value).unwrap();
                assert_eq!(redacted(name, options.get(name).unwrap()), value);
            }
        }

        #[test]
        fn a_secret_option_is_never_shown() {
            for &name in SECRETS {
                let mut options = Options::default();
                options.set(Origin::File, name, "canary").unwrap();
                assert_eq!(redacted(name, options.get(name).unwrap()), REDACTED);
                let again = options.set(Origin::File, name, "canary").unwrap_err();
                let output = format!("{options:?} {options:#?} {again} {again:?}");
                assert!(!output.contains("canary") && !is_safe_to_show(name, "canary"), "{output}");
            }
            for name in ["ca", "cert", "key"] {
                let error =
                    Options::default().set(Origin::File, name, "-----BEGIN\ncanary").unwrap_err();
                assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
            }
        }
    }

    #[test]
    fn an_invalid_value_is_quoted_unless_a_url_contains_it() {
        for name in ["lease", "renew", "handoff", "layout"] {
            let message = |origin, value| {
                Options::default().set(origin, name, value).unwrap_err().to_string()
            };
            assert!(!message(Origin::Url, "secret").contains("secret"));
            assert!(message(Origin::File, "secret").contains("is \"secret\", which is not a "));
            assert!(message(Origin::Url, "1.5").contains("is \"1.5\", which "));
        }
    }

    #[test]
    fn an_error_about_an_unknown_name_suggests_the_most_similar_name() {
        let unknown = |origin, name| match Options::default().set(origin, name, "1s").unwrap_err() {
            ConfigError::Unknown { given, nearest, .. } => (given, nearest.unwrap_or_default()),
            other => panic!("{other:?}"),
        };
        assert_eq!(unknown(Origin::Url, "leese"), ("leese".to_owned(), "lease".to_owned()));
        assert_eq!(unknown(Origin::File, "pol"), ("pol".to_owned(), "poll".to_owned()));
        assert_eq!(unknown(Origin::Url, "x@y z").0, "(not shown)");
        assert!(Options::default().set(Origin::Url, "url", "memory:").is_err());
    }

    #[test]
    fn an_option_that_is_set_twice_is_refused() {
        let mut options = Options::default();
        options.set(Origin::Url, "lease", "5s").unwrap();
        assert!(options.set(Origin::Url, "lease", "5s").unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn all_rows_of_a_name_have_the_same_value_type() {
        for row in all_rows() {
            let first = any_row(row.name).unwrap();
            let value_type = |row: &OptionRow| std::mem::discriminant(&row.values);
            assert_eq!(value_type(row), value_type(first), "{}", row.name);
            let Values::Choice { names, .. } = row.values else { continue };
            for name in names {
                assert!(first.check_syntax(name).is_ok(), "{} {name}", row.name);
            }
        }
    }
}
