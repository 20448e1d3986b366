//! The configuration of a registry from a URL, a file, the environment and code.

// This file merges the options of all sources by precedence. `options` declares the options,
// `store_url` parses URLs, and `connect` opens the registry.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use registry_core::config::{BackendConfig, OptionError, Values, format_time, parse_time};
use registry_core::{Capabilities, ConfigError, Observer, Registry};

use crate::connect;
use crate::options::{self, Options};
use crate::scheme;
use crate::store_url::StoreUrl;

pub use crate::layout::Layout;
pub use crate::options::{OptionDescription, Origin, describe_options};
pub use crate::redact::redact_url;
pub use crate::scheme::describe_schemes;
pub use registry_core::InvalidOption;

/// The configuration of a registry: its lock store and options, merged from several sources.
///
/// If several sources set an option, the strongest source wins. From strongest to weakest:
/// - methods of this type,
/// - the command line ([`with_argument`](Self::with_argument)),
/// - `LOCK_REGISTRY_*` variables,
/// - the configuration file,
/// - the query of the store URL,
/// - the default.
///
/// The URL of the strongest source is used. Other URLs are ignored, with their queries.
///
/// # Options
#[doc = include_str!("options.md")]
///
/// Every option has the same name and syntax in each source: `lease=30s` in a URL, `lease = "30s"`
/// in TOML, `LOCK_REGISTRY_LEASE=30s` in the environment. An unknown name is an error in every
/// source.
///
/// `Debug` and errors never show a user name, a password or a URL that cannot be parsed.
///
/// # Examples
/// ```
/// # use std::time::Duration;
/// # use lock_registry::{LockRegistry, RegistryConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let registry = RegistryConfig::from_url("memory:?lease=10s&poll=1s")?
///     .lease(Duration::from_secs(20))
///     .connect()
///     .await?;
/// let guard = registry.obtain("orders/42").lock().await?;
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
#[must_use = "a configuration does nothing until it is connected"]
pub struct RegistryConfig {
    code: Options,
    command_line: Options,
    environment: Options,
    file: Options,
    observers: Vec<Arc<dyn Observer>>,
    #[cfg(feature = "metrics")]
    metric_names: registry_core::observe::KeyNames,
    connect_within: Option<Duration>,
    /// The first error of a deserialized section, which `check` returns. A deserializer's own error
    /// would quote the surrounding text, which may contain a password.
    #[cfg(feature = "config")]
    pub(crate) deferred_error: Option<ConfigError>,
}

impl RegistryConfig {
    /// The maximum length of a namespace in bytes.
    pub const NAMESPACE_BYTES_MAX: usize = 255;

    /// Returns a configuration without any option.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a configuration with this store URL. The options in its query are weaker than the
    /// options of any other source.
    ///
    /// # Errors
    /// [`ConfigError`] if the URL or an option in its query is invalid, or if its store is not
    /// built in.
    pub fn from_url(url: &str) -> Result<Self, ConfigError> {
        let config = Self::new().url(url);
        config.check()?;
        Ok(config)
    }

