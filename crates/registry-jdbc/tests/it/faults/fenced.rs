//! A fenced transaction is still open when a `max_hold` or a close of the registry ends its lock,
//! or when a `min_hold` prolongs the lock. In another test, the fence's future is not polled. In
//! every case, the next holder commits only after the transaction has ended.

use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockGuard, LockOptions, LostReason, Registry};
use registry_testkit::within;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::app_connection::AppConnection;
use super::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const MODES: [LockMode; 3] = [LockMode::Lease, LockMode::Session, LockMode::Row];
/// Many times the duration of a transaction, so a next holder that does not wait would have
/// committed.
const WAIT: Duration = Duration::from_secs(2);

struct FencedSale {
    server: Server,
    mode: LockMode,
    first_registry: Registry,
}

impl FencedSale {
    async fn open(kind: ServerKind, mode: LockMode) -> Self {
        let server = kind.start().await;
        server.sql("CREATE TABLE sale (n int)").await.unwrap();
        let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
        Self { server, mode, first_registry }
    }

    async fn lock(&self, options: LockOptions) -> LockGuard {
        within(TEST_TIMEOUT, self.first_registry.obtain(KEY).lock_with(options)).await.unwrap()
    }

    /// Spawns another client that waits for the lock, and under it inserts a sale in a fenced
    /// transaction.
    async fn spawn_next_holder(&self) -> JoinHandle<()> {
        let second_registry = registry_with_mode(&self.server.url(), LEASE, self.mode).await;
        let mut app_connection = AppConnection::connect(&self.server).await;
        tokio::spawn(async move {
            loop {
                let guard = within(TEST_TIMEOUT, second_registry.obtain(KEY).lock()).await.unwrap();
                let mut transaction = app_connection.begin().await;
                let fenced = transaction.fence(&guard).await;
                if fenced.is_ok() {
                    transaction.run("INSERT INTO sale VALUES (2)").await;
                    transaction.commit().await;
                    return guard.unlock().await.unwrap();
                }
                let error = fenced.unwrap_err();
                assert!(error.is_retryable(), "{error:?}");
                transaction.rollback().await;
            }
        })
    }

    async fn sales(&self) -> String {
        self.server.sql("SELECT count(*) FROM sale").await.unwrap()
    }
}

async fn a_fenced_transaction_outlasts_the_max_hold_of_its_lock(kind: ServerKind) {
    for mode in MODES {
        let sale = FencedSale::open(kind, mode).await;
        let mut app_connection = AppConnection::connect(&sale.server).await;
        let guard = sale.lock(LockOptions::new().max_hold(WAIT * 2)).await;
        let mut transaction = app_connection.begin().await;
        transaction.fence(&guard).await.unwrap();
        transaction.run("INSERT INTO sale VALUES (1)").await;
        let mut next = sale.spawn_next_holder().await;
        assert_eq!(within(TEST_TIMEOUT, guard.lost()).await, LostReason::MaxHold);
        let early = timeout(WAIT, &mut next).await;
        assert!(early.is_err(), "{mode:?}: the next holder has committed before");
        transaction.commit().await;
        within(TEST_TIMEOUT, next).await.unwrap();
        assert_eq!(sale.sales().await, "2");
        // After the `max_hold`, the guard can fence no other transaction.
        let mut transaction = app_connection.begin().await;
        assert!(transaction.fence(&guard).await.is_err(), "{mode:?}");
        transaction.rollback().await;
    }
}

