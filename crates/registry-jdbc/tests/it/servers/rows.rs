//! Leases in the table: the writes and results of each operation, also while rows are locked.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendErrorKind, LockAdmin, LockBackend, LockOptions, Release, Renewal,
};
use registry_jdbc::Fence as _;
use registry_jdbc::sqlx::Connection as _;
use registry_testkit::eventually;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::common::{
    LEASE, TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, key,
    registry, run, server, token,
};
use super::server::*;

#[tokio::test]
async fn a_busy_attempt_writes_nothing() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    grant(&backend, &claim("k")).await;
    let before = write_counter(&server).await;
    for _ in 0..20 {
        busy(&backend, &claim("k")).await;
        assert_eq!(backend.release(&claim("k")).await.unwrap(), Release::NotHeld);
        backend.inspect(&key("k")).await.unwrap();
    }
    assert_eq!(write_counter(&server).await, before);
}

#[tokio::test]
async fn a_batch_is_renewed_claim_by_claim() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    // More claims than one statement renews.
    let mut claims = Vec::new();
    for n in 0..1200 {
        claims.push(claim(&format!("k{n}")));
    }
    for (n, claim) in claims.iter().enumerate() {
        if n % 100 != 0 {
            grant(&backend, claim).await;
        }
    }
    claims.push(claims[1].clone());
    claims.push(claims[2].clone().with_lease(Duration::from_secs(90)));
    let renewals = backend.renew(&claims).await;
    assert_eq!(renewals.len(), claims.len());
    for (n, renewal) in renewals.into_iter().enumerate() {
        let is_renewed = matches!(renewal.unwrap(), Renewal::Renewed(_));
        assert_eq!(is_renewed, n >= 1200 || n % 100 != 0, "claim {n}");
    }
    assert!(backend.renew(&[]).await.is_empty());
}

#[tokio::test]
async fn a_token_at_its_limit_is_an_error_and_no_smaller_token() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let claim = claim("k");
    grant(&backend, &claim).await;
    backend.release(&claim).await.unwrap();
    server.sql("UPDATE lock_registry_locks SET token = 9223372036854775807").await.unwrap();
    let error = backend.try_acquire(&claim).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", error_chain(&error));
}

/// Begins a transaction that locks the rows of these keys.
async fn lock_rows(conn: &mut Connection, keys: &str) {
    let lock =
        format!("SELECT * FROM lock_registry_locks WHERE {KEY_COLUMN} IN ({keys}) FOR UPDATE");
    run(conn, &format!("{BEGIN_READ_COMMITTED}; {lock}")).await;
}

#[tokio::test]
async fn a_locked_row_is_an_error_and_neither_busy_nor_a_loss() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let (held, other, free) = (claim("held"), claim("other"), claim("free"));
    for claim in [&held, &other, &free] {
        grant(&backend, claim).await;
    }
    backend.release(&free).await.unwrap();

    let mut conn = app_connection(&server).await;
    lock_rows(&mut conn, "'held', 'free'").await;
    let error = backend.try_acquire(&claim("free")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Transient);
    assert!(error.refused(), "{}", error_chain(&error));
    let error = backend.release(&held).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    // A busy attempt does not need the row lock.
    busy(&backend, &claim("held")).await;

    // One locked row delays no other renewal, and the call does not wait for it.
    let claims = [held.clone(), other.clone(), claim("held")];
    let began = Instant::now();
    let renewals = timeout(TEST_TIMEOUT, backend.renew(&claims)).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    let error = renewals[0].as_ref().unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(error));
    assert!(matches!(renewals[1].as_ref().unwrap(), Renewal::Renewed(_)));
    assert_eq!(renewals[2].as_ref().unwrap(), &Renewal::Gone);

    run(&mut conn, "ROLLBACK").await;
    grant(&backend, &claim("free")).await;
    assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
}

