//! The options of all stores: a table of names, with a parser and a formatter for each. Value
//! formats are in `value`, validity in `check`, and the precedence of sources in `config`.

mod check;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use registry_core::ConfigError;

use crate::layout::{Layout, layout};
use crate::nearest::nearest;
use crate::store_url::UrlText;
use crate::value::{HIDDEN, Problem, Secret, choice, count, duration, path, shown, switch};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "redis"))]
pub(crate) use check::SERVERS_MIN;
use check::Stores;

/// The options of one source: URL, file, environment, command line or code. The next source
/// supplies options that are not set.
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
    pub(crate) pool: Option<u32>,
    pub(crate) mode: Option<Mode>,
    pub(crate) row_locks: Option<u32>,
    pub(crate) schema: Option<String>,
    pub(crate) table_prefix: Option<String>,
    pub(crate) create_schema: Option<bool>,
    pub(crate) spring: Option<SpringVersion>,
    pub(crate) region: Option<String>,
    pub(crate) prefix: Option<String>,
    pub(crate) prepared: Option<bool>,
    /// A URL, or [`NO_LISTEN`].
    pub(crate) listen: Option<Secret>,
    pub(crate) sslmode: Option<SslMode>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) token_memory: Option<Duration>,
    pub(crate) publish: Option<Publish>,
    pub(crate) replicas: Option<u32>,
    pub(crate) fsync: Option<bool>,
    pub(crate) replica_timeout: Option<Duration>,
    pub(crate) restart_guard: Option<Duration>,
    pub(crate) db: Option<u32>,
    pub(crate) sentinel_user: Option<Secret>,
    pub(crate) sentinel_password: Option<Secret>,
    pub(crate) session: Option<Duration>,
    pub(crate) sessions: Option<u32>,
    pub(crate) root: Option<String>,
    pub(crate) naming: Option<Naming>,
    /// May contain password hashes.
    pub(crate) acl: Option<Secret>,
    /// `SCHEME:CREDENTIALS`.
    pub(crate) auth: Option<Secret>,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    /// Never shown: a user may pass the key itself instead of its path.
    pub(crate) key: Option<Secret>,
}

/// The kind of lock in a database server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A row with a lease.
    Lease,
    /// A lock that ends with the registry's connection.
    Session,
    /// A row lock of a transaction that lasts as long as the lock.
    Row,
}

const MODE: [(&str, Mode); 3] =
    [("lease", Mode::Lease), ("session", Mode::Session), ("row", Mode::Row)];

/// The command that publishes a release to waiters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Publish {
    Auto,
    Plain,
    Sharded,
}

const PUBLISH: [(&str, Publish); 3] =
    [("auto", Publish::Auto), ("plain", Publish::Plain), ("sharded", Publish::Sharded)];

/// Encryption of database connections, in PostgreSQL's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SslMode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

const SSL_MODE: [(&str, SslMode); 5] = [
    ("disable", SslMode::Disable),
    ("prefer", SslMode::Prefer),
    ("require", SslMode::Require),
    ("verify-ca", SslMode::VerifyCa),
    ("verify-full", SslMode::VerifyFull),
];

/// Version of Spring Integration's lock table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpringVersion {
    /// Version 6 and earlier.
    V6,
    V7,
}

const SPRING: [(&str, SpringVersion); 2] = [("v6", SpringVersion::V6), ("v7", SpringVersion::V7)];

/// Names of lock nodes in ZooKeeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Curator,
    Kazoo,
}

const NAMING: [(&str, Naming); 2] = [("curator", Naming::Curator), ("kazoo", Naming::Kazoo)];

/// Replaces the URL of option `listen`.
pub(crate) const NO_LISTEN: &str = "off";

/// One option: its name, its stores, its parser, its formatter, and whether its value is shown.
pub(crate) struct OptionRow {
    pub(crate) name: &'static str,
    stores: Stores,
    told: Told,
    read: Read,
    show: Show,
}

/// Whether messages show a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Always,
    /// Shown if it is a valid path. Otherwise it may be the contents of the file.
    Path,
    Never,
}

use Stores::{
    All, Database, Encrypted, Postgres, Redis, RedisQuorum, RedisReplicated, RedisSentinel,
    RedisUnix, Servers, Sql, ZooKeeper,
};
use Told::{Always, Never, Path};

