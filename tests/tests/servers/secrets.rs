//! No password is ever exposed: not in `Debug`, not in `Display`, not in a chain of errors, not in
//! a log line. This holds for any malformed URL, and for every source of the URL.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::error::Error;
use std::fmt::Debug;
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use lock_registry::tower::LockLayer;
use lock_registry::{
    ConfigError, LockRegistry, RegistryConfig, RoutingRegistry, config::redact_url, connect,
};

/// The text that must not appear, in any spelling. Nothing else in this file or in a message
/// contains it.
const CANARY: &str = "canary";

const URLS: u64 = 4_000;

/// Everything that this process has logged.
#[derive(Clone, Default)]
struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// Captures all events from now on, at the most verbose level.
    fn capture() -> &'static Self {
        static LOG: OnceLock<CapturedLog> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Self::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
                .with_writer(move || writer.clone())
                .init();
            log
        })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for CapturedLog {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns all texts in which an error may be displayed.
fn error_text(error: &dyn Error) -> String {
    let mut text = format!("{error:?}\n{error:#?}");
    let mut next = Some(error);
    while let Some(error) = next {
        text = format!("{text}\n{error}\n{error:#}\n{error:?}");
        next = error.source();
    }
    text
}

fn debug_text(value: &impl Debug) -> String {
    format!("{value:?}\n{value:#?}")
}

/// Returns all texts in which `result` may be displayed.
fn result_text<T: Debug>(result: &Result<T, ConfigError>) -> String {
    match result {
        Ok(value) => debug_text(value),
        Err(error) => error_text(error),
    }
}

#[track_caller]
fn assert_no_secret(given: &str, shown: &str) {
    assert!(!shown.to_lowercase().contains(CANARY), "{given:?} is shown as {shown}");
}

/// Uses a URL in every way that does not open its store, and checks all resulting texts.
fn use_url(url: &str) {
    assert_no_secret(url, &redact_url(url));
    let config = RegistryConfig::new().url(url);
    assert_no_secret(url, &debug_text(&config));
    assert_no_secret(url, &result_text(&config.check()));
    assert_no_secret(url, &result_text(&config.settings()));
    assert_no_secret(url, &result_text(&RegistryConfig::from_url(url)));

    let variables = [("LOCK_REGISTRY_URL", url), ("LOCK_REGISTRY_POLL", "1s")];
    let from_env = RegistryConfig::new().with_vars(variables);
    assert_no_secret(url, &result_text(&from_env));
    if let Ok(config) = from_env {
        assert_no_secret(url, &result_text(&config.check()));
    }

    // The URL is quoted correctly, quoted without escapes, or not quoted.
    let escaped = url.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    for toml in [
        format!("url = \"{escaped}\""),
        format!("url = '{url}'"),
        format!("url = {url}"),
        format!("[lock-registry]\nurl = '{url}'\nleese = '1s'"),
        format!("lease = '1s'\n{url}"),
    ] {
        let from_file = RegistryConfig::new().with_toml(&toml);
        assert_no_secret(&toml, &result_text(&from_file));
        if let Ok(config) = from_file {
            assert_no_secret(&toml, &result_text(&config.check()));
            assert_no_secret(&toml, &result_text(&config.settings()));
        }
    }
}

const SCHEMES: &[&str] = &[
    "redis",
    "rediss",
    "redis+sentinel",
    "redis+cluster",
    "redis+quorum",
    "redis+unix",
    "rediss+sentinel",
    "rediss+cluster",
    "rediss+quorum",
    "postgres",
    "postgresql",
    "mysql",
    "mariadb",
    "zk",
    "etcd",
    "amqp",
    "postgress",
    "REDIS",
    "http",
];

/// A password of problematic characters that contains the canary.
fn password(random: &mut fastrand::Rng) -> String {
    const SPECIAL_CHARACTERS: &[&str] = &[
        "/",
        "?",
        "#",
        "@",
        ":",
        "%",
        "%2",
        "%2F",
        "%40",
        "&",
        "=",
        "[",
        "]",
        ",",
        ";",
        " ",
        "+",
        "\\",
        "'",
        "\"",
        "\t",
        "\n",
        "\u{0}",
        "é",
        "\u{202e}",
        "🔑",
        "$",
        "{",
        "}",
        "x",
        "1",
        "-",
        ".",
        "_",
        "//",
        "::",
        "@@",
        "&lease=",
        "?lease=1s",
        "=1",
        "lease=1s&",
    ];
    let mut text = String::new();
    let canary_index = random.usize(0..4);
    for n in 0..4 {
        if n == canary_index {
            text.push_str(random.choice(["canary", "Canary", "CANARY"]).unwrap());
        }
        if random.bool() {
            text.push_str(random.choice(SPECIAL_CHARACTERS).unwrap());
        }
    }
    text
}

/// A URL with a password in its proper place, or where users put it by mistake. No server listens
/// at its hosts.
fn url(random: &mut fastrand::Rng) -> String {
    let scheme = random.choice(SCHEMES).unwrap();
    let password = password(random);
    let host = random
        .choice(["localhost:1", "127.0.0.1:1", "a:1,b:2", "[::1]:1", "", "host,127.0.0.1"])
        .unwrap();
    let path = random.choice(["", "/", "/0", "/db/table"]).unwrap();
    let query = random.choice(["", "?lease=1s", "?lease=1s&poll=2s", "?"]).unwrap();
    match random.u8(0..12) {
        0..5 => format!("{scheme}://user:{password}@{host}{path}{query}"),
        5 => format!("{scheme}://:{password}@{host}{path}{query}"),
        6 => format!("{scheme}://{password}@{host}{path}{query}"),
        7 => {
            let name =
                random.choice(["password", "pass", "pwd", "token", "auth", "sslkey"]).unwrap();
            // In a query an unescaped `&` begins another option, which cannot be distinguished from
            // this one.
            format!("{scheme}://{host}{path}?{name}={}", password.replace('&', "%26"))
        }
        8 => format!("{scheme}:user:{password}@{host}{path}{query}"),
        9 => format!("{scheme}//user:{password}@{host}{path}{query}"),
        10 => format!("user:{password}@{host}{path}{query}"),
        _ => format!("{scheme}://user:{password}@{host},user:{password}@b:2{path}{query}"),
    }
}

#[test]
fn no_url_exposes_its_password() {
    CapturedLog::capture();
    for seed in 0..URLS {
        let url = url(&mut fastrand::Rng::with_seed(seed));
        use_url(&url);
    }
    assert_no_secret("the log", &CapturedLog::capture().text());
}

#[test]
fn a_truncated_url_does_not_expose_its_password() {
    CapturedLog::capture();
    for scheme in SCHEMES {
        let url = format!("{scheme}://user:canary@host:6379/0?password=canary&lease=1s");
        for (end, _) in url.char_indices() {
            use_url(&url[..end]);
            use_url(&url[end..]);
        }
    }
    assert_no_secret("the log", &CapturedLog::capture().text());
}

#[test]
fn passwords_for_stores_without_passwords_are_not_exposed() {
    for url in [
        "memory:?password=canary",
        "memory:locks?token=canary&lease=1s",
        "memory://user:canary@host",
        "pass-through:?password=canary",
        "pass-through://user:canary@host",
        "sqlite:locks.db?password=canary",
        "sqlite:locks.db?key=can%61ry",
        "sqlite:locks.db?key=canary",
        "sqlite://user:canary@host/locks.db",
        "sqlite:locks.db#canary",
        "memory:#canary",
    ] {
        use_url(url);
    }
}

#[tokio::test]
async fn a_failed_connect_exposes_and_logs_no_password() {
    CapturedLog::capture();
    // Concurrent, because most calls wait for a time limit.
    let calls = (0..200).map(async |seed| {
        let url = url(&mut fastrand::Rng::with_seed(seed));
        let connected = connect(&url).await;
        assert!(connected.is_err(), "{url} is a store");
        assert_no_secret(&url, &result_text(&connected));
        let config = RegistryConfig::new().url(&url).lease(Duration::from_secs(1));
        assert_no_secret(&url, &result_text(&config.connect().await));
    });
    join_all(calls).await;
    assert_no_secret("the log", &CapturedLog::capture().text());
}

/// If the environment has an invalid URL and code a valid one, the invalid URL never appears.
#[tokio::test]
async fn an_overridden_url_is_not_exposed() {
    let log = CapturedLog::capture();
    let folder = tempfile::tempdir().unwrap();
    let config = RegistryConfig::new()
        .with_vars([("LOCK_REGISTRY_URL", "redis://user:canary@host/0")])
        .unwrap()
        .url(format!("sqlite:{}/locks.db", folder.path().display()));
    assert_no_secret("config", &debug_text(&config));
    assert_no_secret("settings", &result_text(&config.settings()));
    let registry = config.connect().await.unwrap();
    assert_no_secret("registry", &debug_text(&registry));
    let lock = registry.obtain("orders/42");
    let guard = lock.lock().await.unwrap();
    assert_no_secret("lock and guard", &debug_text(&(&lock, &guard, guard.claim())));
    let registry = Arc::new(registry);
    let routing =
        RoutingRegistry::new(Arc::clone(&registry) as _).route("x/*", Arc::clone(&registry) as _);
    assert_no_secret("routing", &debug_text(&routing));
    let layer = LockLayer::new(Arc::clone(&registry) as _, |_: &()| String::from("orders/42"));
    assert_no_secret("layer", &debug_text(&layer));
    guard.unlock().await.unwrap();
    _ = registry.close(Duration::from_secs(60)).await;
    assert_no_secret("the log", &log.text());
    // The log does contain other events.
    assert!(log.text().contains("lock granted"), "nothing is captured");
}

#[tokio::test]
async fn a_failed_open_does_not_expose_the_content_of_the_file() {
    let log = CapturedLog::capture();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("corrupt.db"), "canary ".repeat(1_000)).unwrap();
    for file in ["absent/locks.db", "corrupt.db", ""] {
        let url = format!("sqlite:{}/{file}", folder.path().display());
        let connected = connect(&url).await;
        assert!(connected.is_err(), "{url} is a store");
        // The content of the file may be confidential.
        assert_no_secret(&url, &result_text(&connected));
    }
    assert_no_secret("the log", &log.text());
}
