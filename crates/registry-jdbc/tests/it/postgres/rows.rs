//! Leases in the table: which commits are synchronous, batches of keys, and the growth of tokens.

use std::time::Duration;

use registry_core::{Attempt, BatchAttempt, LockAdmin, LockBackend, Release, Renewal};
use registry_jdbc::{PostgresBackend, PostgresConfig, SqlMode, StatementMode};
use registry_testkit::eventually;
use registry_testkit::pgbouncer::PgBouncer;
use tokio::time::{Instant, timeout};

use super::common::{
    TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, run, server,
    token,
};

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
    let is_set = async || {
        let rows = server.sql("SHOW synchronous_standby_names").await?;
        if rows == "ghost" { Ok(()) } else { Err(std::io::Error::other(rows)) }
    };
    eventually(TEST_TIMEOUT, is_set).await;
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
async fn released_keys_are_acquired_and_released_together() {
    let server = server().await;
    let (first, second) = (backend(config(&server)).await, backend(config(&server)).await);
    let claims = || ["a", "b", "c"].map(claim);
    let mut tokens = Vec::new();
    for claim in claims() {
        tokens.push(token(&first, &claim).await);
        assert_eq!(first.release(&claim).await.unwrap(), Release::Freed);
    }
    let batch = first.batch().unwrap();

    let held = claims();
    let attempt = batch.try_acquire_all(&held).await.unwrap();
    let BatchAttempt::Granted(grants) = attempt else { panic!("{attempt:?}") };
    for (grant, earlier) in grants.iter().zip(tokens) {
        assert!(grant.token.get() > earlier, "{grant:?} after {earlier}");
    }
    let waiter = claim("c");
    let found = busy(&second, &waiter).await;
    let (released, woken) = tokio::join!(batch.release_all(&held), async {
        timeout(TEST_TIMEOUT, second.wait(&waiter, &found)).await
    });
    woken.expect("the release notifies the waiter");
    for released in released {
        assert_eq!(released.unwrap(), Release::Freed);
    }

    // Another client holds one of these keys, so the batch is granted none.
    let other = claim("b");
    grant(&second, &other).await;
    assert_eq!(batch.try_acquire_all(&claims()).await.unwrap(), BatchAttempt::Declined);
    for key in ["a", "c"].map(|key| claim(key).key().clone()) {
        assert_eq!(first.inspect(&key).await.unwrap(), []);
    }
}

#[tokio::test]
async fn tokens_increase_after_rows_are_deleted_by_any_client() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    // The tokens are far ahead of the clock, so only the stored tokens can make the next one
    // larger.
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
    let pooled = PostgresConfig::from_url(&bouncer.url())
        .unwrap()
        .with_statements(StatementMode::Unprepared);
    let mut conn = app_connection(&server).await;
    for (mode, config) in [("direct", config(&server)), ("pooled", pooled)] {
        let config = config.with_namespace(mode).with_busy_timeout(Duration::from_millis(200));
        let backend = backend(config.clone()).await;
        let rows = PostgresBackend::open_mode(config, SqlMode::Row).await.unwrap();
        let (held, row) = (claim("held"), claim("row"));
        grant(&backend, &held).await;
        assert!(matches!(rows.try_acquire(&row).await.unwrap(), Attempt::Granted(_)));
        rows.release(&row).await.unwrap();
        run(&mut conn, "BEGIN; LOCK TABLE lock_registry_locks IN ACCESS EXCLUSIVE MODE").await;
        // The server itself rejects each request, so it executes none of them later.
        for backend in [&backend as &dyn LockBackend, &rows] {
            let attempt = timeout(TEST_TIMEOUT, backend.try_acquire(&claim("k"))).await.unwrap();
            let error = attempt.unwrap_err();
            assert!(error.is_retryable() && error.refused(), "{mode}: {}", error_chain(&error));
        }
        let error = backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap_err();
        assert!(error.is_retryable(), "{mode}: {}", error_chain(&error));
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        assert_eq!(server.sql(waiting).await.unwrap(), "0", "{mode}");
        run(&mut conn, "ROLLBACK").await;
        assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
        let held = backend.list().await.unwrap();
        assert_eq!(held.len(), 1, "{mode}: {held:?}");
    }
}
