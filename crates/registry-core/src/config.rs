//! Configuration of a backend from text: a store URL and named options. For authors of backends.
//!
//! A backend declares its options as [`OptionRow`]s and sets them by name. The crate
//! `lock-registry` adds the sources (URL, file, environment, command line), their precedence, and
//! suggestions for misspelt names. The tables in the book are generated from the rows.

// This file contains the rows. `value` parses values, `url` parses store URLs, and `pem` reads
// certificates and keys.

mod pem;
mod url;
mod value;

use std::borrow::Cow;
use std::collections::HashSet;
use std::error::Error as StdError;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::backend::LockBackend;
use crate::capabilities::Capabilities;
use crate::error::{BackendError, BackendErrorKind};
use crate::registry::RegistryBuilder;

pub use pem::{PemFiles, PemTexts};
pub use url::{Host, Login, UrlParts, display_host, is_host, is_well_encoded};
pub use value::{
    InvalidValue, Secret, format_time, parse_choice, parse_count, parse_path, parse_switch,
    parse_time,
};

/// One kind of store: its schemes, its options, and the parser of its URLs.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct StoreKind {
    /// The name of the store in messages and tables.
    pub name: &'static str,
    /// The store's options, in groups. Rows with the same name apply to different schemes.
    pub options: &'static [&'static [OptionRow]],
    /// Parses a URL, but not its query.
    pub parse: fn(&UrlParts<'_>) -> Result<Box<dyn BackendConfig>, BackendError>,
}

impl StoreKind {
    /// Creates the description of a store.
    #[must_use]
    pub const fn new(
        name: &'static str,
        options: &'static [&'static [OptionRow]],
        parse: fn(&UrlParts<'_>) -> Result<Box<dyn BackendConfig>, BackendError>,
    ) -> Self {
        Self { name, options, parse }
    }

    /// Returns all options.
    pub fn rows(&self) -> impl Iterator<Item = &'static OptionRow> + use<> {
        self.options.iter().copied().flatten()
    }

    /// Returns the option `name` of stores of `scheme`.
    #[must_use]
    pub fn option(&self, name: &str, scheme: &str) -> Option<&'static OptionRow> {
        self.rows().find(|row| row.name == name && row.applies_to(scheme))
    }
}

/// Opens the store of a configuration.
#[async_trait]
pub trait OpenBackend: fmt::Debug + Send + Sync {
    /// Opens the store. The configuration has been validated.
    ///
    /// # Errors
    /// [`BackendError`] with a hint.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connections that it opened.
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError>;
}

/// The configuration of one store, filled from text.
pub trait BackendConfig: OpenBackend {
    /// Returns the kind of store.
    fn kind(&self) -> &'static StoreKind;

    /// Returns the scheme of the store's URLs, which also names the store in errors.
    fn scheme(&self) -> &'static str;

    /// Sets an option to a value that its row accepts. Called by [`set`](Self::set).
    ///
    /// # Errors
    /// [`InvalidValue`] if the store does not have this option, or if the value violates a rule
    /// that the row does not contain.
    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue>;

    /// Checks all options together, without I/O.
    ///
    /// # Errors
    /// [`OptionError`] for the first problem.
    fn validate(&self) -> Result<(), OptionError>;

    /// Returns the capabilities of a store of this configuration, without I/O. A program can thus
    /// check the capabilities before it connects.
    ///
    /// The opened backend returns the same capabilities, unless the server has refused or limited a
    /// function.
    fn capabilities(&self) -> Capabilities;

    /// Returns the hosts of the URL with their ports. Empty for a store without a host.
    fn hosts(&self) -> Vec<Host> {
        Vec::new()
    }

    /// Returns the store's address for messages: `HOST:PORT,HOST:PORT` or a path. Empty for a store
    /// in this process. Contains no secret.
    fn address(&self) -> String {
        self.hosts().iter().map(display_host).collect::<Vec<_>>().join(",")
    }

    /// Returns the default poll interval of this store, if it differs from the engine's default.
    fn poll(&self) -> Option<Duration> {
        None
    }

    /// Returns whether a failed attempt to open the store may succeed later.
    fn is_remote(&self) -> bool {
        true
    }

    /// Sets the option `name` from text.
    ///
    /// # Errors
    /// [`OptionError`] if the store does not have this option, or does not accept the value. The
    /// error does not show the value, unless it is a time or a number.
    fn set(&mut self, name: &str, value: &str) -> Result<(), OptionError> {
        self.check_value(name, value)?;
        self.assign(name, value).map_err(|invalid| match self.kind().option(name, self.scheme()) {
            Some(row) => OptionError::new(row.name, invalid.to_string()),
            None => OptionError::general(invalid.to_string()),
        })
    }

