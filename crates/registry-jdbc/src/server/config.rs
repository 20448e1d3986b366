//! What the configurations of all database servers share: the form of their URLs, most of their
//! options, and the limits that depend on each other. Called by `PostgresConfig` and `MySqlConfig`.

use std::path::PathBuf;
use std::time::Duration;

use registry_core::config::{
    BackendConfig, Host, InvalidValue, Login, OptionError, OptionRow, PemFiles, SERVER_TIME_MIN,
    TIME_MAX, UrlParts, Values, format_time, parse_choice, parse_switch, parse_time,
};
use registry_core::{BackendError, BackendErrorKind, RegistryBuilder};

use super::{Encryption, PURGE_AFTER_MIN, SILENCE, SpringTable, SqlMode};

/// The options of all database servers, in the order of the tables in the book.
/// [`SqlOptions::assign`] or `assign` of the server's configuration sets their fields.
pub(crate) const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`default`"),
    OptionRow::LEASE.with_help(
        "how long a key stays locked after its holder dies; at most `1m` with `mode=session` and `mode=row`",
    ),
    OptionRow::POLL.with_default("`250ms`; with `layout=spring` `100ms`"),
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native", "spring"]),
    OptionRow::CONNECT_TIMEOUT,
    OptionRow::time(
        "busy_timeout",
        (SERVER_TIME_MIN, RegistryBuilder::TIMEOUT_MAX),
        "`1s`; at most five sixths of a `timeout` that is set",
        "how long a statement waits for a row that another transaction has locked; MariaDB and MySQL round up to whole seconds",
    ),
    OptionRow::time(
        "purge_after",
        (PURGE_AFTER_MIN, TIME_MAX),
        "`1h`; at least twice the longest wait for a response",
        "how long rows of free keys are kept; at least twice the longest wait for a response",
    ),
    OptionRow::new(
        "pool",
        Values::Count { min: 1, max: CONNECTIONS_MAX },
        "`4`",
        "the maximum number of connections for statements",
    ),
    OptionRow::new(
        "mode",
        Values::Choice { what: "lock mode", names: &["lease", "session", "row"] },
        "`lease`",
        "whether a lock is a row with a lease, a lock of a connection, or a locked row",
    ),
    OptionRow::new(
        "row_locks",
        Values::Count { min: 1, max: CONNECTIONS_MAX },
        "`16`",
        "with `mode=row`: the maximum number of locks held at once",
    ),
    OptionRow::new(
        "table_prefix",
        Values::Text { bytes_max: PREFIX_BYTES_MAX },
        "`lock_registry`",
        "the prefix of the tables' names: lower-case letters, digits and `_`",
    ),
    OptionRow::new("create_schema", Values::Switch, "`true`", "whether missing tables are created"),
    OptionRow::new(
        "spring",
        Values::Choice { what: "Spring version", names: &["v6", "v7"] },
        "`v7`",
        "with `layout=spring`: the version of Spring Integration. `v6` requires `lease`",
    ),
    OptionRow::new(
        "region",
        Values::Text { bytes_max: 100 },
        "`DEFAULT`",
        "with `layout=spring`: the region, which replaces the namespace",
    ),
    OptionRow::new(
        "prefix",
        Values::Text { bytes_max: 100 },
        "`INT_`",
        "with `layout=spring`: the prefix of `LOCK` in the table's name",
    ),
    OptionRow::new(
        "sslmode",
        Values::Choice {
            what: "TLS mode",
            names: &["disable", "prefer", "require", "verify-ca", "verify-full"],
        },
        "`prefer`; with `ca` `verify-full`",
        "whether connections are encrypted, and whether the server is verified",
    ),
    PemFiles::CA,
    PemFiles::CERT,
    PemFiles::KEY,
];

/// More connections than any server allows one program.
const CONNECTIONS_MAX: u32 = 10_000;
/// A table's name has at most 64 bytes; the longest derived name is that of a trigger.
pub(crate) const PREFIX_BYTES_MAX: usize = 50;

