//! URLs of Redis servers. All start with `[[USER]:PASSWORD@]` and one or several hosts after `//`.
//! The meaning of the path depends on the kind of deployment.

use std::path::PathBuf;

use registry_core::ConfigError;

use super::parts::{
    Host, UrlParts, decode_text, invalid_url, parse_file_path, parse_host, parse_hosts,
};
use crate::scheme::Scheme;
use crate::value::Secret;

/// The servers of one store and their login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisServers {
    /// The scheme of the URL.
    pub(crate) scheme: &'static str,
    pub(crate) topology: RedisTopology,
    /// For a socket, the option `db` sets it instead.
    pub(crate) database: u32,
    pub(crate) login: Option<RedisLogin>,
}

/// Addresses and deployment kind of the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RedisTopology {
    Standalone(Host),
    /// A server on this host, at this socket.
    Socket(PathBuf),
    /// The server that these sentinels name as the master of `service`.
    Sentinels {
        sentinels: Vec<Host>,
        service: String,
    },
    /// Some members of a cluster.
    Cluster(Vec<Host>),
    /// Independent masters.
    Quorum(Vec<Host>),
}

/// A password, and the user if it is not the default user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisLogin {
    pub(crate) user: Option<Secret>,
    pub(crate) password: Secret,
}

impl RedisServers {
    /// Returns the hosts of the URL. Empty if the URL names a socket.
    pub(crate) fn hosts(&self) -> &[Host] {
        match &self.topology {
            RedisTopology::Standalone(host) => std::slice::from_ref(host),
            RedisTopology::Socket(_) => &[],
            RedisTopology::Sentinels { sentinels: hosts, .. }
            | RedisTopology::Cluster(hosts)
            | RedisTopology::Quorum(hosts) => hosts,
        }
    }

    /// Returns whether connections are encrypted.
    #[cfg(feature = "redis-tls")]
    pub(crate) fn are_encrypted(&self) -> bool {
        self.scheme.starts_with("rediss")
    }

    pub(super) fn parse(
        parts: &UrlParts<'_>,
        scheme: &'static Scheme,
    ) -> Result<Self, ConfigError> {
        let kind = scheme.name.split_once('+').map_or("", |(_, kind)| kind);
        let Some(authority) = parts.authority else {
            return Err(invalid_url(
                scheme,
                &format!("contains no server; {}", syntax_hint(scheme, kind)),
            ));
        };
        let (login, hosts) = parts.login_and_hosts(authority, scheme)?;
        let syntax_hint = || syntax_hint(scheme, kind);
        let (topology, database) = match kind {
            "" => (
                RedisTopology::Standalone(parse_single_server(hosts, scheme)?),
                parse_database(parts.path, scheme)?,
            ),
            "unix" => (
                RedisTopology::Socket(parse_socket_path(
                    hosts,
                    parts.path,
                    scheme,
                    &syntax_hint(),
                )?),
                0,
            ),
            "sentinel" => {
                let sentinels = parse_hosts(hosts, scheme, SENTINEL_PORT, &syntax_hint())?;
                let path = parts.path.strip_prefix('/').unwrap_or_default();
                let (service, number) = path.split_at(path.find('/').unwrap_or(path.len()));
                let service = decode_text(service, scheme, "a service")?;
                if service.is_empty() {
                    return Err(invalid_url(
                        scheme,
                        &format!("contains no service name for the sentinels; {}", syntax_hint()),
                    ));
                }
                (RedisTopology::Sentinels { sentinels, service }, parse_database(number, scheme)?)
            }
            "cluster" => {
                let members = parse_hosts(hosts, scheme, PORT, &syntax_hint())?;
                if parse_database(parts.path, scheme)? != 0 {
                    return Err(invalid_url(
                        scheme,
                        "contains a database number; a cluster has only number 0, so leave it out",
                    ));
                }
                (RedisTopology::Cluster(members), 0)
            }
            _ => {
                let masters = parse_hosts(hosts, scheme, PORT, &syntax_hint())?;
                if masters.len() < QUORUM_MIN {
                    return Err(invalid_url(
                        scheme,
                        &format!(
                            "contains fewer than {QUORUM_MIN} servers, which tolerate no failure; {}",
                            syntax_hint()
                        ),
                    ));
                }
                (RedisTopology::Quorum(masters), parse_database(parts.path, scheme)?)
            }
        };
        let login = login.map(|login| parse_login(login, scheme)).transpose()?;
        Ok(Self { scheme: scheme.name, topology, database, login })
    }
}

