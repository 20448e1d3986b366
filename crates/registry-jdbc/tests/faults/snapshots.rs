//! A transaction that took its snapshot before a lock was granted keeps reading that snapshot at
//! some isolation levels. Fences and locks in a transaction keep their guarantees all the same, and
//! no false loss is reported.

use std::time::Duration;

use registry_core::{LockGuard, LockOptions, Registry};
use registry_jdbc::{FenceError, LockInError};
use registry_testkit::{eventually, within};

use crate::app_connection::{AppConnection, AppTransaction};
use crate::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const LEASE_MIN: Duration = Duration::from_millis(300);
const SALES: &str = "SELECT count(*) FROM sale";
const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn start_server(kind: ServerKind) -> Server {
    let server = kind.start().await;
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    server
}

async fn lock(registry: &Registry) -> LockGuard {
    within(TEST_TIMEOUT, registry.obtain(KEY).lock()).await.unwrap()
}

/// Returns a transaction that has already read.
async fn reading<'c>(app_connection: &'c mut AppConnection, level: &str) -> AppTransaction<'c> {
    let mut transaction = app_connection.begin_at(level).await;
    transaction.number(SALES).await;
    transaction
}

async fn a_fence_with_an_outdated_snapshot_is_retryable_and_not_lost(kind: ServerKind) {
    let server = start_server(kind).await;
    let mut app_connection = AppConnection::connect(&server).await;
    for mode in [LockMode::Lease, LockMode::Session, LockMode::Row] {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        // The first grant of a key, and a later one.
        for _ in 0..2 {
            for level in LEVELS {
                let mut transaction = reading(&mut app_connection, level).await;
                let guard = lock(&registry).await;
                match transaction.fence(&guard).await {
                    Ok(()) => {}
                    Err(error) => {
                        let is_retryable = matches!(error, FenceError::Busy { .. });
                        assert!(
                            is_retryable && error.is_retryable(),
                            "{mode:?} {level}: {error:?}"
                        );
                        assert_ne!(level, "READ COMMITTED", "{mode:?}: {error:?}");
                    }
                }
                transaction.rollback().await;
                let mut transaction = app_connection.begin_at(level).await;
                transaction.fence(&guard).await.unwrap();
                transaction.commit().await;
                guard.unlock().await.unwrap();
                registry.idle().await;
            }
        }
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// Behind the fence a transaction reads what the previous holder has written, or the fence returns
/// an error.
async fn a_fenced_transaction_reads_no_overwritten_data(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut app_connection, mut others) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let mut sales = 0;
    for mode in [LockMode::Lease, LockMode::Session, LockMode::Row] {
        let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
        let other = registry_with_mode(&server.url(), LEASE, mode).await;
        // SERIALIZABLE is excluded: where each read locks its rows, the sale in between would
        // block.
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = reading(&mut app_connection, level).await;
            let before = lock(&other).await;
            let mut sale = others.begin().await;
            sale.fence(&before).await.unwrap();
            sale.run("INSERT INTO sale VALUES (1)").await;
            sale.commit().await;
            sales += 1;
            before.unlock().await.unwrap();

            let guard = lock(&first_registry).await;
            match transaction.fence(&guard).await {
                Ok(()) => assert_eq!(transaction.number(SALES).await, sales, "{mode:?} {level}"),
                Err(error) => assert!(error.is_retryable(), "{mode:?} {level}: {error:?}"),
            }
            transaction.rollback().await;
            let mut transaction = app_connection.begin_at(level).await;
            transaction.fence(&guard).await.unwrap();
            assert_eq!(transaction.number(SALES).await, sales);
            transaction.commit().await;
            guard.unlock().await.unwrap();
        }
        first_registry.idle().await;
        other.idle().await;
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// A transaction takes its snapshot only after the fence has waited.
async fn a_fence_that_waited_reads_the_committed_data(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut app_connection, mut others) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let registry = registry_with_mode(&server.url(), LEASE, LockMode::Lease).await;
    let guard = lock(&registry).await;
    let mut owner = others.begin_at("REPEATABLE READ").await;
    owner.run("SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let mut transaction = app_connection.begin_at("REPEATABLE READ").await;
    {
        let mut fence = std::pin::pin!(transaction.fence(&guard));
        let waits = tokio::time::timeout(Duration::from_millis(300), &mut fence).await;
        assert!(waits.is_err(), "{waits:?}");
        owner.run("INSERT INTO sale VALUES (1)").await;
        owner.commit().await;
        let fenced = within(TEST_TIMEOUT, fence).await;
        assert!(fenced.is_ok() || matches!(kind, ServerKind::Postgres), "{fenced:?}");
    }
    if matches!(kind, ServerKind::MariaDb) {
        assert_eq!(transaction.number(SALES).await, 1);
    }
    transaction.rollback().await;
}

async fn a_transaction_with_a_lock_reads_no_overwritten_data(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut app_connection, mut others) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let mut sales = 0;
    for mode in [LockMode::Lease, LockMode::Row] {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = reading(&mut app_connection, level).await;
            let mut sale = others.begin_at("READ COMMITTED").await;
            sale.try_lock_in(&registry, KEY).await.unwrap().unwrap();
            sale.run("INSERT INTO sale VALUES (1)").await;
            sale.commit().await;
            sales += 1;
            match transaction.try_lock_in(&registry, KEY).await {
                Ok(lock) => {
                    assert!(lock.is_some(), "{mode:?} {level}");
                    assert_eq!(transaction.number(SALES).await, sales, "{mode:?} {level}");
                }
                Err(error) => {
                    assert!(is_refused_at(kind, &error), "{error:?}");
                    assert_ne!(level, "READ COMMITTED");
                }
            }
            transaction.rollback().await;
            let mut transaction = app_connection.begin_at(first_lock_level(kind)).await;
            transaction.try_lock_in(&registry, KEY).await.unwrap().unwrap();
            assert_eq!(transaction.number(SALES).await, sales);
            transaction.commit().await;
        }
    }
}