    /// Sets the store URL. [`check`](Self::check) and [`connect`](Self::connect) parse the URL.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.code.replace("url", url);
        self
    }

    /// Sets the namespace. Locks in different namespaces of a store are independent.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.code.replace("namespace", namespace);
        self
    }

    /// Sets the time for which a key stays locked after its holder dies.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.code.replace("lease", format_time(lease));
        self
    }

    /// Sets whether the leases of held locks are renewed.
    pub fn renew(mut self, renew: bool) -> Self {
        self.code.replace("renew", renew.to_string());
        self
    }

    /// Sets whether waiters of all processes get a lock in the order of their arrival.
    pub fn fair(mut self, fair: bool) -> Self {
        self.code.replace("fair", fair.to_string());
        self
    }

    /// Sets whether a waiter registers in the store after a second, so that it can be listed.
    pub fn waiters(mut self, register: bool) -> Self {
        self.code.replace("waiters", register.to_string());
        self
    }

    /// Sets the pause between two attempts of a waiter. A wake-up ends the pause early. In a store
    /// that confirms its wake-ups, the pause grows with the length of the wait.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.code.replace("poll", format_time(poll));
        self
    }

    /// Sets the maximum number of consecutive hand-overs of a lock within this process. Zero
    /// disables hand-over.
    pub fn handoff(mut self, handoff: u32) -> Self {
        self.code.replace("handoff", handoff.to_string());
        self
    }

    /// Sets the time limit for the store's response to one operation.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.code.replace("timeout", format_time(timeout));
        self
    }

    /// Sets the text that other clients see as the holder of a lock. The text must not contain a
    /// secret.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.code.replace("label", label);
        self
    }

    /// Sets the format of the store's records.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.code.replace("layout", layout.to_string());
        self
    }

    /// Sets one option from text of the program's command line. Errors show the option as a flag,
    /// with `-` in place of `_`: `connect_timeout` is `--connect-timeout`.
    ///
    /// # Errors
    /// [`ConfigError`] if the option `name` does not exist, if this method has already set it, or
    /// if `value` does not have its syntax. [`check`](Self::check) also verifies the range.
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let error = RegistryConfig::new().with_argument("lease", "30").unwrap_err();
    /// assert!(error.to_string().starts_with("--lease is \"30\", which has no unit"));
    /// ```
    pub fn with_argument(mut self, name: &str, value: &str) -> Result<Self, ConfigError> {
        self.command_line.set(Origin::CommandLine, name, value)?;
        Ok(self)
    }

    /// Sets the time for which [`connect`](Self::connect) repeats failed connection attempts. This
    /// time replaces the option `connect_timeout`, which still limits each single attempt.
    pub fn connect_within(mut self, limit: Duration) -> Self {
        self.connect_within = Some(limit);
        self
    }

    /// Adds an observer, which receives the events of the registry.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Sets how the label `name` of the metrics is derived from keys.
    #[cfg(feature = "metrics")]
    pub fn metric_names(mut self, names: registry_core::observe::KeyNames) -> Self {
        self.metric_names = names;
        self
    }

    /// Validates the URL, every value and every name, without I/O.
    ///
    /// Some problems are found only by [`connect`](Self::connect): a lease outside the limits of a
    /// server, and `fair` in a store that has no queue.
    ///
    /// # Errors
    /// [`ConfigError`] for the first problem found.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.resolve().map(drop)
    }

    /// Returns the capabilities of the store of this configuration, without I/O.
    ///
    /// The opened store has the same capabilities, unless its server refuses or limits a function.
    /// For example, ZooKeeper servers limit the length of sessions, and thus of leases.
    ///
    /// # Errors
    /// As [`RegistryConfig::check`].
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let config = RegistryConfig::from_url("memory:")?;
    /// assert!(config.capabilities()?.fencing);
    /// # Ok::<(), lock_registry::ConfigError>(())
    /// ```
    pub fn capabilities(&self) -> Result<Capabilities, ConfigError> {
        Ok(self.resolve()?.store.capabilities())
    }

    /// Validates the configuration, and then opens the store.
    ///
    /// If the store is a server, repeats an attempt that fails with a transient error, such as a
    /// refused connection, an unresolved name or a starting server. The pause doubles with each
    /// attempt, up to one second. The repetition ends after `connect_timeout`, or after the time
    /// that [`connect_within`](Self::connect_within) sets. Any other error, such as a wrong
    /// password, is returned at once.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is invalid or the store cannot be opened.
    /// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled.
    ///
    /// # Cancel safety
    /// Dropping the future closes all connections opened so far. A database file that was created
    /// remains.
    pub async fn connect(self) -> Result<Registry, ConfigError> {
        let resolved = self.resolve()?;
        connect::open(
            resolved,
            self.observers,
            self.connect_within,
            #[cfg(feature = "metrics")]
            self.metric_names,
        )
        .await
    }

    /// Returns the options that are set, each with its strongest source. The result contains no
    /// secrets. [`redact_url`] redacts the URL.
    ///
    /// # Errors
    /// As [`RegistryConfig::check`].
    pub fn settings(&self) -> Result<Vec<Setting>, ConfigError> {
        self.resolve()?;
        let sources = self.options_by_source()?;
        let settings = options::names().into_iter().filter_map(|name| {
            let (origin, value) = strongest_value(&sources, name)?;
            Some(Setting { name, value: options::redacted(name, value), origin })
        });
        Ok(settings.collect())
    }

    /// Returns the options of each source, strongest first.
    fn options_by_source(&self) -> Result<[(Origin, Options); 5], ConfigError> {
        let mut url = Options::default();
        if let Some(text) = self.selected_url() {
            for (name, value) in StoreUrl::parse(text)?.options {
                url.set(Origin::Url, &name, value.expose())?;
            }
        }
        Ok([
            (Origin::Code, self.code.clone()),
            (Origin::CommandLine, self.command_line.clone()),
            (Origin::Environment, self.environment.clone()),
            (Origin::File, self.file.clone()),
            (Origin::Url, url),
        ])
    }

    fn selected_url(&self) -> Option<&str> {
        [&self.code, &self.command_line, &self.environment, &self.file]
            .into_iter()
            .find_map(|options| options.get("url"))
    }

    /// Validates the configuration, and applies the options of all sources to that of the store.
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        #[cfg(feature = "config")]
        if let Some(error) = &self.deferred_error {
            return Err(error.clone());
        }
        let Some(url) = self.selected_url() else {
            return Err(ConfigError::Invalid(format!(
                "no store URL is set; set `url`, for example to `sqlite:PATH`; known schemes: {}",
                scheme::list_of_schemes()
            )));
        };
        let store = StoreUrl::parse(url)?.store;
        let sources = self.options_by_source()?;
        Resolved::new(store, &sources)
    }

    /// Returns the options of a source that is read from text.
    #[cfg(feature = "config")]
    pub(crate) fn options_mut(&mut self, origin: Origin) -> &mut Options {
        match origin {
            Origin::Environment => &mut self.environment,
            Origin::File => &mut self.file,
            Origin::CommandLine => &mut self.command_line,
            Origin::Code | Origin::Url => &mut self.code,
        }
    }
}