/// Whether opening a store creates missing tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CreateSchema {
    /// Missing tables are created. Existing ones are not changed.
    #[default]
    IfMissing,
    /// The store cannot be opened if its tables are missing. `lockreg schema` prints the statements
    /// that create them.
    Never,
}

impl CreateSchema {
    /// Parses the value of the option `create_schema`.
    pub(crate) fn parse(value: &str) -> Result<Self, InvalidValue> {
        Ok(if parse_switch(value)? { Self::IfMissing } else { Self::Never })
    }
}

/// The values of options that depend on each other.
#[derive(Clone, Default)]
pub(crate) struct SqlOptions {
    is_spring: bool,
    mode: Option<SqlMode>,
    version: Option<SpringVersion>,
    region: Option<String>,
    prefix: Option<String>,
    has_namespace: bool,
    has_row_locks: bool,
    lease: Option<Duration>,
    timeout: Option<Duration>,
    busy_timeout: Option<Duration>,
    purge_after: Option<Duration>,
    encryption: Option<Encryption>,
    pub(crate) pem_files: PemFiles,
}

/// The version of Spring Integration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SpringVersion {
    /// Version 6 and earlier.
    V6,
    V7,
}

/// The fields that the configurations of all database servers have.
pub(crate) struct SharedFields<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) connections: u32,
    pub(crate) row_locks: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) limits: Limits,
    pub(crate) encryption: Encryption,
}

impl SharedFields<'_> {
    /// Checks fields that may have been set by methods.
    pub(crate) fn validate(&self, config: &dyn BackendConfig) -> Result<(), OptionError> {
        config.check_value("namespace", self.namespace)?;
        config.check_value("pool", &self.connections.to_string())?;
        config.check_value("row_locks", &self.row_locks.to_string())?;
        for (option, value) in [
            ("connect_timeout", self.connect_timeout),
            ("busy_timeout", self.limits.busy_timeout),
            ("purge_after", self.limits.purge_after),
        ] {
            config.check_value(option, &format_time(value))?;
        }
        self.limits.validate()?;
        if !cfg!(feature = "tls")
            && !matches!(self.encryption, Encryption::Off | Encryption::Preferred)
        {
            return Err(OptionError::general("encrypted connections need the feature `tls`"));
        }
        Ok(())
    }
}

/// Time limits that fit together.
pub(crate) struct Limits {
    pub(crate) busy_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) purge_after: Duration,
}

impl Limits {
    pub(crate) const DEFAULT: Self = Self {
        busy_timeout: Duration::from_secs(1),
        // Longer than the engine's own time-out.
        response_timeout: Duration::from_secs(10),
        purge_after: Duration::from_secs(60 * 60),
    };

    fn validate(&self) -> Result<(), OptionError> {
        if !(SERVER_TIME_MIN..=TIME_MAX).contains(&self.response_timeout) {
            return Err(OptionError::new("response_timeout", "is not between 10ms and 366days"));
        }
        if self.busy_timeout >= self.response_timeout {
            return Err(OptionError::new("busy_timeout", "is not shorter than response_timeout"));
        }
        if self.purge_after < self.response_timeout * 2 {
            return Err(OptionError::new(
                "purge_after",
                format!(
                    "is {}, less than {}, twice the longest wait for a response (response_timeout)",
                    format_time(self.purge_after),
                    format_time(self.response_timeout * 2)
                ),
            ));
        }
        Ok(())
    }
}