/// Whether this is the error for an outdated snapshot. PostgreSQL reports the isolation level,
/// MariaDB the outdated read.
fn is_refused_at(kind: ServerKind, error: &LockInError) -> bool {
    match kind {
        ServerKind::Postgres => matches!(error, LockInError::Isolation { .. }),
        ServerKind::MariaDb => matches!(error, LockInError::Conflict { .. }),
    }
}

/// The isolation level of a transaction that locks before it reads.
fn first_lock_level(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Postgres => "READ COMMITTED",
        ServerKind::MariaDb => "REPEATABLE READ",
    }
}

/// How a hold ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Unlock,
    /// The lease expires.
    Expiry,
    /// The holder unlocks while a transaction that it fenced is open.
    Fenced,
}

const ROUNDS: usize = 20;

/// A transaction has read that the coupon is unused, before it locks. Behind the lock it must read
/// the sale, or the lock must be refused.
async fn a_coupon_is_redeemed_once(kind: ServerKind, mode: LockMode, end: End) {
    let server = start_server(kind).await;
    let (mut app_connection, mut others) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let lease = if matches!(end, End::Expiry) { LEASE_MIN } else { LEASE };
    let holders = registry_with_mode(&server.url(), lease, mode).await;
    let registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let level = "REPEATABLE READ";
    for round in 0..ROUNDS {
        server.sql("DELETE FROM sale").await.unwrap();
        let options = LockOptions::new().auto_renew(!matches!(end, End::Expiry));
        let options = options.wait(TEST_TIMEOUT);
        let guard = within(TEST_TIMEOUT, holders.obtain(KEY).lock_with(options)).await;
        let guard = guard.unwrap();
        let mut transaction = reading(&mut app_connection, level).await;
        let mut sale = others.begin().await;
        if matches!(end, End::Fenced) {
            sale.fence(&guard).await.unwrap();
        }
        sale.run("INSERT INTO sale VALUES (1)").await;
        match end {
            End::Unlock => {
                sale.commit().await;
                guard.unlock().await.unwrap();
            }
            End::Expiry => {
                sale.commit().await;
                within(TEST_TIMEOUT, guard.lost()).await;
            }
            End::Fenced => {
                // A lock that cannot be released before the transaction ends returns an error.
                let _ = guard.unlock().await;
                sale.commit().await;
                holders.idle().await;
            }
        }
        let answer = eventually(TEST_TIMEOUT, async || {
            transaction.try_lock_in(&registry, KEY).await.transpose()
        });
        match answer.await {
            Ok(_) => {
                let sales = transaction.number(SALES).await;
                assert_eq!(sales, 1, "{mode:?} {end:?}, round {round}: redeemed twice");
            }
            Err(error) => assert!(is_refused_at(kind, &error), "{mode:?} {end:?}: {error:?}"),
        }
        transaction.rollback().await;
        let mut transaction = app_connection.begin_at(first_lock_level(kind)).await;
        // A holder considers its lease over slightly before the server does.
        eventually(TEST_TIMEOUT, async || transaction.try_lock_in(&registry, KEY).await.unwrap())
            .await;
        assert_eq!(transaction.number(SALES).await, 1, "{mode:?} {end:?}, round {round}");
        transaction.rollback().await;
    }
}

async fn a_coupon_is_redeemed_once_next_to_leases(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, End::Unlock).await;
}

async fn a_coupon_is_redeemed_once_next_to_leases_that_expire(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, End::Expiry).await;
}

async fn a_coupon_is_redeemed_once_next_to_fenced_transactions(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, End::Fenced).await;
    a_coupon_is_redeemed_once(kind, LockMode::Row, End::Fenced).await;
}

async fn a_coupon_is_redeemed_once_next_to_row_locks(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Row, End::Unlock).await;
}

/// The grants of a session need not change the row. MariaDB is excluded, because a transaction
/// there cannot use a session's lock.
#[tokio::test]
async fn a_coupon_is_redeemed_once_next_to_sessions() {
    a_coupon_is_redeemed_once(ServerKind::Postgres, LockMode::Session, End::Unlock).await;
    a_coupon_is_redeemed_once(ServerKind::Postgres, LockMode::Session, End::Fenced).await;
}

on_both_servers! {
    a_fence_with_an_outdated_snapshot_is_retryable_and_not_lost,
    a_fenced_transaction_reads_no_overwritten_data,
    a_fence_that_waited_reads_the_committed_data,
    a_transaction_with_a_lock_reads_no_overwritten_data,
    a_coupon_is_redeemed_once_next_to_leases,
    a_coupon_is_redeemed_once_next_to_leases_that_expire,
    a_coupon_is_redeemed_once_next_to_fenced_transactions,
    a_coupon_is_redeemed_once_next_to_row_locks,
}