    /// Checks that the store has the option `name`, and that its row accepts `value`.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    fn check_value(&self, name: &str, value: &str) -> Result<(), OptionError> {
        let scheme = self.scheme();
        match self.kind().option(name, scheme) {
            Some(row) => row
                .check(value, scheme)
                .map_err(|invalid| OptionError::new(row.name, invalid.to_string())),
            // The error does not show the name, which may be part of a password in a malformed URL.
            None => Err(OptionError::general(format!(
                "the store URL has an option that {scheme} stores do not have"
            ))),
        }
    }
}

/// Parses `url`, for `from_url` of a backend's configuration. Sets the options of the query that
/// are in `allowed`. Any other option is an error.
///
/// # Errors
/// `Misconfigured` for a URL that cannot be parsed or has an invalid option. The error does not
/// repeat the URL, which may contain a password.
pub fn from_url<C: BackendConfig>(
    url: &str,
    allowed: &[&str],
    parse: impl FnOnce(&UrlParts<'_>) -> Result<C, BackendError>,
) -> Result<C, BackendError> {
    let parts = UrlParts::split(url).ok_or_else(|| {
        let message = "the store URL does not start with a scheme";
        BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
    })?;
    parts.check()?;
    let mut config = parse(&parts)?;
    let mut names = HashSet::new();
    for (name, value) in parts.options()? {
        if !names.insert(name.clone()) {
            return Err(parts.invalid("sets an option twice; set it once"));
        }
        if !allowed.contains(&&*name) {
            return Err(parts
                .invalid("contains an option that it cannot set; check the name, or use a method of the configuration"));
        }
        let store = config.scheme();
        config.set(&name, value.expose()).map_err(|error| error.into_backend_error(store))?;
    }
    Ok(config)
}

/// One option of a store.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct OptionRow {
    /// The option's name in URLs and files. The environment variable is `LOCK_REGISTRY_` followed
    /// by the name in capital letters.
    pub name: &'static str,
    /// The accepted values.
    pub values: Values,
    /// The default, as Markdown text.
    pub default: &'static str,
    /// What the option does, as one line of Markdown text.
    pub help: &'static str,
    /// A description of the stores with this option. `None` if all stores of the kind have it.
    pub stores: Option<&'static str>,
    applies: fn(&str) -> bool,
}

/// The values of an option.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Values {
    /// A time with a unit, such as `30s`.
    Time {
        /// The minimum.
        min: Duration,
        /// The maximum.
        max: Duration,
    },
    /// `true` or `false`. `on` and `off` mean the same.
    Switch,
    /// A whole number.
    Count {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
    /// One of these names.
    Choice {
        /// The kind of these names, for messages.
        what: &'static str,
        /// The names.
        names: &'static [&'static str],
    },
    /// Text of at most this length.
    Text {
        /// The maximum number of bytes.
        bytes_max: usize,
    },
    /// The path of a file. Messages show the path unless it may be the contents of the file.
    Path,
    /// The path of a file. Messages never show the path, because a user may pass the contents.
    SecretPath,
    /// Text that messages never show, except `non_secret_values`.
    Secret {
        /// The values that are no secret.
        non_secret_values: &'static [&'static str],
        /// The syntax of other values, for tables.
        syntax: &'static str,
    },
}

impl OptionRow {
    /// The engine's lease, for stores that accept every lease.
    pub const LEASE: Self = Self::time(
        "lease",
        (Capabilities::LEASE_MIN, Capabilities::LEASE_MAX),
        "`30s`",
        "how long a key stays locked after its holder dies",
    );
    /// The engine's time-out.
    pub const TIMEOUT: Self = Self::time(
        "timeout",
        (RegistryBuilder::TIMEOUT_MIN, RegistryBuilder::TIMEOUT_MAX),
        "`3s`",
        "how long the store may take to respond to one operation",
    );
    /// The engine's poll interval.
    pub const POLL: Self = Self::time(
        "poll",
        (RegistryBuilder::POLL_MIN, RegistryBuilder::POLL_MAX),
        "`250ms`",
        "the pause between two attempts of a waiter, unless a notification ends it",
    );
    /// The time limit for connecting, with a default of 2 s.
    pub const CONNECT_TIMEOUT: Self = Self::time(
        "connect_timeout",
        (SERVER_TIME_MIN, RegistryBuilder::TIMEOUT_MAX),
        "`2s`",
        "the limit of one attempt to connect, and how long failed attempts are repeated",
    );

    /// Creates the row of `namespace` with this default.
    #[must_use]
    pub const fn namespace(default: &'static str) -> Self {
        let help = "locks in different namespaces are independent, even if their keys are equal";
        Self::new("namespace", Values::Text { bytes_max: 255 }, default, help)
    }

