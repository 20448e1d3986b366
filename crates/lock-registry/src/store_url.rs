//! Parses store URLs without I/O. Options remain text here; `options` parses them.
//!
//! The URL is split here, not by a general URL parser: hosts can be lists, and paths are opaque. A
//! general parser would normalise `.` and `..`, which changes the meaning of a path with symbolic
//! links.

mod database;
mod etcd;
mod parts;
mod redis;
mod redact;
mod zk;

use std::path::PathBuf;

use registry_core::ConfigError;

use crate::scheme::{self, Scheme};
use crate::value::Secret;
use parts::{Host, UrlParts, decode_text, invalid_url, parse_file_path};

pub(crate) use database::{DatabaseAddress, DatabaseServer};
pub(crate) use etcd::EtcdMembers;
pub(crate) use redact::UrlText;
pub use redact::redact_url;
pub(crate) use redis::{RedisServers, RedisTopology};
pub(crate) use zk::ZkServers;

/// A store and the options that its URL sets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoreUrl {
    pub(crate) store: StoreLocation,
    /// Name and value, decoded. A value may be a password.
    pub(crate) options: Vec<(String, Secret)>,
}

/// A store that this build can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreLocation {
    /// The in-process store: a new one, or the shared one of this name.
    Memory { name: Option<String> },
    /// The SQLite file at this path.
    Sqlite { path: PathBuf },
    /// A database of this PostgreSQL server.
    Postgres(DatabaseServer),
    /// A database of this MariaDB or MySQL server.
    MySql(DatabaseServer),
    /// These Redis servers.
    Redis(RedisServers),
    /// These ZooKeeper servers.
    Zk(ZkServers),
    /// The cluster of these members.
    Etcd(EtcdMembers),
    /// No store: every claim is granted.
    PassThrough,
}

impl StoreLocation {
    /// Returns the scheme of the store's URLs, which also names it in errors.
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Sqlite { .. } => "sqlite",
            Self::Postgres(_) => "postgres",
            Self::MySql(_) => "mysql",
            Self::Redis(servers) => servers.scheme,
            Self::Zk(servers) => servers.scheme,
            Self::Etcd(cluster) => cluster.scheme,
            Self::PassThrough => "pass-through",
        }
    }

    /// Returns the hosts of the URL with their ports. Empty for a store without a host.
    pub(crate) fn hosts(&self) -> &[Host] {
        match self {
            Self::Memory { .. } | Self::Sqlite { .. } | Self::PassThrough => &[],
            Self::Postgres(server) | Self::MySql(server) => server.hosts(),
            Self::Redis(servers) => servers.hosts(),
            Self::Zk(servers) => &servers.hosts,
            Self::Etcd(cluster) => &cluster.members,
        }
    }

    /// Returns the store's address for messages: `HOST:PORT,HOST:PORT` or a path. Empty for a store
    /// in this process.
    pub(crate) fn address(&self) -> String {
        let path = match self {
            Self::Sqlite { path } => Some(path),
            Self::Postgres(DatabaseServer {
                address: DatabaseAddress::Socket(path, _), ..
            })
            | Self::MySql(DatabaseServer { address: DatabaseAddress::Socket(path, _), .. })
            | Self::Redis(RedisServers { topology: RedisTopology::Socket(path), .. }) => Some(path),
            _ => None,
        };
        let host = |(host, port): &Host| {
            // Brackets an IPv6 address, as in a URL.
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
        };
        path.map_or_else(
            || self.hosts().iter().map(host).collect::<Vec<_>>().join(","),
            |path| path.display().to_string(),
        )
    }
}

impl StoreUrl {
    /// Parses `url`. Errors show only its scheme, the names of its options and the path of a file.
    /// Any other part may contain a password, above all in a malformed URL.
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        if url.is_empty() {
            return Err(invalid(
                "the store URL is empty; write for example `sqlite:PATH`; known schemes:",
                &scheme::known(),
            ));
        }
        let Some(parts) = UrlParts::split(url) else {
            return Err(invalid(
                "the store URL does not start with a scheme; for an SQLite file write `sqlite:PATH`; known schemes:",
                &scheme::known(),
            ));
        };
        if !parts.has_scheme() {
            return Err(invalid(
                "the store URL does not start with a known scheme; for an SQLite file write `sqlite:PATH`; known schemes:",
                &scheme::known(),
            ));
        }
        let scheme = Scheme::find(&parts.scheme)?;
        if url.chars().any(char::is_control) {
            return Err(invalid_url(scheme, "contains a control character; percent-encode it"));
        }
        if parts.fragment.is_some() {
            return Err(invalid_url(
                scheme,
                "contains a `#`, which has no meaning here; write `%23` for this character in a name",
            ));
        }
        let store = match scheme.name {
            "memory" => memory(&parts, scheme)?,
            "sqlite" => sqlite(&parts, scheme)?,
            "postgres" | "postgresql" => {
                let port = database::POSTGRES_PORT;
                StoreLocation::Postgres(DatabaseServer::parse(&parts, scheme, port)?)
            }
            "mysql" | "mariadb" => {
                StoreLocation::MySql(DatabaseServer::parse(&parts, scheme, database::MYSQL_PORT)?)
            }
            "zk" | "zks" => StoreLocation::Zk(ZkServers::parse(&parts, scheme)?),
            "etcd" | "etcds" => StoreLocation::Etcd(EtcdMembers::parse(&parts, scheme)?),
            name if name.starts_with("redis") => {
                StoreLocation::Redis(RedisServers::parse(&parts, scheme)?)
            }
            _ => pass_through(&parts, scheme)?,
        };
        let options = parts.query.map_or(Ok(Vec::new()), |query| options(query, scheme))?;
        Ok(Self { store, options })
    }
}

