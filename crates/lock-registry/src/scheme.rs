//! The schemes of store URLs, and whether this build can open them.

use registry_core::ConfigError;

use crate::suggestion::suggest;

/// One scheme of a store URL.
#[derive(Debug)]
pub(crate) struct Scheme {
    pub(crate) name: &'static str,
    /// The Cargo feature of the store. `None` if the store is always built in.
    feature: Option<Feature>,
}

#[derive(Debug)]
struct Feature {
    name: &'static str,
    /// Whether this build has the feature.
    is_enabled: bool,
}

impl Scheme {
    /// Returns the scheme `name`, or an error if it does not exist or this build cannot open it.
    pub(crate) fn find(name: &str) -> Result<&'static Self, ConfigError> {
        let Some(scheme) = SCHEMES.iter().find(|scheme| scheme.name == name) else {
            return Err(ConfigError::unknown(
                "scheme",
                name,
                "the store URL",
                suggest(name, SCHEMES.iter().map(|scheme| scheme.name)),
                known(),
            ));
        };
        match &scheme.feature {
            None | Some(Feature { is_enabled: true, .. }) => Ok(scheme),
            Some(feature) => {
                Err(ConfigError::not_built_in(scheme.name, feature.name, feature.hint()))
            }
        }
    }
}

/// Returns whether `name` is a scheme, built in or not.
pub(crate) fn is_known(name: &str) -> bool {
    SCHEMES.iter().any(|scheme| scheme.name == name)
}

/// Returns whether `name` is a scheme or a probable misspelling of one.
pub(crate) fn is_similar_to_known(name: &str) -> bool {
    SCHEMES.iter().any(|scheme| strsim::normalized_damerau_levenshtein(name, scheme.name) >= 0.7)
}

impl Feature {
    fn hint(&self) -> String {
        let (name, version) = (self.name, env!("CARGO_PKG_VERSION"));
        format!(
            "enable feature `{name}` in Cargo.toml: lock-registry = {{ version = \"{version}\", features = [\"{name}\"] }}"
        )
    }
}

/// Returns the names of all schemes, for messages.
pub(crate) fn known() -> String {
    SCHEMES.iter().map(|scheme| scheme.name).collect::<Vec<_>>().join(", ")
}

const fn built_in(name: &'static str) -> Scheme {
    Scheme { name, feature: None }
}

const fn optional(name: &'static str, feature: &'static str, is_enabled: bool) -> Scheme {
    Scheme { name, feature: Some(Feature { name: feature, is_enabled }) }
}

const ETCD: bool = cfg!(feature = "etcd");
const ETCD_TLS: bool = cfg!(feature = "etcd-tls");
const MYSQL: bool = cfg!(feature = "mysql");
const POSTGRES: bool = cfg!(feature = "postgres");
const REDIS: bool = cfg!(feature = "redis");
const REDIS_TLS: bool = cfg!(feature = "redis-tls");
const ZK: bool = cfg!(feature = "zk");
const ZK_TLS: bool = cfg!(feature = "zk-tls");

static SCHEMES: &[Scheme] = &[
    built_in("memory"),
    optional("sqlite", "sqlite", cfg!(feature = "sqlite")),
    built_in("pass-through"),
    optional("postgres", "postgres", POSTGRES),
    optional("postgresql", "postgres", POSTGRES),
    optional("mysql", "mysql", MYSQL),
    optional("mariadb", "mysql", MYSQL),
    optional("redis", "redis", REDIS),
    optional("rediss", "redis-tls", REDIS_TLS),
    optional("redis+unix", "redis", REDIS),
    optional("redis+sentinel", "redis", REDIS),
    optional("rediss+sentinel", "redis-tls", REDIS_TLS),
    optional("redis+cluster", "redis", REDIS),
    optional("rediss+cluster", "redis-tls", REDIS_TLS),
    optional("redis+quorum", "redis", REDIS),
    optional("rediss+quorum", "redis-tls", REDIS_TLS),
    optional("zk", "zk", ZK),
    optional("zks", "zk-tls", ZK_TLS),
    optional("etcd", "etcd", ETCD),
    optional("etcds", "etcd-tls", ETCD_TLS),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_an_unknown_scheme_suggests_the_most_similar_and_lists_all() {
        let error = Scheme::find("postgress").unwrap_err();
        let ConfigError::Unknown { what, given, nearest, known, .. } = &error else {
            panic!("{error:?}")
        };
        let fields = (*what, given.as_str(), nearest.as_deref());
        assert_eq!(fields, ("scheme", "postgress", Some("postgres")));
        assert!(known.contains("redis+sentinel"), "{known}");
    }

    #[test]
    fn an_error_about_a_disabled_feature_contains_the_cargo_line() {
        for (scheme, feature, built_in) in [
            ("sqlite", "sqlite", cfg!(feature = "sqlite")),
            ("postgres", "postgres", POSTGRES),
            ("postgresql", "postgres", POSTGRES),
            ("mysql", "mysql", MYSQL),
            ("mariadb", "mysql", MYSQL),
            ("redis", "redis", REDIS),
            ("redis+unix", "redis", REDIS),
            ("redis+sentinel", "redis", REDIS),
            ("redis+cluster", "redis", REDIS),
            ("redis+quorum", "redis", REDIS),
            ("rediss", "redis-tls", REDIS_TLS),
            ("rediss+sentinel", "redis-tls", REDIS_TLS),
            ("rediss+cluster", "redis-tls", REDIS_TLS),
            ("rediss+quorum", "redis-tls", REDIS_TLS),
            ("zk", "zk", ZK),
            ("zks", "zk-tls", ZK_TLS),
            ("etcd", "etcd", ETCD),
            ("etcds", "etcd-tls", ETCD_TLS),
        ] {
            let found = Scheme::find(scheme);
            assert_eq!(found.is_ok(), built_in, "{scheme}");
            let Err(error) = found else { continue };
            let line = format!(
                "lock-registry = {{ version = \"{}\", features = [\"{feature}\"] }}",
                env!("CARGO_PKG_VERSION")
            );
            assert!(error.to_string().contains(&line), "{error}");
        }
    }
}