    /// Creates the row of `layout` with these layouts.
    #[must_use]
    pub const fn layout(names: &'static [&'static str]) -> Self {
        let help = "the format of the store's records: `native`, or that of a peer";
        Self::new("layout", Values::Choice { what: "layout", names }, "`native`", help)
    }

    /// Returns this row with another default.
    #[must_use]
    pub const fn with_default(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    /// Returns this row with another description.
    #[must_use]
    pub const fn with_help(self, help: &'static str) -> Self {
        Self { help, ..self }
    }

    /// Returns this row with another minimum, if its values are times. Otherwise returns it
    /// unchanged.
    #[must_use]
    pub const fn with_min(self, min: Duration) -> Self {
        match self.values {
            Values::Time { max, .. } => Self { values: Values::Time { min, max }, ..self },
            _ => self,
        }
    }

    /// Creates a row for `name`.
    #[must_use]
    pub const fn new(
        name: &'static str,
        values: Values,
        default: &'static str,
        help: &'static str,
    ) -> Self {
        Self { name, values, default, help, stores: None, applies: |_| true }
    }

    /// Creates a row for a time between `min` and `max`.
    #[must_use]
    pub const fn time(
        name: &'static str,
        (min, max): (Duration, Duration),
        default: &'static str,
        help: &'static str,
    ) -> Self {
        Self::new(name, Values::Time { min, max }, default, help)
    }

    /// Restricts the option to the schemes for which `applies` returns `true`. `stores` describes
    /// these stores in messages.
    #[must_use]
    pub const fn only(self, stores: &'static str, applies: fn(&str) -> bool) -> Self {
        Self { stores: Some(stores), applies, ..self }
    }

    /// Returns whether stores of `scheme` have this option.
    #[must_use]
    pub fn applies_to(&self, scheme: &str) -> bool {
        (self.applies)(scheme)
    }

    /// Checks the syntax of a value, but not its range.
    ///
    /// # Errors
    /// [`InvalidValue`], which does not show the value.
    pub fn check_syntax(&self, value: &str) -> Result<(), InvalidValue> {
        match self.values {
            Values::Time { .. } => parse_time(value).map(drop),
            Values::Switch => parse_switch(value).map(drop),
            Values::Count { .. } => parse_count(value).map(drop),
            Values::Choice { what, names } if !names.contains(&value) => {
                Err(InvalidValue::new(format!("is not a known {what}; {}", known_values(names))))
            }
            Values::Path | Values::SecretPath => parse_path(value).map(drop),
            Values::Choice { .. } | Values::Text { .. } | Values::Secret { .. } => Ok(()),
        }
    }

    /// Checks the syntax and the range of a value for a store of `scheme`.
    ///
    /// # Errors
    /// [`InvalidValue`] with the limit. The error shows the value only if it is a time or a number.
    pub fn check(&self, value: &str, scheme: &str) -> Result<(), InvalidValue> {
        match self.values {
            Values::Choice { names, .. } if !names.contains(&value) => {
                let supported = self.describe_supported(scheme);
                return Err(InvalidValue::new(format!("has an unsupported value; {supported}")));
            }
            _ => self.check_syntax(value)?,
        }
        let problem = match self.values {
            Values::Time { min, max } => {
                let given = parse_time(value)?;
                out_of_range(&given, &min, &max, |time| format_time(*time))
            }
            Values::Count { min, max } => {
                let given = parse_count(value)?;
                if min > 0 && !(min..=max).contains(&given) {
                    Some(format!("is {given}, not between {min} and {max}"))
                } else {
                    out_of_range(&given, &min, &max, u32::to_string)
                }
            }
            Values::Text { bytes_max } if value.len() > bytes_max => {
                Some(format!("has {} bytes, more than the maximum {bytes_max}", value.len()))
            }
            _ => None,
        };
        problem.map_or(Ok(()), |problem| Err(InvalidValue::new(problem)))
    }

    /// Returns the sentence `SCHEME stores support VALUES`, with the values of this option.
    #[must_use]
    pub fn describe_supported(&self, scheme: &str) -> String {
        let list = match self.values {
            Values::Choice { names: [only], .. } => format!("only `{only}`"),
            Values::Choice { names: [first @ .., last], .. } => {
                format!("{} and `{last}`", quoted_list(first))
            }
            _ => self.describe_values(),
        };
        format!("{scheme} stores support {list}")
    }

    /// Returns `value` for messages, with times and numbers in their usual format. Returns `None`
    /// if `value` may be a secret, or is not a valid time or number.
    #[must_use]
    pub fn non_secret_value(&self, value: &str) -> Option<String> {
        match self.values {
            Values::Time { .. } => parse_time(value).ok().map(format_time),
            Values::Count { .. } => parse_count(value).ok().map(|count| count.to_string()),
            Values::Secret { non_secret_values, .. } => {
                non_secret_values.contains(&value).then(|| value.to_owned())
            }
            Values::SecretPath => None,
            _ => Some(value.to_owned()),
        }
    }

    /// Returns whether a value of this option may be a secret.
    #[must_use]
    pub fn is_secret(&self) -> bool {
        matches!(self.values, Values::Secret { .. } | Values::SecretPath)
    }

    /// Describes the values as Markdown text.
    #[must_use]
    pub fn describe_values(&self) -> String {
        match self.values {
            Values::Time { min, max } => {
                // `366days` is easier to read than `1year 18h`.
                let days = max.as_secs() / DAY.as_secs();
                let max = if days > 1 { format!("{days}days") } else { format_time(max) };
                format!("`{}` to `{max}`", format_time(min))
            }
            Values::Switch => "`true`, `false`".to_owned(),
            Values::Count { max: u32::MAX, .. } => "a number".to_owned(),
            Values::Count { min, max } => format!("`{min}` to `{max}`"),
            Values::Choice { names, .. } => quoted_list(names),
            Values::Text { bytes_max: usize::MAX } => "text".to_owned(),
            Values::Text { bytes_max } => format!("at most {bytes_max} bytes"),
            Values::Path => "the path of a PEM file".to_owned(),
            Values::SecretPath => "the path of a PEM file; never shown".to_owned(),
            Values::Secret { non_secret_values: [], syntax } => format!("{syntax}; never shown"),
            Values::Secret { non_secret_values, syntax } => {
                format!("{}, or {syntax}, which is never shown", quoted_list(non_secret_values))
            }
        }
    }
}

