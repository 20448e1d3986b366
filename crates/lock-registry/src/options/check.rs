//! Validates options: each for its store and its range, and all of them together. Parsing is in
//! `options`.

use std::time::Duration;

use registry_core::{Capabilities, ConfigError, LockOptions, RegistryBuilder};

use super::{LockMode, NO_LISTEN, OPTIONS, Options, Origin, SpringVersion, SslMode};
use crate::config::RegistryConfig;
use crate::layout::Layout;
use crate::store_url::{StoreLocation, StoreUrl};
use crate::value::format_duration;

/// The stores that support an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SupportedStores {
    All,
    /// SQLite and database servers.
    Sql,
    /// PostgreSQL, MariaDB and MySQL.
    Database,
    Postgres,
    /// All stores with connections.
    Servers,
    Redis,
    /// Redis at a Unix socket.
    RedisUnix,
    /// Redis under sentinels.
    RedisSentinel,
    /// A quorum of Redis masters.
    RedisQuorum,
    /// Redis with optional replicas: all but quorums.
    RedisReplicated,
    ZooKeeper,
    /// Redis, ZooKeeper and etcd over encrypted connections, and database servers.
    Encrypted,
}

impl SupportedStores {
    /// Returns whether the store of this scheme is one of them.
    fn contains(self, scheme: &str) -> bool {
        let (store, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        let redis = matches!(store, "redis" | "rediss");
        let database = matches!(store, "postgres" | "mysql");
        let zookeeper = matches!(store, "zk" | "zks");
        let etcd = is_etcd(store);
        match self {
            Self::All => true,
            Self::Sql => database || store == "sqlite",
            Self::Database => database,
            Self::Postgres => store == "postgres",
            Self::Servers => redis || database || zookeeper || etcd,
            Self::Redis => redis,
            Self::RedisUnix => redis && kind == "unix",
            Self::RedisSentinel => redis && kind == "sentinel",
            Self::RedisQuorum => redis && kind == "quorum",
            Self::RedisReplicated => redis && kind != "quorum",
            Self::ZooKeeper => zookeeper,
            Self::Encrypted => database || matches!(store, "rediss" | "zks" | "etcds"),
        }
    }

    /// Returns the name of these stores in messages.
    fn description(self) -> &'static str {
        match self {
            Self::All => "all stores",
            Self::Sql => "sqlite, postgres and mysql stores",
            Self::Database => "postgres and mysql stores",
            Self::Postgres => "postgres stores",
            Self::Servers => "redis, zk, etcd, postgres and mysql stores",
            Self::Redis => "redis stores",
            Self::RedisUnix => "redis+unix stores",
            Self::RedisSentinel => "redis+sentinel stores",
            Self::RedisQuorum => "redis+quorum stores",
            Self::RedisReplicated => "redis stores without `+quorum`",
            Self::ZooKeeper => "zk stores",
            Self::Encrypted => {
                "encrypted redis, zk and etcd stores (`rediss://`, `zks://`, `etcds://`), postgres and mysql stores"
            }
        }
    }
}

