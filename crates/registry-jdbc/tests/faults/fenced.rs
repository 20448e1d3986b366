//! A fenced write while a hold limit, a close or a caller that is not polled ends or keeps the
//! lock. In every case, the next holder does not commit before the transaction has ended.

use std::time::Duration;

use futures_util::poll;
use registry_core::{LockGuard, LockOptions, LockRegistry as _, LostReason, Registry};
use registry_testkit::within;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::data::Data;
use crate::server::{Kind, LONG, Mode, Server, registry_in};

const KEY: &str = "coupon/7";
const LEASE: Duration = Duration::from_secs(20);
const MODES: [Mode; 3] = [Mode::Lease, Mode::Session, Mode::Row];
/// Many times the duration of a transaction.
const A_WHILE: Duration = Duration::from_secs(2);

struct Shop {
    server: Server,
    mode: Mode,
    ours: Registry,
}

impl Shop {
    async fn open(kind: Kind, mode: Mode) -> Self {
        let server = kind.start().await;
        server.sql("CREATE TABLE sale (n int)").await.unwrap();
        let ours = registry_in(&server.url(), LEASE, mode).await;
        Self { server, mode, ours }
    }

    async fn lock(&self, options: LockOptions) -> LockGuard {
        within(LONG, self.ours.obtain(KEY).lock_with(options)).await.unwrap().unwrap()
    }

    /// Starts another process that waits for the lock and sells under it in a fenced transaction.
    async fn next(&self) -> JoinHandle<()> {
        let theirs = registry_in(&self.server.url(), LEASE, self.mode).await;
        let mut data = Data::connect(&self.server).await;
        tokio::spawn(async move {
            loop {
                let guard = within(LONG, theirs.obtain(KEY).lock()).await.unwrap();
                let mut transaction = data.begin().await;
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

async fn a_fenced_transaction_outlasts_the_max_hold_of_its_lock(kind: Kind) {
    for mode in MODES {
        let shop = Shop::open(kind, mode).await;
        let mut data = Data::connect(&shop.server).await;
        let guard = shop.lock(LockOptions::new().max_hold(A_WHILE)).await;
        let mut transaction = data.begin().await;
        transaction.fence(&guard).await.unwrap();
        transaction.run("INSERT INTO sale VALUES (1)").await;
        let mut next = shop.next().await;
        assert_eq!(within(LONG, guard.lost()).await, LostReason::MaxHold);
        let overtaken = timeout(A_WHILE, &mut next).await;
        assert!(overtaken.is_err(), "{mode:?}: the next holder has committed before");
        transaction.commit().await;
        within(LONG, next).await.unwrap();
        assert_eq!(shop.sales().await, "2");
        // After the `max_hold` the guard cannot fence further transactions.
        let mut transaction = data.begin().await;
        assert!(transaction.fence(&guard).await.is_err(), "{mode:?}");
        transaction.rollback().await;
    }
}

async fn a_fenced_transaction_and_a_min_hold_are_both_waited_for(kind: Kind) {
    for mode in MODES {
        let shop = Shop::open(kind, mode).await;
        let mut data = Data::connect(&shop.server).await;
        // The transaction ends after the `min_hold`, and then before it.
        for (min_hold, commits_first) in [(A_WHILE / 2, false), (A_WHILE * 2, true)] {
            let wanted_at = Instant::now();
            let guard = shop.lock(LockOptions::new().min_hold(min_hold)).await;
            let mut transaction = data.begin().await;
            transaction.fence(&guard).await.unwrap();
            transaction.run("INSERT INTO sale VALUES (1)").await;
            // The caller of `unlock` may be the owner of the transaction.
            timeout(LONG / 3, guard.unlock()).await.expect("at once").unwrap();
            let mut next = shop.next().await;
            if !commits_first {
                let overtaken = timeout(A_WHILE, &mut next).await;
                assert!(overtaken.is_err(), "{mode:?}: the next holder has committed before");
            }
            transaction.commit().await;
            within(LONG, next).await.unwrap();
            let kept = wanted_at.elapsed();
            assert!(kept >= min_hold, "{mode:?}: kept for {kept:?} of {min_hold:?}");
            shop.ours.idle().await;
        }
    }
}

async fn a_next_holder_does_not_commit_before_a_fenced_transaction_of_a_closed_registry(
    kind: Kind,
) {
    for mode in MODES {
        let shop = Shop::open(kind, mode).await;
        let mut data = Data::connect(&shop.server).await;
        let guard = shop.lock(LockOptions::new()).await;
        let mut transaction = data.begin().await;
        transaction.fence(&guard).await.unwrap();
        transaction.run("INSERT INTO sale VALUES (1)").await;
        let mut next = shop.next().await;
        let report = within(LONG, shop.ours.close(A_WHILE / 4)).await;
        assert_eq!(report.lost, 1, "{mode:?}: {report:?}");
        assert_eq!(within(LONG, guard.lost()).await, LostReason::Closed);
        let overtaken = timeout(A_WHILE, &mut next).await;
        assert!(overtaken.is_err(), "{mode:?}: the next holder has committed before");
        transaction.commit().await;
        within(LONG, next).await.unwrap();
        assert_eq!(shop.sales().await, "2");
        let mut transaction = data.begin().await;
        assert!(transaction.fence(&guard).await.is_err(), "{mode:?}: the registry is closed");
        transaction.rollback().await;
    }
}

async fn a_parked_fence_holds_up_its_own_key_alone(kind: Kind) {
    for mode in MODES {
        let shop = Shop::open(kind, mode).await;
        for goes_on in [true, false] {
            let mut data = Data::connect(&shop.server).await;
            let guard = shop.lock(LockOptions::new()).await;
            let mut transaction = data.begin().await;
            let mut fence = Box::pin(transaction.fence(&guard));
            // The server may have replied within the poll.
            let answered = poll!(fence.as_mut()).map(Result::unwrap).is_ready();
            let other = shop.ours.obtain("coupon/8");
            within(LONG, other.lock()).await.unwrap().unlock().await.unwrap();
            let mut next = shop.next().await;
            // The next holder waits only for the caller, which still holds the lock.
            assert!(timeout(A_WHILE / 4, &mut next).await.is_err(), "{mode:?}: two holders");
            if goes_on {
                if !answered {
                    within(LONG, fence.as_mut()).await.unwrap();
                }
                drop(fence);
                transaction.run("INSERT INTO sale VALUES (1)").await;
                drop(guard);
                let overtaken = timeout(A_WHILE, &mut next).await;
                assert!(overtaken.is_err(), "{mode:?}: the next holder has committed before");
                transaction.commit().await;
            } else {
                drop(fence);
                drop(transaction);
                drop(data);
                drop(guard);
            }
            within(LONG, next).await.unwrap();
            shop.ours.idle().await;
        }
        assert_eq!(shop.sales().await, "3");
    }
}

on_both_servers! {
    a_fenced_transaction_outlasts_the_max_hold_of_its_lock,
    a_fenced_transaction_and_a_min_hold_are_both_waited_for,
    a_next_holder_does_not_commit_before_a_fenced_transaction_of_a_closed_registry,
    a_parked_fence_holds_up_its_own_key_alone,
}
