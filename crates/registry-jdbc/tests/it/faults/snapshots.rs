//! A transaction that took its snapshot before a lock was granted keeps reading that snapshot at
//! some isolation levels. `fence` and `lock_in` still keep their guarantees, and report no false
//! loss.

use std::time::Duration;

use registry_core::{LockGuard, LockOptions, Registry};
use registry_jdbc::{FenceError, LockInError};
use registry_testkit::{eventually, within};

use super::app_connection::{AppConnection, AppTransaction};
use super::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const SHORT_LEASE: Duration = Duration::from_millis(300);
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

/// Begins a transaction and reads, which takes its snapshot at some levels.
async fn begin_and_read<'c>(
    app_connection: &'c mut AppConnection,
    level: &str,
) -> AppTransaction<'c> {
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
                let mut transaction = begin_and_read(&mut app_connection, level).await;
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

/// After a successful fence, a transaction reads what the previous holder has written. Otherwise
/// the fence returns an error.
async fn a_fenced_transaction_reads_no_overwritten_data(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut app_connection, mut other_connection) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let mut sales = 0;
    for mode in [LockMode::Lease, LockMode::Session, LockMode::Row] {
        let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
        let other = registry_with_mode(&server.url(), LEASE, mode).await;
        // SERIALIZABLE is excluded: in MariaDB each read then locks its rows, which would block the
        // sale of the other client.
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = begin_and_read(&mut app_connection, level).await;
            let before = lock(&other).await;
            let mut sale = other_connection.begin().await;
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

/// In MariaDB, a transaction takes its snapshot only after the fence has waited. In PostgreSQL, the
/// fence may return an error.
async fn a_fence_that_waited_reads_the_committed_data(kind: ServerKind) {
    let server = start_server(kind).await;
    let (mut app_connection, mut other_connection) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let registry = registry_with_mode(&server.url(), LEASE, LockMode::Lease).await;
    let guard = lock(&registry).await;
    let mut blocker = other_connection.begin_at("REPEATABLE READ").await;
    blocker.run("SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let mut transaction = app_connection.begin_at("REPEATABLE READ").await;
    {
        let mut fence = std::pin::pin!(transaction.fence(&guard));
        let waits = tokio::time::timeout(Duration::from_millis(300), &mut fence).await;
        assert!(waits.is_err(), "{waits:?}");
        blocker.run("INSERT INTO sale VALUES (1)").await;
        blocker.commit().await;
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
    let (mut app_connection, mut other_connection) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let mut sales = 0;
    for mode in [LockMode::Lease, LockMode::Row] {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = begin_and_read(&mut app_connection, level).await;
            let mut sale = other_connection.begin_at("READ COMMITTED").await;
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
                    assert!(is_snapshot_error(kind, &error), "{error:?}");
                    assert_ne!(level, "READ COMMITTED");
                }
            }
            transaction.rollback().await;
            let mut transaction = app_connection.begin_at(level_to_lock_first(kind)).await;
            transaction.try_lock_in(&registry, KEY).await.unwrap().unwrap();
            assert_eq!(transaction.number(SALES).await, sales);
            transaction.commit().await;
        }
    }
}

/// Returns whether this is the error for an outdated snapshot. PostgreSQL rejects the isolation
/// level. MariaDB reports a conflict with the outdated read.
fn is_snapshot_error(kind: ServerKind, error: &LockInError) -> bool {
    match kind {
        ServerKind::Postgres => matches!(error, LockInError::Isolation { .. }),
        ServerKind::MariaDb => matches!(error, LockInError::Conflict { .. }),
    }
}

/// Returns an isolation level at which a transaction may lock before it reads.
fn level_to_lock_first(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Postgres => "READ COMMITTED",
        ServerKind::MariaDb => "REPEATABLE READ",
    }
}

/// How a hold ends.
#[derive(Debug, Clone, Copy)]
enum HoldEnd {
    Unlock,
    /// The lease expires.
    Expiry,
    /// The holder unlocks while a transaction that it fenced is open.
    Fenced,
}

