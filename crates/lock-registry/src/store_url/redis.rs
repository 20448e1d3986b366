//! URLs of Redis servers. All start with `[[USER]:PASSWORD@]` and one or several hosts after `//`.
//! The meaning of the path depends on the kind of deployment.

use std::path::PathBuf;

use registry_core::ConfigError;

use super::parts::{Host, Parts, decoded_text, file_path, server, servers, unusable};
use crate::scheme::Scheme;
use crate::value::Secret;

/// The servers of one store and their login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisServers {
    /// The scheme of the URL.
    pub(crate) scheme: &'static str,
    pub(crate) place: Place,
    /// For a socket, the option `db` sets it instead.
    pub(crate) database: u32,
    pub(crate) login: Option<Login>,
}

/// Addresses and deployment kind of the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    One(Host),
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
pub(crate) struct Login {
    pub(crate) user: Option<Secret>,
    pub(crate) password: Secret,
}

impl RedisServers {
    /// Returns the hosts of the URL. Empty if the URL names a socket.
    pub(crate) fn hosts(&self) -> &[Host] {
        match &self.place {
            Place::One(host) => std::slice::from_ref(host),
            Place::Socket(_) => &[],
            Place::Sentinels { sentinels: hosts, .. }
            | Place::Cluster(hosts)
            | Place::Quorum(hosts) => hosts,
        }
    }

    /// Returns whether connections are encrypted.
    #[cfg(feature = "redis-tls")]
    pub(crate) fn are_encrypted(&self) -> bool {
        self.scheme.starts_with("rediss")
    }

    pub(super) fn parse(parts: &Parts<'_>, scheme: &'static Scheme) -> Result<Self, ConfigError> {
        let kind = scheme.name.split_once('+').map_or("", |(_, kind)| kind);
        let Some(authority) = parts.authority else {
            return Err(unusable(scheme, &format!("names no server; {}", form(scheme, kind))));
        };
        let (login, hosts) = parts.login_and_hosts(authority, scheme)?;
        let form = || form(scheme, kind);
        let (place, database) = match kind {
            "" => (Place::One(one(hosts, scheme)?), database(parts.path, scheme)?),
            "unix" => (Place::Socket(socket(hosts, parts.path, scheme, &form())?), 0),
            "sentinel" => {
                let sentinels = servers(hosts, scheme, SENTINEL_PORT, &form())?;
                let path = parts.path.strip_prefix('/').unwrap_or_default();
                let (service, number) = path.split_at(path.find('/').unwrap_or(path.len()));
                let service = decoded_text(service, scheme, "a service")?;
                if service.is_empty() {
                    return Err(unusable(
                        scheme,
                        &format!(
                            "does not say by which name the sentinels know the servers; {}",
                            form()
                        ),
                    ));
                }
                (Place::Sentinels { sentinels, service }, database(number, scheme)?)
            }
            "cluster" => {
                let members = servers(hosts, scheme, PORT, &form())?;
                if database(parts.path, scheme)? != 0 {
                    return Err(unusable(
                        scheme,
                        "names a database, and a cluster has none but number 0; leave it out",
                    ));
                }
                (Place::Cluster(members), 0)
            }
            _ => {
                let masters = servers(hosts, scheme, PORT, &form())?;
                if masters.len() < QUORUM_MIN {
                    return Err(unusable(
                        scheme,
                        &format!(
                            "names fewer than {QUORUM_MIN} servers, of which none may fail; {}",
                            form()
                        ),
                    ));
                }
                (Place::Quorum(masters), database(parts.path, scheme)?)
            }
        };
        let login = login.map(|login| self::login(login, scheme)).transpose()?;
        Ok(Self { scheme: scheme.name, place, database, login })
    }
}

/// Returns the expected form, for errors.
fn form(scheme: &Scheme, kind: &str) -> String {
    let rest = match kind {
        "" => "HOST:PORT",
        "unix" => "/PATH",
        "sentinel" => "HOST:PORT,HOST:PORT/SERVICE",
        "cluster" => "HOST:PORT,HOST:PORT",
        _ => "HOST:PORT,HOST:PORT,HOST:PORT",
    };
    format!("write `{}://{rest}`", scheme.name)
}

