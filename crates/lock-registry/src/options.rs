//! The options of all stores: a table of names, with a parser and a formatter for each. Value
//! formats are in `value`, validity in `check`, and the precedence of sources in `config`.

mod check;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use registry_core::ConfigError;

use crate::layout::{Layout, parse_layout};
use crate::store_url::UrlText;
use crate::suggestion::suggest;
use crate::value::{
    InvalidValue, REDACTED, Secret, format_duration, parse_bool, parse_choice, parse_path,
    parse_time, parse_u32,
};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "redis"))]
pub(crate) use check::SERVER_TIME_MIN;
use check::SupportedStores;

/// The options of one source: URL, file, environment, command line or code. The next source
/// supplies options that are not set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
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
    pub(crate) mode: Option<LockMode>,
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
    pub(crate) publish: Option<PublishMode>,
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
    pub(crate) naming: Option<NodeNaming>,
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
pub(crate) enum LockMode {
    /// A row with a lease.
    Lease,
    /// A lock that ends with the registry's connection.
    Session,
    /// A row lock of a transaction that lasts as long as the lock.
    Row,
}

const LOCK_MODES: [(&str, LockMode); 3] =
    [("lease", LockMode::Lease), ("session", LockMode::Session), ("row", LockMode::Row)];

/// The command that publishes a release to waiters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishMode {
    Auto,
    Plain,
    Sharded,
}

const PUBLISH_MODES: [(&str, PublishMode); 3] =
    [("auto", PublishMode::Auto), ("plain", PublishMode::Plain), ("sharded", PublishMode::Sharded)];

/// Encryption of database connections, in PostgreSQL's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SslMode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

const SSL_MODES: [(&str, SslMode); 5] = [
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

const SPRING_VERSIONS: [(&str, SpringVersion); 2] =
    [("v6", SpringVersion::V6), ("v7", SpringVersion::V7)];

/// Names of lock nodes in ZooKeeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeNaming {
    Curator,
    Kazoo,
}

const NODE_NAMINGS: [(&str, NodeNaming); 2] =
    [("curator", NodeNaming::Curator), ("kazoo", NodeNaming::Kazoo)];

/// Replaces the URL of option `listen`.
pub(crate) const NO_LISTEN: &str = "off";

/// One option: its name, its stores, its parser, its formatter, and whether messages show it.
pub(crate) struct OptionSpec {
    pub(crate) name: &'static str,
    stores: SupportedStores,
    visibility: Visibility,
    parse: ParseValue,
    format: FormatValue,
}

/// Whether messages show a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Visibility {
    Always,
    /// Shown if it is a valid path. Otherwise it may be the contents of the file.
    IfValidPath,
    Never,
}

use SupportedStores::{
    All, Database, Encrypted, Postgres, Redis, RedisQuorum, RedisReplicated, RedisSentinel,
    RedisUnix, Servers, Sql, ZooKeeper,
};
use Visibility::{Always, IfValidPath, Never};

