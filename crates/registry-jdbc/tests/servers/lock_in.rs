//! A lock that lasts until the caller's transaction ends.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use registry_conformance::sweep::{SweepOutcome, sweep};
use registry_core::LockOptions;
use registry_jdbc::sqlx::Connection as _;
use registry_jdbc::{Fence, LockIn};
use registry_testkit::eventually;
use tokio::time::timeout;

use super::common::{TEST_TIMEOUT, config, data, registry, server};
use crate::server::*;

#[tokio::test]
async fn a_transaction_acquires_the_lock_of_an_expired_lease() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let options = LockOptions::new().lease(Duration::from_millis(500)).auto_renew(false);
    let stale = a.obtain("orders/42").lock_with(options).await.unwrap();
    let mut data = data(&server).await;
    let mut tx = data.begin().await.unwrap();
    let held = timeout(TEST_TIMEOUT, b.lock_in(&mut tx, "orders/42")).await.unwrap().unwrap();
    assert!(!stale.is_held(), "the holder was notified first");
    assert!(held.fencing_token() > stale.fencing_token());
    tx.commit().await.unwrap();
}

/// A call that is dropped at any point rolls its transaction back. The connection serves the next
/// transaction, and the lock is free.
#[tokio::test]
#[expect(clippy::async_yields_async, reason = "the sweep polls what is made")]
async fn a_transaction_that_is_dropped_at_any_point_leaves_nothing_behind() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    let pool = PoolOptions::new().max_connections(1).connect(&server.url()).await.unwrap();
    let tokens = RefCell::new(Vec::new());
    let check_lock = async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
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
