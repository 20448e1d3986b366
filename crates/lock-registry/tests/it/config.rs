//! `RegistryConfig`, `connect` and `redact_url`: precedence of option sources, validation, and
//! redaction of secrets. No test contacts a server.

use std::time::Duration;

use lock_registry::{ConfigError, RegistryConfig, config::redact_url, connect};
use registry_testkit::error_text;

const CANARY: &str = "canary";

fn setting(config: &RegistryConfig, name: &str) -> Option<String> {
    let settings = config.settings().expect("the configuration is right");
    settings.into_iter().find(|setting| setting.name == name).map(|setting| setting.value)
}

#[test]
fn code_is_stronger_than_the_url() {
    let config = RegistryConfig::from_url("memory:?lease=5s&poll=1s")
        .unwrap()
        .lease(Duration::from_secs(20));
    assert_eq!(setting(&config, "lease").as_deref(), Some("20s"));
    assert_eq!(setting(&config, "poll").as_deref(), Some("1s"));
    assert_eq!(setting(&config, "renew"), None);
}

#[tokio::test]
async fn an_opened_store_has_the_capabilities_of_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let mut urls = vec!["memory:".to_owned(), "pass-through:".to_owned()];
    if cfg!(all(feature = "sqlite", target_os = "linux")) {
        urls.push(format!("sqlite:{}", folder.path().join("locks.db").display()));
    }
    for url in urls {
        let config = RegistryConfig::from_url(&url).unwrap();
        let expected = config.capabilities().unwrap();
        assert_eq!(config.connect().await.unwrap().capabilities(), expected, "{url}");
    }
}

#[test]
fn a_configuration_without_a_url_is_refused() {
    let error = RegistryConfig::new().check().unwrap_err();
    assert!(error.to_string().contains("sqlite:PATH"), "{error}");
}

#[tokio::test]
async fn values_from_code_are_checked_too() {
    for config in [
        RegistryConfig::new().url("memory:").lease(Duration::ZERO),
        RegistryConfig::new().url("memory:").lease(Duration::from_millis(1)),
        RegistryConfig::new().url("memory:").lease(Duration::from_secs(100 * 365 * 24 * 3_600)),
        RegistryConfig::new().url("memory:").poll(Duration::ZERO),
        RegistryConfig::new().url("memory:").timeout(Duration::ZERO),
        RegistryConfig::new().url("memory:").handoff(1_000_000),
        RegistryConfig::new().url("memory:").label("x".repeat(5_000)),
    ] {
        let error = config.connect().await.unwrap_err();
        assert!(matches!(error, ConfigError::Invalid(_)), "{error:?}");
        assert!(error.to_string().contains("in the code"), "{error}");
    }
}

/// `check` refuses everything that a store would refuse without a request to its server. An error
/// of `check` therefore always means an invalid configuration, never an unreachable store.
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "redis",
    feature = "zk",
    feature = "etcd"
))]
#[test]
fn check_returns_every_error_that_needs_no_io() {
    for (url, hint) in [
        ("postgres://h/db?table_prefix=a-b", "prefix"),
        ("postgres://h/db?schema=a.b", "schema"),
        ("postgres://h/db?purge_after=1m&timeout=1h", "purge_after"),
        ("postgres://h/db?mode=session&lease=61s", "lease"),
        ("postgres://h/db?layout=spring&region=%20", "region"),
        ("mysql://h/db?table_prefix=a-b", "tables"),
        ("mysql://h/db?mode=row&lease=61s", "lease"),
        ("mysql://h/db?layout=spring&prefix=%3B", "prefix"),
        ("zk://h/a/../b", "chroot"),
        ("zk://h?root=a", "root"),
        ("zk://h?acl=creator", "login"),
        ("zk://h?acl=world:anyone:r", "must grant"),
        ("etcd://h?namespace=", "namespace"),
        ("etcd://h?lease=1999ms", "lease"),
    ] {
        let error = RegistryConfig::new().url(url).check().unwrap_err();
        assert!(matches!(error, ConfigError::Invalid(_)), "{url}: {error:?}");
        assert!(error.to_string().contains(hint), "{url}: {error}");
    }
    for url in [
        "postgres://h/db?table_prefix=a_b&schema=B&mode=session&lease=60s",
        "mysql://h/db?layout=spring&prefix=a.b_&region=r",
        "zk://u:p@h/a/b?root=/c/d&acl=creator",
        "etcd://h?layout=etcdctl&namespace=&lease=2s",
        "redis+quorum://a,b,c?restart_guard=1m",
    ] {
        RegistryConfig::from_url(url)
            .unwrap()
            .check()
            .unwrap_or_else(|error| panic!("{url}: {error}"));
    }
}

