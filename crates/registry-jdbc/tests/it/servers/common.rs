//! Helpers that the tests of all servers share.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, Grant, Key, LockBackend, LockGuard, Registry,
};
use registry_jdbc::sqlx::{AssertSqlSafe, ConnectOptions, raw_sql};

use super::server::{AppConnectOptions, Backend, Config, Connection, Server};

pub(crate) const LEASE: Duration = Duration::from_secs(60);

/// Long enough for the slowest machine; costs time only when a test fails.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) async fn server() -> Server {
    Server::start().await.unwrap()
}

pub(crate) fn config(server: &Server) -> Config {
    Config::from_url(&server.url()).unwrap()
}

pub(crate) async fn backend(config: Config) -> Backend {
    Backend::open(config).await.unwrap()
}

pub(crate) async fn registry(config: Config) -> Registry {
    Registry::builder(Arc::new(backend(config).await)).build().unwrap()
}

pub(crate) async fn lock(registry: &Registry, key: &str) -> LockGuard {
    registry.obtain(key).lock().await.unwrap()
}

/// Opens a connection of the application.
pub(crate) async fn app_connection(server: &Server) -> Connection {
    server.url().parse::<AppConnectOptions>().unwrap().connect().await.unwrap()
}

pub(crate) async fn run(connection: &mut Connection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned())).execute(connection).await.unwrap();
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

pub(crate) fn claim(text: &str) -> Claim {
    Claim::new(key(text), LEASE)
}

/// Retries an attempt whose connection broke while idle, as the engine does.
async fn attempt(backend: &Backend, claim: &Claim) -> Attempt {
    match backend.try_acquire(claim).await {
        Err(error) if error.is_stale_connection() => backend.try_acquire(claim).await.unwrap(),
        attempt => attempt.unwrap(),
    }
}

pub(crate) async fn grant(backend: &Backend, claim: &Claim) -> Grant {
    match attempt(backend, claim).await {
        Attempt::Granted(grant) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) async fn token(backend: &Backend, claim: &Claim) -> u64 {
    grant(backend, claim).await.token.get()
}

pub(crate) async fn busy(backend: &Backend, claim: &Claim) -> Busy {
    match attempt(backend, claim).await {
        Attempt::Busy(busy) => busy,
        other => panic!("not busy: {other:?}"),
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
