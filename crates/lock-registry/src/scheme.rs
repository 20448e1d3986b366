//! The schemes of store URLs, and whether this build can open them.

use registry_core::ConfigError;
use registry_core::config::StoreKind;

use crate::memory::{MEMORY, PASS_THROUGH};
use crate::suggestion::suggest;

/// One scheme of a store URL.
#[derive(Debug)]
pub(crate) struct Scheme {
    pub(crate) name: &'static str,
    /// The Cargo feature that the scheme requires, for example `redis-tls` for `rediss`. `None` if
    /// the store is always built in.
    feature: Option<Feature>,
    /// The store. `None` if this build does not contain the store.
    store: Option<&'static StoreKind>,
}

#[derive(Debug)]
struct Feature {
    name: &'static str,
    /// Whether this build has the feature.
    is_enabled: bool,
}

impl Scheme {
    /// Returns the store of the scheme `name`. Returns an error if the scheme is unknown or this
    /// build cannot open its store.
    pub(crate) fn find_store(name: &str) -> Result<&'static StoreKind, ConfigError> {
        let Some(scheme) = SCHEMES.iter().find(|scheme| scheme.name == name) else {
            return Err(ConfigError::unknown(
                "scheme",
                name,
                "the store URL",
                suggest(name, SCHEMES.iter().map(|scheme| scheme.name)),
                list_of_schemes(),
            ));
        };
        match (&scheme.feature, scheme.store) {
            (None | Some(Feature { is_enabled: true, .. }), Some(store)) => Ok(store),
            (feature, _) => {
                let feature = feature.as_ref().expect("a store without a feature is built in");
                Err(ConfigError::not_built_in(scheme.name, feature.name, feature.hint()))
            }
        }
    }
}

/// Returns the stores of this build, each once.
pub(crate) fn stores() -> impl Iterator<Item = &'static StoreKind> {
    let mut names = Vec::new();
    SCHEMES.iter().filter_map(|scheme| scheme.store).filter(move |store| {
        let is_new = !names.contains(&store.name);
        names.push(store.name);
        is_new
    })
}

/// Returns the first scheme of `store`, which is the store's name in messages.
pub(crate) fn primary_scheme(store: &StoreKind) -> &'static str {
    let is_first = |scheme: &&Scheme| scheme.store.is_some_and(|kind| kind.name == store.name);
    SCHEMES.iter().find(is_first).map_or(store.name, |scheme| scheme.name)
}

