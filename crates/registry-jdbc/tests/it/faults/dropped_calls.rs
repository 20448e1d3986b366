//! Calls that were dropped before they completed. sqlx's own pool may reuse the connection of such
//! a call with its transaction still open. The next user of the connection then commits nothing, so
//! no other client sees its writes. The backends have their own pools, which do not reuse such
//! connections.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use registry_core::{Attempt, Claim, Key, LockBackend, Release};
use registry_jdbc::sqlx::mysql::MySqlPoolOptions;
use registry_jdbc::sqlx::postgres::PgPoolOptions;
use registry_jdbc::sqlx::{self, Connection as _};
use tokio::time::timeout;

use super::server::{
    LockMode, OpenOptions, Server, ServerKind, TEST_TIMEOUT, backend_with,
    backend_with_long_timeouts,
};

const LEASE: Duration = Duration::from_secs(60);
const CALL_TIMEOUT: Duration = Duration::from_millis(300);

/// Polls `future` at most `times` times. Returns `None` if it has not completed by then.
async fn poll_at_most<F: Future>(future: F, times: usize) -> Option<F::Output> {
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

async fn assert_committed_grant(server: &Server, first_backend: &dyn LockBackend) {
    let claim = Claim::new(Key::new("after").unwrap(), LEASE);
    assert!(matches!(first_backend.try_acquire(&claim).await.unwrap(), Attempt::Granted(_)));
    let second_backend = backend_with_long_timeouts(&server.url(), LockMode::Lease).await;
    let other = Claim::new(claim.key().clone(), LEASE);
    assert!(matches!(second_backend.try_acquire(&other).await.unwrap(), Attempt::Busy(_)));
    assert_eq!(first_backend.release(&claim).await.unwrap(), Release::Freed);
    second_backend.close().await;
}

/// Drops the calls after every possible number of polls.
async fn a_call_that_is_dropped_at_any_poll_leaves_no_open_transaction(kind: ServerKind) {
    let server = kind.start().await;
    let options =
        OpenOptions { connections: 1, response_timeout: TEST_TIMEOUT, ..OpenOptions::default() };
    let first_backend = backend_with(&server.url(), options).await;
    for times in 0.. {
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        let granted = poll_at_most(first_backend.try_acquire(&claim), times).await;
        let renewed = poll_at_most(first_backend.renew(std::slice::from_ref(&claim)), times).await;
        let released = poll_at_most(first_backend.release(&claim), times).await;
        assert_committed_grant(&server, &*first_backend).await;
        first_backend.admin().unwrap().force_release(claim.key()).await.unwrap();
        // On a loaded machine, a reply may have arrived before the first poll.
        if times > 1 && granted.is_some() && renewed.is_some() && released.is_some() {
            break;
        }
    }
    assert_eq!(server.open_transactions().await, "0");
}

/// Drops a call while the server is suspended, as a time-out does. With sqlx's pool, a transaction
/// that the call began could stay open.
async fn a_paused_server_has_no_open_transaction_afterwards(kind: ServerKind) {
    let server = kind.start().await;
    let options = OpenOptions {
        connections: 1,
        response_timeout: Duration::from_secs(5),
        ..OpenOptions::default()
    };
    let first_backend = backend_with(&server.url(), options).await;
    assert_committed_grant(&server, &*first_backend).await;
    for _ in 0..3 {
        server.pause();
        let claim = Claim::new(Key::new("dropped").unwrap(), LEASE);
        assert!(timeout(CALL_TIMEOUT, first_backend.try_acquire(&claim)).await.is_err());
        server.resume();
        assert_committed_grant(&server, &*first_backend).await;
        first_backend.admin().unwrap().force_release(claim.key()).await.unwrap();
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
            assert!(timeout(CALL_TIMEOUT, connection.begin()).await.is_err());
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
    #[ignore = "shows the behaviour of sqlx: cargo test -p registry-jdbc --all-features --test it -- --ignored --nocapture the_sqlx_pool_reuses_connections_with_open_transactions"]
    the_sqlx_pool_reuses_connections_with_open_transactions,
}