/// All options, in the order of `settings`. A URL can hold all of them except `url`.
#[rustfmt::skip]
pub(crate) static OPTIONS: &[OptionRow] = &[
    row("url",               All,             Never,  |l, t| put(&mut l.url, Ok(UrlText::new(t))),                  |l| l.url.as_ref().map(ToString::to_string)),
    row("namespace",         All,             Always, |l, t| put(&mut l.namespace, Ok(t.into())),                   |l| l.namespace.clone()),
    row("lease",             All,             Always, |l, t| put(&mut l.lease, duration(t)),                        |l| l.lease.map(shown)),
    row("renew",             All,             Always, |l, t| put(&mut l.renew, switch(t)),                          |l| l.renew.map(|on| on.to_string())),
    row("poll",              All,             Always, |l, t| put(&mut l.poll, duration(t)),                         |l| l.poll.map(shown)),
    row("handoff",           All,             Always, |l, t| put(&mut l.handoff, count(t)),                         |l| l.handoff.map(|n| n.to_string())),
    row("timeout",           All,             Always, |l, t| put(&mut l.timeout, duration(t)),                      |l| l.timeout.map(shown)),
    row("label",             All,             Always, |l, t| put(&mut l.label, Ok(t.into())),                       |l| l.label.clone()),
    row("layout",            All,             Always, |l, t| put(&mut l.layout, layout(t)),                         |l| l.layout.map(|l| l.to_string())),
    row("busy_timeout",      Sql,             Always, |l, t| put(&mut l.busy_timeout, duration(t)),                 |l| l.busy_timeout.map(shown)),
    row("purge_after",       Sql,             Always, |l, t| put(&mut l.purge_after, duration(t)),                  |l| l.purge_after.map(shown)),
    row("pool",              Database,        Always, |l, t| put(&mut l.pool, count(t)),                            |l| l.pool.map(|n| n.to_string())),
    row("mode",              Database,        Always, |l, t| put(&mut l.mode, choice(t, "mode", &MODE)),            |l| l.mode.map(mode_name)),
    row("row_locks",         Database,        Always, |l, t| put(&mut l.row_locks, count(t)),                       |l| l.row_locks.map(|n| n.to_string())),
    row("schema",            Postgres,        Always, |l, t| put(&mut l.schema, Ok(t.into())),                      |l| l.schema.clone()),
    row("table_prefix",      Database,        Always, |l, t| put(&mut l.table_prefix, Ok(t.into())),                |l| l.table_prefix.clone()),
    row("create_schema",     Database,        Always, |l, t| put(&mut l.create_schema, switch(t)),                  |l| l.create_schema.map(|on| on.to_string())),
    row("spring",            Database,        Always, |l, t| put(&mut l.spring, choice(t, "version", &SPRING)),     |l| l.spring.map(spring_name)),
    row("region",            Database,        Always, |l, t| put(&mut l.region, Ok(t.into())),                      |l| l.region.clone()),
    row("prefix",            Database,        Always, |l, t| put(&mut l.prefix, Ok(t.into())),                      |l| l.prefix.clone()),
    row("prepared",          Postgres,        Always, |l, t| put(&mut l.prepared, switch(t)),                       |l| l.prepared.map(|on| on.to_string())),
    row("listen",            Postgres,        Never,  |l, t| put(&mut l.listen, Ok(Secret::new(t))),                |l| l.listen.as_ref().map(shown_listen)),
    row("sslmode",           Database,        Always, |l, t| put(&mut l.sslmode, choice(t, "mode", &SSL_MODE)),     |l| l.sslmode.map(ssl_mode_name)),
    row("connect_timeout",   Servers,         Always, |l, t| put(&mut l.connect_timeout, duration(t)),              |l| l.connect_timeout.map(shown)),
    row("token_memory",      Redis,           Always, |l, t| put(&mut l.token_memory, duration(t)),                 |l| l.token_memory.map(shown)),
    row("publish",           Redis,           Always, |l, t| put(&mut l.publish, choice(t, "way to publish", &PUBLISH)), |l| l.publish.map(publish_name)),
    row("replicas",          RedisReplicated, Always, |l, t| put(&mut l.replicas, count(t)),                        |l| l.replicas.map(|n| n.to_string())),
    row("fsync",             RedisReplicated, Always, |l, t| put(&mut l.fsync, switch(t)),                          |l| l.fsync.map(|on| on.to_string())),
    row("replica_timeout",   RedisReplicated, Always, |l, t| put(&mut l.replica_timeout, duration(t)),              |l| l.replica_timeout.map(shown)),
    row("restart_guard",     RedisQuorum,     Always, |l, t| put(&mut l.restart_guard, duration(t)),                |l| l.restart_guard.map(shown)),
    row("db",                RedisUnix,       Always, |l, t| put(&mut l.db, count(t)),                              |l| l.db.map(|n| n.to_string())),
    row("sentinel_user",     RedisSentinel,   Never,  |l, t| put(&mut l.sentinel_user, Ok(Secret::new(t))),         |l| l.sentinel_user.as_ref().map(hidden)),
    row("sentinel_password", RedisSentinel,   Never,  |l, t| put(&mut l.sentinel_password, Ok(Secret::new(t))),     |l| l.sentinel_password.as_ref().map(hidden)),
    row("session",           ZooKeeper,       Always, |l, t| put(&mut l.session, duration(t)),                      |l| l.session.map(shown)),
    row("sessions",          ZooKeeper,       Always, |l, t| put(&mut l.sessions, count(t)),                        |l| l.sessions.map(|n| n.to_string())),
    row("root",              ZooKeeper,       Always, |l, t| put(&mut l.root, Ok(t.into())),                        |l| l.root.clone()),
    row("naming",            ZooKeeper,       Always, |l, t| put(&mut l.naming, choice(t, "naming", &NAMING)),      |l| l.naming.map(naming_name)),
    row("acl",               ZooKeeper,       Never,  |l, t| put(&mut l.acl, Ok(Secret::new(t))),                   |l| l.acl.as_ref().map(shown_acl)),
    row("auth",              ZooKeeper,       Never,  |l, t| put(&mut l.auth, Ok(Secret::new(t))),                  |l| l.auth.as_ref().map(hidden)),
    row("ca",                Encrypted,       Path,   |l, t| put(&mut l.ca, path(t)),                               |l| l.ca.as_deref().map(shown_path)),
    row("cert",              Encrypted,       Path,   |l, t| put(&mut l.cert, path(t)),                             |l| l.cert.as_deref().map(shown_path)),
    row("key",               Encrypted,       Never,  |l, t| put(&mut l.key, path(t).map(|_| Secret::new(t))),      |l| l.key.as_ref().map(hidden)),
];