/// All options, in the order of `settings`. A URL can hold all of them except `url`.
#[rustfmt::skip]
pub(crate) static OPTIONS: &[OptionSpec] = &[
    spec("url",               All,             Never,       |o, t| assign(&mut o.url, Ok(UrlText::new(t))),                                    |o| o.url.as_ref().map(ToString::to_string)),
    spec("namespace",         All,             Always,      |o, t| assign(&mut o.namespace, Ok(t.into())),                                     |o| o.namespace.clone()),
    spec("lease",             All,             Always,      |o, t| assign(&mut o.lease, parse_time(t)),                                        |o| o.lease.map(format_duration)),
    spec("renew",             All,             Always,      |o, t| assign(&mut o.renew, parse_bool(t)),                                        |o| o.renew.map(|on| on.to_string())),
    spec("poll",              All,             Always,      |o, t| assign(&mut o.poll, parse_time(t)),                                         |o| o.poll.map(format_duration)),
    spec("handoff",           All,             Always,      |o, t| assign(&mut o.handoff, parse_u32(t)),                                       |o| o.handoff.map(|n| n.to_string())),
    spec("timeout",           All,             Always,      |o, t| assign(&mut o.timeout, parse_time(t)),                                      |o| o.timeout.map(format_duration)),
    spec("label",             All,             Always,      |o, t| assign(&mut o.label, Ok(t.into())),                                         |o| o.label.clone()),
    spec("layout",            All,             Always,      |o, t| assign(&mut o.layout, parse_layout(t)),                                     |o| o.layout.map(|o| o.to_string())),
    spec("busy_timeout",      Sql,             Always,      |o, t| assign(&mut o.busy_timeout, parse_time(t)),                                 |o| o.busy_timeout.map(format_duration)),
    spec("purge_after",       Sql,             Always,      |o, t| assign(&mut o.purge_after, parse_time(t)),                                  |o| o.purge_after.map(format_duration)),
    spec("pool",              Database,        Always,      |o, t| assign(&mut o.pool, parse_u32(t)),                                          |o| o.pool.map(|n| n.to_string())),
    spec("mode",              Database,        Always,      |o, t| assign(&mut o.mode, parse_choice(t, "lock mode", &LOCK_MODES)),             |o| o.mode.map(mode_name)),
    spec("row_locks",         Database,        Always,      |o, t| assign(&mut o.row_locks, parse_u32(t)),                                     |o| o.row_locks.map(|n| n.to_string())),
    spec("schema",            Postgres,        Always,      |o, t| assign(&mut o.schema, Ok(t.into())),                                        |o| o.schema.clone()),
    spec("table_prefix",      Database,        Always,      |o, t| assign(&mut o.table_prefix, Ok(t.into())),                                  |o| o.table_prefix.clone()),
    spec("create_schema",     Database,        Always,      |o, t| assign(&mut o.create_schema, parse_bool(t)),                                |o| o.create_schema.map(|on| on.to_string())),
    spec("spring",            Database,        Always,      |o, t| assign(&mut o.spring, parse_choice(t, "Spring version", &SPRING_VERSIONS)), |o| o.spring.map(spring_name)),
    spec("region",            Database,        Always,      |o, t| assign(&mut o.region, Ok(t.into())),                                        |o| o.region.clone()),
    spec("prefix",            Database,        Always,      |o, t| assign(&mut o.prefix, Ok(t.into())),                                        |o| o.prefix.clone()),
    spec("prepared",          Postgres,        Always,      |o, t| assign(&mut o.prepared, parse_bool(t)),                                     |o| o.prepared.map(|on| on.to_string())),
    spec("listen",            Postgres,        Never,       |o, t| assign(&mut o.listen, Ok(Secret::new(t))),                                  |o| o.listen.as_ref().map(redact_listen)),
    spec("sslmode",           Database,        Always,      |o, t| assign(&mut o.sslmode, parse_choice(t, "TLS mode", &SSL_MODES)),            |o| o.sslmode.map(ssl_mode_name)),
    spec("connect_timeout",   Servers,         Always,      |o, t| assign(&mut o.connect_timeout, parse_time(t)),                              |o| o.connect_timeout.map(format_duration)),
    spec("token_memory",      Redis,           Always,      |o, t| assign(&mut o.token_memory, parse_time(t)),                                 |o| o.token_memory.map(format_duration)),
    spec("publish",           Redis,           Always,      |o, t| assign(&mut o.publish, parse_choice(t, "publish command", &PUBLISH_MODES)), |o| o.publish.map(publish_name)),
    spec("replicas",          RedisReplicated, Always,      |o, t| assign(&mut o.replicas, parse_u32(t)),                                      |o| o.replicas.map(|n| n.to_string())),
    spec("fsync",             RedisReplicated, Always,      |o, t| assign(&mut o.fsync, parse_bool(t)),                                        |o| o.fsync.map(|on| on.to_string())),
    spec("replica_timeout",   RedisReplicated, Always,      |o, t| assign(&mut o.replica_timeout, parse_time(t)),                              |o| o.replica_timeout.map(format_duration)),
    spec("restart_guard",     RedisQuorum,     Always,      |o, t| assign(&mut o.restart_guard, parse_time(t)),                                |o| o.restart_guard.map(format_duration)),
    spec("db",                RedisUnix,       Always,      |o, t| assign(&mut o.db, parse_u32(t)),                                            |o| o.db.map(|n| n.to_string())),
    spec("sentinel_user",     RedisSentinel,   Never,       |o, t| assign(&mut o.sentinel_user, Ok(Secret::new(t))),                           |o| o.sentinel_user.as_ref().map(redact)),
    spec("sentinel_password", RedisSentinel,   Never,       |o, t| assign(&mut o.sentinel_password, Ok(Secret::new(t))),                       |o| o.sentinel_password.as_ref().map(redact)),
    spec("session",           ZooKeeper,       Always,      |o, t| assign(&mut o.session, parse_time(t)),                                      |o| o.session.map(format_duration)),
    spec("sessions",          ZooKeeper,       Always,      |o, t| assign(&mut o.sessions, parse_u32(t)),                                      |o| o.sessions.map(|n| n.to_string())),
    spec("root",              ZooKeeper,       Always,      |o, t| assign(&mut o.root, Ok(t.into())),                                          |o| o.root.clone()),
    spec("naming",            ZooKeeper,       Always,      |o, t| assign(&mut o.naming, parse_choice(t, "node naming", &NODE_NAMINGS)),       |o| o.naming.map(naming_name)),
    spec("acl",               ZooKeeper,       Never,       |o, t| assign(&mut o.acl, Ok(Secret::new(t))),                                     |o| o.acl.as_ref().map(redact_acl)),
    spec("auth",              ZooKeeper,       Never,       |o, t| assign(&mut o.auth, Ok(Secret::new(t))),                                    |o| o.auth.as_ref().map(redact)),
    spec("ca",                Encrypted,       IfValidPath, |o, t| assign(&mut o.ca, parse_path(t)),                                           |o| o.ca.as_deref().map(format_path)),
    spec("cert",              Encrypted,       IfValidPath, |o, t| assign(&mut o.cert, parse_path(t)),                                         |o| o.cert.as_deref().map(format_path)),
    spec("key",               Encrypted,       Never,       |o, t| assign(&mut o.key, parse_path(t).map(|_| Secret::new(t))),                  |o| o.key.as_ref().map(redact)),
];