impl SqlOptions {
    /// Notes the value of an option. Ignores options that no other option depends on.
    pub(crate) fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.has_namespace = true,
            "row_locks" => self.has_row_locks = true,
            "lease" => self.lease = Some(parse_time(value)?),
            "timeout" => self.timeout = Some(parse_time(value)?),
            "layout" => self.is_spring = value == "spring",
            "busy_timeout" => self.busy_timeout = Some(parse_time(value)?),
            "purge_after" => self.purge_after = Some(parse_time(value)?),
            "mode" => {
                let modes = [
                    ("lease", SqlMode::Lease),
                    ("session", SqlMode::Session),
                    ("row", SqlMode::Row),
                ];
                self.mode = Some(parse_choice(value, &modes)?);
            }
            "spring" => {
                let versions = [("v6", SpringVersion::V6), ("v7", SpringVersion::V7)];
                self.version = Some(parse_choice(value, &versions)?);
            }
            "region" => self.region = Some(value.to_owned()),
            "prefix" => self.prefix = Some(value.to_owned()),
            "sslmode" => {
                let modes = [
                    ("disable", Encryption::Off),
                    ("prefer", Encryption::Preferred),
                    ("require", Encryption::Required),
                    ("verify-ca", Encryption::VerifyAuthority),
                    ("verify-full", Encryption::VerifyHost),
                ];
                self.encryption = Some(parse_choice(value, &modes)?);
            }
            _ => {
                self.pem_files.assign(name, value)?;
            }
        }
        Ok(())
    }

    /// Returns the limits if an option sets one of them.
    pub(crate) fn limits(&self) -> Option<Limits> {
        if (self.timeout, self.busy_timeout, self.purge_after) == (None, None, None) {
            return None;
        }
        let default = Limits::DEFAULT;
        let busy_timeout = match (self.busy_timeout, self.timeout) {
            (Some(busy_timeout), _) => busy_timeout,
            // The engine ignores the result of a statement that takes longer than its time-out.
            (None, Some(timeout)) => default.busy_timeout.min(timeout * 5 / 6).max(SERVER_TIME_MIN),
            (None, None) => default.busy_timeout,
        };
        // The connection must outlast the longest wait for a response.
        let longest = busy_timeout.max(self.timeout.unwrap_or_default());
        let response_timeout = default.response_timeout.max(longest * 6 / 5);
        // A row must be kept until every statement that could have read it has timed out.
        let purge_after = default.purge_after.max(response_timeout * 2);
        let purge_after = self.purge_after.unwrap_or(purge_after);
        Some(Limits { busy_timeout, response_timeout, purge_after })
    }

    /// Returns what a lock is.
    pub(crate) fn mode(&self) -> SqlMode {
        if !self.is_spring {
            return self.mode.clone().unwrap_or(SqlMode::Lease);
        }
        let mut table = match (self.version, self.lease) {
            (Some(SpringVersion::V6), Some(lease)) => SpringTable::v6(lease),
            _ => SpringTable::v7(),
        };
        if let Some(region) = &self.region {
            table = table.with_region(region);
        }
        if let Some(prefix) = &self.prefix {
            table = table.with_prefix(prefix);
        }
        SqlMode::Spring(table)
    }

    /// Returns the poll interval in Spring's table: its peers publish no release, and poll at the
    /// default of Spring's `idleBetweenTries`.
    pub(crate) fn poll(&self) -> Option<Duration> {
        self.is_spring.then_some(Duration::from_millis(100))
    }

    /// Returns the encryption, or an error if this build does not have it. `server` is the name of
    /// the server's feature.
    pub(crate) fn encryption(&self, server: &str) -> Result<Option<Encryption>, BackendError> {
        let is_plain =
            matches!(self.encryption, None | Some(Encryption::Off | Encryption::Preferred));
        let needs_tls = !is_plain || !self.pem_files.is_empty();
        if needs_tls && !cfg!(feature = "tls") {
            let message = format!(
                "{server}: encrypted connections are not built in; enable feature `{server}-tls` of lock-registry"
            );
            return Err(BackendError::new(BackendErrorKind::Misconfigured, message).as_refused());
        }
        Ok(self.encryption)
    }

    /// Checks the options together.
    pub(crate) fn validate(&self) -> Result<(), OptionError> {
        self.check_spring()?;
        if self.has_row_locks && !matches!(self.mode, Some(SqlMode::Row)) {
            return Err(OptionError::new(
                "row_locks",
                "has no effect without `mode=row`; set `mode=row` or remove the option",
            ));
        }
        let verifies = matches!(
            self.encryption,
            None | Some(Encryption::VerifyAuthority | Encryption::VerifyHost)
        );
        if self.pem_files.has_ca() && !verifies {
            return Err(OptionError::new(
                "ca",
                "has no effect, because `sslmode` does not verify the server; write `sslmode=verify-full` or leave `sslmode` out",
            ));
        }
        self.pem_files.validate()?;
        // The store has the same limit, but checks it only when it is open.
        match (self.lease, &self.mode) {
            (Some(lease), Some(SqlMode::Session | SqlMode::Row)) if lease > SILENCE => {
                Err(OptionError::new(
                    "lease",
                    format!(
                        "is {}, more than the maximum {} with `mode=session` and `mode=row`",
                        format_time(lease),
                        format_time(SILENCE)
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks the options of `layout=spring`, and refuses them in other layouts.
    fn check_spring(&self) -> Result<(), OptionError> {
        if !self.is_spring {
            let options = [
                ("spring", self.version.is_some()),
                ("region", self.region.is_some()),
                ("prefix", self.prefix.is_some()),
            ];
            return match options.iter().find(|(_, is_set)| *is_set) {
                Some((option, _)) => Err(OptionError::new(
                    option,
                    "has no effect without `layout=spring`; set `layout=spring` or remove the option",
                )),
                None => Ok(()),
            };
        }
        if matches!(self.mode, Some(SqlMode::Session | SqlMode::Row)) {
            let problem = "must be `lease` with `layout=spring`; leave `mode` out";
            return Err(OptionError::new("mode", problem));
        }
        if self.has_namespace {
            let problem = "has no effect with `layout=spring`; set `region` instead";
            return Err(OptionError::new("namespace", problem));
        }
        if self.version == Some(SpringVersion::V6) && self.lease.is_none() {
            return Err(OptionError::new(
                "spring",
                "is v6, which requires `lease`; set `lease` to the `timeToLive` of the peers (10s by default)",
            ));
        }
        if let SqlMode::Spring(table) = self.mode() {
            table.check().map_err(OptionError::general)?;
        }
        Ok(())
    }
}

/// The server of a URL.
pub(crate) struct ServerUrl {
    pub(crate) address: ServerAddress,
    /// Empty if the URL names none.
    pub(crate) database: String,
    pub(crate) login: Option<Login>,
}

pub(crate) enum ServerAddress {
    Host(Host),
    /// On this host: PostgreSQL's socket directory, or the socket of MariaDB or MySQL.
    Socket(
        PathBuf,
        #[cfg_attr(
            not(feature = "postgres"),
            expect(dead_code, reason = "only PostgreSQL's sockets have a port")
        )]
        u16,
    ),
}

impl ServerUrl {
    /// Parses `SCHEME://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`. The slashes of a socket are
    /// `%2F`.
    pub(crate) fn parse(url: &UrlParts<'_>, default_port: u16) -> Result<Self, BackendError> {
        let syntax = syntax(url);
        let (login, host) = url.login_and_hosts(&syntax)?;
        let database = url.path.strip_prefix('/').unwrap_or_default();
        if database.contains('/') {
            return Err(no_database(url));
        }
        if login.as_ref().is_some_and(|login| login.user.expose().is_empty()) {
            return Err(url.invalid("contains a password without a user; write `USER:PASSWORD@`"));
        }
        let database = url.text(database, "a database")?;
        if database.contains('\0') {
            return Err(url.invalid("contains a NUL character in the name of the database"));
        }
        let address = if host.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("%2f")) {
            let (socket, port) = match host.split_once(':') {
                Some((socket, port)) => (socket, port.parse().ok().filter(|port| *port != 0)),
                None => (host, Some(default_port)),
            };
            let port = port.ok_or_else(|| url.invalid_host())?;
            ServerAddress::Socket(url.file_path(socket, &syntax)?, port)
        } else if host.contains(',') {
            return Err(url.invalid(
                "contains several servers; write one host, such as a DNS name of the primary",
            ));
        } else {
            ServerAddress::Host(url.host(host, default_port)?)
        };
        Ok(Self { address, database, login })
    }
}

/// Refuses a URL without a database. A registry has no default for it.
pub(crate) fn require_database(url: &UrlParts<'_>) -> Result<(), BackendError> {
    if matches!(url.path, "" | "/") { Err(no_database(url)) } else { Ok(()) }
}

fn no_database(url: &UrlParts<'_>) -> BackendError {
    url.invalid(&format!("contains no database; {}", syntax(url)))
}

/// Returns the expected form, for errors.
fn syntax(url: &UrlParts<'_>) -> String {
    format!("write `{}://USER:PASSWORD@HOST:PORT/DATABASE`", url.scheme)
}

#[cfg(all(test, feature = "postgres", feature = "mysql"))]
mod tests {
    use registry_core::config::StoreKind;

    use crate::stores::{MYSQL, POSTGRES};

    use super::*;

    fn parse(store: &StoreKind, url: &str) -> Result<Box<dyn BackendConfig>, BackendError> {
        (store.parse)(&UrlParts::split(url).expect("the URL has a scheme"))
    }

    #[test]
    fn a_url_contains_host_port_and_database() {
        for (store, url, address, database) in [
            (&POSTGRES, "postgres://db/shop", "db:5432", "shop"),
            (&POSTGRES, "postgresql://db.example.com:6432/shop", "db.example.com:6432", "shop"),
            (&POSTGRES, "postgres://[::1]/a%20b", "[::1]:5432", "a b"),
            (&POSTGRES, "postgres://%2Frun%2Fpg/shop", "/run/pg", "shop"),
            (&POSTGRES, "postgres://u@%2frun%2fpg:1/shop", "/run/pg", "shop"),
            (&MYSQL, "mysql://db/shop", "db:3306", "shop"),
            (&MYSQL, "mariadb://u:p@db:3307/shop", "db:3307", "shop"),
            (&MYSQL, "mysql://%2Frun%2Fdb.sock/shop", "/run/db.sock", "shop"),
        ] {
            let config = parse(store, url).unwrap_or_else(|error| panic!("{url}: {error}"));
            assert_eq!(config.address(), address, "{url}");
            assert_eq!(config.hosts().is_empty(), address.starts_with('/'), "{url}");
            assert!(format!("{config:?}").contains(&format!("{database:?}")), "{config:?}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_redacted() {
        for (url, user, password) in [
            ("postgres://worker@db/x", "worker", None),
            ("postgres://worker:secret@db/x", "worker", Some("secret")),
            ("postgres://w%40rk:p%2Fa%3As%25@db/x", "w@rk", Some("p/a:s%")),
        ] {
            let server = ServerUrl::parse(&UrlParts::split(url).unwrap(), 1).unwrap();
            let login = server.login.unwrap();
            assert_eq!(login.user.expose(), user);
            assert_eq!(login.password.as_ref().map(|password| password.expose()), password);
            let config = parse(&POSTGRES, url).unwrap();
            let output = format!("{login:?}{config:?}{config:#?}");
            assert!(
                !output.contains(user) && password.is_none_or(|p| !output.contains(p)),
                "{output}"
            );
        }
    }

    #[test]
    fn an_error_about_a_url_without_a_database_contains_a_hint() {
        for (url, hint) in [
            ("postgres:", "contains no server"),
            ("postgres://db", "contains no database"),
            ("postgres://db/", "contains no database"),
            ("postgres://db/a/b", "contains no database"),
            ("postgres:///x", "no valid host"),
            ("postgres://db:0/x", "no valid host"),
            ("postgres://a,b/x", "several servers"),
            ("postgres://:p@db/x", "without a user"),
            ("postgres://u:p@p@db/x", "`%40`"),
        ] {
            let error = parse(&POSTGRES, url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[test]
    fn an_error_names_the_scheme_of_the_url() {
        let error = parse(&MYSQL, "mariadb://db").unwrap_err().to_string();
        assert!(error.contains("`mariadb://USER"), "{error}");
    }
}
