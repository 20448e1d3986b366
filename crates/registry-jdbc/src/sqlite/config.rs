//! Configuration of a SQLite store. `SqliteBackend::open` validates it, and checks the path.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, InvalidValue, OptionError, OptionRow, StoreKind, TIME_MAX, UrlParts,
    parse_time,
};
use registry_core::{BackendError, Capabilities, GuaranteeClass, Reach, RegistryBuilder};

/// SQLite.
pub static STORE: StoreKind = StoreKind::new("sqlite", &[OPTIONS], |url| {
    SqliteConfig::parse(url).map(|config| Box::new(config) as Box<dyn BackendConfig>)
});

/// The options, in the order of the tables in the book. `SqliteConfig::assign` sets their fields.
const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`default`"),
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native"]),
    OptionRow::time(
        "busy_timeout",
        (Duration::ZERO, RegistryBuilder::TIMEOUT_MAX),
        "`2.5s`, or five sixths of `timeout` if that is shorter",
        "how long a statement is retried while another process writes to the file",
    ),
    OptionRow::time(
        "purge_after",
        (Duration::ZERO, TIME_MAX),
        "`1h`",
        "how long rows of free keys are kept",
    ),
];

/// The location and the time limits of a [`SqliteBackend`](crate::SqliteBackend).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteConfig {
    /// The database file. It is created if it does not exist. Its folder must exist.
    pub path: PathBuf,
    /// The namespace of the locks. Equal keys in different namespaces are different locks. Default:
    /// `default`.
    pub namespace: String,
    /// How long a statement is retried while another process writes to the file. After this time
    /// the statement returns a retryable error. Default: 2.5 s, which is below the engine's own
    /// time-out.
    pub busy_timeout: Duration,
    /// How long a key must have been free before its row may be deleted. Default: one hour.
    pub purge_after: Duration,
    /// The `busy_timeout` that an option or a method has set. It has precedence over the limit that
    /// follows from `timeout`.
    explicit_busy_timeout: Option<Duration>,
    timeout: Option<Duration>,
}

impl SqliteConfig {
    /// Returns a configuration for the file at `path`, with the namespace `default`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            namespace: "default".to_owned(),
            busy_timeout: BUSY_TIMEOUT,
            purge_after: Duration::from_secs(60 * 60),
            explicit_busy_timeout: None,
            timeout: None,
        }
    }

    /// Parses `sqlite:PATH` or `sqlite:///PATH`.
    ///
    /// # Errors
    /// `Misconfigured` if the URL is invalid or contains an option. The error does not contain the
    /// URL, because a URL may contain a password by mistake.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        if url.scheme != "sqlite" {
            return Err(url.invalid("has no SQLite scheme; write `sqlite:PATH`"));
        }
        if url.authority.is_some_and(|authority| !authority.is_empty()) {
            return Err(url.invalid(
                "contains a host or a user after `//`; write `sqlite:PATH` for a relative path, `sqlite:///PATH` for an absolute path",
            ));
        }
        if url.path == ":memory:" {
            return Err(url.invalid(
                "does not contain a file path; for a store within this process write `memory:`",
            ));
        }
        Ok(Self::new(url.file_path(url.path, "write `sqlite:PATH`")?))
    }

    /// Sets [`namespace`](Self::namespace).
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets [`busy_timeout`](Self::busy_timeout).
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self.explicit_busy_timeout = Some(busy_timeout);
        self
    }

    /// Sets [`purge_after`](Self::purge_after).
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// Returns the path of the database file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl BackendConfig for SqliteConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        "sqlite"
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = value.to_owned(),
            "timeout" => self.timeout = Some(parse_time(value)?),
            "layout" => {}
            "busy_timeout" => self.explicit_busy_timeout = Some(parse_time(value)?),
            "purge_after" => self.purge_after = parse_time(value)?,
            _ => return Err(InvalidValue::unknown_option()),
        }
        match (self.explicit_busy_timeout, self.timeout) {
            (Some(busy_timeout), _) => self.busy_timeout = busy_timeout,
            // The engine ignores the result of a statement that takes longer than its time-out.
            (None, Some(timeout)) => {
                self.busy_timeout = BUSY_TIMEOUT.min(timeout.saturating_mul(5) / 6)
            }
            (None, None) => {}
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        OptionError::check_not_empty("namespace", &self.namespace)?;
        self.check_value("namespace", &self.namespace)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("sqlite", GuaranteeClass::Durable, Reach::Host)
            .with_fencing()
            .with_wakes()
            .with_labels()
            .with_inspect()
            .with_shared()
            .with_upgradable()
            .with_permits()
            .with_values()
            .with_waiters()
            .with_fair_on_request()
    }

    fn address(&self) -> String {
        self.path.display().to_string()
    }

    fn is_remote(&self) -> bool {
        false
    }
}

const BUSY_TIMEOUT: Duration = Duration::from_millis(2_500);

// Implemented manually, so that a secret field added later is not printed by default.
impl fmt::Debug for SqliteConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteConfig")
            .field("path", &self.path)
            .field("namespace", &self.namespace)
            .field("busy_timeout", &self.busy_timeout)
            .field("purge_after", &self.purge_after)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sqlite_path_is_not_normalised() {
        for (url, path) in [
            ("sqlite:locks.db", "locks.db"),
            ("sqlite:./a/../locks.db", "./a/../locks.db"),
            ("sqlite:/var/lib/locks.db", "/var/lib/locks.db"),
            ("sqlite:///var/lib/locks.db", "/var/lib/locks.db"),
            ("SQLite:locks.db", "locks.db"),
            ("sqlite:with%20space%3F%23%25.db", "with space?#%.db"),
            ("sqlite:me@home:1.db", "me@home:1.db"),
            ("sqlite:a+b c.db", "a+b c.db"),
        ] {
            assert_eq!(SqliteConfig::from_url(url).unwrap().path, Path::new(path), "{url}");
        }
    }

    #[test]
    fn a_busy_timeout_has_precedence_over_the_limit_that_follows_from_a_time_limit() {
        let seconds = Duration::from_secs;
        let mut config = SqliteConfig::from_url("sqlite:locks.db").unwrap();
        config.assign("timeout", "1200ms").unwrap();
        assert_eq!(config.busy_timeout, seconds(1));
        let mut config = config.with_busy_timeout(seconds(2));
        config.assign("timeout", "1200ms").unwrap();
        assert_eq!(config.busy_timeout, seconds(2));
    }

    #[test]
    fn an_error_about_a_sqlite_url_without_a_file_contains_a_hint() {
        for (url, hint) in [
            ("sqlite:", "has no path"),
            ("sqlite:///", "ends in `/`"),
            ("sqlite:folder/", "ends in `/`"),
            ("sqlite://relative/locks.db", "sqlite:PATH"),
            ("sqlite::memory:", "write `memory:`"),
            ("sqlite:a%00b", "NUL"),
            ("sqlite:100%.db", "`%25`"),
            ("sqlite:a#b", "`%23`"),
            ("sqlite:a\nb", "control character"),
            ("sqlite:a?lease", "name=value"),
        ] {
            let error = SqliteConfig::from_url(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url:?}: {error}");
        }
    }
}
