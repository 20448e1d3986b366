//! URLs of database servers: `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, and the same for
//! `mysql:`. Instead of a host, the URL can name PostgreSQL's socket directory, or the socket of
//! MariaDB or MySQL, with slashes as `%2F`.

use std::path::PathBuf;

use registry_core::ConfigError;

use super::parts::{Host, Parts, decoded_text, file_path, server, unusable};
use crate::scheme::Scheme;
use crate::value::Secret;

/// A database and its login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DatabaseServer {
    pub(crate) place: Place,
    pub(crate) database: String,
    pub(crate) login: Option<Login>,
}

impl DatabaseServer {
    /// Returns the host of the URL. Empty if the URL names a socket.
    pub(crate) fn hosts(&self) -> &[Host] {
        match &self.place {
            Place::Host(host) => std::slice::from_ref(host),
            Place::Socket(..) => &[],
        }
    }
}

/// Address of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Host(Host),
    /// On this host: PostgreSQL's socket directory, or the socket of MariaDB or MySQL.
    Socket(PathBuf, u16),
}

/// A user and an optional password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Secret,
    pub(crate) password: Option<Secret>,
}

impl DatabaseServer {
    /// Parses the server of a URL, with `port` as the default port.
    pub(super) fn parse(
        parts: &Parts<'_>,
        scheme: &'static Scheme,
        port: u16,
    ) -> Result<Self, ConfigError> {
        let form = form(scheme);
        let Some(authority) = parts.authority else {
            return Err(unusable(scheme, &format!("names no server; {form}")));
        };
        let (login, host) = parts.login_and_hosts(authority, scheme)?;
        let database = parts.path.strip_prefix('/').unwrap_or_default();
        if database.is_empty() || database.contains('/') {
            return Err(unusable(scheme, &format!("does not name a database; {form}")));
        }
        let login = login.map(|login| self::login(login, scheme)).transpose()?;
        let database = decoded_text(database, scheme, "a database")?;
        if database.contains('\0') {
            return Err(unusable(scheme, "names a database with a NUL character, which none has"));
        }
        Ok(Self { place: place(host, scheme, port)?, database, login })
    }
}

fn place(host: &str, scheme: &Scheme, usual_port: u16) -> Result<Place, ConfigError> {
    if host.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("%2f")) {
        let (folder, port) = match host.split_once(':') {
            Some((folder, port)) => (folder, port.parse().ok().filter(|port| *port != 0)),
            None => (host, Some(usual_port)),
        };
        let Some(port) = port else { return Err(no_host(scheme)) };
        return Ok(Place::Socket(file_path(folder, scheme, &form(scheme))?, port));
    }
    if host.contains(',') {
        return Err(unusable(
            scheme,
            "names several servers, and the locks are in one; a name that leads to the primary can be moved",
        ));
    }
    server(host, usual_port).map(Place::Host).ok_or_else(|| no_host(scheme))
}

fn no_host(scheme: &Scheme) -> ConfigError {
    unusable(
        scheme,
        "does not name a host and, after a colon, perhaps a port from 1 to 65535; special characters in a password are \
         percent-encoded, `/` as `%2F`",
    )
}

fn login(login: &str, scheme: &Scheme) -> Result<Login, ConfigError> {
    let text = |part: &str| decoded_text(part, scheme, "a user or a password").map(Secret::new);
    let (user, password) = match login.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (login, None),
    };
    if user.is_empty() {
        return Err(unusable(scheme, "names no user before the password; write `USER:PASSWORD@`"));
    }
    Ok(Login { user: text(user)?, password: password.map(text).transpose()? })
}

/// Returns the expected form, for errors.
fn form(scheme: &Scheme) -> String {
    format!("write `{}://USER:PASSWORD@HOST:PORT/DATABASE`", scheme.name)
}

/// PostgreSQL's default port.
pub(super) const POSTGRES_PORT: u16 = 5_432;
/// Default port of MariaDB and MySQL.
pub(super) const MYSQL_PORT: u16 = 3_306;

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;
    use crate::store_url::{Store, StoreUrl};

    fn parsed(url: &str) -> DatabaseServer {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: Store::Postgres(server), .. }) => server,
            other => panic!("{url}: {other:?}"),
        }
    }

    #[test]
    fn a_server_is_named_by_host_port_and_database() {
        let host = |name: &str, port| Place::Host((name.to_owned(), port));
        for (url, place, database) in [
            ("postgres://db/shop", host("db", 5_432), "shop"),
            ("postgresql://db.example.com:6432/shop", host("db.example.com", 6_432), "shop"),
            ("postgres://[::1]/a%20b?lease=5s", host("::1", 5_432), "a b"),
            ("postgres://%2Frun%2Fpg/shop", Place::Socket("/run/pg".into(), 5_432), "shop"),
            ("postgres://u@%2frun%2fpg:1/shop", Place::Socket("/run/pg".into(), 1), "shop"),
        ] {
            let server = parsed(url);
            assert_eq!((server.place, server.database.as_str()), (place, database), "{url}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_not_shown() {
        for (url, user, password) in [
            ("postgres://worker@db/x", "worker", None),
            ("postgres://worker:secret@db/x", "worker", Some("secret")),
            ("postgres://w%40rk:p%2Fa%3As%25@db/x", "w@rk", Some("p/a:s%")),
        ] {
            let server = parsed(url);
            let login = server.login.clone().unwrap();
            assert_eq!(login.user.told(), user);
            assert_eq!(login.password.as_ref().map(Secret::told), password);
            let shown = format!("{server:?}{server:#?}");
            assert!(
                !shown.contains(user) && password.is_none_or(|p| !shown.contains(p)),
                "{shown}"
            );
        }
    }

    #[test]
    fn a_url_that_names_no_database_says_what_to_write() {
        for (url, hint) in [
            ("postgres:", "names no server"),
            ("postgres://db", "does not name a database"),
            ("postgres://db/", "does not name a database"),
            ("postgres://db/a/b", "does not name a database"),
            ("postgres:///x", "does not name a host"),
            ("postgres://db:0/x", "does not name a host"),
            ("postgres://a,b/x", "several servers"),
            ("postgres://:p@db/x", "names no user"),
            ("postgres://u:p@p@db/x", "`%40`"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn mariadb_and_mysql_are_named_alike() {
        for (url, place) in [
            ("mysql://db/shop", Place::Host(("db".to_owned(), 3_306))),
            ("mariadb://u:p@db:3307/shop", Place::Host(("db".to_owned(), 3_307))),
            ("mysql://%2Frun%2Fdb.sock/shop", Place::Socket("/run/db.sock".into(), 3_306)),
        ] {
            let StoreUrl { store: Store::MySql(server), .. } = StoreUrl::parse(url).unwrap() else {
                panic!("{url}")
            };
            assert_eq!((server.place, server.database.as_str()), (place, "shop"), "{url}");
        }
        let error = StoreUrl::parse("mariadb://db").unwrap_err().to_string();
        assert!(error.contains("`mariadb://USER"), "{error}");
    }
}