type Read = fn(&mut Layer, &str) -> Result<(), Problem>;
type Show = fn(&Layer) -> Option<String>;

const fn row(name: &'static str, stores: Stores, told: Told, read: Read, show: Show) -> OptionRow {
    OptionRow { name, stores, told, read, show }
}

fn put<T>(place: &mut Option<T>, value: Result<T, Problem>) -> Result<(), Problem> {
    *place = Some(value?);
    Ok(())
}

fn publish_name(publish: Publish) -> String {
    let named = PUBLISH.iter().find(|(_, named)| *named == publish);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn mode_name(mode: Mode) -> String {
    let named = MODE.iter().find(|(_, named)| *named == mode);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn spring_name(version: SpringVersion) -> String {
    let named = SPRING.iter().find(|(_, named)| *named == version);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn ssl_mode_name(mode: SslMode) -> String {
    let named = SSL_MODE.iter().find(|(_, named)| *named == mode);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn naming_name(naming: Naming) -> String {
    let named = NAMING.iter().find(|(_, named)| *named == naming);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn shown_acl(acl: &Secret) -> String {
    if matches!(acl.told(), "open" | "creator") { acl.told().to_owned() } else { HIDDEN.to_owned() }
}

fn shown_listen(listen: &Secret) -> String {
    if listen.told() == NO_LISTEN { NO_LISTEN.to_owned() } else { HIDDEN.to_owned() }
}

fn shown_path(path: &std::path::Path) -> String {
    path.display().to_string()
}

fn hidden(_: &Secret) -> String {
    HIDDEN.to_owned()
}

impl OptionRow {
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        OPTIONS.iter().find(|row| row.name == name)
    }

    /// Returns whether `value` can be shown.
    pub(crate) fn is_harmless(&self, value: &str) -> bool {
        // A plain but invalid value may be the rest of a password, so the value must also parse.
        let plain = |c: char| c.is_alphanumeric() || "-._/ ".contains(c);
        self.told != Never
            && value.chars().all(plain)
            && (self.read)(&mut Layer::default(), value).is_ok()
    }

    /// Returns the option's value in `layer` without secrets, or `None` if `layer` does not set it.
    pub(crate) fn shown_in(&self, layer: &Layer) -> Option<String> {
        (self.show)(layer)
    }
}

/// Source of an option's value, strongest first.
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
    /// Returns the name of `option` in messages.
    fn names(self, option: &str) -> String {
        match self {
            Self::CommandLine => format!("--{}", option.replace('_', "-")),
            Self::Environment => variable(option),
            other => format!("option {option:?} in {other}"),
        }
    }
}

/// Returns the environment variable that sets `option`.
pub(crate) fn variable(option: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", option.to_ascii_uppercase())
}

pub(crate) const VARIABLE_PREFIX: &str = "LOCK_REGISTRY_";

impl Layer {
    /// Parses one option of `origin` from text. A URL cannot contain the option `url`.
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

    /// Parses one option from an environment variable, named with its prefix.
    #[cfg(feature = "config")]
    pub(crate) fn read_variable(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        // Case-sensitive, so that all programs ignore a variable in lower case alike.
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
            // A value in a URL may be part of a password that was not percent-encoded. A plain
            // number is shown, because it is likely a time without a unit.
            Origin::Url if value.parse::<f64>().is_err() => {
                wrong(&format!("has a value {problem}"))
            }
            _ if row.told != Always => wrong(&format!("has a value {problem}")),
            _ => wrong(&format!("is {value:?}, {problem}")),
        })
    }
}

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
    // Compared without the prefix, which would make all names similar.
    let option = name.strip_prefix(VARIABLE_PREFIX).unwrap_or(name);
    let near = nearest(option, OPTIONS.iter().map(|row| row.name)).map(variable);
    let place = Origin::Environment.to_string();
    ConfigError::unknown("variable", name, place, near.as_deref(), names.join(", "))
}