fn memory(parts: &UrlParts<'_>, scheme: &Scheme) -> Result<StoreLocation, ConfigError> {
    if parts.authority.is_some() {
        return Err(invalid_url(
            scheme,
            "contains `//`; write `memory:`, or `memory:NAME` to share one store by name",
        ));
    }
    let name = decode_text(parts.path, scheme, "a name")?;
    Ok(StoreLocation::Memory { name: Some(name).filter(|name| !name.is_empty()) })
}

fn sqlite(parts: &UrlParts<'_>, scheme: &Scheme) -> Result<StoreLocation, ConfigError> {
    if parts.authority.is_some_and(|authority| !authority.is_empty()) {
        return Err(invalid_url(
            scheme,
            "contains a host or a user after `//`; write `sqlite:PATH` for a relative path, `sqlite:///PATH` for an absolute path",
        ));
    }
    if parts.path == ":memory:" {
        return Err(invalid_url(
            scheme,
            "does not contain a file path; for a store within this process write `memory:`",
        ));
    }
    Ok(StoreLocation::Sqlite { path: parse_file_path(parts.path, scheme, "write `sqlite:PATH`")? })
}

fn pass_through(parts: &UrlParts<'_>, scheme: &Scheme) -> Result<StoreLocation, ConfigError> {
    if parts.authority.is_some() || !parts.path.is_empty() {
        return Err(invalid_url(
            scheme,
            "contains more than the scheme and options; write `pass-through:`",
        ));
    }
    Ok(StoreLocation::PassThrough)
}

fn options(query: &str, scheme: &Scheme) -> Result<Vec<(String, Secret)>, ConfigError> {
    let text = |part: &str| decode_text(part, scheme, "an option");
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| match pair.split_once('=') {
            Some((name, value)) => Ok((text(name)?, Secret::new(text(value)?))),
            // Not shown: it may be the rest of a password that contains a `?`.
            None => {
                Err(invalid_url(scheme, "contains an option without a value; write `name=value`"))
            }
        })
        .collect()
}

fn invalid(problem: &str, list: &str) -> ConfigError {
    ConfigError::Invalid(format!("{problem} {list}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(url: &str) -> StoreLocation {
        StoreUrl::parse(url).unwrap().store
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_sqlite_path_is_not_normalised() {
        for (url, path) in [
            ("sqlite:locks.db", "locks.db"),
            ("sqlite:./a/../locks.db", "./a/../locks.db"),
            ("sqlite:/var/lib/locks.db", "/var/lib/locks.db"),
            ("sqlite:///var/lib/locks.db", "/var/lib/locks.db"),
            ("SQLite:locks.db", "locks.db"),
            ("sqlite:with%20space%3F%23%25.db?lease=5s", "with space?#%.db"),
            ("sqlite:me@home:1.db", "me@home:1.db"),
            ("sqlite:a+b c.db", "a+b c.db"),
        ] {
            assert_eq!(store(url), StoreLocation::Sqlite { path: path.into() }, "{url}");
        }
    }

    #[cfg(feature = "sqlite")]
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
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url:?}: {error}");
        }
    }

    #[test]
    fn a_memory_url_has_an_optional_name() {
        assert_eq!(store("memory:"), StoreLocation::Memory { name: None });
        assert_eq!(store("memory:a%2Fb"), StoreLocation::Memory { name: Some("a/b".to_owned()) });
        assert!(StoreUrl::parse("memory://a").is_err());
        assert_eq!(store("pass-through:"), StoreLocation::PassThrough);
        assert!(StoreUrl::parse("pass-through:x").is_err());
    }

    #[test]
    fn options_are_percent_decoded_and_a_plus_sign_stays() {
        let url = StoreUrl::parse("memory:?label=a%20b+c&lease=5s&").unwrap();
        let pairs = [("label", "a b+c"), ("lease", "5s")];
        assert_eq!(url.options, pairs.map(|(name, value)| (name.to_owned(), Secret::new(value))));
    }
}
