//! A fenced transaction commits before the next holder's, or not at all. The next holder is a
//! caller of the same process, which may be granted the lock without the store.

use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockGuard, LockRegistry, Registry};
use registry_testkit::within;
use tokio::time::timeout;

use crate::data::Data;
use crate::server::{Kind, LONG, Mode, Server, patient_backend, patient_spring, registry_in};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const MODES: [Mode; 3] = [Mode::Lease, Mode::Session, Mode::Row];
/// Many times the duration of a hand-over and a transaction.
const A_WHILE: Duration = Duration::from_secs(2);

async fn shop(kind: Kind) -> Server {
    let server = kind.start().await;
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    server
}

async fn lock(registry: &Registry) -> LockGuard {
    within(LONG, registry.obtain(KEY).lock()).await.unwrap()
}

/// Writes under the lock in a fenced transaction, which is started again if necessary.
async fn sell(guard: &LockGuard, data: &mut Data) {
    loop {
        let mut transaction = data.begin().await;
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

async fn a_fenced_transaction_never_commits_after_the_next_holders(kind: Kind) {
    let server = shop(kind).await;
    let (mut ours, mut theirs) = (Data::connect(&server).await, Data::connect(&server).await);
    for mode in MODES {
        let registry = registry_in(&server.url(), LEASE, mode).await;
        for by_reentry in [false, true] {
            let first = lock(&registry).await;
            let mut transaction = ours.begin().await;
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
                sell(&guard, &mut theirs).await;
                guard.unlock().await
            });
            assert!(poll!(next.as_mut()).is_pending(), "two guards of one key");
            drop(first);
            // The lock is released, but the transaction has not ended.
            let overtaken = timeout(A_WHILE, next.as_mut()).await;
            assert!(overtaken.is_err(), "{mode:?}: the next holder has committed before");
            transaction.commit().await;
            within(LONG, next).await.unwrap();
        }
        registry.idle().await;
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// The caller of `unlock` may be the owner of the transaction, so `unlock` must not wait for its
/// end.
async fn an_unlock_next_to_an_open_fenced_transaction_answers_at_once(kind: Kind) {
    let server = shop(kind).await;
    let mut data = Data::connect(&server).await;
    let mut stores: Vec<_> = Vec::new();
    for mode in MODES {
        stores.push((format!("{mode:?}"), patient_backend(&server.url(), mode).await));
    }
    stores.push(("Spring".to_owned(), patient_spring(&server.url()).await));
    for (name, backend) in stores {
        let registry = Registry::builder(backend).timeout(LONG * 2).build().unwrap();
        for commits in [true, false] {
            let guard = lock(&registry).await;
            let mut transaction = data.begin().await;
            transaction.fence(&guard).await.unwrap();
            // Far less than the timeouts of the server and of the registry.
            match timeout(LONG / 3, guard.unlock()).await.expect(&name) {
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

/// With `completion_type` a server ends the connection after each COMMIT, or begins another
/// transaction.
#[tokio::test]
async fn a_server_that_ends_connections_with_their_transactions_is_no_loss() {
    let server = shop(Kind::MariaDb).await;
    let mut data = Data::connect(&server).await;
    for kind_of_end in ["CHAIN", "RELEASE"] {
        server.sql(&format!("SET GLOBAL completion_type = '{kind_of_end}'")).await.unwrap();
        for mode in MODES {
            let registry = registry_in(&server.url(), LEASE, mode).await;
            for _ in 0..3 {
                lock(&registry).await.unlock().await.unwrap();
                let guard = lock(&registry).await;
                sell(&guard, &mut data).await;
                guard.unlock().await.unwrap();
            }
            registry.idle().await;
        }
    }
    assert_eq!(server.open_transactions().await, "0");
}

on_both_servers! {
    a_fenced_transaction_never_commits_after_the_next_holders,
    an_unlock_next_to_an_open_fenced_transaction_answers_at_once,
}