impl fmt::Debug for RegistryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sources = [
            (Origin::Code, &self.code),
            (Origin::CommandLine, &self.command_line),
            (Origin::Environment, &self.environment),
            (Origin::File, &self.file),
        ];
        let mut debug = f.debug_map();
        for name in options::names() {
            for (origin, options) in sources {
                if let Some(value) = options.get(name) {
                    let value = options::redacted(name, value);
                    debug.entry(&format_args!("{name} ({origin})"), &value);
                }
            }
        }
        debug.finish()
    }
}

/// One option that is set: its value as text, and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setting {
    /// The option's name.
    pub name: &'static str,
    /// The option's value, without secrets.
    pub value: String,
    /// The strongest source of the option.
    pub origin: Origin,
}

/// A validated configuration.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) store: Box<dyn BackendConfig>,
    /// The merged options of all sources. An absent option has the default of the store or the
    /// engine.
    pub(crate) options: Options,
}

impl Resolved {
    /// Sets the options of all sources in `store`, and validates the result. The first source in
    /// `sources` is the strongest. Its options are set last, so that they replace other values.
    fn new(
        mut store: Box<dyn BackendConfig>,
        sources: &[(Origin, Options)],
    ) -> Result<Self, ConfigError> {
        let mut merged = Options::default();
        for (origin, source) in sources.iter().rev() {
            for (name, value) in source.iter().filter(|(name, _)| *name != "url") {
                check_and_set(&mut *store, *origin, name, value)?;
                merged.replace(name, value);
            }
        }
        store.validate().map_err(|error| {
            let option = error.option();
            match option.and_then(|option| Some((option, strongest_value(sources, option)?))) {
                Some((option, (origin, _))) => origin.invalid_option(option, error.problem()),
                None => general_error(&*store, error),
            }
        })?;
        Ok(Self { store, options: merged })
    }
}

