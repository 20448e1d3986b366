//! URLs of etcd clusters: `etcd://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]…`.

use registry_core::ConfigError;

use super::parts::{Host, UrlParts, decode_text, invalid_url, parse_hosts};
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

    pub(super) fn parse(
        parts: &UrlParts<'_>,
        scheme: &'static Scheme,
    ) -> Result<Self, ConfigError> {
        let syntax_hint = format!("write `{}://HOST:PORT,HOST:PORT`", scheme.name);
        let Some(authority) = parts.authority else {
            return Err(invalid_url(scheme, &format!("contains no server; {syntax_hint}")));
        };
        let (login, hosts) = parts.login_and_hosts(authority, scheme)?;
        let members = parse_hosts(hosts, scheme, PORT, &syntax_hint)?;
        if !matches!(parts.path, "" | "/") {
            return Err(invalid_url(
                scheme,
                "contains a path, which etcd does not support; set the prefix of keys with option `namespace`",
            ));
        }
        let login = login.map(|login| parse_login(login, scheme)).transpose()?;
        Ok(Self { scheme: scheme.name, members, login })
    }
}

fn parse_login(login: &str, scheme: &Scheme) -> Result<(Secret, Secret), ConfigError> {
    let text = |part: &str| decode_text(part, scheme, "a user or a password");
    let named =
        login.split_once(':').filter(|(user, password)| !user.is_empty() && !password.is_empty());
    let Some((user, password)) = named else {
        return Err(invalid_url(
            scheme,
            "contains an incomplete login; write `USER:PASSWORD@` or no login",
        ));
    };
    Ok((Secret::new(text(user)?), Secret::new(text(password)?)))
}

/// Default port of members for clients.
const PORT: u16 = 2379;

#[cfg(all(test, feature = "etcd"))]
mod tests {
    use super::super::{StoreLocation, StoreUrl};

    #[test]
    fn a_url_lists_the_members_of_a_cluster() {
        let StoreLocation::Etcd(cluster) =
            StoreUrl::parse("etcd://u:p%40@a:1,[::1],b/").unwrap().store
        else {
            panic!("another store")
        };
        let members = [("a", 1), ("::1", 2379), ("b", 2379)];
        assert_eq!(cluster.members, members.map(|(host, port)| (host.to_owned(), port)));
        let (user, password) = cluster.login.unwrap();
        assert_eq!((user.expose(), password.expose()), ("u", "p@"));
    }

    #[test]
    fn an_error_about_an_invalid_url_contains_a_hint_and_no_secret() {
        for (url, hint) in [
            ("etcd:", "contains no server"),
            ("etcd://", "contains no server"),
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
