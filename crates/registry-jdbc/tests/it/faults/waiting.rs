//! The number of requests that waiters send, and the order of grants between guards and
//! transactions that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use registry_core::Registry;
use registry_testkit::within;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::app_connection::AppConnection;
use super::server::{ServerKind, TEST_TIMEOUT, backend};

const KEY: &str = "coupon/7";

/// A transaction waits in the same local queue as the guards of its registry, although their
/// hand-overs do not use the store.
async fn a_waiting_transaction_is_not_starved_by_guards(kind: ServerKind) {
    const GUARDS: u32 = 8;
    const WORK: Duration = Duration::from_millis(2);
    const TIME: Duration = Duration::from_secs(5);
    let server = kind.start().await;
    let registry = Registry::builder(backend(&server.url()).await).build().unwrap();
    let until = Instant::now() + TIME;
    let by_guards = Arc::new(AtomicU32::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..GUARDS {
        let (lock, grants) = (registry.obtain(KEY), Arc::clone(&by_guards));
        tasks.spawn(async move {
            while Instant::now() < until {
                let guard = lock.lock().await.unwrap();
                sleep(WORK).await;
                guard.unlock().await.unwrap();
                grants.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut app_connection = AppConnection::connect(&server).await;
    let (mut by_transactions, mut conflicts) = (0, 0);
    while Instant::now() < until {
        let mut transaction = app_connection.begin().await;
        match within(TEST_TIMEOUT, transaction.lock_in(&registry, KEY)).await {
            Ok(_) => {
                sleep(WORK).await;
                transaction.commit().await;
                by_transactions += 1;
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                transaction.rollback().await;
                conflicts += 1;
            }
        }
    }
    within(TEST_TIMEOUT, tasks.join_all()).await;
    let by_guards = by_guards.load(Ordering::Relaxed);
    println!("{kind:?}: {by_transactions} transactions, {conflicts} conflicts, {by_guards} guards");
    let share = by_guards / GUARDS;
    assert!(by_transactions >= share / 4, "{by_transactions} of a transaction, {share} of a guard");
}

/// A waiter whose listener receives notifications polls at the end of the holder's lease. Otherwise
/// its poll interval grows with the time waited. MariaDB sends no notifications, so one task polls
/// the keys of all waiters together.
async fn idle_waiters_send_few_requests(kind: ServerKind) {
    const KEYS: u64 = 200;
    const LEASE: Duration = Duration::from_secs(300);
    const SETTLING_TIME: Duration = Duration::from_secs(30);
    const TIME: Duration = Duration::from_secs(30);
    let per_second = match kind {
        ServerKind::Postgres => 10,
        ServerKind::MariaDb => 100,
    };
    let server = kind.start().await;
    let open = async || Registry::builder(backend(&server.url()).await).lease(LEASE);
    let (holder, waiting) = (open().await.build().unwrap(), open().await.build().unwrap());
    let mut guards = Vec::new();
    let mut waiters = JoinSet::new();
    for n in 0..KEYS {
        guards.push(holder.obtain(&format!("k{n}")).lock().await.unwrap());
        let lock = waiting.obtain(&format!("k{n}"));
        waiters.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    // The poll intervals must have grown before the requests of a fixed time are counted.
    sleep(SETTLING_TIME).await;
    let before = server.work_done().await;
    sleep(TIME).await;
    let requests = server.work_done().await - before;
    println!("{kind:?}: {requests} of {KEYS} waiters in {TIME:?}");
    assert!(before > KEYS, "nothing was counted");
    assert!(requests < per_second * TIME.as_secs(), "{requests} of {KEYS} waiters in {TIME:?}");
    drop(guards);
    while let Some(served) = within(TEST_TIMEOUT, waiters.join_next()).await {
        served.unwrap();
    }
}

on_both_servers! {
    a_waiting_transaction_is_not_starved_by_guards,
    idle_waiters_send_few_requests,
}
