//! Calls that were dropped before they completed. sqlx's own pool may reuse such a connection with
//! a transaction open; no other client then sees the next borrower's commits. The stores have their
//! own pools, which do not reuse such connections.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use registry_core::{Attempt, Claim, Key, LockBackend, Release};
use registry_jdbc::sqlx::mysql::MySqlPoolOptions;
use registry_jdbc::sqlx::postgres::PgPoolOptions;
use registry_jdbc::sqlx::{self, Connection as _};
use tokio::time::timeout;

use crate::server::{Kind, Opening, Server, backend, backend_with};

const LEASE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Polls `future` at most `times` times. Returns `None` if it has not completed by then.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(context).map(Some)
    })
    .await
}

async fn what_is_granted_after_a_dropped_call_is_there_for_all(
    server: &Server,
    ours: &dyn LockBackend,
) {
    let claim = Claim::new(Key::new("after").unwrap(), LEASE);
    assert!(matches!(ours.try_acquire(&claim).await.unwrap(), Attempt::Granted(_)));
    let theirs = backend(&server.url()).await;
    let other = Claim::new(claim.key().clone(), LEASE);
    assert!(matches!(theirs.try_acquire(&other).await.unwrap(), Attempt::Busy(_)));
    assert_eq!(ours.release(&claim).await.unwrap(), Release::Freed);
    theirs.close().await;
}

/// The calls are dropped after every possible number of polls.
async fn a_call_that_is_dropped_anywhere_leaves_no_transaction_open(kind: Kind) {
    let server = kind.start().await;
    let opening = Opening { connections: 1, ..Opening::default() };
    let ours = backend_with(&server.url(), opening).await;
    for times in 0.. {
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        let granted = polled(ours.try_acquire(&claim), times).await;
        let renewed = polled(ours.renew(std::slice::from_ref(&claim)), times).await;
        let released = polled(ours.release(&claim), times).await;
        what_is_granted_after_a_dropped_call_is_there_for_all(&server, &*ours).await;
        ours.force_release(claim.key()).await.unwrap();
        if granted.is_some() && renewed.is_some() && released.is_some() {
            assert!(times > 1, "nothing was dropped");
            break;
        }
    }
    assert_eq!(server.open_transactions().await, "0");
}

/// Reproduces the fault: a `begin` that timed out because the server was suspended.
async fn a_server_that_stood_still_leaves_no_transaction_open(kind: Kind) {
    let server = kind.start().await;
    let opening = Opening { connections: 1, answer: Duration::from_secs(5), ..Opening::default() };
    let ours = backend_with(&server.url(), opening).await;
    what_is_granted_after_a_dropped_call_is_there_for_all(&server, &*ours).await;
    for _ in 0..3 {
        server.pause();
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        assert!(timeout(SHORT, ours.try_acquire(&claim)).await.is_err());
        server.resume();
        what_is_granted_after_a_dropped_call_is_there_for_all(&server, &*ours).await;
        ours.force_release(claim.key()).await.unwrap();
    }
    assert_eq!(server.open_transactions().await, "0");
}

/// Not a promise of this library: prints what sqlx's pool does with a connection whose `begin`
/// timed out. This matters to applications that fence transactions over such a pool.
async fn what_the_pool_of_sqlx_does_is_told(kind: Kind) {
    let server = kind.start().await;
    server.sql("CREATE TABLE counter (n bigint)").await.unwrap();
    server.sql("INSERT INTO counter VALUES (0)").await.unwrap();
    macro_rules! increment_after_a_timeout {
        ($options:expr) => {{
            let pool = $options.max_connections(1).connect(&server.url()).await.unwrap();
            let mut connection = pool.acquire().await.unwrap();
            server.pause();
            assert!(timeout(SHORT, connection.begin()).await.is_err());
            server.resume();
            drop(connection);
            let update = sqlx::query("UPDATE counter SET n = n + 1").execute(&pool).await.unwrap();
            assert_eq!(update.rows_affected(), 1);
            let seen = server.sql("SELECT n FROM counter").await.unwrap();
            println!("{kind:?}: 1 row was updated, others see {seen}");
        }};
    }
    match kind {
        Kind::Postgres => increment_after_a_timeout!(PgPoolOptions::new()),
        Kind::MariaDb => increment_after_a_timeout!(MySqlPoolOptions::new()),
    }
}

on_both_servers! {
    a_call_that_is_dropped_anywhere_leaves_no_transaction_open,
    a_server_that_stood_still_leaves_no_transaction_open,
    #[ignore = "tells what sqlx does: cargo test -p registry-jdbc --all-features --test faults -- --ignored --nocapture what_the_pool_of_sqlx_does"]
    what_the_pool_of_sqlx_does_is_told,
}
