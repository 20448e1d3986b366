//! A transaction that began to read before a lock was granted goes on reading the past, if its isolation level wants that. What is promised of fences and of locks
//! in a transaction holds all the same, and nobody is told of a loss that was none.

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

/// A transaction that has read something.
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
        // The first grant of a key, and later ones.
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

/// What the holder before has written is read behind the fence, or the fence refuses.
async fn behind_a_fence_nothing_is_read_that_somebody_has_overwritten(kind: Kind) {
    let server = shop(kind).await;
    let (mut data, mut others) = (Data::connect(&server).await, Data::connect(&server).await);
    let mut sales = 0;
    for mode in [Mode::Lease, Mode::Session, Mode::Row] {
        let ours = registry_in(&server.url(), LEASE, mode).await;
        let other = registry_in(&server.url(), LEASE, mode).await;
        // Where each read locks what it reads, the sale in between could not be made.
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

/// While the fence waits for its turn, the transaction has not begun to read.
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

/// The error for a transaction that reads the past: of its level, or of what it has read.
fn is_refused_at(kind: Kind, error: &LockInError) -> bool {
    match kind {
        Kind::Postgres => matches!(error, LockInError::Isolation { .. }),
        Kind::MariaDb => matches!(error, LockInError::Conflict { .. }),
    }
}

/// The level for a transaction that locks before it reads.
fn first_lock_level(kind: Kind) -> &'static str {
    match kind {
        Kind::Postgres => "READ COMMITTED",
        Kind::MariaDb => "REPEATABLE READ",
    }
}

/// How a holder ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Unlock,
    /// Its lease runs out.
    Expiry,
    /// It unlocks while a transaction that it fences is open.
    Fenced,
}

const ROUNDS: usize = 20;

/// A transaction has read, long ago, that the coupon is there. Then it gets the lock: behind that it sees the sale, or it does not get the lock.
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
                // Where the lock cannot be let go before the transaction ends, that is told.
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
        // A holder knows of the end of its lease a moment before the server does.
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

/// The grants of a session leave no trace in the row. Elsewhere the locks of sessions are none of a transaction's.
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
