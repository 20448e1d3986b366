//! The writes of each operation, and the operations without writes.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{Attempt, LockAdmin, LockBackend, LockOptions, Release, Renewal};
use registry_jdbc::Fence as _;
use registry_jdbc::sqlx::Connection as _;
use registry_jdbc::{PostgresBackend, PostgresConfig, SqlMode};
use registry_testkit::eventually;
use registry_testkit::pgbouncer::PgBouncer;
use tokio::time::{Instant, timeout};

use crate::common::{
    LEASE, TEST_TIMEOUT, backend, busy, claim, config, data, error_chain, grant, key, registry,
    run, server, token,
};
use crate::server::*;

#[tokio::test]
async fn a_released_key_is_reacquired_unless_another_client_holds_it() {
    let server = server().await;
    let (first_store, second_store) =
        (backend(config(&server)).await, backend(config(&server)).await);
    let mut last = 0;
    for round in 0..3 {
        let first = claim("k").with_label(Some("first".into())).with_token_block(7);
        let token_of_first = token(&first_store, &first).await;
        assert!(token_of_first > last, "round {round}");
        let holder = second_store.inspect(&key("k")).await.unwrap().unwrap();
        assert_eq!(holder.label.as_deref(), Some("first"));
        assert_eq!(first_store.release(&first).await.unwrap(), Release::Freed);
        // Case 1: no other client is faster.
        let again = claim("k");
        let token_again = token(&first_store, &again).await;
        assert!(token_again >= token_of_first + 7, "round {round}: {token_again}");
        let holder = second_store.inspect(&key("k")).await.unwrap().unwrap();
        assert_eq!((holder.label, holder.token.map(Into::into)), (None, Some(token_again)));
        assert!(holder.lease_left.unwrap() > LEASE / 2, "{:?}", holder.lease_left);
        assert_eq!(first_store.release(&again).await.unwrap(), Release::Freed);
        // Case 2: another client is faster.
        let faster = claim("k");
        let token_of_faster = token(&second_store, &faster).await;
        let before = writes(&server).await;
        let reply = busy(&first_store, &claim("k")).await;
        assert_eq!(writes(&server).await, before);
        assert_eq!(reply.holder.unwrap().token.map(Into::into), Some(token_of_faster));
        let renewed = second_store.renew(std::slice::from_ref(&faster)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
        assert_eq!(second_store.release(&faster).await.unwrap(), Release::Freed);
        // Case 3: the row was deleted, which leaves only its tokens in the floor.
        let far_ahead = claim("k").with_token_block(u32::MAX);
        last = token(&first_store, &far_ahead).await + u64::from(u32::MAX) - 1;
        assert_eq!(first_store.release(&far_ahead).await.unwrap(), Release::Freed);
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

#[tokio::test]
async fn a_released_key_is_not_acquired_during_a_fenced_transaction() {
    let server = server().await;
    let long_busy_timeout = config(&server).with_busy_timeout(Duration::from_secs(8));
    let (first_store, second_store) =
        (Arc::new(backend(long_busy_timeout).await), registry(config(&server)).await);
    let before = claim("k");
    grant(&first_store, &before).await;
    assert_eq!(first_store.release(&before).await.unwrap(), Release::Freed);
    let mut data = data(&server).await;
    let mut transaction = data.begin().await.unwrap();
    let options = LockOptions::new().lease(Duration::from_secs(2)).auto_renew(false);
    let guard = second_store.obtain("k").lock_with(options).await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    // The holder stops slightly before its lease ends on the server.
    eventually(TEST_TIMEOUT, async || first_store.inspect(before.key()).await.unwrap().is_none())
        .await;
    let backend = Arc::clone(&first_store);
    let attempt = tokio::spawn(async move { backend.try_acquire(&claim("k")).await });
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    // The release of the lost guard may wait too.
    eventually(TEST_TIMEOUT, async || server.sql(waiting).await.is_ok_and(|count| count != "0"))
        .await;
    transaction.commit().await.unwrap();
    let attempt = timeout(TEST_TIMEOUT, attempt).await.unwrap().unwrap().unwrap();
    let Attempt::Granted(grant) = attempt else { panic!("{attempt:?}") };
    assert!(grant.token > guard.fencing_token());
}

#[tokio::test]
async fn a_grant_is_durable_and_a_release_need_not_be() {
    let server = server().await;
    let busy_timeout = Duration::from_millis(100);
    let config = config(&server).with_busy_timeout(busy_timeout);
    let backend = backend(config.with_response_timeout(Duration::from_secs(1))).await;
    let (first, second) = (claim("a"), claim("b"));
    grant(&backend, &first).await;
    grant(&backend, &second).await;
    // From now on a synchronous commit waits for a standby that does not exist.
    server
        .sql("ALTER SYSTEM SET synchronous_standby_names = 'ghost'; SELECT pg_reload_conf()")
        .await
        .unwrap();
    let waits = async || {
        let rows = server.sql("SHOW synchronous_standby_names").await?;
        if rows == "ghost" { Ok(()) } else { Err(std::io::Error::other(rows)) }
    };
    eventually(TEST_TIMEOUT, waits).await;
    // The setting reaches each session separately; an idle session applies it before its next
    // statement.
    let began = Instant::now();
    assert_eq!(backend.release(&first).await.unwrap(), Release::Freed);
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    let error = backend.try_acquire(&claim("c")).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
    let renewal = backend.renew(&[second]).await.remove(0).unwrap_err();
    assert!(renewal.is_retryable() && !renewal.refused(), "{}", error_chain(&renewal));
}

#[tokio::test]
async fn tokens_increase_after_rows_are_deleted_by_any_client() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    // Far ahead of the clock, so that only the stored tokens can make the next one larger.
    let block = u32::MAX;
    let mut last = 0;
    for (round, statement) in [
        "SELECT 1",
        "DELETE FROM lock_registry_locks",
        "TRUNCATE lock_registry_locks",
        "DELETE FROM lock_registry_locks WHERE false; TRUNCATE lock_registry_locks; TRUNCATE lock_registry_locks",
    ]
    .into_iter()
    .enumerate()
    {
        let claim = claim("k").with_token_block(block);
        let first = token(&backend, &claim).await;
        assert!(first > last, "round {round}: {first} is not above {last}");
        last = first + u64::from(block) - 1;
        assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
        server.sql(statement).await.unwrap();
    }
}

#[tokio::test]
async fn locked_tables_are_an_error_and_grant_nothing_afterwards() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let through = PostgresConfig::from_url(&bouncer.url()).unwrap().with_prepared(false);
    let mut data = data(&server).await;
    for (mode, config) in [("direct", config(&server)), ("pooled", through)] {
        let config = config.with_namespace(mode).with_busy_timeout(Duration::from_millis(200));
        let backend = backend(config.clone()).await;
        let rows = PostgresBackend::open_mode(config, SqlMode::Row).await.unwrap();
        let (held, row) = (claim("held"), claim("row"));
        grant(&backend, &held).await;
        assert!(matches!(rows.try_acquire(&row).await.unwrap(), Attempt::Granted(_)));
        rows.release(&row).await.unwrap();
        run(&mut data, "BEGIN; LOCK TABLE lock_registry_locks IN ACCESS EXCLUSIVE MODE").await;
        // The server itself has rejected each request, so none is still pending there.
        for backend in [&backend as &dyn LockBackend, &rows] {
            let attempt = timeout(TEST_TIMEOUT, backend.try_acquire(&claim("k"))).await.unwrap();
            let error = attempt.unwrap_err();
            assert!(error.is_retryable() && error.refused(), "{mode}: {}", error_chain(&error));
        }
        let error = backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap_err();
        assert!(error.is_retryable(), "{mode}: {}", error_chain(&error));
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        assert_eq!(server.sql(waiting).await.unwrap(), "0", "{mode}");
        run(&mut data, "ROLLBACK").await;
        assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
        let held = backend.list().await.unwrap();
        assert_eq!(held.len(), 1, "{mode}: {held:?}");
    }
}