const ROUNDS: usize = 20;

/// A transaction reads that the coupon is unused, and locks after the coupon was sold. It must then
/// read the sale, or get an error instead of the lock.
async fn a_coupon_is_redeemed_once(kind: ServerKind, mode: LockMode, end: HoldEnd) {
    let server = start_server(kind).await;
    let (mut app_connection, mut other_connection) =
        (AppConnection::connect(&server).await, AppConnection::connect(&server).await);
    let lease = if matches!(end, HoldEnd::Expiry) { SHORT_LEASE } else { LEASE };
    let holder_registry = registry_with_mode(&server.url(), lease, mode).await;
    let registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let level = "REPEATABLE READ";
    for round in 0..ROUNDS {
        server.sql("DELETE FROM sale").await.unwrap();
        let options = LockOptions::new().auto_renew(!matches!(end, HoldEnd::Expiry));
        let options = options.wait(TEST_TIMEOUT);
        let guard = within(TEST_TIMEOUT, holder_registry.obtain(KEY).lock_with(options)).await;
        let guard = guard.unwrap();
        let mut transaction = begin_and_read(&mut app_connection, level).await;
        let mut sale = other_connection.begin().await;
        if matches!(end, HoldEnd::Fenced) {
            sale.fence(&guard).await.unwrap();
        }
        sale.run("INSERT INTO sale VALUES (1)").await;
        match end {
            HoldEnd::Unlock => {
                sale.commit().await;
                guard.unlock().await.unwrap();
            }
            HoldEnd::Expiry => {
                sale.commit().await;
                within(TEST_TIMEOUT, guard.lost()).await;
            }
            HoldEnd::Fenced => {
                // The fenced lock may be released only after the transaction, and `unlock` then
                // returns an error.
                let _ = guard.unlock().await;
                sale.commit().await;
                holder_registry.idle().await;
            }
        }
        let attempt = eventually(TEST_TIMEOUT, async || {
            transaction.try_lock_in(&registry, KEY).await.transpose()
        });
        match attempt.await {
            Ok(_) => {
                let sales = transaction.number(SALES).await;
                assert_eq!(sales, 1, "{mode:?} {end:?}, round {round}: redeemed twice");
            }
            Err(error) => assert!(is_snapshot_error(kind, &error), "{mode:?} {end:?}: {error:?}"),
        }
        transaction.rollback().await;
        let mut transaction = app_connection.begin_at(level_to_lock_first(kind)).await;
        // For a holder its lease ends slightly earlier than for the server.
        eventually(TEST_TIMEOUT, async || transaction.try_lock_in(&registry, KEY).await.unwrap())
            .await;
        assert_eq!(transaction.number(SALES).await, 1, "{mode:?} {end:?}, round {round}");
        transaction.rollback().await;
    }
}

async fn a_coupon_is_redeemed_once_next_to_leases(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, HoldEnd::Unlock).await;
}

async fn a_coupon_is_redeemed_once_next_to_leases_that_expire(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, HoldEnd::Expiry).await;
}

async fn a_coupon_is_redeemed_once_next_to_fenced_transactions(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Lease, HoldEnd::Fenced).await;
    a_coupon_is_redeemed_once(kind, LockMode::Row, HoldEnd::Fenced).await;
}

async fn a_coupon_is_redeemed_once_next_to_row_locks(kind: ServerKind) {
    a_coupon_is_redeemed_once(kind, LockMode::Row, HoldEnd::Unlock).await;
}

/// A grant of a session may leave the row unchanged. MariaDB is excluded, because `lock_in` does
/// not support session locks there.
#[tokio::test]
async fn a_coupon_is_redeemed_once_next_to_sessions() {
    a_coupon_is_redeemed_once(ServerKind::Postgres, LockMode::Session, HoldEnd::Unlock).await;
    a_coupon_is_redeemed_once(ServerKind::Postgres, LockMode::Session, HoldEnd::Fenced).await;
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
