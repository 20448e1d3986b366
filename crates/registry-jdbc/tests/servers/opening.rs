//! Connecting to a store and creating its tables.

use registry_core::{BackendErrorKind, LockBackend};

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