/// Returns the expected form, for errors.
fn syntax_hint(scheme: &Scheme, kind: &str) -> String {
    let rest = match kind {
        "" => "HOST:PORT",
        "unix" => "/PATH",
        "sentinel" => "HOST:PORT,HOST:PORT/SERVICE",
        "cluster" => "HOST:PORT,HOST:PORT",
        _ => "HOST:PORT,HOST:PORT,HOST:PORT",
    };
    format!("write `{}://{rest}`", scheme.name)
}

fn parse_single_server(host: &str, scheme: &Scheme) -> Result<Host, ConfigError> {
    if host.contains(',') {
        let plain = scheme.name;
        return Err(invalid_url(
            scheme,
            &format!(
                "contains several servers; write one, or use `{plain}+sentinel:`, `{plain}+cluster:` or `{plain}+quorum:`"
            ),
        ));
    }
    parse_host(host, PORT).ok_or_else(|| {
        invalid_url(
            scheme,
            "contains no valid host with an optional port from 1 to 65535; percent-encode special characters in a password, \
             `/` as `%2F`",
        )
    })
}

fn parse_socket_path(
    host: &str,
    path: &str,
    scheme: &Scheme,
    form: &str,
) -> Result<PathBuf, ConfigError> {
    if !host.is_empty() {
        return Err(invalid_url(
            scheme,
            &format!("contains a host after `//`, which a socket does not have; {form}"),
        ));
    }
    parse_file_path(path, scheme, form)
}

fn parse_login(login: &str, scheme: &Scheme) -> Result<RedisLogin, ConfigError> {
    let text = |part: &str| decode_text(part, scheme, "a user or a password");
    // Without a password, the client would not send the user.
    let Some((user, password)) = login.split_once(':').filter(|login| *login != ("", "")) else {
        return Err(invalid_url(
            scheme,
            "contains an incomplete login; write `USER:PASSWORD@`, or `:PASSWORD@` without a user",
        ));
    };
    let user = Some(text(user)?).filter(|user| !user.is_empty());
    Ok(RedisLogin { user: user.map(Secret::new), password: Secret::new(text(password)?) })
}

fn parse_database(path: &str, scheme: &Scheme) -> Result<u32, ConfigError> {
    let number = path.strip_prefix('/').unwrap_or(path);
    let plain = number.bytes().all(|byte| byte.is_ascii_digit());
    match number.parse() {
        Err(_) if number.is_empty() => Ok(0),
        Ok(number) if plain => Ok(number),
        _ => {
            Err(invalid_url(scheme, "contains a path that is not a database number, such as `/0`"))
        }
    }
}

