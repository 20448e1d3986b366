//! URLs of etcd clusters: `etcd://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]…`.

use registry_core::ConfigError;

use super::parts::{Host, Parts, decoded_text, servers, unusable};
use crate::scheme::Scheme;
use crate::value::Secret;

/// Some members of a cluster and their login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdMembers {
    /// The scheme of the URL.
    pub(crate) scheme: &'static str,
    pub(crate) members: Vec<Host>,
    /// User and password.
    pub(crate) login: Option<(Secret, Secret)>,
}

impl EtcdMembers {
    /// Returns whether connections are encrypted.
    #[cfg(feature = "etcd-tls")]
    pub(crate) fn are_encrypted(&self) -> bool {
        self.scheme == "etcds"
    }

    pub(super) fn parse(parts: &Parts<'_>, scheme: &'static Scheme) -> Result<Self, ConfigError> {
        let form = format!("write `{}://HOST:PORT,HOST:PORT`", scheme.name);
        let Some(authority) = parts.authority else {
            return Err(unusable(scheme, &format!("names no server; {form}")));
        };
        let (login, hosts) = parts.login_and_hosts(authority, scheme)?;
        let members = servers(hosts, scheme, PORT, &form)?;
        if !matches!(parts.path, "" | "/") {
            return Err(unusable(
                scheme,
                "has a path, which means nothing in etcd; what keys begin with is said by option `namespace`",
            ));
        }
        let login = login.map(|login| self::login(login, scheme)).transpose()?;
        Ok(Self { scheme: scheme.name, members, login })
    }
}

fn login(login: &str, scheme: &Scheme) -> Result<(Secret, Secret), ConfigError> {
    let text = |part: &str| decoded_text(part, scheme, "a user or a password");
    let named =
        login.split_once(':').filter(|(user, password)| !user.is_empty() && !password.is_empty());
    let Some((user, password)) = named else {
        return Err(unusable(
            scheme,
            "names no user, or no password; write `USER:PASSWORD@`, or neither",
        ));
    };
    Ok((Secret::new(text(user)?), Secret::new(text(password)?)))
}

/// Default port of members for clients.
const PORT: u16 = 2379;

#[cfg(all(test, feature = "etcd"))]
mod tests {
    use super::super::{Store, StoreUrl};

    #[test]
    fn a_cluster_is_a_list_of_members() {
        let Store::Etcd(cluster) = StoreUrl::parse("etcd://u:p%40@a:1,[::1],b/").unwrap().store
        else {
            panic!("another store")
        };
        let members = [("a", 1), ("::1", 2379), ("b", 2379)];
        assert_eq!(cluster.members, members.map(|(host, port)| (host.to_owned(), port)));
        let (user, password) = cluster.login.unwrap();
        assert_eq!((user.told(), password.told()), ("u", "p@"));
    }

    #[test]
    fn what_is_no_cluster_says_what_to_write() {
        for (url, hint) in [
            ("etcd:", "names no server"),
            ("etcd://", "names no server"),
            ("etcd://a,a", "twice"),
            ("etcd://a:0", "port from 1"),
            ("etcd://canary@a", "USER:PASSWORD@"),
            ("etcd://:canary@a", "USER:PASSWORD@"),
            ("etcd://a/canary", "`namespace`"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint) && !error.contains("canary"), "{url}: {error}");
        }
    }
}