/// Returns the strongest source of `option`, and the value in this source.
fn strongest_value<'a>(
    sources: &'a [(Origin, Options)],
    option: &str,
) -> Option<(Origin, &'a str)> {
    sources.iter().find_map(|(origin, options)| Some((*origin, options.get(option)?)))
}

/// Checks one option. Sets it in `store` if the store has a row for it. Any other option must be an
/// engine option, which `connect::open` passes to the registry builder.
fn check_and_set(
    store: &mut dyn BackendConfig,
    origin: Origin,
    name: &str,
    value: &str,
) -> Result<(), ConfigError> {
    let scheme = store.scheme();
    let Some(row) = store.kind().option(name, scheme) else {
        let Some(row) = options::default_row(name) else {
            let stores = options::describe_stores_with(name);
            let problem = format!("is an option of {stores}; the store is {scheme}");
            return Err(origin.invalid_option(name, &problem));
        };
        let checked = row.check(value, scheme);
        return checked.map_err(|problem| origin.invalid_option(name, &problem.to_string()));
    };
    if let (Values::Choice { .. }, Err(_)) = (row.values, row.check_syntax(value)) {
        // The value exists for another store, so it is no secret.
        let problem = format!("is {value}; {}", row.describe_supported(scheme));
        return Err(origin.invalid_option(name, &problem));
    }
    store.set(name, value).map_err(|error| origin.invalid_option(name, error.problem()))
}

/// Returns the error for a problem that no single option of a source causes.
fn general_error(store: &dyn BackendConfig, error: OptionError) -> ConfigError {
    ConfigError::Invalid(error.into_backend_error(store.kind().name).to_string())
}

/// Parses a time such as `30s`, `1500ms` or `1m 30s`. All sources of options use this format.
///
/// # Errors
/// [`ConfigError::Invalid`] if the text has no unit, is negative or is not a time. Only `0` needs
/// no unit.
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
    parse_time(text).map_err(|problem| ConfigError::Invalid(format!("the time {text:?} {problem}")))
}

#[cfg(all(
    test,
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "redis-tls",
    feature = "zk-tls",
    feature = "etcd-tls"
))]
mod tests {
    use super::*;

    /// Returns the error for these options of a store of `scheme`.
    fn problem_in(origin: Origin, scheme: &str, values: &[(&str, &str)]) -> Option<String> {
        let address = match scheme {
            "memory" | "pass-through" => "",
            "sqlite" => "locks.db",
            "postgres" | "mysql" => "//h/db",
            _ if scheme.ends_with("+unix") => "///run/redis.sock",
            _ if scheme.ends_with("+sentinel") => "//h/main",
            _ if scheme.ends_with("+quorum") => "//a,b,c",
            _ => "//h",
        };
        let url = StoreUrl::parse(&format!("{scheme}:{address}"));
        let store = url.expect("the address has the syntax of the scheme").store;
        let mut options = Options::default();
        let set = values.iter().try_for_each(|(name, value)| options.set(origin, name, value));
        let resolved = set.and_then(|()| Resolved::new(store, &[(origin, options)]));
        resolved.err().map(|error| error.to_string())
    }

    /// Returns the error for these options in a store URL.
    fn problem(scheme: &str, values: &[(&str, &str)]) -> Option<String> {
        problem_in(Origin::Url, scheme, values)
    }

    const REDIS: [&str; 9] = [
        "redis",
        "rediss",
        "redis+unix",
        "redis+sentinel",
        "rediss+sentinel",
        "redis+cluster",
        "rediss+cluster",
        "redis+quorum",
        "rediss+quorum",
    ];

