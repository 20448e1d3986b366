//! A fenced transaction commits only if no conflicting claim was granted after that of its holder.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    ClaimMode, LockBackend, LockGuard, LockOptions, LockRegistryExt as _, Registry, Renewal,
};
use registry_jdbc::sqlx::{Connection as _, Executor};
use registry_jdbc::{Fence, FenceError};
use tokio::time::timeout;

use super::common::{self, TEST_TIMEOUT, app_connection, backend, config, lock, registry};
use super::server::{Backend, CREATE_SALE, Connection, SELL, SET_LEVEL, Server, TAKE_OVER};

pub(crate) async fn start_server() -> Server {
    let server = common::server().await;
    server.sql(CREATE_SALE).await.unwrap();
    server
}

pub(crate) async fn sell(guard: &LockGuard, conn: &mut Connection) -> Result<(), FenceError> {
    let mut transaction = conn.begin().await.unwrap();
    if let Err(error) = guard.fence(&mut transaction).await {
        // A dropped transaction is rolled back when its connection is next used, and this
        // connection stays idle.
        transaction.rollback().await.unwrap();
        return Err(error);
    }
    transaction.execute(SELL).await.unwrap();
    transaction.commit().await.unwrap();
    Ok(())
}

pub(crate) async fn sales(server: &Server) -> String {
    server.sql("SELECT count(*) FROM sale").await.unwrap()
}

#[tokio::test]
async fn a_holder_commits_with_a_token_of_its_block() {
    let server = start_server().await;
    let registry = registry(config(&server)).await;
    let mut conn = app_connection(&server).await;
    let mut guard = lock(&registry, "coupon/7").await;
    for _ in 0..3 {
        let waiting = registry.obtain("coupon/7");
        // Polled before the release, so that the claim is handed over with the next token.
        let next = async { waiting.lock().await.unwrap() };
        let token = guard.fencing_token();
        let (next, unlocked) = tokio::join!(next, guard.unlock());
        unlocked.unwrap();
        assert_eq!(next.fencing_token().get(), token.get() + 1, "the claim was not handed over");
        guard = next;
    }
    sell(&guard, &mut conn).await.unwrap();
    assert_eq!(sales(&server).await, "1");
}

/// The modes of a holder and its successor.
const EXCLUSIVE: [ClaimMode; 2] = [ClaimMode::Exclusive; 2];
const SHARED: [ClaimMode; 2] = [ClaimMode::Shared, ClaimMode::Exclusive];
const PERMITS: [ClaimMode; 2] =
    [ClaimMode::Permits { take: 2, of: 2 }, ClaimMode::Permits { take: 1, of: 2 }];

async fn acquire(registry: &Registry, mode: ClaimMode, options: LockOptions) -> LockGuard {
    let lock = registry.obtain("coupon/7");
    match mode {
        ClaimMode::Shared => lock.read_with(options).await.unwrap(),
        ClaimMode::Permits { take, of } => {
            registry.semaphore("coupon/7", of).acquire_with(take, options).await.unwrap()
        }
        _ => lock.lock_with(options).await.unwrap(),
    }
}

#[tokio::test]
async fn a_lost_holder_cannot_commit_before_its_notification() {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let mut conn = app_connection(&server).await;
    for (successors, [mode, next_mode]) in (1..).zip([EXCLUSIVE, SHARED, PERMITS]) {
        let stale = acquire(&a, mode, LockOptions::new()).await;
        assert!(b.force_release("coupon/7").await.unwrap());
        assert!(stale.is_held(), "{mode}: it has received no notification yet");
        let error = sell(&stale, &mut conn).await.unwrap_err();
        assert!(matches!(&error, FenceError::Lost { key, .. } if key == "coupon/7"), "{error:?}");
        let successor = acquire(&b, next_mode, LockOptions::new()).await;
        let error = sell(&stale, &mut conn).await.unwrap_err();
        assert!(matches!(error, FenceError::Lost { .. }), "{mode}: {error:?}");
        sell(&successor, &mut conn).await.unwrap();
        assert_eq!(sales(&server).await, successors.to_string());
        drop(stale);
        successor.unlock().await.unwrap();
        a.idle().await;
    }
}

#[tokio::test]
async fn a_takeover_waits_for_the_end_of_a_fenced_transaction() {
    assert_takeover_waits(EXCLUSIVE).await;
}

#[tokio::test]
async fn a_takeover_waits_for_the_end_of_a_transaction_of_a_reader() {
    assert_takeover_waits(SHARED).await;
}