/// The minimum of each time that is sent to a server. Servers often treat zero as no limit.
pub const SERVER_TIME_MIN: Duration = Duration::from_millis(10);
/// The maximum of times without another limit.
pub const TIME_MAX: Duration = Duration::from_secs(366 * DAY.as_secs());
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn out_of_range<T: PartialOrd>(
    given: &T,
    min: &T,
    max: &T,
    format: impl Fn(&T) -> String,
) -> Option<String> {
    if given < min {
        Some(format!("is {}, less than the minimum {}", format(given), format(min)))
    } else if given > max {
        Some(format!("is {}, more than the maximum {}", format(given), format(max)))
    } else {
        None
    }
}

fn known_values(names: &[&str]) -> String {
    format!("known values: {}", quoted_list(names))
}

fn quoted_list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The error of an invalid option, or of options that are invalid together. Contains no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionError {
    option: Option<&'static str>,
    problem: Cow<'static, str>,
}

impl OptionError {
    /// Creates the error for `option`. `problem` is a predicate: `is 1ms, less than …`.
    #[must_use]
    pub fn new(option: &'static str, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { option: Some(option), problem: problem.into() }
    }

    /// Checks a time that a method of the configuration sets.
    ///
    /// # Errors
    /// [`OptionError`] if the time is outside `limits`.
    pub fn check_time(
        option: &'static str,
        time: Duration,
        limits: &RangeInclusive<Duration>,
    ) -> Result<(), Self> {
        if limits.contains(&time) {
            return Ok(());
        }
        let [time, min, max] = [time, *limits.start(), *limits.end()].map(format_time);
        Err(Self::new(option, format!("is {time}, not between {min} and {max}")))
    }

    /// Checks that the text of an option is not empty. An empty namespace usually comes from an
    /// unset variable. If it were accepted, it would be a namespace of its own, not the default.
    ///
    /// # Errors
    /// [`OptionError`] if the text is empty.
    pub fn check_not_empty(option: &'static str, text: &str) -> Result<(), Self> {
        if text.is_empty() {
            return Err(Self::new(option, "is empty; leave it out for the default"));
        }
        Ok(())
    }

    /// Creates an error that names no option: of several options together, or of an unknown one.
    /// `problem` is a sentence.
    #[must_use]
    pub fn general(problem: impl Into<Cow<'static, str>>) -> Self {
        Self { option: None, problem: problem.into() }
    }

    /// Returns the option, if a single option causes the error.
    #[must_use]
    pub fn option(&self) -> Option<&'static str> {
        self.option
    }

    /// Returns the problem, without the option.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the error of opening a `store` with this configuration.
    #[must_use]
    pub fn into_backend_error(self, store: &str) -> BackendError {
        BackendError::new(BackendErrorKind::Misconfigured, format!("{store}: {self}")).as_refused()
    }
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.option {
            Some(option) => write!(f, "{option} {}", self.problem),
            None => f.write_str(&self.problem),
        }
    }
}

impl StdError for OptionError {}
