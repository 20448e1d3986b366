//! Leases in the table: the results of concurrent attempts, the growth of tokens, and jumps of the
//! server's clock.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{Attempt, LockAdmin, LockBackend, Release, Renewal};
use registry_jdbc::Fence as _;
use registry_jdbc::sqlx::Connection as _;
use registry_testkit::clock::ClockShim;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::common::{
    LEASE, TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, lock,
    registry, run, server, token,
};
use super::server::*;

#[tokio::test]
async fn a_released_key_is_busy_while_its_new_holder_has_a_fenced_transaction() {
    let server = server().await;
    let short_busy_timeout = config(&server).with_busy_timeout(Duration::from_millis(200));
    let (first_backend, second_registry) =
        (backend(short_busy_timeout).await, registry(config(&server)).await);
    let before = claim("k");
    grant(&first_backend, &before).await;
    assert_eq!(first_backend.release(&before).await.unwrap(), Release::Freed);
    let guard = lock(&second_registry, "k").await;
    let mut conn = app_connection(&server).await;
    let mut transaction = conn.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    let reply = busy(&first_backend, &claim("k")).await;
    assert_eq!(reply.holder.unwrap().token, Some(guard.fencing_token()));
    transaction.commit().await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn of_many_attempts_on_a_free_key_one_is_granted() {
    let server = server().await;
    let mut backends = Vec::new();
    for _ in 0..6 {
        backends.push(Arc::new(backend(config(&server).with_connections(1)).await));
    }
    for round in 0..60 {
        // Two rounds per key: in the first the row does not exist, in the second it is free.
        let name = format!("k{}", round / 2);
        let mut attempts = JoinSet::new();
        for backend in &backends {
            let (backend, claim) = (Arc::clone(backend), claim(&name));
            attempts.spawn(async move {
                let attempt = backend.try_acquire(&claim).await.unwrap();
                (backend, claim, attempt)
            });
        }
        let (mut granted, mut reported) = (Vec::new(), Vec::new());
        for (backend, claim, attempt) in attempts.join_all().await {
            match attempt {
                Attempt::Granted(grant) => granted.push((backend, claim, grant.token)),
                Attempt::Busy(busy) => reported.extend(busy.holder.and_then(|holder| holder.token)),
                Attempt::Gone => panic!("{claim:?} is no conversion"),
            }
        }
        assert_eq!(granted.len(), 1, "round {round}: {granted:?}");
        let (backend, claim, token) = granted.remove(0);
        assert!(reported.iter().all(|holder| *holder == token), "round {round}: {reported:?}");
        // The row contains the same token, and so does the reply to a retry.
        let held = backend.inspect(claim.key()).await.unwrap().remove(0);
        assert_eq!(held.token, Some(token));
        assert_eq!(grant(&backend, &claim).await.token, token);
        assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
    }
}

#[tokio::test]
async fn an_attempt_that_waited_for_a_row_returns_its_new_holder() {
    let server = server().await;
    let first = backend(config(&server)).await;
    let config = config(&server).with_connections(1).with_busy_timeout(Duration::from_secs(8));
    let second = Arc::new(backend(config).await);
    // This grant uses the same connection as the later attempt, which must not return its token.
    grant(&second, &claim("before")).await;
    let held = claim("k");
    let token = token(&first, &held).await;
    server.sql("CREATE TABLE kept AS SELECT * FROM lock_registry_locks").await.unwrap();
    let insert_row = "INSERT INTO lock_registry_locks SELECT * FROM kept WHERE lock_key = 'k'";
    let delete_row = "DELETE FROM lock_registry_locks WHERE lock_key = 'k'";
    let free = "UPDATE lock_registry_locks SET claim = NULL WHERE lock_key = 'k'";
    let take = "UPDATE lock_registry_locks JOIN kept USING (id) \
        SET lock_registry_locks.claim = kept.claim, lock_registry_locks.token = kept.token, \
            lock_registry_locks.until = kept.until WHERE kept.lock_key = 'k'";
    for (before, concurrent_change) in [(delete_row, insert_row), (free, take)] {
        for (end, is_granted) in [("COMMIT", false), ("ROLLBACK", true)] {
            server.sql(before).await.unwrap();
            let mut other_transaction = app_connection(&server).await;
            run(&mut other_transaction, &format!("BEGIN; {concurrent_change}")).await;
            let (backend, late) = (Arc::clone(&second), claim("k"));
            let attempted = late.clone();
            let attempt = tokio::spawn(async move { backend.try_acquire(&attempted).await });
            wait_for_blocked_statement(&server).await;
            run(&mut other_transaction, end).await;
            match timeout(TEST_TIMEOUT, attempt).await.unwrap().unwrap().unwrap() {
                Attempt::Granted(_) => {
                    assert!(is_granted, "{concurrent_change}: granted a held key");
                    assert_eq!(second.release(&late).await.unwrap(), Release::Freed);
                }
                Attempt::Busy(busy) => {
                    assert!(!is_granted, "{concurrent_change}: {busy:?}");
                    assert_eq!(busy.holder.unwrap().token.unwrap().get(), token);
                }
                Attempt::Gone => panic!("{late:?} is no conversion"),
            }
        }
    }
}

#[tokio::test]
async fn keys_that_differ_in_a_bit_are_different_and_may_be_long() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let long = "x".repeat(4_095);
    let keys = ["a", "A", "ä", "a ", "a\0", &format!("{long}a"), &format!("{long}A")];
    for key in keys {
        grant(&backend, &claim(key)).await;
    }
    for key in keys {
        busy(&backend, &claim(key)).await;
    }
    assert_eq!(backend.list().await.unwrap().len(), keys.len());
}