fn one(host: &str, scheme: &Scheme) -> Result<Host, ConfigError> {
    if host.contains(',') {
        let plain = scheme.name;
        return Err(unusable(
            scheme,
            &format!(
                "names several servers; one is what it can have, and how several work together is said by `{plain}+sentinel:`, \
                 `{plain}+cluster:` or `{plain}+quorum:`"
            ),
        ));
    }
    server(host, PORT).ok_or_else(|| {
        unusable(
            scheme,
            "does not name a host and, after a colon, perhaps a port from 1 to 65535; special characters in a password are \
             percent-encoded, `/` as `%2F`",
        )
    })
}

fn socket(host: &str, path: &str, scheme: &Scheme, form: &str) -> Result<PathBuf, ConfigError> {
    if !host.is_empty() {
        return Err(unusable(
            scheme,
            &format!("names a host after `//`, which a socket does not have; {form}"),
        ));
    }
    file_path(path, scheme, form)
}

fn login(login: &str, scheme: &Scheme) -> Result<Login, ConfigError> {
    let text = |part: &str| decoded_text(part, scheme, "a user or a password");
    // Without a password, the client would not send the user.
    let Some((user, password)) = login.split_once(':').filter(|login| *login != ("", "")) else {
        return Err(unusable(
            scheme,
            "names a user and no password, or neither; write `USER:PASSWORD@`, or `:PASSWORD@` without a user",
        ));
    };
    let user = Some(text(user)?).filter(|user| !user.is_empty());
    Ok(Login { user: user.map(Secret::new), password: Secret::new(text(password)?) })
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

/// Redis's default port.
const PORT: u16 = 6_379;
/// Default port of sentinels.
const SENTINEL_PORT: u16 = 26_379;
/// With fewer masters, a quorum tolerates no failure.
const QUORUM_MIN: usize = 3;

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;
    use crate::store_url::{Store, StoreUrl};

    fn parsed(url: &str) -> RedisServers {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: Store::Redis(servers), .. }) => servers,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn open_to_all(host: &str, port: u16, database: u32) -> RedisServers {
        let place = Place::One((host.to_owned(), port));
        RedisServers { scheme: "redis", place, database, login: None }
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
    fn several_servers_are_named_with_how_they_work_together() {
        let hosts = |all: &[(&str, u16)]| {
            all.iter().map(|(host, port)| ((*host).to_owned(), *port)).collect::<Vec<_>>()
        };
        let under = |service: &str, sentinels| Place::Sentinels {
            sentinels: hosts(sentinels),
            service: service.to_owned(),
        };
        for (url, place, database) in [
            ("redis+sentinel://s/main", under("main", &[("s", 26_379)]), 0),
            (
                "redis+sentinel://a,b:1,[::1],[::1]:2/my%2Fmain/7?lease=5s",
                under("my/main", &[("a", 26_379), ("b", 1), ("::1", 26_379), ("::1", 2)]),
                7,
            ),
            ("redis+cluster://a", Place::Cluster(hosts(&[("a", 6_379)])), 0),
            ("redis+cluster://a:1,b/", Place::Cluster(hosts(&[("a", 1), ("b", 6_379)])), 0),
            ("redis+cluster://a/0", Place::Cluster(hosts(&[("a", 6_379)])), 0),
            (
                "redis+quorum://h:1,h:2,g/3",
                Place::Quorum(hosts(&[("h", 1), ("h", 2), ("g", 6_379)])),
                3,
            ),
            ("redis+unix:///run/a%20b.sock", Place::Socket("/run/a b.sock".into()), 0),
            ("redis+unix:///redis.sock?db=3", Place::Socket("/redis.sock".into()), 0),
        ] {
            let servers = parsed(url);
            assert_eq!((servers.place, servers.database), (place, database), "{url}");
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
            ("redis+sentinel://worker:secret@a,b/main", Some("worker"), "secret"),
            ("redis+cluster://:secret@a,b", None, "secret"),
            ("redis+quorum://worker:secret@a,b,c/1", Some("worker"), "secret"),
            ("redis+unix://worker:secret@/run/redis.sock", Some("worker"), "secret"),
        ] {
            let servers = parsed(url);
            let login = servers.login.clone().unwrap();
            let told = (login.user.as_ref().map(Secret::told), login.password.told());
            assert_eq!(told, (user, password), "{url}");
            let shown = format!("{servers:?}{servers:#?}");
            assert!(password.is_empty() || !shown.contains(password), "{shown}");
            assert!(user.is_none_or(|user| !shown.contains(user)), "{shown}");
        }
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn one_letter_more_encrypts() {
        let servers = parsed("rediss://:secret@db/1");
        assert!(servers.are_encrypted() && !parsed("redis+sentinel://a/b").are_encrypted());
        assert_eq!(servers.place, Place::One(("db".to_owned(), 6_379)));
        for url in ["rediss+sentinel://a,b/main", "rediss+cluster://a,b", "rediss+quorum://a,b,c/1"]
        {
            let (encrypted, plain) = (parsed(url), parsed(&url.replace("rediss", "redis")));
            assert!(encrypted.are_encrypted(), "{url}");
            assert_eq!((encrypted.place, encrypted.database), (plain.place, plain.database));
        }
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
            ("redis://a,b", "`redis+sentinel:`"),
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

    #[test]
    fn several_servers_that_cannot_work_say_what_to_write() {
        const SENTINELS: &str = "write `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`";
        const CLUSTER: &str = "write `redis+cluster://HOST:PORT,HOST:PORT`";
        const QUORUM: &str = "write `redis+quorum://HOST:PORT,HOST:PORT,HOST:PORT`";
        const SOCKET: &str = "write `redis+unix:///PATH`";
        for (url, problem, hint) in [
            ("redis+sentinel:main", "names no server", SENTINELS),
            ("redis+sentinel:///main", "names no server", SENTINELS),
            ("redis+sentinel://a,b", "by which name", SENTINELS),
            ("redis+sentinel://a,b/", "by which name", SENTINELS),
            ("redis+sentinel://a,b//1", "by which name", SENTINELS),
            ("redis+sentinel://a,b/main/x", "number of a database", "`/0`"),
            ("redis+sentinel://a,b/main/1/2", "number of a database", "`/0`"),
            ("redis+sentinel://a,b/main//1", "number of a database", "`/0`"),
            ("redis+sentinel://a,b/%ff", "a service", "not UTF-8"),
            ("redis+sentinel://a,,b/main", "not a host", SENTINELS),
            ("redis+sentinel://a,b:0/main", "port from 1 to 65535", SENTINELS),
            ("redis+sentinel://a,b,A:26379/main", "twice", "26379 unless"),
            ("redis+sentinel://worker@a/main", "no password", "`:PASSWORD@`"),
            ("redis+cluster:", "names no server", CLUSTER),
            ("redis+cluster://", "names no server", CLUSTER),
            ("redis+cluster://a,", "not a host", CLUSTER),
            ("redis+cluster://a,b c", "not a host", CLUSTER),
            ("redis+cluster://a,::1", "not a host", CLUSTER),
            ("redis+cluster://a,b/1", "number 0", "leave it out"),
            ("redis+cluster://a,b/main", "number of a database", "`/0`"),
            ("redis+cluster://[::1],[::1]:6379", "twice", "name each once"),
            ("redis+quorum://", "names no server", QUORUM),
            ("redis+quorum://a,b", "fewer than 3", QUORUM),
            ("redis+quorum://a,b/1", "fewer than 3", QUORUM),
            ("redis+quorum://a,b,a:6379", "twice", "6379 unless"),
            ("redis+quorum://a,b,c/main", "number of a database", "`/0`"),
            ("redis+quorum://a:1,b:2/3@c:4", "`@`", "`%40`"),
            ("redis+unix:/run/redis.sock", "names no server", SOCKET),
            ("redis+unix://", "no path", SOCKET),
            ("redis+unix:///", "ends in `/`", "not its folder"),
            ("redis+unix:///run/", "ends in `/`", "not its folder"),
            ("redis+unix://run/redis.sock", "names a host", SOCKET),
            ("redis+unix:///run/a@b.sock", "`@`", "path and options write `%40`"),
            ("redis+unix:///run/%00", "NUL", "no file name"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(hint), "{url}: {error}");
        }
    }
}