/// Returns all schemes, each with the Cargo feature of `lock-registry` that it requires. `None` if
/// the store is always built in.
#[must_use]
pub fn describe_schemes() -> Vec<(&'static str, Option<&'static str>)> {
    let feature = |scheme: &Scheme| scheme.feature.as_ref().map(|feature| feature.name);
    SCHEMES.iter().map(|scheme| (scheme.name, feature(scheme))).collect()
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

/// Returns the list of all schemes, for messages.
pub(crate) fn list_of_schemes() -> String {
    SCHEMES.iter().map(|scheme| scheme.name).collect::<Vec<_>>().join(", ")
}

const fn built_in(name: &'static str, store: &'static StoreKind) -> Scheme {
    Scheme { name, feature: None, store: Some(store) }
}

const fn optional(
    name: &'static str,
    (feature, is_enabled): (&'static str, bool),
    store: Option<&'static StoreKind>,
) -> Scheme {
    Scheme { name, feature: Some(Feature { name: feature, is_enabled }), store }
}

/// Returns the store if the feature is enabled.
macro_rules! store {
    ($feature:literal, $store:path) => {{
        #[cfg(feature = $feature)]
        let store: Option<&'static StoreKind> = Some(&$store);
        #[cfg(not(feature = $feature))]
        let store: Option<&'static StoreKind> = None;
        store
    }};
}

/// Returns the name of a feature, and whether the feature is enabled.
macro_rules! feature {
    ($feature:literal) => {
        ($feature, cfg!(feature = $feature))
    };
}

static SCHEMES: &[Scheme] = &[
    built_in("memory", &MEMORY),
    optional("sqlite", feature!("sqlite"), SQLITE),
    built_in("pass-through", &PASS_THROUGH),
    optional("postgres", feature!("postgres"), POSTGRES),
    optional("postgresql", feature!("postgres"), POSTGRES),
    optional("mysql", feature!("mysql"), MYSQL),
    optional("mariadb", feature!("mysql"), MYSQL),
    optional("redis", feature!("redis"), REDIS),
    optional("rediss", feature!("redis-tls"), REDIS),
    optional("redis+unix", feature!("redis"), REDIS),
    optional("redis+sentinel", feature!("redis"), REDIS),
    optional("rediss+sentinel", feature!("redis-tls"), REDIS),
    optional("redis+cluster", feature!("redis"), REDIS),
    optional("rediss+cluster", feature!("redis-tls"), REDIS),
    optional("redis+quorum", feature!("redis"), REDIS),
    optional("rediss+quorum", feature!("redis-tls"), REDIS),
    optional("zk", feature!("zk"), ZK),
    optional("zks", feature!("zk-tls"), ZK),
    optional("etcd", feature!("etcd"), ETCD),
    optional("etcds", feature!("etcd-tls"), ETCD),
];

static SQLITE: Option<&StoreKind> = store!("sqlite", registry_jdbc::stores::SQLITE);
static POSTGRES: Option<&StoreKind> = store!("postgres", registry_jdbc::stores::POSTGRES);
static MYSQL: Option<&StoreKind> = store!("mysql", registry_jdbc::stores::MYSQL);
static REDIS: Option<&StoreKind> = store!("redis", registry_redis::STORE);
static ZK: Option<&StoreKind> = store!("zk", registry_zk::STORE);
static ETCD: Option<&StoreKind> = store!("etcd", registry_etcd::STORE);

#[cfg(test)]
mod tests {
    use registry_core::config::{BackendConfig, UrlParts};

    use super::*;
    use crate::options::example_value;

    /// Returns the configuration of a store of `scheme`.
    fn config(scheme: &str) -> Box<dyn BackendConfig> {
        let location = match scheme {
            "memory" | "pass-through" => "",
            "sqlite" => "locks.db",
            "redis+unix" => "///redis.sock",
            "redis+quorum" | "rediss+quorum" => "//a,b,c",
            "postgres" | "postgresql" | "mysql" | "mariadb" => "//host/database",
            "redis+sentinel" | "rediss+sentinel" => "//host/service",
            _ => "//host",
        };
        let url = format!("{scheme}:{location}");
        let parse = Scheme::find_store(scheme).expect("the store is built in").parse;
        parse(&UrlParts::split(&url).expect("the URL has a scheme")).expect("the URL is valid")
    }

    fn built_in_schemes() -> impl Iterator<Item = &'static str> {
        SCHEMES.iter().map(|scheme| scheme.name).filter(|name| Scheme::find_store(name).is_ok())
    }

    #[test]
    fn a_store_assigns_every_option_that_it_declares() {
        for scheme in built_in_schemes() {
            let mut config = config(scheme);
            let store_scheme = config.scheme();
            for row in config.kind().rows().filter(|row| row.applies_to(store_scheme)) {
                let assigned = config.set(row.name, &example_value(row));
                assigned.unwrap_or_else(|error| panic!("{scheme}: {error}"));
            }
        }
    }

    #[test]
    fn an_unknown_option_is_an_error() {
        for scheme in built_in_schemes() {
            let error = config(scheme).assign("unknown", "1").unwrap_err();
            assert!(error.to_string().contains("not an option"), "{scheme}: {error}");
            config(scheme).set("unknown", "1").unwrap_err();
        }
    }

    #[test]
    fn an_error_about_an_unknown_scheme_suggests_the_most_similar_scheme_and_lists_all() {
        let error = Scheme::find_store("postgress").unwrap_err();
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
            ("postgres", "postgres", cfg!(feature = "postgres")),
            ("postgresql", "postgres", cfg!(feature = "postgres")),
            ("mysql", "mysql", cfg!(feature = "mysql")),
            ("mariadb", "mysql", cfg!(feature = "mysql")),
            ("redis", "redis", cfg!(feature = "redis")),
            ("redis+unix", "redis", cfg!(feature = "redis")),
            ("redis+sentinel", "redis", cfg!(feature = "redis")),
            ("redis+cluster", "redis", cfg!(feature = "redis")),
            ("redis+quorum", "redis", cfg!(feature = "redis")),
            ("rediss", "redis-tls", cfg!(feature = "redis-tls")),
            ("rediss+sentinel", "redis-tls", cfg!(feature = "redis-tls")),
            ("rediss+cluster", "redis-tls", cfg!(feature = "redis-tls")),
            ("rediss+quorum", "redis-tls", cfg!(feature = "redis-tls")),
            ("zk", "zk", cfg!(feature = "zk")),
            ("zks", "zk-tls", cfg!(feature = "zk-tls")),
            ("etcd", "etcd", cfg!(feature = "etcd")),
            ("etcds", "etcd-tls", cfg!(feature = "etcd-tls")),
        ] {
            let found = Scheme::find_store(scheme);
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