/// Redis's default port.
const PORT: u16 = 6_379;
/// Default port of sentinels.
const SENTINEL_PORT: u16 = 26_379;
/// With fewer masters, a quorum tolerates no failure.
const QUORUM_MIN: usize = 3;

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;
    use crate::store_url::{StoreLocation, StoreUrl};

    fn parsed(url: &str) -> RedisServers {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: StoreLocation::Redis(servers), .. }) => servers,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn without_login(host: &str, port: u16, database: u32) -> RedisServers {
        let topology = RedisTopology::Standalone((host.to_owned(), port));
        RedisServers { scheme: "redis", topology, database, login: None }
    }

    #[test]
    fn a_url_contains_host_port_and_database() {
        for (url, server) in [
            ("redis://db", without_login("db", 6_379, 0)),
            ("REDIS://db.example.com:6380/", without_login("db.example.com", 6_380, 0)),
            ("redis://10.1.2.3/15?lease=5s", without_login("10.1.2.3", 6_379, 15)),
            ("redis://[::1]", without_login("::1", 6_379, 0)),
            ("redis://[2001:db8::1]:7000/2", without_login("2001:db8::1", 7_000, 2)),
        ] {
            assert_eq!(parsed(url), server, "{url}");
        }
    }

    #[test]
    fn the_scheme_selects_the_topology_of_several_servers() {
        let hosts = |all: &[(&str, u16)]| {
            all.iter().map(|(host, port)| ((*host).to_owned(), *port)).collect::<Vec<_>>()
        };
        let sentinels_of = |service: &str, sentinels| RedisTopology::Sentinels {
            sentinels: hosts(sentinels),
            service: service.to_owned(),
        };
        for (url, topology, database) in [
            ("redis+sentinel://s/main", sentinels_of("main", &[("s", 26_379)]), 0),
            (
                "redis+sentinel://a,b:1,[::1],[::1]:2/my%2Fmain/7?lease=5s",
                sentinels_of("my/main", &[("a", 26_379), ("b", 1), ("::1", 26_379), ("::1", 2)]),
                7,
            ),
            ("redis+cluster://a", RedisTopology::Cluster(hosts(&[("a", 6_379)])), 0),
            ("redis+cluster://a:1,b/", RedisTopology::Cluster(hosts(&[("a", 1), ("b", 6_379)])), 0),
            ("redis+cluster://a/0", RedisTopology::Cluster(hosts(&[("a", 6_379)])), 0),
            (
                "redis+quorum://h:1,h:2,g/3",
                RedisTopology::Quorum(hosts(&[("h", 1), ("h", 2), ("g", 6_379)])),
                3,
            ),
            ("redis+unix:///run/a%20b.sock", RedisTopology::Socket("/run/a b.sock".into()), 0),
            ("redis+unix:///redis.sock?db=3", RedisTopology::Socket("/redis.sock".into()), 0),
        ] {
            let servers = parsed(url);
            assert_eq!((servers.topology, servers.database), (topology, database), "{url}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_redacted() {
        for (url, user, password) in [
            ("redis://:secret@db", None, "secret"),
            ("redis://worker:secret@db", Some("worker"), "secret"),
            ("redis://w%40rk:p%2Fa%3As%25%20%C3%BC%0A@db", Some("w@rk"), "p/a:s% ü\n"),
            ("redis://worker:a:b@db:1", Some("worker"), "a:b"),
            ("redis://worker:@db", Some("worker"), ""),
            ("redis+sentinel://worker:secret@a,b/main", Some("worker"), "secret"),
            ("redis+cluster://:secret@a,b", None, "secret"),
            ("redis+quorum://worker:secret@a,b,c/1", Some("worker"), "secret"),
            ("redis+unix://worker:secret@/run/redis.sock", Some("worker"), "secret"),
        ] {
            let servers = parsed(url);
            let login = servers.login.clone().unwrap();
            let login = (login.user.as_ref().map(Secret::expose), login.password.expose());
            assert_eq!(login, (user, password), "{url}");
            let output = format!("{servers:?}{servers:#?}");
            assert!(password.is_empty() || !output.contains(password), "{output}");
            assert!(user.is_none_or(|user| !output.contains(user)), "{output}");
        }
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn the_scheme_rediss_encrypts() {
        let servers = parsed("rediss://:secret@db/1");
        assert!(servers.are_encrypted() && !parsed("redis+sentinel://a/b").are_encrypted());
        assert_eq!(servers.topology, RedisTopology::Standalone(("db".to_owned(), 6_379)));
        for url in ["rediss+sentinel://a,b/main", "rediss+cluster://a,b", "rediss+quorum://a,b,c/1"]
        {
            let (encrypted, plain) = (parsed(url), parsed(&url.replace("rediss", "redis")));
            assert!(encrypted.are_encrypted(), "{url}");
            assert_eq!((encrypted.topology, encrypted.database), (plain.topology, plain.database));
        }
    }

    #[test]
    fn an_error_about_a_url_without_a_server_contains_a_hint() {
        for (url, hint) in [
            ("redis:", "redis://HOST"),
            ("redis:db", "redis://HOST"),
            ("redis://", "no valid host"),
            ("redis:///0", "no valid host"),
            ("redis://:secret@", "no valid host"),
            ("redis://db:", "port"),
            ("redis://db:0", "port"),
            ("redis://db:65536", "port"),
            ("redis://db:+1", "port"),
            ("redis://dä", "no valid host"),
            ("redis://::1", "no valid host"),
            ("redis://a,b", "several servers"),
            ("redis://a,b", "`redis+sentinel:`"),
            ("redis://db/x", "not a database number"),
            ("redis://db/-1", "not a database number"),
            ("redis://db/+1", "not a database number"),
            ("redis://db/0/0", "not a database number"),
            ("redis://db/99999999999", "not a database number"),
            ("redis://worker@db", "incomplete login"),
            ("redis://@db", "incomplete login"),
            ("redis://:@db", "incomplete login"),
            ("redis://worker:x@y@db", "`%40`"),
            ("redis://worker:1/2@db", "`%40`"),
            ("redis://worker:1?label=x@db", "`%40`"),
            ("redis://worker:1/x:y", "not a database number"),
            ("redis://worker:100%@db", "`%25`"),
            ("redis://worker:%ff@db", "UTF-8"),
            ("redis://db#insecure", "`%23`"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[test]
    fn an_error_about_an_invalid_topology_contains_a_hint() {
        const SENTINELS: &str = "write `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`";
        const CLUSTER: &str = "write `redis+cluster://HOST:PORT,HOST:PORT`";
        const QUORUM: &str = "write `redis+quorum://HOST:PORT,HOST:PORT,HOST:PORT`";
        const SOCKET: &str = "write `redis+unix:///PATH`";
        for (url, problem, hint) in [
            ("redis+sentinel:main", "contains no server", SENTINELS),
            ("redis+sentinel:///main", "contains no server", SENTINELS),
            ("redis+sentinel://a,b", "no service name", SENTINELS),
            ("redis+sentinel://a,b/", "no service name", SENTINELS),
            ("redis+sentinel://a,b//1", "no service name", SENTINELS),
            ("redis+sentinel://a,b/main/x", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/main/1/2", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/main//1", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/%ff", "a service", "not UTF-8"),
            ("redis+sentinel://a,,b/main", "invalid server in its list", SENTINELS),
            ("redis+sentinel://a,b:0/main", "port from 1 to 65535", SENTINELS),
            ("redis+sentinel://a,b,A:26379/main", "twice", "default port is 26379"),
            ("redis+sentinel://worker@a/main", "incomplete login", "`:PASSWORD@`"),
            ("redis+cluster:", "contains no server", CLUSTER),
            ("redis+cluster://", "contains no server", CLUSTER),
            ("redis+cluster://a,", "invalid server in its list", CLUSTER),
            ("redis+cluster://a,b c", "invalid server in its list", CLUSTER),
            ("redis+cluster://a,::1", "invalid server in its list", CLUSTER),
            ("redis+cluster://a,b/1", "number 0", "leave it out"),
            ("redis+cluster://a,b/main", "not a database number", "`/0`"),
            ("redis+cluster://[::1],[::1]:6379", "twice", "each server once"),
            ("redis+quorum://", "contains no server", QUORUM),
            ("redis+quorum://a,b", "fewer than 3", QUORUM),
            ("redis+quorum://a,b/1", "fewer than 3", QUORUM),
            ("redis+quorum://a,b,a:6379", "twice", "default port is 6379"),
            ("redis+quorum://a,b,c/main", "not a database number", "`/0`"),
            ("redis+quorum://a:1,b:2/3@c:4", "`@`", "`%40`"),
            ("redis+unix:/run/redis.sock", "contains no server", SOCKET),
            ("redis+unix://", "no path", SOCKET),
            ("redis+unix:///", "ends in `/`", "not of its directory"),
            ("redis+unix:///run/", "ends in `/`", "not of its directory"),
            ("redis+unix://run/redis.sock", "contains a host", SOCKET),
            ("redis+unix:///run/a@b.sock", "`@`", "path and options write `%40`"),
            ("redis+unix:///run/%00", "NUL", "invalid in a file name"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(hint), "{url}: {error}");
        }
    }
}
