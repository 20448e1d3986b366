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

use crate::server::{OpenOptions, Server, ServerKind, backend, backend_with};

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

async fn assert_committed_grant(server: &Server, first_registry: &dyn LockBackend) {
    let claim = Claim::new(Key::new("after").unwrap(), LEASE);
    assert!(matches!(first_registry.try_acquire(&claim).await.unwrap(), Attempt::Granted(_)));
    let second_registry = backend(&server.url()).await;
    let other = Claim::new(claim.key().clone(), LEASE);
    assert!(matches!(second_registry.try_acquire(&other).await.unwrap(), Attempt::Busy(_)));
    assert_eq!(first_registry.release(&claim).await.unwrap(), Release::Freed);
    second_registry.close().await;
}

/// The calls are dropped after every possible number of polls.
async fn a_call_that_is_dropped_at_any_poll_leaves_no_open_transaction(kind: ServerKind) {
    let server = kind.start().await;
    let opening = OpenOptions { connections: 1, ..OpenOptions::default() };
    let first_registry = backend_with(&server.url(), opening).await;
    for times in 0.. {
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        let granted = polled(first_registry.try_acquire(&claim), times).await;
        let renewed = polled(first_registry.renew(std::slice::from_ref(&claim)), times).await;
        let released = polled(first_registry.release(&claim), times).await;
        assert_committed_grant(&server, &*first_registry).await;
        first_registry.admin().unwrap().force_release(claim.key()).await.unwrap();
        // On a loaded machine, a reply may have arrived before the first poll.
        if times > 1 && granted.is_some() && renewed.is_some() && released.is_some() {
            break;
        }
    }
    assert_eq!(server.open_transactions().await, "0");
}

/// Reproduces the fault: a `begin` that timed out because the server was suspended.
async fn a_paused_server_has_no_open_transaction_afterwards(kind: ServerKind) {
    let server = kind.start().await;
    let opening =
        OpenOptions { connections: 1, answer: Duration::from_secs(5), ..OpenOptions::default() };
    let first_registry = backend_with(&server.url(), opening).await;
    assert_committed_grant(&server, &*first_registry).await;
    for _ in 0..3 {
        server.pause();
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        assert!(timeout(SHORT, first_registry.try_acquire(&claim)).await.is_err());
        server.resume();
        assert_committed_grant(&server, &*first_registry).await;
        first_registry.admin().unwrap().force_release(claim.key()).await.unwrap();
    }
    assert_eq!(server.open_transactions().await, "0");
}

/// Not a promise of this library: prints what sqlx's pool does with a connection whose `begin`
/// timed out. This matters to applications that fence transactions over such a pool.
async fn the_sqlx_pool_reuses_connections_with_open_transactions(kind: ServerKind) {
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
        ServerKind::Postgres => increment_after_a_timeout!(PgPoolOptions::new()),
        ServerKind::MariaDb => increment_after_a_timeout!(MySqlPoolOptions::new()),
    }
}

on_both_servers! {
    a_call_that_is_dropped_at_any_poll_leaves_no_open_transaction,
    a_paused_server_has_no_open_transaction_afterwards,
    #[ignore = "shows the behaviour of sqlx: cargo test -p registry-jdbc --all-features --test faults -- --ignored --nocapture the_sqlx_pool_reuses_connections_with_open_transactions"]
    the_sqlx_pool_reuses_connections_with_open_transactions,
}