async fn a_fenced_transaction_and_a_min_hold_are_both_waited_for(kind: ServerKind) {
    for mode in MODES {
        let sale = FencedSale::open(kind, mode).await;
        let mut app_connection = AppConnection::connect(&sale.server).await;
        // In the first round the transaction ends after the `min_hold`, in the second before it.
        for (min_hold, commits_first) in [(WAIT / 2, false), (WAIT * 2, true)] {
            let requested_at = Instant::now();
            let guard = sale.lock(LockOptions::new().min_hold(min_hold)).await;
            let mut transaction = app_connection.begin().await;
            transaction.fence(&guard).await.unwrap();
            transaction.run("INSERT INTO sale VALUES (1)").await;
            // `unlock` must not wait for the transaction: its caller may be the one that commits
            // later.
            match timeout(TEST_TIMEOUT / 3, guard.unlock()).await.expect("unlock waits for nothing")
            {
                Ok(()) => {}
                // On a loaded machine, the `min_hold` may be over before `unlock`. MariaDB then
                // refuses to release a fenced lease.
                Err(LockError::Backend { source, .. }) if !commits_first => {
                    assert!(source.refused() && source.is_retryable(), "{mode:?}: {source:?}");
                }
                Err(error) => panic!("{mode:?}: {error:?}"),
            }
            let mut next = sale.spawn_next_holder().await;
            if !commits_first {
                let early = timeout(WAIT, &mut next).await;
                assert!(early.is_err(), "{mode:?}: the next holder has committed before");
            }
            transaction.commit().await;
            within(TEST_TIMEOUT, next).await.unwrap();
            let elapsed = requested_at.elapsed();
            assert!(elapsed >= min_hold, "{mode:?}: kept for {elapsed:?} of {min_hold:?}");
            sale.first_registry.idle().await;
        }
    }
}

async fn the_next_holder_does_not_commit_before_a_fenced_transaction_of_a_closed_registry(
    kind: ServerKind,
) {
    for mode in MODES {
        let sale = FencedSale::open(kind, mode).await;
        let mut app_connection = AppConnection::connect(&sale.server).await;
        let guard = sale.lock(LockOptions::new()).await;
        let mut transaction = app_connection.begin().await;
        transaction.fence(&guard).await.unwrap();
        transaction.run("INSERT INTO sale VALUES (1)").await;
        let mut next = sale.spawn_next_holder().await;
        let report = within(TEST_TIMEOUT, sale.first_registry.close(WAIT / 4)).await;
        assert_eq!(report.lost, 1, "{mode:?}: {report:?}");
        assert_eq!(within(TEST_TIMEOUT, guard.lost()).await, LostReason::Closed);
        let early = timeout(WAIT, &mut next).await;
        assert!(early.is_err(), "{mode:?}: the next holder has committed before");
        transaction.commit().await;
        within(TEST_TIMEOUT, next).await.unwrap();
        assert_eq!(sale.sales().await, "2");
        let mut transaction = app_connection.begin().await;
        assert!(transaction.fence(&guard).await.is_err(), "{mode:?}: the registry is closed");
        transaction.rollback().await;
    }
}

async fn a_fence_that_is_not_polled_delays_only_its_own_key(kind: ServerKind) {
    for mode in MODES {
        let sale = FencedSale::open(kind, mode).await;
        for is_polled_again in [true, false] {
            let mut app_connection = AppConnection::connect(&sale.server).await;
            let guard = sale.lock(LockOptions::new()).await;
            let mut transaction = app_connection.begin().await;
            let mut fence = Box::pin(transaction.fence(&guard));
            // The server may have replied before the poll ended.
            let is_completed = poll!(fence.as_mut()).map(Result::unwrap).is_ready();
            let other = sale.first_registry.obtain("coupon/8");
            within(TEST_TIMEOUT, other.lock()).await.unwrap().unlock().await.unwrap();
            let mut next = sale.spawn_next_holder().await;
            // The next holder waits only for the caller, which still holds the lock.
            assert!(timeout(WAIT / 4, &mut next).await.is_err(), "{mode:?}: two holders");
            if is_polled_again {
                if !is_completed {
                    within(TEST_TIMEOUT, fence.as_mut()).await.unwrap();
                }
                drop(fence);
                transaction.run("INSERT INTO sale VALUES (1)").await;
                drop(guard);
                let early = timeout(WAIT, &mut next).await;
                assert!(early.is_err(), "{mode:?}: the next holder has committed before");
                transaction.commit().await;
            } else {
                drop(fence);
                drop(transaction);
                drop(app_connection);
                drop(guard);
            }
            within(TEST_TIMEOUT, next).await.unwrap();
            sale.first_registry.idle().await;
        }
        assert_eq!(sale.sales().await, "3");
    }
}

on_both_servers! {
    a_fenced_transaction_outlasts_the_max_hold_of_its_lock,
    a_fenced_transaction_and_a_min_hold_are_both_waited_for,
    the_next_holder_does_not_commit_before_a_fenced_transaction_of_a_closed_registry,
    a_fence_that_is_not_polled_delays_only_its_own_key,
}