type ParseValue = fn(&mut Options, &str) -> Result<(), InvalidValue>;
type FormatValue = fn(&Options) -> Option<String>;

const fn spec(
    name: &'static str,
    stores: SupportedStores,
    visibility: Visibility,
    parse: ParseValue,
    format: FormatValue,
) -> OptionSpec {
    OptionSpec { name, stores, visibility, parse, format }
}

fn assign<T>(target: &mut Option<T>, value: Result<T, InvalidValue>) -> Result<(), InvalidValue> {
    *target = Some(value?);
    Ok(())
}

fn publish_name(publish: PublishMode) -> String {
    let named = PUBLISH_MODES.iter().find(|(_, named)| *named == publish);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn mode_name(mode: LockMode) -> String {
    let named = LOCK_MODES.iter().find(|(_, named)| *named == mode);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn spring_name(version: SpringVersion) -> String {
    let named = SPRING_VERSIONS.iter().find(|(_, named)| *named == version);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn ssl_mode_name(mode: SslMode) -> String {
    let named = SSL_MODES.iter().find(|(_, named)| *named == mode);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn naming_name(naming: NodeNaming) -> String {
    let named = NODE_NAMINGS.iter().find(|(_, named)| *named == naming);
    named.map_or("", |(name, _)| *name).to_owned()
}

fn redact_acl(acl: &Secret) -> String {
    if matches!(acl.expose(), "open" | "creator") {
        acl.expose().to_owned()
    } else {
        REDACTED.to_owned()
    }
}

fn redact_listen(listen: &Secret) -> String {
    if listen.expose() == NO_LISTEN { NO_LISTEN.to_owned() } else { REDACTED.to_owned() }
}

fn format_path(path: &std::path::Path) -> String {
    path.display().to_string()
}

fn redact(_: &Secret) -> String {
    REDACTED.to_owned()
}

impl OptionSpec {
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        OPTIONS.iter().find(|spec| spec.name == name)
    }

    /// Returns whether `value` can be shown.
    pub(crate) fn is_safe_to_show(&self, value: &str) -> bool {
        // A plain but invalid value may be the rest of a password, so the value must also parse.
        let plain = |c: char| c.is_alphanumeric() || "-._/ ".contains(c);
        self.visibility != Never
            && value.chars().all(plain)
            && (self.parse)(&mut Options::default(), value).is_ok()
    }

    /// Returns the option's value in `options` without secrets. Returns `None` if it is not set.
    pub(crate) fn redacted_value(&self, options: &Options) -> Option<String> {
        (self.format)(options)
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
    fn describe(self, option: &str) -> String {
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

impl Options {
    /// Parses one option of `origin` from text. A URL cannot contain the option `url`.
    pub(crate) fn set(
        &mut self,
        origin: Origin,
        name: &str,
        value: &str,
    ) -> Result<(), ConfigError> {
        match OptionSpec::find(name) {
            Some(spec) if !(origin == Origin::Url && spec.name == "url") => {
                self.set_option(spec, origin, value)
            }
            _ => Err(unknown_option(origin, name)),
        }
    }

    /// Parses one option from an environment variable, named with its prefix.
    #[cfg(feature = "config")]
    pub(crate) fn set_variable(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        // Case-sensitive, so that all programs ignore a variable in lower case alike.
        match OPTIONS.iter().find(|spec| variable(spec.name) == name) {
            Some(spec) => self.set_option(spec, Origin::Environment, value),
            None => Err(unknown_variable(name)),
        }
    }

    fn set_option(
        &mut self,
        spec: &OptionSpec,
        origin: Origin,
        value: &str,
    ) -> Result<(), ConfigError> {
        let invalid = |problem: &str| {
            ConfigError::Invalid(format!("{} {problem}", origin.describe(spec.name)))
        };
        if spec.redacted_value(self).is_some() {
            return Err(invalid("is set twice; set it once"));
        }
        (spec.parse)(self, value).map_err(|InvalidValue(problem)| match origin {
            // A value in a URL may be part of a password that was not percent-encoded. A plain
            // number is shown, because it is likely a time without a unit.
            Origin::Url if value.parse::<f64>().is_err() => {
                invalid(&format!("has a value that {problem}"))
            }
            _ if spec.visibility != Always => invalid(&format!("has a value that {problem}")),
            _ => invalid(&format!("is {value:?}, which {problem}")),
        })
    }
}

fn unknown_option(origin: Origin, name: &str) -> ConfigError {
    let names = OPTIONS
        .iter()
        .map(|spec| spec.name)
        .filter(|name| !(origin == Origin::Url && *name == "url"));
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
    let names: Vec<String> = OPTIONS.iter().map(|spec| variable(spec.name)).collect();
    // Compared without the prefix, which would make all names similar.
    let option = name.strip_prefix(VARIABLE_PREFIX).unwrap_or(name);
    let suggestion = suggest(option, OPTIONS.iter().map(|spec| spec.name)).map(variable);
    let source = Origin::Environment.to_string();
    ConfigError::unknown("variable", name, source, suggestion.as_deref(), names.join(", "))
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

    fn parse_and_check(name: &str, value: &str) -> Result<Options, ConfigError> {
        let mut options = Options::default();
        options.set(Origin::Url, name, value)?;
        options.check(Origin::Url, "sqlite")?;
        Ok(options)
    }

    #[test]
    fn every_option_is_parsed_and_formatted() {
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
            let mut options = Options::default();
            options.set(Origin::Url, name, value).unwrap();
            assert_eq!(
                OptionSpec::find(name).unwrap().redacted_value(&options).as_deref(),
                Some(value)
            );
        }
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
            let error = parse_and_check(name, value).unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains(name), "{name}={value}: {error}");
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
    fn a_secret_option_is_never_shown() {
        for name in ["sentinel_user", "sentinel_password", "key", "listen", "acl", "auth"] {
            let spec = OptionSpec::find(name).unwrap();
            let mut options = Options::default();
            options.set(Origin::File, name, "canary").unwrap();
            assert_eq!(spec.redacted_value(&options).as_deref(), Some(REDACTED));
            let again = options.set(Origin::File, name, "canary").unwrap_err();
            let output = format!("{options:?} {options:#?} {again} {again:?}");
            assert!(!output.contains("canary") && !spec.is_safe_to_show("canary"), "{output}");
        }
        for name in ["ca", "cert", "key"] {
            let error =
                Options::default().set(Origin::File, name, "-----BEGIN\ncanary").unwrap_err();
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
    }

    #[test]
    fn an_option_that_is_set_twice_is_refused() {
        let mut options = Options::default();
        options.set(Origin::Url, "lease", "5s").unwrap();
        assert!(options.set(Origin::Url, "lease", "5s").unwrap_err().to_string().contains("twice"));
    }
}
