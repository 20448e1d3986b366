//! URLs of database servers: `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, and the same for
//! `mysql:`. Instead of a host, the URL can name PostgreSQL's socket directory, or the socket of
//! MariaDB or MySQL, with slashes as `%2F`.

use std::path::PathBuf;

use registry_core::ConfigError;

use super::parts::{Host, UrlParts, decode_text, invalid_url, parse_file_path, parse_host};
use crate::scheme::Scheme;
use crate::value::Secret;

/// A database and its login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DatabaseServer {
    pub(crate) address: DatabaseAddress,
    pub(crate) database: String,
    pub(crate) login: Option<DatabaseLogin>,
}

impl DatabaseServer {
    /// Returns the host of the URL. Empty if the URL names a socket.
    pub(crate) fn hosts(&self) -> &[Host] {
        match &self.address {
            DatabaseAddress::Host(host) => std::slice::from_ref(host),
            DatabaseAddress::Socket(..) => &[],
        }
    }
}

/// Address of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DatabaseAddress {
    Host(Host),
    /// On this host: PostgreSQL's socket directory, or the socket of MariaDB or MySQL.
    Socket(PathBuf, u16),
}

/// A user and an optional password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DatabaseLogin {
    pub(crate) user: Secret,
    pub(crate) password: Option<Secret>,
}

impl DatabaseServer {
    /// Parses the server of a URL, with `port` as the default port.
    pub(super) fn parse(
        parts: &UrlParts<'_>,
        scheme: &'static Scheme,
        port: u16,
    ) -> Result<Self, ConfigError> {
        let form = syntax_hint(scheme);
        let Some(authority) = parts.authority else {
            return Err(invalid_url(scheme, &format!("contains no server; {form}")));
        };
        let (login, host) = parts.login_and_hosts(authority, scheme)?;
        let database = parts.path.strip_prefix('/').unwrap_or_default();
        if database.is_empty() || database.contains('/') {
            return Err(invalid_url(scheme, &format!("contains no database; {form}")));
        }
        let login = login.map(|login| parse_login(login, scheme)).transpose()?;
        let database = decode_text(database, scheme, "a database")?;
        if database.contains('\0') {
            return Err(invalid_url(
                scheme,
                "contains a NUL character in the name of the database",
            ));
        }
        Ok(Self { address: parse_address(host, scheme, port)?, database, login })
    }
}

fn parse_address(
    host: &str,
    scheme: &Scheme,
    default_port: u16,
) -> Result<DatabaseAddress, ConfigError> {
    if host.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("%2f")) {
        let (directory, port) = match host.split_once(':') {
            Some((directory, port)) => (directory, port.parse().ok().filter(|port| *port != 0)),
            None => (host, Some(default_port)),
        };
        let Some(port) = port else { return Err(missing_host_error(scheme)) };
        return Ok(DatabaseAddress::Socket(
            parse_file_path(directory, scheme, &syntax_hint(scheme))?,
            port,
        ));
    }
    if host.contains(',') {
        return Err(invalid_url(
            scheme,
            "contains several servers; write one host, such as a DNS name of the primary",
        ));
    }
    parse_host(host, default_port)
        .map(DatabaseAddress::Host)
        .ok_or_else(|| missing_host_error(scheme))
}

fn missing_host_error(scheme: &Scheme) -> ConfigError {
    invalid_url(
        scheme,
        "contains no valid host with an optional port from 1 to 65535; percent-encode special characters in a password, \
         `/` as `%2F`",
    )
}

fn parse_login(login: &str, scheme: &Scheme) -> Result<DatabaseLogin, ConfigError> {
    let text = |part: &str| decode_text(part, scheme, "a user or a password").map(Secret::new);
    let (user, password) = match login.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (login, None),
    };
    if user.is_empty() {
        return Err(invalid_url(
            scheme,
            "contains a password without a user; write `USER:PASSWORD@`",
        ));
    }
    Ok(DatabaseLogin { user: text(user)?, password: password.map(text).transpose()? })
}

/// Returns the expected form, for errors.
fn syntax_hint(scheme: &Scheme) -> String {
    format!("write `{}://USER:PASSWORD@HOST:PORT/DATABASE`", scheme.name)
}

/// PostgreSQL's default port.
pub(super) const POSTGRES_PORT: u16 = 5_432;
/// Default port of MariaDB and MySQL.
pub(super) const MYSQL_PORT: u16 = 3_306;

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;
    use crate::store_url::{StoreLocation, StoreUrl};

    fn parsed(url: &str) -> DatabaseServer {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: StoreLocation::Postgres(server), .. }) => server,
            other => panic!("{url}: {other:?}"),
        }
    }

    #[test]
    fn a_url_contains_host_port_and_database() {
        let host = |name: &str, port| DatabaseAddress::Host((name.to_owned(), port));
        for (url, address, database) in [
            ("postgres://db/shop", host("db", 5_432), "shop"),
            ("postgresql://db.example.com:6432/shop", host("db.example.com", 6_432), "shop"),
            ("postgres://[::1]/a%20b?lease=5s", host("::1", 5_432), "a b"),
            (
                "postgres://%2Frun%2Fpg/shop",
                DatabaseAddress::Socket("/run/pg".into(), 5_432),
                "shop",
            ),
            (
                "postgres://u@%2frun%2fpg:1/shop",
                DatabaseAddress::Socket("/run/pg".into(), 1),
                "shop",
            ),
        ] {
            let server = parsed(url);
            assert_eq!((server.address, server.database.as_str()), (address, database), "{url}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_redacted() {
        for (url, user, password) in [
            ("postgres://worker@db/x", "worker", None),
            ("postgres://worker:secret@db/x", "worker", Some("secret")),
            ("postgres://w%40rk:p%2Fa%3As%25@db/x", "w@rk", Some("p/a:s%")),
        ] {
            let server = parsed(url);
            let login = server.login.clone().unwrap();
            assert_eq!(login.user.expose(), user);
            assert_eq!(login.password.as_ref().map(Secret::expose), password);
            let output = format!("{server:?}{server:#?}");
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
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn mariadb_and_mysql_urls_have_the_same_form() {
        for (url, address) in [
            ("mysql://db/shop", DatabaseAddress::Host(("db".to_owned(), 3_306))),
            ("mariadb://u:p@db:3307/shop", DatabaseAddress::Host(("db".to_owned(), 3_307))),
            (
                "mysql://%2Frun%2Fdb.sock/shop",
                DatabaseAddress::Socket("/run/db.sock".into(), 3_306),
            ),
        ] {
            let StoreUrl { store: StoreLocation::MySql(server), .. } =
                StoreUrl::parse(url).unwrap()
            else {
                panic!("{url}")
            };
            assert_eq!((server.address, server.database.as_str()), (address, "shop"), "{url}");
        }
        let error = StoreUrl::parse("mariadb://db").unwrap_err().to_string();
        assert!(error.contains("`mariadb://USER"), "{error}");
    }
}
