//! Validates options: each for its store and its range, and all of them together. Parsing is in
//! `layer`.

use std::time::Duration;

use registry_core::{Capabilities, ConfigError, LockOptions, RegistryBuilder};

use super::{Layer, Mode, NO_LISTEN, OPTIONS, Origin, SpringVersion, SslMode};
use crate::config::RegistryConfig;
use crate::layout::Layout;
use crate::store_url::{Store, StoreUrl};
use crate::value::shown;

/// The stores that support an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stores {
    All,
    /// SQLite and database servers.
    Sql,
    /// PostgreSQL, MariaDB and MySQL.
    Database,
    Postgres,
    /// All stores with connections.
    Servers,
    Redis,
    /// Redis at a socket.
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

impl Stores {
    /// Returns whether the store of this scheme is one of them.
    fn have(self, scheme: &str) -> bool {
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
    fn called(self) -> &'static str {
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
            Self::RedisReplicated => "redis stores that are no quorum",
            Self::ZooKeeper => "zk stores",
            Self::Encrypted => {
                "encrypted redis, zk and etcd stores (`rediss://`, `zks://`, `etcds://`), postgres and mysql stores"
            }
        }
    }
}

impl Layer {
    /// Validates every value, and that the store of scheme `store` supports each option that is
    /// set.
    pub(crate) fn check(&self, origin: Origin, store: &str) -> Result<(), ConfigError> {
        for row in OPTIONS.iter().filter(|row| row.shown_in(self).is_some()) {
            if !row.stores.have(store) {
                return Err(ConfigError::Invalid(format!(
                    "{} is for {}, and the store is {store}",
                    origin.names(row.name),
                    row.stores.called(),
                )));
            }
        }
        let wrong = |option: &str, problem: String| {
            Err(ConfigError::Invalid(format!("{} {problem}", origin.names(option))))
        };
        // For servers, zero means no limit or is below their resolution.
        let busy_min = if Stores::Database.have(store) { SERVERS_MIN } else { Duration::ZERO };
        // Longer than any statement runs. Otherwise a purge could make tokens decrease.
        let purge_min = if Stores::Database.have(store) { PURGE_MIN } else { Duration::ZERO };
        let lease_min = if is_etcd(store) { ETCD_LEASE_MIN } else { Capabilities::LEASE_MIN };
        let spans = [
            ("lease", self.lease, lease_min, Capabilities::LEASE_MAX),
            ("poll", self.poll, RegistryBuilder::POLL_MIN, RegistryBuilder::POLL_MAX),
            ("timeout", self.timeout, RegistryBuilder::TIMEOUT_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("busy_timeout", self.busy_timeout, busy_min, RegistryBuilder::TIMEOUT_MAX),
            ("purge_after", self.purge_after, purge_min, DAYS_MAX),
            ("connect_timeout", self.connect_timeout, SERVERS_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("token_memory", self.token_memory, SERVERS_MIN, DAYS_MAX),
            ("replica_timeout", self.replica_timeout, SERVERS_MIN, RegistryBuilder::TIMEOUT_MAX),
            ("restart_guard", self.restart_guard, Duration::ZERO, DAYS_MAX),
            ("session", self.session, SESSION_MIN, Capabilities::LEASE_MAX),
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
                    format!(
                        "is {handoff}, more than the most, {}: each hand-over reserves a fencing token, and tokens must \
                         not outrun the store's clock",
                        RegistryBuilder::HANDOFF_MAX
                    ),
                );
            }
            _ => {}
        }
        for (option, given) in [("pool", self.pool), ("row_locks", self.row_locks)] {
            if given.is_some_and(|given| !(1..=POOL_MAX).contains(&given)) {
                return wrong(option, format!("is not between 1 and {POOL_MAX}"));
            }
        }
        if self.sessions.is_some_and(|given| !(1..=SESSIONS_MAX).contains(&given)) {
            return wrong("sessions", format!("is not between 1 and {SESSIONS_MAX}"));
        }
        if let Some(layout) = self.layout
            && !layouts(store).contains(&layout)
        {
            let known = match layouts(store) {
                [first, second, third] => format!("`{first}`, `{second}` and `{third}`"),
                [first, second] => format!("`{first}` and `{second}`"),
                _ => "only `native`".to_owned(),
            };
            return wrong("layout", format!("is {layout}, and {store} stores have {known}"));
        }
        if self.layout == Some(Layout::Spring) && self.mode.is_some_and(|mode| mode != Mode::Lease)
        {
            return wrong(
                "mode",
                "is not lease, and the locks of layout `spring` are leases".to_owned(),
            );
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

    /// Validates combinations of options. This layer is the merged result of all sources; `origin`
    /// returns the source of an option.
    pub(crate) fn check_together(
        &self,
        store: &str,
        origin: impl Fn(&str) -> Origin,
    ) -> Result<(), ConfigError> {
        let wrong = |option: &str, problem: String| {
            Err(ConfigError::Invalid(format!("{} {problem}", origin(option).names(option))))
        };
        if Stores::Redis.have(store)
            && self.layout != Some(Layout::Redisson)
            && self.namespace.as_deref() == Some("")
        {
            return wrong(
                "namespace",
                "is empty; in Redis every name begins with it, but for those of the layout `redisson`"
                    .to_owned(),
            );
        }
        if self.row_locks.is_some() && self.mode != Some(Mode::Row) {
            return wrong("row_locks", "is of no use without `mode=row`".to_owned());
        }
        if Stores::ZooKeeper.have(store) {
            self.check_session().or_else(|(option, problem)| wrong(option, problem))?;
        }
        if Stores::Database.have(store) {
            self.check_spring().or_else(|(option, problem)| wrong(option, problem))?;
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
                return wrong(option, format!("is of no use without `{other}`; give both"));
            }
        }
        if self.ca.is_some()
            && let Some(mode) = self.sslmode
            && !matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull)
        {
            return wrong(
                "ca",
                "is of no use with a `sslmode` that verifies nothing; write `verify-full`, or leave `sslmode` away"
                    .to_owned(),
            );
        }
        if let Some(listen) = self.listen.as_ref().filter(|listen| listen.told() != NO_LISTEN) {
            let url = StoreUrl::parse(listen.told());
            if !url
                .is_ok_and(|url| matches!(url.store, Store::Postgres(_)) && url.options.is_empty())
            {
                return wrong(
                    "listen",
                    format!(
                        "is neither `{NO_LISTEN}` nor a URL such as `postgres://USER:PASSWORD@HOST:PORT/DATABASE` without options; in the \
                         query of another URL it is percent-encoded"
                    ),
                );
            }
        }
        // The store has the same limit, but checks it only when it is open.
        if let (Some(lease), Some(Mode::Session | Mode::Row)) = (self.lease, self.mode)
            && lease > CONNECTION_LEASE_MAX
        {
            return wrong(
                "lease",
                format!(
                    "is {}, more than the most of locks that die with their connection (`mode`), {}",
                    shown(lease),
                    shown(CONNECTION_LEASE_MAX)
                ),
            );
        }
        let lease = self.lease.unwrap_or(LEASE);
        match self.restart_guard {
            Some(given) if !given.is_zero() && given < lease => {
                return wrong(
                    "restart_guard",
                    format!(
                        "is {}, less than the `lease`, {}: a master that has forgotten a lock could vote while it is held",
                        shown(given),
                        shown(lease)
                    ),
                );
            }
            _ => {}
        }
        let timeout = self.timeout.unwrap_or(TIMEOUT);
        match self.replica_timeout {
            Some(given) if given >= timeout => wrong(
                "replica_timeout",
                format!(
                    "is {}, which must be less than the `timeout` of the whole operation, {}",
                    shown(given),
                    shown(timeout)
                ),
            ),
            _ => Ok(()),
        }
    }
}