#[cfg(feature = "zk-tls")]
#[test]
fn encrypted_zookeeper_without_a_ca_is_refused_by_the_check() {
    let error = RegistryConfig::new().url("zks://h").check().unwrap_err();
    assert!(error.to_string().contains("`ca`"), "{error}");
}

/// A host is looked up only to explain a lost connection.
#[cfg(feature = "redis-tls")]
#[tokio::test]
async fn an_unresolved_host_replaces_no_permanent_error() {
    let url = "rediss://no-such-host.invalid?ca=/absent/ca.pem";
    let error = connect(url).await.unwrap_err();
    let text = error_text(&error);
    let ConfigError::Open { source, .. } = &error else { panic!("{text}") };
    assert_eq!(source.kind(), lock_registry::backend::BackendErrorKind::Misconfigured, "{text}");
    assert!(text.contains("/absent/ca.pem") && !text.contains("cannot resolve"), "{text}");
}

#[cfg(all(
    feature = "postgres-tls",
    feature = "mysql-tls",
    feature = "redis-tls",
    feature = "zk-tls",
    feature = "etcd-tls"
))]
mod certificates {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

    use lock_registry::backend::{BackendError, BackendErrorKind};
    use lock_registry::etcd::{EtcdBackend, EtcdConfig};
    use lock_registry::mysql::{MySqlBackend, MySqlConfig};
    use lock_registry::postgres::{PostgresBackend, PostgresConfig};
    use lock_registry::redis::{FencedWrites, RedisBackend, RedisConfig};
    use lock_registry::zk::{ZkBackend, ZkConfig};
    use registry_core::config::BackendConfig;

    use super::*;

    /// Asserts that `open` reads the file of each option before it connects.
    async fn assert_reads_the_files<C: BackendConfig + Clone, B>(
        config: Result<C, BackendError>,
        open: impl AsyncFn(C) -> Result<B, BackendError>,
    ) {
        let config = config.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let present = directory.path().join("present.pem");
        std::fs::write(&present, "-----BEGIN CERTIFICATE-----").unwrap();
        let present = present.to_str().unwrap();
        for (ca, cert, problem) in [
            ("/absent/ca.pem", present, "file \"/absent/ca.pem\" of option `ca` cannot be read"),
            (present, "/absent/cert.pem", "file \"/absent/cert.pem\" of option `cert` cannot"),
            // No error shows this path, because a user may pass the key itself.
            (present, present, "the file of option `key` cannot be read"),
        ] {
            let mut config = config.clone();
            for (option, value) in [("ca", ca), ("cert", cert), ("key", "/absent/canary.pem")] {
                config.set(option, value).unwrap();
            }
            let error = open(config).await.err().unwrap();
            let text = error_text(&error);
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{text}");
            assert!(text.contains(problem) && !text.contains(CANARY), "{text}");
        }
    }

    #[tokio::test]
    async fn a_backend_opened_directly_reads_the_files_of_its_options() {
        let postgres = PostgresConfig::from_url("postgres://u@127.0.0.1:1/db");
        assert_reads_the_files(postgres, PostgresBackend::open).await;
        let mysql = MySqlConfig::from_url("mysql://u@127.0.0.1:1/db");
        assert_reads_the_files(mysql, MySqlBackend::open).await;
        let redis = || RedisConfig::from_url("rediss://127.0.0.1:1");
        assert_reads_the_files(redis(), RedisBackend::open).await;
        assert_reads_the_files(redis(), FencedWrites::open).await;
        assert_reads_the_files(ZkConfig::from_url("zks://127.0.0.1:1"), ZkBackend::open).await;
        assert_reads_the_files(EtcdConfig::from_url("etcds://127.0.0.1:1"), EtcdBackend::open)
            .await;
    }
}