#[tokio::test]
async fn tokens_increase_whatever_the_clock_does() {
    let clock = ClockShim::new().unwrap();
    let server = MariaDbServer::start_with(MariaDbOptions::new().clock(&clock)).await.unwrap();
    let backend = backend(config(&server)).await;
    let mut last = 0;
    for jump in [0, 3_600, -7_200, -86_400, 61] {
        clock.jump_wall(jump).unwrap();
        for _ in 0..2 {
            let claim = claim("k").with_token_block(10);
            let first = token(&backend, &claim).await;
            assert!(first > last, "after {jump} s: {first} is not above {last}");
            last = first + 9;
            assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
        }
    }
}

#[tokio::test]
async fn a_clock_jump_ends_a_lease_early_and_the_holder_is_notified() {
    let clock = ClockShim::new().unwrap();
    let server = MariaDbServer::start_with(MariaDbOptions::new().clock(&clock)).await.unwrap();
    let backend = backend(config(&server)).await;
    let (first, second) = (claim("k"), claim("k"));
    let before = token(&backend, &first).await;
    clock.jump_wall(61).unwrap();
    assert!(token(&backend, &second).await > before);
    assert_eq!(backend.renew(&[first]).await[0].as_ref().unwrap(), &Renewal::Gone);
    // After the clock was set back, the lease is longer than requested. Its holder can still
    // release it.
    clock.jump_wall(-3_600).unwrap();
    let left = busy(&backend, &claim("k")).await.retry_after.unwrap();
    assert!(left > Duration::from_secs(3_000), "{left:?}");
    let renewed = backend.renew(std::slice::from_ref(&second)).await.remove(0).unwrap();
    assert!(matches!(renewed, Renewal::Renewed(lease) if lease <= LEASE), "{renewed:?}");
    assert_eq!(backend.release(&second).await.unwrap(), Release::Freed);
    grant(&backend, &claim("k")).await;
}

#[tokio::test]
async fn locked_tables_are_an_error_and_grant_nothing_afterwards() {
    let server = server().await;
    let backend = backend(config(&server).with_busy_timeout(Duration::from_millis(200))).await;
    let held = claim("held");
    grant(&backend, &held).await;
    let mut conn = app_connection(&server).await;
    run(&mut conn, "LOCK TABLES app.lock_registry_locks WRITE").await;
    let error = timeout(TEST_TIMEOUT, backend.try_acquire(&claim("k"))).await.unwrap().unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    let error = backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap_err();
    assert!(error.is_retryable(), "{}", error_chain(&error));
    run(&mut conn, "UNLOCK TABLES").await;
    assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
    let held = backend.list().await.unwrap();
    assert_eq!(held.len(), 1, "{held:?}");
}
