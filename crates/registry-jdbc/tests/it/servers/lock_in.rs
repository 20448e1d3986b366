//! `lock_in`: a lock that lasts until the caller's transaction ends.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use registry_conformance::sweep::{SweepOutcome, sweep};
use registry_core::{Claim, ClaimMode, LockAdmin, LockBackend, LockOptions, Registry, Renewal};
use registry_jdbc::sqlx::{AssertSqlSafe, Connection as _, Executor, Row};
use registry_jdbc::{Fence, LockIn};
use registry_testkit::eventually;
use tokio::time::timeout;

use super::common::{
    TEST_TIMEOUT, app_connection, backend, claim, config, error_chain, grant, key, lock, registry,
    server,
};
use super::server::*;

#[tokio::test]
async fn a_transaction_acquires_the_lock_of_an_expired_lease() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let options = LockOptions::new().lease(Duration::from_millis(500)).auto_renew(false);
    let stale = a.obtain("orders/42").lock_with(options).await.unwrap();
    let mut conn = app_connection(&server).await;
    let mut tx = conn.begin().await.unwrap();
    let held = timeout(TEST_TIMEOUT, b.lock_in(&mut tx, "orders/42")).await.unwrap().unwrap();
    assert!(!stale.is_held(), "the holder was notified first");
    assert!(held.fencing_token() > stale.fencing_token());
    tx.commit().await.unwrap();
}

/// A call that is dropped at any point rolls its transaction back. The connection serves the next
/// transaction, and the lock is free.
#[tokio::test]
#[expect(clippy::async_yields_async, reason = "the sweep polls the returned futures")]
async fn a_transaction_that_is_dropped_at_any_point_leaves_nothing_behind() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    let pool = PoolOptions::new().max_connections(1).connect(&server.url()).await.unwrap();
    let tokens = RefCell::new(Vec::new());
    let check_lock = async |outcome| {
        if let SweepOutcome::Completed { output, .. } = outcome {
            tokens.borrow_mut().push(output);
        }
        let guard =
            timeout(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap().unwrap();
        tokens.borrow_mut().push(guard.fencing_token());
        guard.unlock().await.unwrap();
    };
    let locked = async || {
        let mut tx = timeout(TEST_TIMEOUT, pool.begin()).await.unwrap().unwrap();
        let registry = registry.clone();
        async move {
            let lock = registry.lock_in(&mut tx, "orders/42").await.unwrap();
            tx.commit().await.unwrap();
            lock.fencing_token()
        }
    };
    sweep(locked, 100, check_lock).await;
    assert!(tokens.borrow().is_sorted_by(|one, next| one < next), "{tokens:?}");

    let guard = Arc::new(registry.obtain("orders/43").lock().await.unwrap());
    let fenced = async || {
        let mut tx = timeout(TEST_TIMEOUT, pool.begin()).await.unwrap().unwrap();
        let guard = Arc::clone(&guard);
        async move {
            guard.fence(&mut tx).await.unwrap();
            tx.commit().await.unwrap();
        }
    };
    // The pool rolls back in the background, and the server needs time to process it.
    let renewed =
        async || guard.extend(Duration::from_secs(30)).await.map_err(|error| error.to_string());
    let check_guard = async |_| {
        eventually(TEST_TIMEOUT, renewed).await;
        assert!(guard.is_held());
    };
    sweep(fenced, 100, check_guard).await;
}

#[tokio::test]
async fn two_transactions_exclude_each_other_until_commit_or_rollback() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    let (mut one, mut two) = (app_connection(&server).await, app_connection(&server).await);
    let mut last = None;
    for commits in [true, false, true] {
        let mut tx = one.begin().await.unwrap();
        let held = registry.lock_in(&mut tx, "orders/42").await.unwrap();
        assert_eq!(held.key(), "orders/42");
        assert!(Some(held.fencing_token()) > last, "tokens grow");
        last = Some(held.fencing_token());

        let mut other = two.begin().await.unwrap();
        assert_eq!(registry.try_lock_in(&mut other, "orders/42").await.unwrap(), None);
        // A transaction that received "busy" remains usable.
        other.execute("SELECT 1").await.unwrap();
        let mut waiting = Box::pin(registry.lock_in(&mut other, "orders/42"));
        assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
        if commits {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        let next = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
        assert!(Some(next.fencing_token()) > last, "tokens grow");
        last = Some(next.fencing_token());
        // The same key again, in the same transaction.
        let again = registry.lock_in(&mut other, "orders/42").await.unwrap();
        assert!(Some(again.fencing_token()) > last, "tokens grow");
        last = Some(again.fencing_token());
        other.commit().await.unwrap();
    }
}

/// A transaction that ends releases its locks without a request to the store.
#[tokio::test]
async fn a_process_that_only_uses_lock_in_purges_the_rows_of_free_keys() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    for n in 0..600 {
        lock(&registry, &format!("coupons/{n}")).await.unlock().await.unwrap();
    }
    server.sql("UPDATE lock_registry_locks SET since = 0, until = 0").await.unwrap();
    let mut conn = app_connection(&server).await;
    for _ in 0..200 {
        for _ in 0..100 {
            let mut tx = conn.begin().await.unwrap();
            registry.lock_in(&mut tx, "coupons/0").await.unwrap();
            tx.commit().await.unwrap();
        }
        let rows = conn.fetch_one("SELECT count(*) FROM lock_registry_locks").await.unwrap();
        if rows.get::<i64, _>(0) < 300 {
            return;
        }
    }
    panic!("20,000 calls of `lock_in` have not purged 300 rows");
}

