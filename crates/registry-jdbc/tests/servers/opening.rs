//! Connecting to a store and creating its tables.

use registry_core::{BackendErrorKind, LockAdmin, LockBackend};

use super::common::{backend, busy, claim, config, error_chain, grant, server};
use crate::server::*;

pub(crate) async fn open_refused(config: Config) -> registry_core::BackendError {
    let error = Backend::open(config).await.unwrap_err();
    assert!(error.refused(), "{}", error_chain(&error));
    error
}

#[tokio::test]
async fn concurrent_starts_create_the_tables_once() {
    let server = server().await;
    let mut starts = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let config = config(&server);
        starts.spawn(async move { backend(config).await });
    }
    let backends = starts.join_all().await;
    grant(&backends[0], &claim("k")).await;
    for backend in &backends {
        busy(backend, &claim("k")).await;
    }
}

#[tokio::test]
async fn tables_of_another_version_are_refused_unchanged() {
    let server = server().await;
    backend(config(&server)).await.close().await;
    server.sql("UPDATE lock_registry_meta SET version = 2").await.unwrap();
    let error = open_refused(config(&server)).await;
    assert!(error.to_string().contains("version 2"), "{error}");
}

/// The token of a statement that started before a row was created, used and deleted would be
/// smaller than the row's.
#[tokio::test]
async fn purge_after_exceeds_the_duration_of_any_statement() {
    let server = server().await;
    let seconds = std::time::Duration::from_secs;
    for (purge_after, response_timeout, works) in
        [(60, 10, true), (59, 10, false), (119, 60, false), (120, 60, true)]
    {
        let config = config(&server).with_purge_after(seconds(purge_after));
        let config = config.with_response_timeout(seconds(response_timeout));
        if works {
            backend(config).await;
        } else {
            let error = open_refused(config).await;
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
            assert!(error.to_string().contains("purge_after"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_user_without_the_right_to_create_tables_can_lock() {
    let server = server().await;
    server.sql(CREATE_WORKER).await.unwrap();
    let worker = || config(&server).with_login("worker", None);
    let error = open_refused(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    assert!(error.to_string().contains(REFUSAL), "{error}");

    server.sql(Backend::schema()).await.unwrap();
    server.sql(Backend::schema()).await.unwrap();
    let error = open_refused(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    for (rights, table) in [("SELECT, INSERT, UPDATE, DELETE", "locks"), ("SELECT, UPDATE", "meta")]
    {
        let grant = format!("GRANT {rights} ON {SCHEMA}.lock_registry_{table} TO {WORKER}");
        server.sql(&grant).await.unwrap();
    }
    let backend = backend(worker().with_purge_after(std::time::Duration::from_secs(60))).await;
    // Runs until rows have been deleted as well. Some releases delete rows that are old enough.
    let was_purged =
        async || server.sql("SELECT floor FROM lock_registry_meta").await.unwrap() != "0";
    let mut number = 0;
    while !was_purged().await {
        assert!(number < 20_000, "nothing was purged");
        for _ in 0..100 {
            let claim = claim(&format!("k{number}"));
            grant(&backend, &claim).await;
            backend.release(&claim).await.unwrap();
            number += 1;
        }
        let age =
            "UPDATE lock_registry_locks SET since = since - 3600000000, until = until - 3600000000";
        server.sql(age).await.unwrap();
    }
    assert!(backend.diagnose().await.is_ok());
}