impl Layer {
    /// Validates ZooKeeper's namespace, session time-out and login.
    fn check_session(&self) -> Result<(), (&'static str, String)> {
        if self.namespace.as_deref() == Some("") {
            return Err(("namespace", "is empty; leave it away".to_owned()));
        }
        if let (Some(lease), Some(session)) = (self.lease, self.session)
            && session < lease * 2
        {
            return Err((
                "session",
                format!(
                    "is {}, less than twice the `lease`, {}: half of a session is what is certain of it",
                    shown(session),
                    shown(lease)
                ),
            ));
        }
        if self.auth.as_ref().is_some_and(|auth| {
            auth.told().split_once(':').is_none_or(|(scheme, _)| scheme.is_empty())
        }) {
            return Err((
                "auth",
                "is no SCHEME:CREDENTIALS, such as `digest:USER:PASSWORD`".to_owned(),
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
                    return Err((option, "is of no use without `layout=spring`".to_owned()));
                }
            }
        } else if self.mode.is_some_and(|mode| mode != Mode::Lease) {
            return Err((
                "mode",
                "is not lease, and locks in Spring's table are leases".to_owned(),
            ));
        } else if self.namespace.is_some() {
            return Err((
                "namespace",
                "is of no use with `layout=spring`: Spring's table has regions; give `region`"
                    .to_owned(),
            ));
        } else if self.spring == Some(SpringVersion::V6) && self.lease.is_none() {
            return Err((
                "spring",
                "is v6, whose rows do not say when they end: give `lease`, and exactly what the peers have as `timeToLive` (10s unless \
                 they set it)"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// Returns the layouts that the stores of this scheme support.
fn layouts(store: &str) -> &'static [Layout] {
    if Stores::RedisReplicated.have(store) {
        &[Layout::Native, Layout::Spring, Layout::Redisson]
    } else if Stores::Database.have(store) {
        &[Layout::Native, Layout::Spring]
    } else if Stores::ZooKeeper.have(store) {
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
const DAYS_MAX: Duration = LockOptions::WAIT_MAX;
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
pub(crate) const SERVERS_MIN: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error for these options in a store URL.
    fn problem(store: &str, options: &[(&str, &str)]) -> Option<String> {
        let mut layer = Layer::default();
        let read =
            options.iter().try_for_each(|(name, value)| layer.read(Origin::Url, name, value));
        let checked = read
            .and_then(|()| layer.check(Origin::Url, store))
            .and_then(|()| layer.check_together(store, |_| Origin::Url));
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
        let mut layer = Layer::default();
        layer.read(Origin::Environment, "purge_after", "1h").unwrap();
        layer.check(Origin::Environment, "sqlite").unwrap();
        let error = layer.check(Origin::Environment, "memory").unwrap_err().to_string();
        assert_eq!(
            error,
            "LOCK_REGISTRY_PURGE_AFTER is for sqlite, postgres and mysql stores, and the store is memory"
        );
    }

    #[test]
    fn each_option_of_redis_is_for_the_servers_that_know_it() {
        type Knows = fn(&str) -> bool;
        let replicated = |store: &str| !store.ends_with("+quorum");
        let rows: [(&str, &str, Knows); 13] = [
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
        for (option, value, knows) in rows {
            for store in REDIS {
                let problem = problem(store, &[(option, value)]);
                assert_eq!(problem.is_none(), knows(store), "{option} of {store}: {problem:?}");
                assert!(problem.is_none_or(|problem| problem.contains(store)));
            }
            for store in ["sqlite", "memory", "pass-through"] {
                let problem = problem(store, &[(option, value)]);
                assert_eq!(problem.is_none(), (option, value) == ("layout", "native"), "{option}");
            }
        }
    }

    #[test]
    fn values_of_redis_have_limits() {
        for (option, value, hint) in [
            ("connect_timeout", "1ms", "less than the least, 10ms"),
            ("connect_timeout", "2h", "more than the most, 1h"),
            ("token_memory", "0s", "less than the least, 10ms"),
            ("token_memory", "2years", "more than the most"),
            ("replica_timeout", "1ms", "less than the least, 10ms"),
            ("replica_timeout", "3s", "less than the `timeout` of the whole operation, 3s"),
            ("namespace", "", "is empty"),
            ("replicas", "some", "whole number"),
            ("fsync", "yes", "`true` or `false`"),
            (
                "layout",
                "redison",
                "did you mean `redisson`? There are `native`, `spring`, `redisson`, `curator`, `etcdctl`",
            ),
            ("publish", "sharp", "did you mean `sharded`? There are `auto`, `plain`, `sharded`"),
            ("cert", "a.pem", "without `key`"),
            ("key", "a.pem", "without `cert`"),
            ("ca", "", "names no file"),
            ("ca", "-----BEGIN CERTIFICATE-----", "into a file"),
            ("key", "MII\nMII", "into a file"),
        ] {
            let error = problem("rediss", &[(option, value)]).unwrap();
            assert!(error.contains(hint) && error.contains(option), "{option}={value}: {error}");
        }
        assert!(problem("redis+quorum", &[("restart_guard", "2years")]).is_some());
        assert!(problem("redis+sentinel", &[("sentinel_user", "x")]).is_some());
    }

    #[test]
    fn each_option_of_databases_is_for_those_that_know_it() {
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
                let knows = store == "postgres" || others.contains(&store);
                let encrypted = option == "ca" && store.starts_with("rediss");
                let connects = option == "connect_timeout" && store.starts_with("redis");
                let problem = problem(store, &[(option, value)]);
                assert_eq!(
                    problem.is_none(),
                    knows || encrypted || connects,
                    "{option} of {store}"
                );
            }
        }
        for (option, value, hint) in [
            ("layout", "redisson", "have `native` and `spring`"),
            ("region", "EU", "without `layout=spring`"),
            ("spring", "v8", "`v6`, `v7`"),
            ("pool", "0", "between 1 and"),
            ("row_locks", "0", "between 1 and"),
            ("mode", "rows", "did you mean `row`?"),
            ("busy_timeout", "0s", "less than the least, 10ms"),
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
    fn the_limit_of_zookeeper_s_sessions_has_a_range() {
        for store in ["zk", "zks"] {
            for fine in ["1", "8", "32"] {
                assert_eq!(problem(store, &[("sessions", fine)]), None);
            }
            for wrong in ["0", "33"] {
                let error = problem(store, &[("sessions", wrong)]).unwrap();
                assert!(error.contains("sessions") && error.contains("1 and 32"), "{error}");
            }
        }
        assert!(problem("etcd", &[("sessions", "2")]).unwrap().contains("zk stores"));
    }

    #[test]
    fn each_option_of_etcd_is_for_clusters_that_know_it() {
        for store in ["etcd", "etcds"] {
            for (option, value, knows) in [
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
                assert_eq!(problem.is_none(), knows, "{option} of {store}: {problem:?}");
            }
        }
        let error = problem("redis", &[("layout", "etcdctl")]).unwrap();
        assert!(error.contains("have `native`, `spring` and `redisson`"), "{error}");
        let error = problem("memory", &[("layout", "etcdctl")]).unwrap();
        assert!(error.contains("have only `native`"), "{error}");
    }

    #[cfg(all(feature = "postgres", feature = "mysql"))]
    #[test]
    fn a_lock_of_a_connection_is_leased_for_as_long_as_its_server_bears_silence() {
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::PostgresSessionBackend::SILENCE);
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::PostgresRowBackend::SILENCE);
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::MySqlSessionBackend::SILENCE);
        assert_eq!(CONNECTION_LEASE_MAX, registry_jdbc::MySqlRowBackend::SILENCE);
    }

    #[test]
    fn options_that_need_each_other_are_looked_at_together() {
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
        assert!(error.contains("give `lease`"), "{error}");
        let error = problem("postgres", &[("layout", "spring"), ("namespace", "n")]).unwrap();
        assert!(error.contains("give `region`"), "{error}");
        let error = problem("mysql", &[("layout", "spring"), ("mode", "session")]).unwrap();
        assert!(error.contains("are leases"), "{error}");
        for store in ["postgres", "mysql"] {
            assert_eq!(problem(store, &[("mode", "row"), ("row_locks", "64")]), None);
            for options in [&[("row_locks", "64")][..], &[("mode", "session"), ("row_locks", "64")]]
            {
                let error = problem(store, options).unwrap();
                assert!(error.contains("without `mode=row`"), "{error}");
            }
            let error = problem(store, &[("purge_after", "59s")]).unwrap();
            assert!(error.contains("less than the least, 1m"), "{error}");
        }
        assert_eq!(problem("sqlite", &[("purge_after", "0s")]), None);
        for store in ["postgres", "mysql"] {
            for mode in ["disable", "prefer", "require"] {
                let error = problem(store, &[("ca", "a.pem"), ("sslmode", mode)]).unwrap();
                assert!(error.contains("verifies nothing"), "{error}");
            }
            assert_eq!(problem(store, &[("ca", "a.pem"), ("sslmode", "verify-ca")]), None);
            assert_eq!(problem(store, &[("ca", "a.pem")]), None);
        }
        let error = problem("redis", &[("replica_timeout", "2s"), ("timeout", "1s")]).unwrap();
        assert!(error.contains("the `timeout` of the whole operation, 1s"), "{error}");
        assert!(problem("redis", &[("namespace", ""), ("layout", "spring")]).is_some());
        let error = problem("redis+quorum", &[("restart_guard", "29s")]).unwrap();
        assert!(error.contains("less than the `lease`, 30s"), "{error}");
    }
}