#[tokio::test]
async fn the_engine_accepts_every_value_that_passes_the_check() {
    for query in [
        "lease=100ms&timeout=10ms",
        "lease=1day&poll=1h&timeout=1h&handoff=256",
        "poll=1ms&handoff=0&renew=false",
    ] {
        connect(&format!("memory:?{query}"))
            .await
            .unwrap_or_else(|error| panic!("{query}: {error}"));
    }
}

#[tokio::test]
async fn each_memory_url_without_a_name_opens_a_separate_store() {
    let (one, other) = (connect("memory:").await.unwrap(), connect("memory:").await.unwrap());
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_some());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_named_memory_store_is_shared_within_its_namespace() {
    let one = connect("memory:shared").await.unwrap();
    let other = connect("memory:shared").await.unwrap();
    let elsewhere = connect("memory:shared?namespace=elsewhere").await.unwrap();
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_none());
    assert!(elsewhere.obtain("key").try_lock().await.unwrap().is_some());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn pass_through_excludes_only_callers_of_the_same_registry() {
    let registry = connect("pass-through:").await.unwrap();
    let other = connect("pass-through:").await.unwrap();
    let _one = registry.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(registry.obtain("key").try_lock().await.unwrap().is_none());
    assert!(other.obtain("key").try_lock().await.unwrap().is_some());
}

#[test]
fn a_registry_outside_a_runtime_is_an_error_not_a_panic() {
    let mut connecting = std::pin::pin!(connect("memory:"));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(outcome) = connecting.as_mut().poll(&mut cx) else {
        panic!("the future is pending")
    };
    assert!(matches!(outcome, Err(ConfigError::NoRuntime)), "{outcome:?}");
}

#[tokio::test]
async fn no_public_type_shows_the_password_of_a_url() {
    for url in [
        "redis+cluster://user:canary@host:6379/1",
        "redis+cluster://user:canary@a,canary@b",
        "redis+sentinel://user:canary@a/main?sentinel_user=canary",
        "redis+sentinel://a/main?sentinel_password=canary&sentinel_password=canary",
        "redis+quorum://user:canary@a,b,b",
        "redis+unix://user:canary@host/run/redis.sock",
        "redis+unix:///run/redis.sock?password=canary",
        "rediss+quorum://user:canary@a,b,c?key=canary",
        "rediss://host?ca=-----BEGIN%20canary",
        "redis://user:canary@canary@host",
        "redis://user:canary@host?leese=1s",
        "postgres://user:can/ary@host/canary@db",
        "mysql://user:canary@host?password=canary",
        "redis+sentinel://:canary@a:1,b:2",
        "bogus://user:canary@host",
        "user:canary@host",
        "sqlite://user:canary@host/locks.db",
        "redis://user:canary",
        "memory:?url=redis:canary",
        "memory:?can%20ary=canary",
        "memory:?canary",
    ] {
        let config = RegistryConfig::new().url(url);
        for shown in [
            format!("{config:?}"),
            format!("{config:#?}"),
            redact_url(url),
            error_text(&config.check().unwrap_err()),
            error_text(&config.settings().unwrap_err()),
            error_text(&connect(url).await.unwrap_err()),
            error_text(&RegistryConfig::from_url(url).unwrap_err()),
        ] {
            assert!(!shown.contains(CANARY), "{url}: {shown}");
        }
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use super::*;

    #[tokio::test]
    async fn a_file_excludes_two_registries() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}/a%20b.db?lease=60s&timeout=60s", directory.path().display());
        let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
        let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
        assert!(other.obtain("key").try_lock().await.unwrap().is_none());
        guard.unlock().await.unwrap();
        assert!(other.obtain("key").try_lock().await.unwrap().is_some());
        assert!(directory.path().join("a b.db").exists());
    }

    #[tokio::test]
    async fn an_invalid_option_creates_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().display();
        for query in ["leese=5s", "lease=1ms", "layout=spring", "purge_after=soon"] {
            connect(&format!("sqlite:{path}/locks.db?{query}")).await.unwrap_err();
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_missing_folder_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let error = connect(&format!("sqlite:{}/absent/locks.db", directory.path().display()))
            .await
            .unwrap_err();
        assert!(matches!(error, ConfigError::Open { .. }), "{error:?}");
        assert!(error_text(&error).contains("absent"), "{error}");
    }

    #[test]
    fn an_option_of_sqlite_is_refused_by_other_stores() {
        assert!(RegistryConfig::from_url("sqlite:a.db?busy_timeout=1s").is_ok());
        assert!(RegistryConfig::from_url("memory:?busy_timeout=1s").is_err());
    }
}