#[tokio::test]
async fn a_takeover_waits_for_the_end_of_a_transaction_of_a_permit() {
    assert_takeover_waits(PERMITS).await;
}

/// Tokens do not order the writes of readers that hold the key together.
#[tokio::test]
async fn readers_that_hold_the_key_together_commit_in_any_order() {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let (mut conn_a, mut conn_b) = (app_connection(&server).await, app_connection(&server).await);
    let older = acquire(&a, ClaimMode::Shared, LockOptions::new()).await;
    let newer = acquire(&b, ClaimMode::Shared, LockOptions::new()).await;
    assert!(newer.fencing_token() > older.fencing_token());
    let mut transaction = conn_b.begin().await.unwrap();
    newer.fence(&mut transaction).await.unwrap();
    transaction.execute(SELL).await.unwrap();
    // Neither waits for the other.
    timeout(TEST_TIMEOUT, sell(&older, &mut conn_a)).await.unwrap().unwrap();
    transaction.commit().await.unwrap();
    sell(&older, &mut conn_a).await.unwrap();
    assert_eq!(sales(&server).await, "3");
}

async fn assert_takeover_waits([mode, next_mode]: [ClaimMode; 2]) {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let mut conn = app_connection(&server).await;

    let options = LockOptions::new().lease(Duration::from_secs(2)).auto_renew(false);
    let guard = acquire(&a, mode, options).await;
    let mut transaction = conn.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    transaction.execute(SELL).await.unwrap();

    // The lease expires while the transaction is open. The key is free, but the transaction delays
    // the next grant.
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    let mut takeover = Box::pin(acquire(&b, next_mode, LockOptions::new()));
    assert!(timeout(Duration::from_millis(2_500), &mut takeover).await.is_err());
    transaction.commit().await.unwrap();
    let successor = timeout(TEST_TIMEOUT, takeover).await.unwrap();
    assert!(successor.fencing_token() > guard.fencing_token());
    assert_eq!(
        sales(&server).await,
        "1",
        "the successor was granted before the sale was committed"
    );
}

#[tokio::test]
async fn a_fence_waits_for_an_earlier_takeover_and_sees_it() {
    let server = start_server().await;
    let a = registry(config(&server)).await;
    let guard = lock(&a, "coupon/7").await;
    let mut other_transaction = app_connection(&server).await;
    common::run(&mut other_transaction, TAKE_OVER).await;
    let mut conn = app_connection(&server).await;
    let mut transaction = conn.begin().await.unwrap();
    let mut fence = Box::pin(guard.fence(&mut transaction));
    assert!(timeout(Duration::from_millis(500), &mut fence).await.is_err());
    common::run(&mut other_transaction, "COMMIT").await;
    let error = timeout(TEST_TIMEOUT, fence).await.unwrap().unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}

#[tokio::test]
async fn a_fence_detects_an_outdated_snapshot() {
    let server = start_server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<Backend>::clone(&backend)).build().unwrap();
    let other = common::registry(config(&server)).await;
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        // Each level has its own key, so that it does not depend on the release of the last guard.
        let guard = lock(&registry, level).await;
        let mut conn = app_connection(&server).await;
        common::run(&mut conn, &format!("{SET_LEVEL} {level}")).await;
        let holder_claim = [guard.claim().clone()];
        for is_lost in [false, true] {
            let mut transaction = conn.begin().await.unwrap();
            // Takes the snapshot of the transaction.
            transaction.execute("SELECT * FROM sale").await.unwrap();
            transaction.execute("SELECT count(*) FROM lock_registry_meta").await.unwrap();
            assert!(matches!(backend.renew(&holder_claim).await[0], Ok(Renewal::Renewed(_))));
            if !is_lost {
                // A renewal after the snapshot does not make the fence fail.
                guard.fence(&mut transaction).await.unwrap();
                transaction.rollback().await.unwrap();
                continue;
            }
            assert!(other.force_release(level).await.unwrap());
            let successor = lock(&other, level).await;
            assert!(guard.is_held(), "it has received no notification yet");
            let error = guard.fence(&mut transaction).await.unwrap_err();
            let is_expected = matches!(error, FenceError::Lost { .. } | FenceError::Busy { .. });
            assert!(is_expected, "{level}: {error:?}");
            transaction.rollback().await.unwrap();
            successor.unlock().await.unwrap();
        }
    }
}