    #[test]
    fn an_option_of_another_store_is_refused() {
        let set = |store| problem_in(Origin::Environment, store, &[("purge_after", "1h")]);
        assert_eq!(set("sqlite"), None);
        let error = set("memory").unwrap();
        assert_eq!(
            error,
            "LOCK_REGISTRY_PURGE_AFTER is an option of sqlite, postgres and mysql stores; the store is memory"
        );
    }

    #[test]
    fn a_redis_option_is_accepted_by_the_setups_that_support_it() {
        type IsSupported = fn(&str) -> bool;
        let is_no_quorum = |store: &str| !store.ends_with("+quorum");
        let rows: [(&str, &str, IsSupported); 13] = [
            ("connect_timeout", "500ms", |_| true),
            ("token_memory", "2days", |_| true),
            ("publish", "sharded", |_| true),
            ("layout", "native", |_| true),
            ("layout", "spring", is_no_quorum),
            ("layout", "redisson", is_no_quorum),
            ("replicas", "1", is_no_quorum),
            ("fsync", "true", is_no_quorum),
            ("replica_timeout", "1s", is_no_quorum),
            ("restart_guard", "30s", |store| store.ends_with("+quorum")),
            ("db", "1", |store| store.ends_with("+unix")),
            ("sentinel_password", "x", |store| store.ends_with("+sentinel")),
            ("ca", "ca.pem", |store| store.starts_with("rediss")),
        ];
        for (option, value, is_supported) in rows {
            for store in REDIS {
                let problem = problem(store, &[(option, value)]);
                assert_eq!(
                    problem.is_none(),
                    is_supported(store),
                    "{option} of {store}: {problem:?}"
                );
                assert!(problem.is_none_or(|problem| problem.contains(store)));
            }
            for store in ["sqlite", "memory", "pass-through"] {
                let problem = problem(store, &[(option, value)]);
                assert_eq!(problem.is_none(), (option, value) == ("layout", "native"), "{option}");
            }
        }
    }

    #[test]
    fn redis_options_have_limits() {
        for (option, value, hint) in [
            ("connect_timeout", "1ms", "less than the minimum 10ms"),
            ("connect_timeout", "2h", "more than the maximum 1h"),
            ("token_memory", "0s", "less than the minimum 10ms"),
            ("token_memory", "2years", "more than the maximum"),
            ("replica_timeout", "1ms", "less than the minimum 10ms"),
            ("replica_timeout", "3s", "not less than the `timeout` 3s"),
            ("namespace", "", "is empty"),
            ("replicas", "some", "whole number"),
            ("fsync", "yes", "`true` or `false`"),
            (
                "layout",
                "redison",
                "did you mean `redisson`? known values: `native`, `spring`, `redisson`, `curator`, `etcdctl`",
            ),
            (
                "publish",
                "sharp",
                "did you mean `sharded`? known values: `auto`, `plain`, `sharded`",
            ),
            ("cert", "a.pem", "without `key`"),
            ("key", "a.pem", "without `cert`"),
            ("ca", "", "is empty"),
            ("ca", "-----BEGIN CERTIFICATE-----", "to a file"),
            ("key", "MII\nMII", "to a file"),
        ] {
            let error = problem("rediss", &[(option, value)]).unwrap();
            assert!(error.contains(hint) && error.contains(option), "{option}={value}: {error}");
        }
        assert!(problem("redis+quorum", &[("restart_guard", "2years")]).is_some());
        assert!(problem("redis+sentinel", &[("sentinel_user", "x")]).is_some());
    }