#[cfg(feature = "config")]
mod toml_and_variables {
    use super::*;

    #[test]
    fn code_overrides_environment_overrides_file_overrides_url() {
        let toml = "url = 'memory:?namespace=url&lease=1s&poll=1s&label=url'\nlease = '2s'\npoll = '2s'\nlabel = 'file'";
        let vars = [("LOCK_REGISTRY_POLL", "3s"), ("LOCK_REGISTRY_LABEL", "environment")];
        let config =
            RegistryConfig::new().with_toml(toml).unwrap().with_vars(vars).unwrap().label("code");
        let values =
            ["namespace", "lease", "poll", "label"].map(|name| setting(&config, name).unwrap());
        assert_eq!(values, ["url", "2s", "3s", "code"]);
    }

    #[test]
    fn the_options_of_an_overridden_url_are_ignored() {
        let config = RegistryConfig::new()
            .with_toml("url = 'memory:file?lease=1s'")
            .unwrap()
            .with_vars([("LOCK_REGISTRY_URL", "memory:env?poll=1s")])
            .unwrap();
        assert_eq!(setting(&config, "url").as_deref(), Some("memory:env?poll=1s"));
        assert_eq!(setting(&config, "lease"), None);
        assert_eq!(setting(&config.url("memory:code"), "url").as_deref(), Some("memory:code"));
    }

    #[test]
    fn toml_accepts_numbers_booleans_and_its_own_table() {
        let config = RegistryConfig::new()
            .with_toml(
                "title = 'app'\n[lock-registry]\nurl = 'memory:'\nrenew = false\nhandoff = 8",
            )
            .unwrap();
        assert_eq!(setting(&config, "renew").as_deref(), Some("false"));
        assert_eq!(setting(&config, "handoff").as_deref(), Some("8"));
    }

    #[test]
    fn an_error_about_invalid_toml_contains_a_hint() {
        for (toml, hint) in [
            ("leese = '1s'", "lease"),
            ("lease = 30", "no unit"),
            ("lease = 1.5", "must be text"),
            ("lease = ['1s']", "must be text"),
            ("[leese]\na = 1", "lease"),
            ("lease = '1s'\nlease = '2s'", "line 2"),
            ("lease = ", "line 1"),
            ("\n\nurl = 'memory:", "line 3"),
            ("lock-registry = 1", "table"),
            ("handoff = -1", "whole number"),
        ] {
            let error = RegistryConfig::new().with_toml(toml).unwrap_err().to_string();
            assert!(error.contains(hint), "{toml:?}: {error}");
        }
    }

    #[test]
    fn an_unknown_variable_is_refused_with_a_suggestion_and_unrelated_variables_are_ignored() {
        for (variable, nearest) in [
            ("LOCK_REGISTRY_LEESE", "LOCK_REGISTRY_LEASE"),
            ("LOCK_REGISTRY_URI", "LOCK_REGISTRY_URL"),
            ("LOCK_REGISTRY_lease", "LOCK_REGISTRY_LEASE"),
        ] {
            let error = RegistryConfig::new().with_vars([(variable, "1s")]).unwrap_err();
            let ConfigError::Unknown { what: "variable", given, nearest: suggestion, .. } = error
            else {
                panic!("{error:?}")
            };
            assert_eq!((given.as_str(), suggestion.as_deref()), (variable, Some(nearest)));
        }
        let vars = [("LOCK_REGISTRY_LOG", "debug"), ("LOCK_REGISTRIES", "x"), ("PATH", "/bin")];
        assert!(RegistryConfig::new().with_vars(vars).is_ok());
        let error = RegistryConfig::new().with_vars([("LOCK_REGISTRY_XYZZY", "1")]).unwrap_err();
        assert!(matches!(error, ConfigError::Unknown { nearest: None, .. }), "{error:?}");
    }