#[tokio::test]
async fn renewals_succeed_while_acquisitions_use_all_connections() {
    let server = server().await;
    let config = config(&server).with_connections(1).with_busy_timeout(Duration::from_secs(8));
    let backend = Arc::new(backend(config).await);
    let (held, gone, locked) = (claim("held"), claim("gone"), claim("locked"));
    for claim in [&held, &gone, &locked] {
        grant(&backend, claim).await;
    }
    backend.release(&locked).await.unwrap();
    let mut conn = app_connection(&server).await;
    lock_rows(&mut conn, "'locked'").await;
    let mut attempts = JoinSet::new();
    for _ in 0..8 {
        let backend = Arc::clone(&backend);
        attempts.spawn(async move { backend.try_acquire(&claim("locked")).await });
    }
    // One attempt waits in the server, and the others wait for its connection.
    wait_for_blocked_statement(&server).await;
    let began = Instant::now();
    assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
    assert_eq!(backend.release(&gone).await.unwrap(), Release::Freed);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    run(&mut conn, "ROLLBACK").await;
    let granted = attempts.join_all().await.into_iter();
    let granted = granted.filter(|attempt| matches!(attempt, Ok(Attempt::Granted(_))));
    assert_eq!(granted.count(), 1);
}

#[tokio::test]
async fn a_released_key_is_reacquired_unless_another_client_holds_it() {
    let server = server().await;
    let (first_backend, second_backend) =
        (backend(config(&server)).await, backend(config(&server)).await);
    let mut last = 0;
    for round in 0..3 {
        let first = claim("k").with_label(Some("first".into())).with_token_block(7);
        let token_of_first = token(&first_backend, &first).await;
        assert!(token_of_first > last, "round {round}");
        let holder = second_backend.inspect(&key("k")).await.unwrap().remove(0);
        assert_eq!(holder.label.as_deref(), Some("first"));
        assert_eq!(first_backend.release(&first).await.unwrap(), Release::Freed);
        // Case 1: no other client is faster.
        let again = claim("k");
        let token_again = token(&first_backend, &again).await;
        assert!(token_again >= token_of_first + 7, "round {round}: {token_again}");
        let holder = second_backend.inspect(&key("k")).await.unwrap().remove(0);
        assert_eq!((holder.label, holder.token.map(Into::into)), (None, Some(token_again)));
        assert!(holder.lease_left.unwrap() > LEASE / 2, "{:?}", holder.lease_left);
        assert_eq!(first_backend.release(&again).await.unwrap(), Release::Freed);
        // Case 2: another client is faster.
        let faster = claim("k");
        let token_of_faster = token(&second_backend, &faster).await;
        let before = write_counter(&server).await;
        let reply = busy(&first_backend, &claim("k")).await;
        assert_eq!(write_counter(&server).await, before);
        assert_eq!(reply.holder.unwrap().token.map(Into::into), Some(token_of_faster));
        let renewed = second_backend.renew(std::slice::from_ref(&faster)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
        assert_eq!(second_backend.release(&faster).await.unwrap(), Release::Freed);
        // Case 3: the row was deleted. Where the tables remember deleted tokens, these are far
        // ahead of the clock.
        let block = if REMEMBERS_DELETED_TOKENS { u32::MAX } else { 1 };
        let gone = claim("k").with_token_block(block);
        last = token(&first_backend, &gone).await + u64::from(block) - 1;
        assert_eq!(first_backend.release(&gone).await.unwrap(), Release::Freed);
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

#[tokio::test]
async fn a_released_key_is_not_acquired_during_a_fenced_transaction() {
    let server = server().await;
    let long_busy_timeout = config(&server).with_busy_timeout(Duration::from_secs(8));
    let (first_backend, second_registry) =
        (Arc::new(backend(long_busy_timeout).await), registry(config(&server)).await);
    let before = claim("k");
    grant(&first_backend, &before).await;
    assert_eq!(first_backend.release(&before).await.unwrap(), Release::Freed);
    let mut conn = app_connection(&server).await;
    let mut transaction = conn.begin().await.unwrap();
    let options = LockOptions::new().lease(Duration::from_secs(2)).auto_renew(false);
    let guard = second_registry.obtain("k").lock_with(options).await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    // The holder stops slightly before its lease ends on the server.
    eventually(TEST_TIMEOUT, async || server.sql(LEASE_IS_OVER).await.unwrap() == "1").await;
    let backend = Arc::clone(&first_backend);
    let attempt = tokio::spawn(async move { backend.try_acquire(&claim("k")).await });
    // The release of the lost guard may wait too.
    wait_for_blocked_statement(&server).await;
    transaction.commit().await.unwrap();
    let attempt = timeout(TEST_TIMEOUT, attempt).await.unwrap().unwrap().unwrap();
    let Attempt::Granted(grant) = attempt else { panic!("{attempt:?}") };
    assert!(grant.token > guard.fencing_token());
}
