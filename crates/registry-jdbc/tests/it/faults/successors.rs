//! A fenced transaction commits before the next holder's, or not at all. The next holder is a
//! caller of the same process, which may be granted the lock by hand-over, without the store.

use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockGuard, Registry};
use registry_testkit::within;
use tokio::time::timeout;

use super::app_connection::AppConnection;
use super::server::{
    LockMode, Server, ServerKind, TEST_TIMEOUT, backend_with_long_timeouts, registry_with_mode,
    spring_backend_with_long_timeouts,
};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const MODES: [LockMode; 3] = [LockMode::Lease, LockMode::Session, LockMode::Row];
/// Many times the duration of a hand-over and a transaction, so a next holder that does not wait
/// would have committed.
const WAIT: Duration = Duration::from_secs(2);

async fn start_server(kind: ServerKind) -> Server {
    let server = kind.start().await;
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    server
}

async fn lock(registry: &Registry) -> LockGuard {
    within(TEST_TIMEOUT, registry.obtain(KEY).lock()).await.unwrap()
}

/// Inserts a sale in a fenced transaction. Repeats the transaction if the fence returns a retryable
/// error.
async fn sell(guard: &LockGuard, app_connection: &mut AppConnection) {
    loop {
        let mut transaction = app_connection.begin().await;
        match transaction.fence(guard).await {
            Ok(()) => {
                transaction.run("INSERT INTO sale VALUES (2)").await;
                return transaction.commit().await;
            }
            Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
        transaction.rollback().await;
    }
}

async fn a_fenced_transaction_never_commits_after_the_next_holders(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut first_connection, mut second_connection) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    for mode in MODES {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        for by_reentry in [false, true] {
            let first = lock(&registry).await;
            let mut transaction = first_connection.begin().await;
            if by_reentry {
                let inner = first.reenter().unwrap();
                transaction.fence(&inner).await.unwrap();
                inner.unlock().await.unwrap();
            } else {
                transaction.fence(&first).await.unwrap();
            }
            transaction.run("INSERT INTO sale VALUES (1)").await;

            let token = first.fencing_token();
            let mut next = Box::pin(async {
                let guard = lock(&registry).await;
                assert!(guard.fencing_token() > token, "{mode:?}");
                sell(&guard, &mut second_connection).await;
                guard.unlock().await
            });
            assert!(poll!(next.as_mut()).is_pending(), "two guards of one key");
            drop(first);
            // The guard is dropped, but the transaction has not ended.
            let early = timeout(WAIT, next.as_mut()).await;
            assert!(early.is_err(), "{mode:?}: the next holder has committed before");
            transaction.commit().await;
            within(TEST_TIMEOUT, next).await.unwrap();
        }
        registry.idle().await;
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// The caller of `unlock` may be the one that commits the transaction, so `unlock` must not wait
/// for its end.
async fn an_unlock_next_to_an_open_fenced_transaction_returns_at_once(kind: ServerKind) {
    let server = start_server(kind).await;
    let mut app_connection = AppConnection::connect(&server).await;
    let mut stores: Vec<_> = Vec::new();
    for mode in MODES {
        stores.push((format!("{mode:?}"), backend_with_long_timeouts(&server.url(), mode).await));
    }
    stores.push(("Spring".to_owned(), spring_backend_with_long_timeouts(&server.url()).await));
    for (name, backend) in stores {
        let registry = Registry::builder(backend).timeout(TEST_TIMEOUT * 2).build().unwrap();
        for commits in [true, false] {
            let guard = lock(&registry).await;
            let mut transaction = app_connection.begin().await;
            transaction.fence(&guard).await.unwrap();
            // Far less than the timeouts of the server and of the registry.
            match timeout(TEST_TIMEOUT / 3, guard.unlock()).await.expect(&name) {
                Ok(()) => {}
                Err(LockError::Backend { source, .. }) => {
                    assert!(source.refused() && source.is_retryable(), "{name}: {source:?}");
                    assert!(source.to_string().contains("commit"), "{name}: {source}");
                }
                Err(error) => panic!("{name}: {error:?}"),
            }
            if commits {
                transaction.commit().await;
            } else {
                transaction.rollback().await;
            }
            // The release completes in the background after the transaction, so no caller waits for
            // the end of the lease.
            registry.idle().await;
        }
        lock(&registry).await.unlock().await.unwrap();
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// With the setting `completion_type`, the server ends the connection after each COMMIT, or begins
/// another transaction.
#[tokio::test]
async fn a_server_that_closes_connections_after_commit_causes_no_loss() {
    let server = start_server(ServerKind::MariaDb).await;
    let mut app_connection = AppConnection::connect(&server).await;
    for next_step in ["CHAIN", "RELEASE"] {
        server.sql(&format!("SET GLOBAL completion_type = '{next_step}'")).await.unwrap();
        for mode in MODES {
            let registry = registry_with_mode(&server.url(), LEASE, mode).await;
            for _ in 0..3 {
                lock(&registry).await.unlock().await.unwrap();
                let guard = lock(&registry).await;
                sell(&guard, &mut app_connection).await;
                guard.unlock().await.unwrap();
            }
            registry.idle().await;
        }
    }
    assert_eq!(server.open_transactions().await, "0");
}

on_both_servers! {
    a_fenced_transaction_never_commits_after_the_next_holders,
    an_unlock_next_to_an_open_fenced_transaction_returns_at_once,
}