    #[test]
    fn variables_of_a_kubernetes_service_are_ignored() {
        let vars = [
            ("LOCK_REGISTRY_URL", "memory:"),
            ("LOCK_REGISTRY_PORT", "tcp://10.0.0.1:6379"),
            ("LOCK_REGISTRY_SERVICE_HOST", "10.0.0.1"),
            ("LOCK_REGISTRY_SERVICE_PORT", "6379"),
            ("LOCK_REGISTRY_SERVICE_PORT_REDIS", "6379"),
            ("LOCK_REGISTRY_PORT_6379_TCP", "tcp://10.0.0.1:6379"),
            ("LOCK_REGISTRY_PORT_6379_TCP_PROTO", "tcp"),
            ("LOCK_REGISTRY_PORT_6379_TCP_ADDR", "10.0.0.1"),
            ("LOCK_REGISTRY_REDIS_MASTER_SERVICE_HOST", "10.0.0.1"),
            ("LOCK_REGISTRY_REDIS_MASTER_PORT", "tcp://10.0.0.1:6379"),
        ];
        let config = RegistryConfig::new().with_vars(vars).unwrap();
        let set: Vec<_> = config.settings().unwrap().iter().map(|setting| setting.name).collect();
        assert_eq!(set, ["url"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_variable_that_is_not_utf8_is_refused_without_its_value() {
        use std::os::unix::ffi::OsStringExt as _;

        let value = std::ffi::OsString::from_vec(b"canary\xff".to_vec());
        let error = RegistryConfig::new().with_vars([("LOCK_REGISTRY_URL", value)]).unwrap_err();
        assert!(!error_text(&error).contains(CANARY), "{error:?}");
    }

    #[test]
    fn no_error_about_toml_or_variables_shows_a_password() {
        for toml in [
            "url = 'redis://u:canary@h/0'\nleese = '1s'",
            "url = 'redis://u:canary@h/0",
            "url = redis://u:canary@h/0",
            "url = 'memory:'\nurl = 'redis://u:canary@h/0'",
            "url = ['redis://u:canary@h/0']",
            "lock-registry = 'redis://u:canary@h/0'",
        ] {
            let error = RegistryConfig::new().with_toml(toml).unwrap_err();
            assert!(!error_text(&error).contains(CANARY), "{toml}: {}", error_text(&error));
        }
        let config = RegistryConfig::new()
            .with_toml("url = 'etcd://u:canary@h/0'")
            .unwrap()
            .with_vars([("LOCK_REGISTRY_URL", "etcd://u:canary@h/0")])
            .unwrap();
        assert!(!format!("{config:?}").contains(CANARY));
        assert!(!error_text(&config.check().unwrap_err()).contains(CANARY));
    }

    #[test]
    fn an_error_in_a_deserialized_section_is_returned_by_check() {
        #[derive(Debug, serde::Deserialize)]
        struct App {
            locks: RegistryConfig,
        }
        let app: App =
            toml::from_str("[locks]\nurl = 'memory:'\nlease = '7s'\nhandoff = 3\nrenew = true")
                .unwrap();
        assert_eq!(setting(&app.locks, "lease").as_deref(), Some("7s"));
        assert_eq!(setting(&app.locks, "handoff").as_deref(), Some("3"));

        let wrong: App =
            toml::from_str("locks = { url = 'redis://u:canary@h', leese = '7s' }").unwrap();
        let error = wrong.locks.check().unwrap_err();
        assert!(
            matches!(&error, ConfigError::Unknown { nearest, .. } if nearest.as_deref() == Some("lease")),
            "{error:?}"
        );
        assert!(!error_text(&error).contains(CANARY) && !format!("{wrong:?}").contains(CANARY));

        for value in ["'redis://u:canary@h'", "['redis://u:canary@h']", "7", "0.5", "true"] {
            let not_a_table: App = toml::from_str(&format!("locks = {value}")).unwrap();
            let text = error_text(&not_a_table.locks.check().unwrap_err());
            assert!(text.contains("table") && !text.contains(CANARY), "{value}: {text}");
        }
    }
}
