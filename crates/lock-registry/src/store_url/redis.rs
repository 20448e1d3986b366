//! URLs of Redis servers: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`. Not lists of servers, which are other schemes.

use std::fmt;

use registry_core::ConfigError;

use super::{Parts, Store, decoded, is_host, unusable};
use crate::scheme::Scheme;

/// One server, and how to log in to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisServer {
    /// Whether the connection is encrypted.
    pub(crate) encrypted: bool,
    /// A name or an address, without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: u32,
    pub(crate) login: Option<Login>,
}

/// A password, and the user whose it is if it is not that of the server as a whole.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: String,
}

// By hand: there is nothing in it that may be shown.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl RedisServer {
    pub(crate) fn scheme(&self) -> &'static str {
        if self.encrypted { "rediss" } else { "redis" }
    }
}

pub(super) fn redis(parts: &Parts<'_>, scheme: &Scheme) -> Result<Store, ConfigError> {
    let Some(authority) = parts.authority else {
        return Err(unusable(scheme, "names no server; write `redis://HOST:PORT`"));
    };
    let (login, host) = match authority.rsplit_once('@') {
        Some((login, host)) => (Some(login), host),
        None => (None, authority),
    };
    let strayed = |part: &str| part.contains('@');
    if login.is_some_and(strayed) || strayed(parts.path) || parts.query.is_some_and(strayed) {
        return Err(unusable(
            scheme,
            "holds an `@` that does not end the password; in user, password and options write `%40`, and for `/`, `?` and `#` \
             in a password `%2F`, `%3F` and `%23`",
        ));
    }
    let (host, port) = server(host, scheme)?;
    Ok(Store::Redis(RedisServer {
        encrypted: scheme.name == "rediss",
        host,
        port,
        database: database(parts.path, scheme)?,
        login: login.map(|login| self::login(login, scheme)).transpose()?,
    }))
}

fn server(host: &str, scheme: &Scheme) -> Result<(String, u16), ConfigError> {
    if host.contains(',') {
        return Err(unusable(scheme, "names several servers; one is what it can have"));
    }
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(PORT)),
    };
    let Some(port) = port.filter(|port| is_host(host) && *port != 0 && !name.is_empty()) else {
        return Err(unusable(
            scheme,
            "does not name a host and, after a colon, perhaps a port from 1 to 65535; special characters in a password are \
             percent-encoded, `/` as `%2F`",
        ));
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    Ok((name.to_owned(), port))
}

fn login(login: &str, scheme: &Scheme) -> Result<Login, ConfigError> {
    let text = |part: &str| {
        String::from_utf8(decoded(part, scheme)?)
            .map_err(|_| unusable(scheme, "has a user or a password that is not UTF-8"))
    };
    // Without a password the server would never be told of the user.
    let Some((user, password)) = login.split_once(':').filter(|login| *login != ("", "")) else {
        return Err(unusable(
            scheme,
            "names a user and no password, or neither; write `USER:PASSWORD@`, or `:PASSWORD@` without a user",
        ));
    };
    let user = Some(text(user)?).filter(|user| !user.is_empty());
    Ok(Login { user, password: text(password)? })
}

fn database(path: &str, scheme: &Scheme) -> Result<u32, ConfigError> {
    let number = path.strip_prefix('/').unwrap_or(path);
    let plain = number.bytes().all(|byte| byte.is_ascii_digit());
    match number.parse() {
        Err(_) if number.is_empty() => Ok(0),
        Ok(number) if plain => Ok(number),
        _ => Err(unusable(scheme, "has a path that is not the number of a database, such as `/0`")),
    }
}

/// Where Redis listens unless it is told otherwise.
const PORT: u16 = 6_379;

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;
    use crate::store_url::StoreUrl;

    fn parsed(url: &str) -> RedisServer {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: Store::Redis(server), .. }) => server,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn open_to_all(host: &str, port: u16, database: u32) -> RedisServer {
        RedisServer { encrypted: false, host: host.to_owned(), port, database, login: None }
    }

    #[test]
    fn a_server_is_named_by_host_port_and_database() {
        for (url, server) in [
            ("redis://db", open_to_all("db", 6_379, 0)),
            ("REDIS://db.example.com:6380/", open_to_all("db.example.com", 6_380, 0)),
            ("redis://10.1.2.3/15?lease=5s", open_to_all("10.1.2.3", 6_379, 15)),
            ("redis://[::1]", open_to_all("::1", 6_379, 0)),
            ("redis://[2001:db8::1]:7000/2", open_to_all("2001:db8::1", 7_000, 2)),
        ] {
            assert_eq!(parsed(url), server, "{url}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_not_shown() {
        for (url, user, password) in [
            ("redis://:secret@db", None, "secret"),
            ("redis://worker:secret@db", Some("worker"), "secret"),
            ("redis://w%40rk:p%2Fa%3As%25%20%C3%BC%0A@db", Some("w@rk"), "p/a:s% ü\n"),
            ("redis://worker:a:b@db:1", Some("worker"), "a:b"),
            ("redis://worker:@db", Some("worker"), ""),
        ] {
            let server = parsed(url);
            let login = server.login.clone().unwrap();
            assert_eq!((login.user.as_deref(), &*login.password), (user, password), "{url}");
            let shown = format!("{server:?}{server:#?}");
            assert!(password.is_empty() || !shown.contains(password), "{shown}");
        }
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn one_letter_more_encrypts() {
        let server = parsed("rediss://:secret@db/1");
        assert!(server.encrypted);
        assert_eq!((server.scheme(), server.port, server.database), ("rediss", 6_379, 1));
    }

    #[test]
    fn what_names_no_server_says_what_to_write() {
        for (url, hint) in [
            ("redis:", "redis://HOST"),
            ("redis:db", "redis://HOST"),
            ("redis://", "name a host"),
            ("redis:///0", "name a host"),
            ("redis://:secret@", "name a host"),
            ("redis://db:", "port"),
            ("redis://db:0", "port"),
            ("redis://db:65536", "port"),
            ("redis://db:+1", "port"),
            ("redis://dä", "name a host"),
            ("redis://::1", "name a host"),
            ("redis://a,b", "several servers"),
            ("redis://db/x", "number of a database"),
            ("redis://db/-1", "number of a database"),
            ("redis://db/+1", "number of a database"),
            ("redis://db/0/0", "number of a database"),
            ("redis://db/99999999999", "number of a database"),
            ("redis://worker@db", "no password"),
            ("redis://@db", "no password"),
            ("redis://:@db", "no password"),
            ("redis://worker:x@y@db", "`%40`"),
            ("redis://worker:1/2@db", "`%40`"),
            ("redis://worker:1?label=x@db", "`%40`"),
            ("redis://worker:1/x:y", "number of a database"),
            ("redis://worker:100%@db", "`%25`"),
            ("redis://worker:%ff@db", "UTF-8"),
            ("redis://db#insecure", "`%23`"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }
}