impl Options {
    /// Validates every value, and that the store of scheme `store` supports each option that is
    /// set.
    pub(crate) fn check(&self, origin: Origin, store: &str) -> Result<(), ConfigError> {
        for spec in OPTIONS.iter().filter(|spec| spec.redacted_value(self).is_some()) {
            if !spec.stores.contains(store) {
                return Err(ConfigError::Invalid(format!(
                    "{} is an option of {}; the store is {store}",
                    origin.describe(spec.name),
                    spec.stores.description(),
                )));
            }
        }
        let invalid = |option: &str, problem: String| {
            Err(ConfigError::Invalid(format!("{} {problem}", origin.describe(option))))
        };
        // For servers, zero means no limit or is below their resolution.
        let busy_min = if SupportedStores::Database.contains(store) {
            SERVER_TIME_MIN
        } else {
            Duration::ZERO
        };
        // Longer than any statement runs. Otherwise a purge could make tokens decrease.
        let purge_min =
            if SupportedStores::Database.contains(store) { PURGE_MIN } else { Duration::ZERO };
        let lease_min = if is_etcd(store) { ETCD_LEASE_MIN } else { Capabilities::LEASE_MIN };
        let durations = [
            ("lease", self.lease, lease_min, Capabilities::LEASE_MAX),
            ("poll", self.poll, RegistryBuilder::POLL_MIN, RegistryBuilder::POLL_MAX),
            ("timeout", self.timeout, RegistryBuilder::TIMEOUT_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("busy_timeout", self.busy_timeout, busy_min, RegistryBuilder::TIMEOUT_MAX),
            ("purge_after", self.purge_after, purge_min, DURATION_MAX),
            (
                "connect_timeout",
                self.connect_timeout,
                SERVER_TIME_MIN,
                RegistryBuilder::TIMEOUT_MAX,
            ),
            ("token_memory", self.token_memory, SERVER_TIME_MIN, DURATION_MAX),
            (
                "replica_timeout",
                self.replica_timeout,
                SERVER_TIME_MIN,
                RegistryBuilder::TIMEOUT_MAX,
            ),
            ("restart_guard", self.restart_guard, Duration::ZERO, DURATION_MAX),
            ("session", self.session, SESSION_MIN, Capabilities::LEASE_MAX),
        ];
        for (option, given, min, max) in durations {
            match given {
                Some(given) if given < min => {
                    return invalid(
                        option,
                        format!(
                            "is {}, less than the minimum {}",
                            format_duration(given),
                            format_duration(min)
                        ),
                    );
                }
                Some(given) if given > max => {
                    return invalid(
                        option,
                        format!(
                            "is {}, more than the maximum {}",
                            format_duration(given),
                            format_duration(max)
                        ),
                    );
                }
                _ => {}
            }
        }
        match self.handoff {
            Some(handoff) if handoff > RegistryBuilder::HANDOFF_MAX => {
                return invalid(
                    "handoff",
                    format!(
                        "is {handoff}, more than the maximum {}; each hand-over reserves a fencing token",
                        RegistryBuilder::HANDOFF_MAX
                    ),
                );
            }
            _ => {}
        }
        for (option, given) in [("pool", self.pool), ("row_locks", self.row_locks)] {
            if let Some(given) = given.filter(|given| !(1..=POOL_MAX).contains(given)) {
                return invalid(option, format!("is {given}, not between 1 and {POOL_MAX}"));
            }
        }
        if let Some(given) = self.sessions.filter(|given| !(1..=SESSIONS_MAX).contains(given)) {
            return invalid("sessions", format!("is {given}, not between 1 and {SESSIONS_MAX}"));
        }
        if let Some(layout) = self.layout
            && !layouts(store).contains(&layout)
        {
            let known = match layouts(store) {
                [first, second, third] => format!("`{first}`, `{second}` and `{third}`"),
                [first, second] => format!("`{first}` and `{second}`"),
                _ => "only `native`".to_owned(),
            };
            return invalid("layout", format!("is {layout}; {store} stores support {known}"));
        }
        if self.layout == Some(Layout::Spring)
            && self.mode.is_some_and(|mode| mode != LockMode::Lease)
        {
            return invalid(
                "mode",
                "must be `lease` with `layout=spring`; leave `mode` out".to_owned(),
            );
        }
        let texts = [
            ("namespace", &self.namespace, RegistryConfig::NAMESPACE_BYTES_MAX),
            ("label", &self.label, LockOptions::LABEL_BYTES_MAX),
        ];
        for (option, given, bytes_max) in texts {
            match given {
                Some(text) if text.len() > bytes_max => {
                    return invalid(
                        option,
                        format!("has {} bytes, more than the maximum {bytes_max}", text.len()),
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Validates combinations of options. `self` is the merged result of all sources; `origin`
    /// returns the source of an option.
    pub(crate) fn check_combinations(
        &self,
        store: &str,
        origin: impl Fn(&str) -> Origin,
    ) -> Result<(), ConfigError> {
        let invalid = |option: &str, problem: String| {
            Err(ConfigError::Invalid(format!("{} {problem}", origin(option).describe(option))))
        };
        if SupportedStores::Redis.contains(store)
            && self.layout != Some(Layout::Redisson)
            && self.namespace.as_deref() == Some("")
        {
            return invalid(
                "namespace",
                "is empty; in Redis only `layout=redisson` accepts an empty namespace".to_owned(),
            );
        }
        if self.row_locks.is_some() && self.mode != Some(LockMode::Row) {
            return invalid(
                "row_locks",
                "has no effect without `mode=row`; set `mode=row` or remove the option".to_owned(),
            );
        }
        if SupportedStores::ZooKeeper.contains(store) {
            self.check_zookeeper().or_else(|(option, problem)| invalid(option, problem))?;
        }
        if SupportedStores::Database.contains(store) {
            self.check_spring().or_else(|(option, problem)| invalid(option, problem))?;
        }
        for (option, is_set, other, other_is_set) in [
            (
                "sentinel_user",
                self.sentinel_user.is_some(),
                "sentinel_password",
                self.sentinel_password.is_some(),
            ),
            ("cert", self.cert.is_some(), "key", self.key.is_some()),
            ("key", self.key.is_some(), "cert", self.cert.is_some()),
        ] {
            if is_set && !other_is_set {
                return invalid(option, format!("has no effect without `{other}`; set both"));
            }
        }
        if self.ca.is_some()
            && let Some(mode) = self.sslmode
            && !matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull)
        {
            return invalid(
                "ca",
                "has no effect, because `sslmode` does not verify the server; write `sslmode=verify-full` or leave `sslmode` out"
                    .to_owned(),
            );
        }
        if let Some(listen) = self.listen.as_ref().filter(|listen| listen.expose() != NO_LISTEN) {
            let url = StoreUrl::parse(listen.expose());
            if !url.is_ok_and(|url| {
                matches!(url.store, StoreLocation::Postgres(_)) && url.options.is_empty()
            }) {
                return invalid(
                    "listen",
                    format!(
                        "is neither `{NO_LISTEN}` nor a URL such as `postgres://USER:PASSWORD@HOST:PORT/DATABASE` without options; \
                         percent-encode it in the query of another URL"
                    ),
                );
            }
        }
        // The store has the same limit, but checks it only when it is open.
        if let (Some(lease), Some(LockMode::Session | LockMode::Row)) = (self.lease, self.mode)
            && lease > CONNECTION_LEASE_MAX
        {
            return invalid(
                "lease",
                format!(
                    "is {}, more than the maximum {} with `mode=session` and `mode=row`",
                    format_duration(lease),
                    format_duration(CONNECTION_LEASE_MAX)
                ),
            );
        }
        let lease = self.lease.unwrap_or(LEASE);
        match self.restart_guard {
            Some(given) if !given.is_zero() && given < lease => {
                return invalid(
                    "restart_guard",
                    format!(
                        "is {}, less than the `lease` {}; a restarted master could vote while a lock that it lost is held",
                        format_duration(given),
                        format_duration(lease)
                    ),
                );
            }
            _ => {}
        }
        let timeout = self.timeout.unwrap_or(TIMEOUT);
        match self.replica_timeout {
            Some(given) if given >= timeout => invalid(
                "replica_timeout",
                format!(
                    "is {}, not less than the `timeout` {} of the whole operation",
                    format_duration(given),
                    format_duration(timeout)
                ),
            ),
            _ => Ok(()),
        }
    }
}

impl Options {
    /// Validates ZooKeeper's namespace, session time-out and login.
    fn check_zookeeper(&self) -> Result<(), (&'static str, String)> {
        if self.namespace.as_deref() == Some("") {
            return Err(("namespace", "is empty; leave it out for the default".to_owned()));
        }
        if let (Some(lease), Some(session)) = (self.lease, self.session)
            && session < lease * 2
        {
            return Err((
                "session",
                format!(
                    "is {}, less than twice the `lease` {}; set a longer session or a shorter lease",
                    format_duration(session),
                    format_duration(lease)
                ),
            ));
        }
        if self.auth.as_ref().is_some_and(|auth| {
            auth.expose().split_once(':').is_none_or(|(scheme, _)| scheme.is_empty())
        }) {
            return Err((
                "auth",
                "has not the form SCHEME:CREDENTIALS, such as `digest:USER:PASSWORD`".to_owned(),
            ));
        }
        Ok(())
    }

    /// Validates the options of `layout=spring` in a database, and refuses them in other layouts.
    fn check_spring(&self) -> Result<(), (&'static str, String)> {
        if self.layout != Some(Layout::Spring) {
            for (option, is_set) in [
                ("spring", self.spring.is_some()),
                ("region", self.region.is_some()),
                ("prefix", self.prefix.is_some()),
            ] {
                if is_set {
                    return Err((option, "has no effect without `layout=spring`; set `layout=spring` or remove the option".to_owned()));
                }
            }
        } else if self.mode.is_some_and(|mode| mode != LockMode::Lease) {
            return Err((
                "mode",
                "must be `lease` with `layout=spring`; leave `mode` out".to_owned(),
            ));
        } else if self.namespace.is_some() {
            return Err((
                "namespace",
                "has no effect with `layout=spring`; set `region` instead".to_owned(),
            ));
        } else if self.spring == Some(SpringVersion::V6) && self.lease.is_none() {
            return Err((
                "spring",
                "is v6, which requires `lease`; set `lease` to the `timeToLive` of the peers (10s by default)"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// Returns the layouts that the stores of this scheme support.
fn layouts(store: &str) -> &'static [Layout] {
    if SupportedStores::RedisReplicated.contains(store) {
        &[Layout::Native, Layout::Spring, Layout::Redisson]
    } else if SupportedStores::Database.contains(store) {
        &[Layout::Native, Layout::Spring]
    } else if SupportedStores::ZooKeeper.contains(store) {
        &[Layout::Native, Layout::Curator]
    } else if is_etcd(store) {
        &[Layout::Native, Layout::Etcdctl]
    } else {
        &[Layout::Native]
    }
}

fn is_etcd(store: &str) -> bool {
    matches!(store, "etcd" | "etcds")
}

// The engine's defaults, for options that are not set.
const LEASE: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(3);
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// Minimum session time-out: four times the minimum lease.
const SESSION_MIN: Duration = Duration::from_millis(400);
/// Maximum number of sessions in the ZooKeeper backend.
const SESSIONS_MAX: u32 = 32;
/// Minimum lease of the etcd backend.
const ETCD_LEASE_MIN: Duration = Duration::from_secs(2);
/// Maximum time for which a server keeps the locks of a silent session or transaction.
const CONNECTION_LEASE_MAX: Duration = Duration::from_secs(60);
/// More connections than any server allows one program.
const POOL_MAX: u32 = 10_000;
/// Minimum time that rows are kept in a server.
const PURGE_MIN: Duration = Duration::from_secs(60);
/// Minimum of all times that are sent to servers.
pub(crate) const SERVER_TIME_MIN: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error for these options in a store URL.
    fn problem(store: &str, values: &[(&str, &str)]) -> Option<String> {
        let mut options = Options::default();
        let set = values.iter().try_for_each(|(name, value)| options.set(Origin::Url, name, value));
        let checked = set
            .and_then(|()| options.check(Origin::Url, store))
            .and_then(|()| options.check_combinations(store, |_| Origin::Url));
        checked.err().map(|error| error.to_string())
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
        let mut options = Options::default();
        options.set(Origin::Environment, "purge_after", "1h").unwrap();
        options.check(Origin::Environment, "sqlite").unwrap();
        let error = options.check(Origin::Environment, "memory").unwrap_err().to_string();
        assert_eq!(
            error,
            "LOCK_REGISTRY_PURGE_AFTER is an option of sqlite, postgres and mysql stores; the store is memory"
        );
    }

    #[test]
    fn a_redis_option_is_accepted_by_the_setups_that_support_it() {
        type IsSupported = fn(&str) -> bool;
        let replicated = |store: &str| !store.ends_with("+quorum");
        let rows: [(&str, &str, IsSupported); 13] = [
            ("connect_timeout", "500ms", |_| true),
            ("token_memory", "2days", |_| true),
            ("publish", "sharded", |_| true),
            ("layout", "native", |_| true),
            ("layout", "spring", replicated),
            ("layout", "redisson", replicated),
            ("replicas", "1", replicated),
            ("fsync", "true", replicated),
            ("replica_timeout", "1s", replicated),
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
            for valid in ["1", "8", "32"] {
                assert_eq!(problem(store, &[("sessions", valid)]), None);
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
                ("namespace", "", true),
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

    #[cfg(all(feature = "postgres", feature = "mysql"))]
    #[test]
    fn the_maximum_lease_of_connection_locks_is_the_silence_limit_of_the_stores() {
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::PostgresBackend::SILENCE);
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::MySqlBackend::SILENCE);
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
        for store in ["postgres", "mysql"] {
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
}