/// Returns `name` if it looks like an option. Part of a password with an unescaped `?` and `=` is
/// not returned.
fn printable_name(name: &str) -> &str {
    let plain =
        name.len() <= 40 && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
    if plain { name } else { "(not shown)" }
}

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
            ("pool", "16"),
            ("mode", "session"),
            ("row_locks", "64"),
            ("schema", "locks"),
            ("table_prefix", "app_locks"),
            ("create_schema", "false"),
            ("spring", "v6"),
            ("region", "EU"),
            ("prefix", "app.INT_"),
            ("prepared", "false"),
            ("listen", "off"),
            ("sslmode", "verify-full"),
            ("connect_timeout", "500ms"),
            ("token_memory", "2days"),
            ("publish", "sharded"),
            ("replicas", "2"),
            ("fsync", "true"),
            ("replica_timeout", "800ms"),
            ("restart_guard", "1m"),
            ("db", "15"),
            ("session", "20s"),
            ("sessions", "16"),
            ("root", "/locks"),
            ("naming", "kazoo"),
            ("acl", "creator"),
            ("ca", "/etc/locks/ca.pem"),
            ("cert", "client.pem"),
        ] {
            let mut layer = Layer::default();
            layer.read(Origin::Url, name, value).unwrap();
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
            ("handoff", "257", "more than the most"),
            ("layout", "sprnig", "did you mean `spring`?"),
            ("layout", "spring", "sqlite stores have only `native`"),
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
            ConfigError::Unknown { given, nearest, .. } => (given, nearest.unwrap_or_default()),
            other => panic!("{other:?}"),
        };
        assert_eq!(told(Origin::Url, "leese"), ("leese".to_owned(), "lease".to_owned()));
        assert_eq!(told(Origin::File, "pol"), ("pol".to_owned(), "poll".to_owned()));
        assert_eq!(told(Origin::Url, "x@y z").0, "(not shown)");
        assert!(Layer::default().read(Origin::Url, "url", "memory:").is_err());
    }

    #[test]
    fn a_secret_is_shown_to_nobody() {
        for name in ["sentinel_user", "sentinel_password", "key", "listen", "acl", "auth"] {
            let row = OptionRow::find(name).unwrap();
            let mut layer = Layer::default();
            layer.read(Origin::File, name, "canary").unwrap();
            assert_eq!(row.shown_in(&layer).as_deref(), Some(HIDDEN));
            let again = layer.read(Origin::File, name, "canary").unwrap_err();
            let shown = format!("{layer:?} {layer:#?} {again} {again:?}");
            assert!(!shown.contains("canary") && !row.is_harmless("canary"), "{shown}");
        }
        for name in ["ca", "cert", "key"] {
            let error =
                Layer::default().read(Origin::File, name, "-----BEGIN\ncanary").unwrap_err();
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
    }

    #[test]
    fn an_option_given_twice_is_refused() {
        let mut layer = Layer::default();
        layer.read(Origin::Url, "lease", "5s").unwrap();
        assert!(layer.read(Origin::Url, "lease", "5s").unwrap_err().to_string().contains("twice"));
    }
}