    #[test]
    fn a_database_option_is_accepted_by_the_databases_that_support_it() {
        for (option, value, others) in [
            ("pool", "8", &["mysql"][..]),
            ("mode", "session", &["mysql"]),
            ("schema", "locks", &[]),
            ("table_prefix", "locks", &["mysql"]),
            ("create_schema", "false", &["mysql"]),
            ("layout", "spring", &["mysql", "redis", "rediss", "rediss+cluster"]),
            ("prepared", "false", &[]),
            ("listen", "off", &[]),
            ("sslmode", "require", &["mysql"]),
            ("busy_timeout", "1s", &["sqlite", "mysql"]),
            ("purge_after", "1h", &["sqlite", "mysql"]),
            ("connect_timeout", "1s", &["redis", "rediss+cluster", "mysql"]),
            ("ca", "ca.pem", &["rediss", "mysql"]),
        ] {
            for store in
                ["postgres", "mysql", "sqlite", "redis", "rediss", "rediss+cluster", "memory"]
            {
                let is_supported = store == "postgres" || others.contains(&store);
                let encrypted = option == "ca" && store.starts_with("rediss");
                let connects = option == "connect_timeout" && store.starts_with("redis");
                let problem = problem(store, &[(option, value)]);
                assert_eq!(
                    problem.is_none(),
                    is_supported || encrypted || connects,
                    "{option} of {store}"
                );
            }
        }
        for (option, value, hint) in [
            ("layout", "redisson", "support `native` and `spring`"),
            ("region", "EU", "without `layout=spring`"),
            ("spring", "v8", "`v6`, `v7`"),
            ("pool", "0", "between 1 and"),
            ("row_locks", "0", "between 1 and"),
            ("mode", "rows", "did you mean `row`?"),
            ("busy_timeout", "0s", "less than the minimum 10ms"),
            ("mode", "sesion", "did you mean `session`?"),
            ("sslmode", "verify", "did you mean `verify-ca`?"),
            ("listen", "redis://h", "is neither `off` nor a URL"),
            ("listen", "postgres://user@h", "is neither `off` nor a URL"),
            ("listen", "postgres://h/db?lease=1s", "is neither `off` nor a URL"),
            ("cert", "a.pem", "without `key`"),
        ] {
            let error = problem("postgres", &[(option, value)]).unwrap();
            assert!(error.contains(hint) && error.contains(option), "{option}={value}: {error}");
        }
    }

    #[test]
    fn the_option_sessions_accepts_1_to_32() {
        for store in ["zk", "zks"] {
            let ca = [("ca", "a.pem")];
            let ca = if store == "zks" { &ca[..] } else { &[] };
            for valid in ["1", "8", "32"] {
                assert_eq!(problem(store, &[ca, &[("sessions", valid)]].concat()), None);
            }
            for invalid in ["0", "33"] {
                let error = problem(store, &[("sessions", invalid)]).unwrap();
                assert!(error.contains("sessions") && error.contains("1 and 32"), "{error}");
            }
        }
        assert!(problem("etcd", &[("sessions", "2")]).unwrap().contains("zk stores"));
    }

    #[test]
    fn an_etcd_option_is_accepted_by_the_clusters_that_support_it() {
        for store in ["etcd", "etcds"] {
            for (option, value, is_supported) in [
                ("connect_timeout", "1s", true),
                ("namespace", "", false),
                ("layout", "etcdctl", true),
                ("layout", "native", true),
                ("layout", "redisson", false),
                ("ca", "ca.pem", store == "etcds"),
                ("token_memory", "1h", false),
                ("pool", "1", false),
            ] {
                let problem = problem(store, &[(option, value)]);
                assert_eq!(problem.is_none(), is_supported, "{option} of {store}: {problem:?}");
            }
        }
        let error = problem("redis", &[("layout", "etcdctl")]).unwrap();
        assert!(error.contains("support `native`, `spring` and `redisson`"), "{error}");
        let error = problem("memory", &[("layout", "etcdctl")]).unwrap();
        assert!(error.contains("support only `native`"), "{error}");
    }