#[tokio::test]
async fn a_lease_excludes_a_transaction_and_is_still_renewed() {
    let server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<Backend>::clone(&backend)).build().unwrap();
    let mut conn = app_connection(&server).await;
    let guard = lock(&registry, "orders/42").await;
    let token = guard.fencing_token();
    let mut tx = conn.begin().await.unwrap();
    let limit = Duration::from_millis(300);
    assert_eq!(registry.try_lock_in(&mut tx, "orders/42").await.unwrap(), None);
    assert_eq!(registry.try_lock_in_for(&mut tx, "orders/42", limit).await.unwrap(), None);
    let renewed = backend.renew(std::slice::from_ref(guard.claim())).await;
    assert!(matches!(renewed[0], Ok(Renewal::Renewed(_))), "{renewed:?}");
    assert!(guard.is_held());
    let mut waiting = Box::pin(registry.lock_in(&mut tx, "orders/42"));
    assert!(timeout(Duration::from_millis(200), &mut waiting).await.is_err());
    guard.unlock().await.unwrap();
    let held = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    assert!(held.fencing_token() > token);
    tx.commit().await.unwrap();
    let next = lock(&registry, "orders/42").await;
    assert!(next.fencing_token() > held.fencing_token());
}

#[tokio::test]
async fn a_transaction_excludes_leases_until_it_ends() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_millis(50));
    let backend = Arc::new(backend(config).await);
    let registry = Registry::builder(Arc::<Backend>::clone(&backend)).build().unwrap();
    let mut conn = app_connection(&server).await;
    // The rolled-back transaction is between two committed ones, so the row exists before and after
    // it.
    for commits in [true, false, true] {
        let mut tx = conn.begin().await.unwrap();
        let held = registry.lock_in(&mut tx, "orders/42").await.unwrap();
        expect_row_locked(backend.try_acquire(&claim("orders/42")).await);
        let attempt = registry.obtain("orders/42").try_lock().await;
        assert_eq!(matches!(attempt, Ok(None)), DETECTS_TRANSACTIONS, "{attempt:?}");
        let other = registry.obtain("orders/43").try_lock().await.unwrap();
        other.expect("the other lock is free").unlock().await.unwrap();
        let waiting = registry.obtain("orders/42");
        let mut waiting = Box::pin(waiting.lock());
        assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
        if commits {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        let guard = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
        assert!(guard.fencing_token() > held.fencing_token());
        guard.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_forced_release_reports_the_transaction_that_holds_a_key_with_an_expired_record() {
    let server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<Backend>::clone(&backend)).build().unwrap();
    let reader = Claim::new(key("orders/42"), Duration::from_millis(100));
    let reader = reader.with_mode(ClaimMode::Shared);
    grant(&backend, &reader).await;
    eventually(TEST_TIMEOUT, async || backend.inspect(reader.key()).await.unwrap().is_empty())
        .await;
    let mut conn = app_connection(&server).await;
    let mut tx = conn.begin().await.unwrap();
    timeout(TEST_TIMEOUT, registry.lock_in(&mut tx, "orders/42")).await.unwrap().unwrap();
    let error = backend.force_release(reader.key()).await.unwrap_err();
    assert!(error.to_string().contains("transaction holds the key"), "{}", error_chain(&error));
    tx.commit().await.unwrap();
    assert!(!registry.force_release("orders/42").await.unwrap());
}

#[tokio::test]
async fn transactions_and_leases_lose_no_increment() {
    const EACH: i64 = 40;
    let server = server().await;
    server.sql("CREATE TABLE counter (n BIGINT); INSERT INTO counter VALUES (0)").await.unwrap();
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..4 {
        let (registry, mut conn) = (registry(config(&server)).await, app_connection(&server).await);
        workers.spawn(async move {
            for _ in 0..EACH {
                let guard = match worker % 2 {
                    0 => Some(lock(&registry, "counter").await),
                    _ => None,
                };
                loop {
                    let mut tx = conn.begin().await.unwrap();
                    if guard.is_none() {
                        match registry.lock_in(&mut tx, "counter").await {
                            Ok(_) => {}
                            Err(error) if error.is_retryable() => {
                                tx.rollback().await.unwrap();
                                continue;
                            }
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                    let n: i64 = tx.fetch_one("SELECT n FROM counter").await.unwrap().get(0);
                    let write = AssertSqlSafe(format!("UPDATE counter SET n = {}", n + 1));
                    tx.execute(write).await.unwrap();
                    tx.commit().await.unwrap();
                    break;
                }
                if let Some(guard) = guard {
                    guard.unlock().await.unwrap();
                }
            }
        });
    }
    workers.join_all().await;
    assert_eq!(server.sql("SELECT n FROM counter").await.unwrap().trim(), (4 * EACH).to_string());
}
