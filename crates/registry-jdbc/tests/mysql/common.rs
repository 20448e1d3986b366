//! Helpers that the tests share.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, Grant, Key, LockBackend, LockGuard, Registry,
};
use registry_jdbc::sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use registry_jdbc::sqlx::{AssertSqlSafe, ConnectOptions, raw_sql};
use registry_jdbc::{MySqlBackend, MySqlConfig};
use registry_testkit::mariadb::MariaDbServer;

pub(crate) const LEASE: Duration = Duration::from_secs(60);

/// Long enough for the slowest machine; costs time only when a test fails.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) async fn server() -> MariaDbServer {
    MariaDbServer::start().await.unwrap()
}

pub(crate) fn config(server: &MariaDbServer) -> MySqlConfig {
    MySqlConfig::from_url(&server.url()).unwrap()
}

pub(crate) async fn backend(config: MySqlConfig) -> MySqlBackend {
    MySqlBackend::open(config).await.unwrap()
}

pub(crate) async fn registry(config: MySqlConfig) -> Registry {
    Registry::builder(Arc::new(backend(config).await)).build().unwrap()
}

pub(crate) async fn lock(registry: &Registry, key: &str) -> LockGuard {
    registry.obtain(key).lock().await.unwrap()
}

/// A connection of the application.
pub(crate) async fn data(server: &MariaDbServer) -> MySqlConnection {
    server.url().parse::<MySqlConnectOptions>().unwrap().connect().await.unwrap()
}

pub(crate) async fn run(connection: &mut MySqlConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned())).execute(connection).await.unwrap();
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

pub(crate) fn claim(text: &str) -> Claim {
    Claim::new(key(text), LEASE)
}

/// Retries an attempt whose connection broke while idle, as the engine does.
async fn attempt(backend: &MySqlBackend, claim: &Claim) -> Attempt {
    match backend.try_acquire(claim).await {
        Err(error) if error.is_stale_connection() => backend.try_acquire(claim).await.unwrap(),
        attempt => attempt.unwrap(),
    }
}

pub(crate) async fn grant(backend: &MySqlBackend, claim: &Claim) -> Grant {
    match attempt(backend, claim).await {
        Attempt::Granted(grant) => grant,
        Attempt::Busy(busy) => panic!("busy: {busy:?}"),
    }
}

pub(crate) async fn token(backend: &MySqlBackend, claim: &Claim) -> u64 {
    grant(backend, claim).await.token.get()
}

pub(crate) async fn busy(backend: &MySqlBackend, claim: &Claim) -> Busy {
    match attempt(backend, claim).await {
        Attempt::Busy(busy) => busy,
        Attempt::Granted(grant) => panic!("granted: {grant:?}"),
    }
}

/// An error with all its sources, as a log would contain it.
pub(crate) fn error_chain(error: &BackendError) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text += &format!(" {error} {error:?}");
        source = error.source();
    }
    text
}

/// Ends all connections of the store. The testkit itself connects through a Unix socket.
pub(crate) async fn close_all_connections(server: &MariaDbServer) {
    let all = "SELECT id FROM information_schema.processlist WHERE host LIKE '127.0.0.1:%'";
    for id in server.sql(all).await.unwrap().lines() {
        // The connection may already have ended.
        server.sql(&format!("KILL CONNECTION {id}")).await.ok();
    }
}