    #[test]
    fn options_that_depend_on_each_other_are_checked_together() {
        for (store, options) in [
            ("rediss", &[("cert", "a.pem"), ("key", "b.pem")][..]),
            ("redis+sentinel", &[("sentinel_user", "x"), ("sentinel_password", "y")]),
            ("redis", &[("namespace", ""), ("layout", "redisson")]),
            ("redis", &[("replica_timeout", "3s"), ("timeout", "4s")]),
            ("redis+quorum", &[("restart_guard", "5s"), ("lease", "5s")]),
            ("redis+quorum", &[("restart_guard", "0s")]),
            ("postgres", &[("layout", "spring"), ("region", "EU"), ("prefix", "app.INT_")]),
            ("mysql", &[("layout", "spring"), ("spring", "v6"), ("lease", "10s")]),
        ] {
            assert_eq!(problem(store, options), None);
        }
        let error = problem("mysql", &[("layout", "spring"), ("spring", "v6")]).unwrap();
        assert!(error.contains("requires `lease`"), "{error}");
        let error = problem("postgres", &[("layout", "spring"), ("namespace", "n")]).unwrap();
        assert!(error.contains("set `region`"), "{error}");
        let error = problem("mysql", &[("layout", "spring"), ("mode", "session")]).unwrap();
        assert!(error.contains("must be `lease`"), "{error}");
        for store in ["postgres", "mysql"] {
            assert_eq!(problem(store, &[("mode", "row"), ("row_locks", "64")]), None);
            for options in [&[("row_locks", "64")][..], &[("mode", "session"), ("row_locks", "64")]]
            {
                let error = problem(store, options).unwrap();
                assert!(error.contains("without `mode=row`"), "{error}");
            }
            let error = problem(store, &[("purge_after", "59s")]).unwrap();
            assert!(error.contains("less than the minimum 1m"), "{error}");
        }
        assert_eq!(problem("sqlite", &[("purge_after", "0s")]), None);
        for store in ["memory", "sqlite", "postgres", "mysql"] {
            assert!(problem(store, &[("namespace", "")]).unwrap().contains("is empty"), "{store}");
        }
        for store in ["postgres", "mysql"] {
            for mode in ["disable", "prefer"] {
                let options = [("cert", "a.pem"), ("key", "b.pem"), ("sslmode", mode)];
                assert!(problem(store, &options).unwrap().contains("without encryption"), "{mode}");
            }
            for mode in ["disable", "prefer", "require"] {
                let error = problem(store, &[("ca", "a.pem"), ("sslmode", mode)]).unwrap();
                assert!(error.contains("does not verify"), "{error}");
            }
            assert_eq!(problem(store, &[("ca", "a.pem"), ("sslmode", "verify-ca")]), None);
            assert_eq!(problem(store, &[("ca", "a.pem")]), None);
        }
        let error = problem("redis", &[("replica_timeout", "2s"), ("timeout", "1s")]).unwrap();
        assert!(error.contains("not less than the `timeout` 1s"), "{error}");
        assert!(problem("redis", &[("namespace", ""), ("layout", "spring")]).is_some());
        let error = problem("redis+quorum", &[("restart_guard", "29s")]).unwrap();
        assert!(error.contains("less than the `lease` 30s"), "{error}");
    }

    #[test]
    fn an_error_about_a_value_names_the_option_and_the_limit() {
        for (name, value, hint) in [
            ("lease", "0s", "less than the minimum 100ms"),
            ("lease", "1ms", "less than the minimum 100ms"),
            ("lease", "100years", "more than the maximum 1day"),
            ("lease", "-5s", "negative"),
            ("lease", "30", "no unit"),
            ("lease", "", "not a time"),
            ("lease", "soon", "`30s`"),
            ("lease", "99999999999999999999years", "not a time"),
            ("poll", "0s", "less than the minimum"),
            ("timeout", "2h", "more than the maximum"),
            ("renew", "yes", "`true` or `false`"),
            ("handoff", "-1", "whole number"),
            ("handoff", "4294967296", "whole number"),
            ("handoff", "257", "more than the maximum"),
            ("layout", "sprnig", "did you mean `spring`?"),
            ("layout", "spring", "sqlite stores support only `native`"),
            ("label", &"x".repeat(1_025), "1025 bytes"),
        ] {
            let error = problem("sqlite", &[(name, value)]).unwrap();
            assert!(error.contains(hint) && error.contains(name), "{name}={value}: {error}");
        }
    }
}
