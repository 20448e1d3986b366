//! URLs of ZooKeeper servers: `zk://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]…[/CHROOT]`, and `zks:`
//! for encrypted connections.

use registry_core::ConfigError;

use super::parts::{Host, UrlParts, decode_text, invalid_url, parse_hosts};
use crate::scheme::Scheme;
use crate::value::Secret;

/// The servers of one ensemble and their login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ZkServers {
    /// The scheme of the URL.
    pub(crate) scheme: &'static str,
    pub(crate) hosts: Vec<Host>,
    /// The parent of all nodes.
    pub(crate) chroot: Option<String>,
    pub(crate) login: Option<(Secret, Secret)>,
}

impl ZkServers {
    /// Returns whether connections are encrypted.
    #[cfg(feature = "zk")]
    pub(crate) fn are_encrypted(&self) -> bool {
        self.scheme == "zks"
    }

    pub(super) fn parse(
        parts: &UrlParts<'_>,
        scheme: &'static Scheme,
    ) -> Result<Self, ConfigError> {
        let syntax_hint = format!("write `{}://HOST:PORT,HOST:PORT/CHROOT`", scheme.name);
        let Some(authority) = parts.authority else {
            return Err(invalid_url(scheme, &format!("contains no server; {syntax_hint}")));
        };
        let (login, hosts) = parts.login_and_hosts(authority, scheme)?;
        let chroot = match decode_text(parts.path, scheme, "a chroot")? {
            path if path.is_empty() || path == "/" => None,
            path if path.ends_with('/') || path.contains("//") => {
                return Err(invalid_url(
                    scheme,
                    "contains a chroot that ends in `/` or contains `//`; write the path of a node, such as `/app`",
                ));
            }
            path => Some(path),
        };
        Ok(Self {
            scheme: scheme.name,
            hosts: parse_hosts(hosts, scheme, PORT, &syntax_hint)?,
            chroot,
            login: login.map(|login| parse_login(login, scheme)).transpose()?,
        })
    }
}

fn parse_login(login: &str, scheme: &Scheme) -> Result<(Secret, Secret), ConfigError> {
    let text = |part: &str| decode_text(part, scheme, "a user or a password").map(Secret::new);
    match login.split_once(':') {
        Some((user, password)) if !user.is_empty() => Ok((text(user)?, text(password)?)),
        _ => Err(invalid_url(scheme, "contains an incomplete login; write `USER:PASSWORD@`")),
    }
}

/// ZooKeeper's default port.
const PORT: u16 = 2_181;

#[cfg(all(test, feature = "zk"))]
mod tests {
    use super::*;
    use crate::store_url::{StoreLocation, StoreUrl};

    fn parsed(url: &str) -> ZkServers {
        match StoreUrl::parse(url) {
            Ok(StoreUrl { store: StoreLocation::Zk(servers), .. }) => servers,
            other => panic!("{url}: {other:?}"),
        }
    }

    #[test]
    fn servers_chroot_and_login_are_parsed() {
        let servers = parsed("zk://app:p%40ss@zk1,zk2:2182,[::1]:1/app/locks?lease=10s");
        let hosts = [("zk1", 2_181), ("zk2", 2_182), ("::1", 1)];
        assert_eq!(servers.hosts, hosts.map(|(name, port)| (name.to_owned(), port)));
        assert_eq!(servers.chroot.as_deref(), Some("/app/locks"));
        assert_eq!(servers.login, Some((Secret::new("app"), Secret::new("p@ss"))));
        for url in ["zk://h", "zk://h/"] {
            assert_eq!((parsed(url).chroot, parsed(url).login), (None, None));
        }
    }

    #[test]
    fn an_error_about_an_invalid_url_contains_a_hint_and_no_secret() {
        for (url, hint) in [
            ("zk:", "contains no server"),
            ("zk://", "contains no server"),
            ("zk:///app", "contains no server"),
            ("zk://h:0", "from 1 to 65535"),
            ("zk://h,,g", "from 1 to 65535"),
            ("zk://h,h:2181", "twice"),
            ("zk://canary@h", "USER:PASSWORD@"),
            ("zk://:canary@h", "USER:PASSWORD@"),
            ("zk://h/a/", "such as `/app`"),
            ("zk://h/a//b", "such as `/app`"),
            ("zk://u:can@ary@h", "`%40`"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint) && !error.contains("canary"), "{url}: {error}");
        }
    }
}
