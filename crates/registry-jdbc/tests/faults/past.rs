//! A transaction that took its snapshot before a lock was granted keeps reading that snapshot at
//! some isolation levels. Fences and locks in a transaction keep their guarantees all the same, and
//! no false loss is reported.

use std::time::Duration;

use registry_core::{LockGuard, LockOptions, LockRegistry, Registry};
use registry_jdbc::{FenceError, LockInError};
use registry_testkit::{eventually, within};

use crate::data::{Data, Open};
use crate::server::{Kind, LONG, Mode, Server, registry_in};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const LEASE_MIN: Duration = Duration::from_millis(300);
const SALES: &str = "SELECT count(*) FROM sale";
const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn shop(kind: Kind) -> Server {
    let server = kind.start().await;
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    server
}

async fn lock(registry: &Registry) -> LockGuard {
    within(LONG, registry.obtain(KEY).lock()).await.unwrap()
}

/// Returns a transaction that has already read.
async fn reading<'c>(data: &'c mut Data, level: &str) -> Open<'c> {
    let mut transaction = data.begin_at(level).await;
    transaction.number(SALES).await;
    transaction
}

async fn a_fence_of_what_began_before_the_grant_says_begin_anew_and_not_lost(kind: Kind) {
    let server = shop(kind).await;
    let mut data = Data::connect(&server).await;
    for mode in [Mode::Lease, Mode::Session, Mode::Row] {
        let registry = registry_in(&server.url(), LEASE, mode).await;
        // The first grant of a key, and a later one.
        for _ in 0..2 {
            for level in LEVELS {
                let mut transaction = reading(&mut data, level).await;
                let guard = lock(&registry).await;
                match transaction.fence(&guard).await {
                    Ok(()) => {}
                    Err(error) => {
                        let anew = matches!(error, FenceError::Busy { .. });
                        assert!(anew && error.is_retryable(), "{mode:?} {level}: {error:?}");
                        assert_ne!(level, "READ COMMITTED", "{mode:?}: {error:?}");
                    }
                }
                transaction.rollback().await;
                let mut transaction = data.begin_at(level).await;
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
async fn behind_a_fence_nothing_is_read_that_somebody_has_overwritten(kind: Kind) {
    let server = shop(kind).await;
    let (mut data, mut others) = (Data::connect(&server).await, Data::connect(&server).await);
    let mut sales = 0;
    for mode in [Mode::Lease, Mode::Session, Mode::Row] {
        let ours = registry_in(&server.url(), LEASE, mode).await;
        let other = registry_in(&server.url(), LEASE, mode).await;
        // SERIALIZABLE is excluded: where each read locks its rows, the sale in between would
        // block.
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = reading(&mut data, level).await;
            let before = lock(&other).await;
            let mut sale = others.begin().await;
            sale.fence(&before).await.unwrap();
            sale.run("INSERT INTO sale VALUES (1)").await;
            sale.commit().await;
            sales += 1;
            before.unlock().await.unwrap();

            let guard = lock(&ours).await;
            match transaction.fence(&guard).await {
                Ok(()) => assert_eq!(transaction.number(SALES).await, sales, "{mode:?} {level}"),
                Err(error) => assert!(error.is_retryable(), "{mode:?} {level}: {error:?}"),
            }
            transaction.rollback().await;
            let mut transaction = data.begin_at(level).await;
            transaction.fence(&guard).await.unwrap();
            assert_eq!(transaction.number(SALES).await, sales);
            transaction.commit().await;
            guard.unlock().await.unwrap();
        }
        ours.idle().await;
        other.idle().await;
        server.sql("DELETE FROM lock_registry_locks").await.unwrap();
    }
}

/// A transaction takes its snapshot only after the fence has waited.
async fn a_fence_that_waited_reads_what_it_waited_for(kind: Kind) {
    let server = shop(kind).await;
    let (mut data, mut others) = (Data::connect(&server).await, Data::connect(&server).await);
    let registry = registry_in(&server.url(), LEASE, Mode::Lease).await;
    let guard = lock(&registry).await;
    let mut owner = others.begin_at("REPEATABLE READ").await;
    owner.run("SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let mut transaction = data.begin_at("REPEATABLE READ").await;
    {
        let mut fence = std::pin::pin!(transaction.fence(&guard));
        let waits = tokio::time::timeout(Duration::from_millis(300), &mut fence).await;
        assert!(waits.is_err(), "{waits:?}");
        owner.run("INSERT INTO sale VALUES (1)").await;
        owner.commit().await;
        let fenced = within(LONG, fence).await;
        assert!(fenced.is_ok() || matches!(kind, Kind::Postgres), "{fenced:?}");
    }
    if matches!(kind, Kind::MariaDb) {
        assert_eq!(transaction.number(SALES).await, 1);
    }
    transaction.rollback().await;
}

async fn behind_a_lock_in_a_transaction_nothing_is_read_that_somebody_has_overwritten(kind: Kind) {
    let server = shop(kind).await;
    let (mut data, mut others) = (Data::connect(&server).await, Data::connect(&server).await);
    let mut sales = 0;
    for mode in [Mode::Lease, Mode::Row] {
        let registry = registry_in(&server.url(), LEASE, mode).await;
        for level in ["READ COMMITTED", "REPEATABLE READ"] {
            let mut transaction = reading(&mut data, level).await;
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
            let mut transaction = data.begin_at(first_lock_level(kind)).await;
            transaction.try_lock_in(&registry, KEY).await.unwrap().unwrap();
            assert_eq!(transaction.number(SALES).await, sales);
            transaction.commit().await;
        }
    }
}

/// Whether this is the error for an outdated snapshot. PostgreSQL reports the isolation level,
/// MariaDB the outdated read.
fn is_refused_at(kind: Kind, error: &LockInError) -> bool {
    match kind {
        Kind::Postgres => matches!(error, LockInError::Isolation { .. }),
        Kind::MariaDb => matches!(error, LockInError::Conflict { .. }),
    }
}

/// The isolation level of a transaction that locks before it reads.
fn first_lock_level(kind: Kind) -> &'static str {
    match kind {
        Kind::Postgres => "READ COMMITTED",
        Kind::MariaDb => "REPEATABLE READ",
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
async fn a_coupon_is_redeemed_once(kind: Kind, mode: Mode, end: End) {
    let server = shop(kind).await;
    let (mut data, mut others) = (Data::connect(&server).await, Data::connect(&server).await);
    let lease = if matches!(end, End::Expiry) { LEASE_MIN } else { LEASE };
    let holders = registry_in(&server.url(), lease, mode).await;
    let registry = registry_in(&server.url(), LEASE, mode).await;
    let level = "REPEATABLE READ";
    for round in 0..ROUNDS {
        server.sql("DELETE FROM sale").await.unwrap();
        let options = LockOptions::new().renew(!matches!(end, End::Expiry));
        let guard = within(LONG, holders.obtain(KEY).lock_with(options)).await;
        let guard = guard.unwrap().unwrap();
        let mut transaction = reading(&mut data, level).await;
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
                within(LONG, guard.lost()).await;
            }
            End::Fenced => {
                // A lock that cannot be released before the transaction ends returns an error.
                let _ = guard.unlock().await;
                sale.commit().await;
                holders.idle().await;
            }
        }
        let answer =
            eventually(LONG, async || transaction.try_lock_in(&registry, KEY).await.transpose());
        match answer.await {
            Ok(_) => {
                let sales = transaction.number(SALES).await;
                assert_eq!(sales, 1, "{mode:?} {end:?}, round {round}: redeemed twice");
            }
            Err(error) => assert!(is_refused_at(kind, &error), "{mode:?} {end:?}: {error:?}"),
        }
        transaction.rollback().await;
        let mut transaction = data.begin_at(first_lock_level(kind)).await;
        // A holder considers its lease over slightly before the server does.
        eventually(LONG, async || transaction.try_lock_in(&registry, KEY).await.unwrap()).await;
        assert_eq!(transaction.number(SALES).await, 1, "{mode:?} {end:?}, round {round}");
        transaction.rollback().await;
    }
}

async fn a_coupon_is_redeemed_once_next_to_leases(kind: Kind) {
    a_coupon_is_redeemed_once(kind, Mode::Lease, End::Unlock).await;
}

async fn a_coupon_is_redeemed_once_next_to_leases_that_expire(kind: Kind) {
    a_coupon_is_redeemed_once(kind, Mode::Lease, End::Expiry).await;
}

async fn a_coupon_is_redeemed_once_next_to_fenced_transactions(kind: Kind) {
    a_coupon_is_redeemed_once(kind, Mode::Lease, End::Fenced).await;
    a_coupon_is_redeemed_once(kind, Mode::Row, End::Fenced).await;
}

async fn a_coupon_is_redeemed_once_next_to_row_locks(kind: Kind) {
    a_coupon_is_redeemed_once(kind, Mode::Row, End::Unlock).await;
}

/// The grants of a session need not change the row. MariaDB is excluded, because a transaction
/// there cannot use a session's lock.
#[tokio::test]
async fn a_coupon_is_redeemed_once_next_to_sessions() {
    a_coupon_is_redeemed_once(Kind::Postgres, Mode::Session, End::Unlock).await;
    a_coupon_is_redeemed_once(Kind::Postgres, Mode::Session, End::Fenced).await;
}

on_both_servers! {
    a_fence_of_what_began_before_the_grant_says_begin_anew_and_not_lost,
    behind_a_fence_nothing_is_read_that_somebody_has_overwritten,
    a_fence_that_waited_reads_what_it_waited_for,
    behind_a_lock_in_a_transaction_nothing_is_read_that_somebody_has_overwritten,
    a_coupon_is_redeemed_once_next_to_leases,
    a_coupon_is_redeemed_once_next_to_leases_that_expire,
    a_coupon_is_redeemed_once_next_to_fenced_transactions,
    a_coupon_is_redeemed_once_next_to_row_locks,
}
