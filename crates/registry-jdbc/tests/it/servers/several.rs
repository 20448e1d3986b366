//! Keys that several claims hold: concurrent changes of one row, large records, and fences.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, Claim, ClaimMode, LockAdmin, LockBackend, LockOptions, LockRegistryExt as _, Queueing,
    Release, Renewal,
};
use registry_jdbc::sqlx::{Connection as _, Executor as _};
use registry_jdbc::{Fence, FenceError, LockIn, SqlMode};
use registry_testkit::waiter_race::assert_a_waiter_undoes_no_renewal;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::common::{
    LEASE, TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, key,
    registry, run, server,
};
use super::fence::{sales, sell, start_server};
use super::server::{
    BEGIN_READ_COMMITTED, Backend, DETECTS_TRANSACTIONS, KEY_COLUMN, SELL, Server,
};

fn reader(text: &str) -> Claim {
    claim(text).with_mode(ClaimMode::Shared)
}

/// Acquires, renews and releases eight claims of this mode, one after the other. Returns the
/// tokens.
async fn acquire_repeatedly(backend: Backend, mode: ClaimMode) -> Vec<u64> {
    let mut tokens = Vec::new();
    while tokens.len() < 8 {
        let claim = claim("k").with_mode(mode).with_queueing(Queueing::Join);
        loop {
            match backend.try_acquire(&claim).await {
                Ok(Attempt::Granted(grant)) => break tokens.push(grant.token.get()),
                Ok(Attempt::Busy(busy)) => {
                    let wait = backend.wait(&claim, &busy);
                    let _ = timeout(Duration::from_millis(50), wait).await;
                }
                other => panic!("{mode}: {other:?}"),
            }
        }
        let renewed = backend.renew(std::slice::from_ref(&claim)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{mode}: {renewed:?}");
        let released = backend.release(&claim).await;
        assert_eq!(released.unwrap_or_else(|e| panic!("{}", error_chain(&e))), Release::Freed);
    }
    tokens
}

#[tokio::test]
async fn concurrent_changes_of_one_record_are_not_lost() {
    let server = server().await;
    let modes = [ClaimMode::Shared, ClaimMode::Shared, ClaimMode::Upgradable, ClaimMode::Exclusive];
    let mut clients = JoinSet::new();
    for n in 0..16 {
        let config = config(&server).with_connections(2);
        clients.spawn(acquire_repeatedly(backend(config).await, modes[n % modes.len()]));
    }
    let mut tokens: Vec<u64> = clients.join_all().await.concat();
    tokens.sort_unstable();
    let count = tokens.len();
    tokens.dedup();
    assert_eq!((count, tokens.len()), (16 * 8, 16 * 8), "a token was granted twice");
    let free = "SELECT count(*) FROM lock_registry_locks WHERE claim IS NULL AND label IS NULL";
    assert_eq!(server.sql(free).await.unwrap(), "1");
}

/// Separate statements grant and release a claim that is alone in its record. They write the same
/// format of records, so other claims can join.
#[tokio::test]
async fn a_claim_that_is_alone_has_the_record_that_others_can_join() {
    let server = server().await;
    let (a, b) = (backend(config(&server)).await, backend(config(&server)).await);
    let permits = ClaimMode::Permits { take: 2, of: 5 };
    let mut last_token = 0;
    for mode in [ClaimMode::Shared, permits, ClaimMode::Upgradable, permits, ClaimMode::Shared] {
        let alone = claim("k").with_mode(mode).with_label(Some("alone; ü".into()));
        let token = grant(&a, &alone).await.token.get();
        assert!(token > last_token, "{mode}: {token} after {last_token}");
        last_token = token;
        assert_eq!(grant(&a, &alone).await.token.get(), token, "{mode}: granted again");
        let holders = b.inspect(&key("k")).await.unwrap();
        let [holder] = &holders[..] else { panic!("{mode}: {holders:?}") };
        assert_eq!((holder.mode, holder.label.as_deref()), (mode, Some("alone; ü")));
        assert_eq!(holder.token.map(|token| token.get()), Some(token));
        let left = holder.lease_left.unwrap();
        assert!(left <= LEASE && left > LEASE / 2, "{mode}: {left:?}");
        let renewed = a.renew(std::slice::from_ref(&alone)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{mode}: {renewed:?}");
        busy(&b, &claim("k")).await;
        assert_eq!(b.release(&claim("k").with_mode(mode)).await.unwrap(), Release::NotHeld);
        if mode != ClaimMode::Upgradable {
            let other = claim("k").with_mode(mode);
            last_token = grant(&b, &other).await.token.get();
            assert!(last_token > token, "{mode}: {last_token} after {token}");
            assert_eq!(b.inspect(&key("k")).await.unwrap().len(), 2);
            assert_eq!(a.release(&alone).await.unwrap(), Release::Freed);
            assert_eq!(b.inspect(&key("k")).await.unwrap().len(), 1);
            assert_eq!(b.release(&other).await.unwrap(), Release::Freed);
            continue;
        }
        assert_eq!(a.release(&alone).await.unwrap(), Release::Freed);
        assert_eq!(a.release(&alone).await.unwrap(), Release::NotHeld);
    }
    let short = Duration::from_millis(50);
    let expired = claim("k").with_mode(ClaimMode::Shared).with_lease(short);
    grant(&b, &expired).await;
    tokio::time::sleep(2 * short).await;
    assert_eq!(b.release(&expired).await.unwrap(), Release::NotHeld);
    let writer = claim("k");
    assert!(grant(&a, &writer).await.token.get() > last_token);
    assert_eq!(a.release(&writer).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn a_waiter_that_joins_the_queue_undoes_no_renewal() {
    let server = server().await;
    let (holding, waiting) = (backend(config(&server)).await, backend(config(&server)).await);
    assert_a_waiter_undoes_no_renewal(&holding, &waiting).await;
}

#[tokio::test]
async fn a_record_may_be_larger_than_a_label() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let label: Arc<str> = "x".repeat(1024).into();
    let readers: Vec<_> =
        (0..80).map(|_| reader("k").with_label(Some(Arc::clone(&label)))).collect();
    for reader in &readers {
        grant(&backend, reader).await;
    }
    grant(&backend, &claim("other")).await;
    let holders = backend.inspect(&key("k")).await.unwrap();
    assert_eq!(holders.len(), readers.len());
    assert!(holders.iter().all(|holder| holder.label.as_deref() == Some(&*label)));
    assert_eq!(backend.list().await.unwrap().len(), readers.len() + 1);
    for renewal in backend.renew(&readers).await {
        assert!(matches!(renewal, Ok(Renewal::Renewed(_))), "{renewal:?}");
    }
    for reader in &readers {
        assert_eq!(backend.release(reader).await.unwrap(), Release::Freed);
    }
    assert_eq!(backend.inspect(&key("k")).await.unwrap(), []);
}

#[tokio::test]
async fn a_locked_row_is_no_loss_of_its_readers_and_delays_no_others() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_secs(8));
    let backend = backend(config).await;
    const LOCKED: usize = 60;
    let readers: Vec<_> = (0..=LOCKED).map(|n| reader(&format!("k{n}"))).collect();
    for reader in &readers {
        grant(&backend, reader).await;
    }
    let mut conn = app_connection(&server).await;
    let lock = format!("SELECT * FROM lock_registry_locks WHERE {KEY_COLUMN} <> 'k60' FOR UPDATE");
    run(&mut conn, &format!("{BEGIN_READ_COMMITTED}; {lock}")).await;
    let began = Instant::now();
    let renewals = backend.renew(&readers).await;
    // One after the other, the attempts for a locked row and the pauses between them would take
    // longer, also without a wait for the row.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    for renewal in &renewals[..LOCKED] {
        let error = renewal.as_ref().unwrap_err();
        assert!(error.is_retryable() && error.refused(), "{}", error_chain(error));
    }
    assert!(matches!(renewals[LOCKED], Ok(Renewal::Renewed(_))), "{:?}", renewals[LOCKED]);
    run(&mut conn, "ROLLBACK").await;
    for renewal in backend.renew(&readers).await {
        assert!(matches!(renewal, Ok(Renewal::Renewed(_))), "{renewal:?}");
    }
}

/// An exclusive grant is stored in the columns of its row. It moves to a record when a claim queues
/// behind it.
#[tokio::test]
async fn a_grant_keeps_its_lease_and_token_when_a_claim_queues_behind_it() {
    let server = server().await;
    let (a, b) = (backend(config(&server)).await, backend(config(&server)).await);
    let holder = claim("k").with_token_block(5);
    let token = grant(&a, &holder).await.token;
    let waiter = claim("k").with_queueing(Queueing::Join);
    assert!(busy(&b, &waiter).await.is_queued);
    assert_eq!(grant(&a, &holder).await.token, token);
    let holders = b.inspect(&key("k")).await.unwrap();
    assert_eq!(holders.iter().map(|holder| holder.token).collect::<Vec<_>>(), [Some(token)]);
    assert!(matches!(a.renew(std::slice::from_ref(&holder)).await[0], Ok(Renewal::Renewed(_))));
    assert_eq!(a.release(&holder.clone().with_token_block(2)).await.unwrap(), Release::Freed);
    assert!(grant(&b, &waiter).await.token > token);
    assert_eq!(a.release(&holder).await.unwrap(), Release::NotHeld);
    assert_eq!(b.release(&waiter).await.unwrap(), Release::Freed);
}

/// Row locks and transactions of callers exclude readers.
#[tokio::test]
async fn locks_of_other_modes_find_a_key_of_readers_held() {
    let server = start_server().await;
    let registry = registry(config(&server)).await;
    let rows = Backend::open_mode(config(&server), SqlMode::Row).await.unwrap();
    let readers = [registry.obtain("k").read().await.unwrap()];
    busy(&rows, &claim("k")).await;
    let mut conn = app_connection(&server).await;
    let mut transaction = conn.begin().await.unwrap();
    assert_eq!(registry.try_lock_in(&mut transaction, "k").await.unwrap(), None);
    transaction.rollback().await.unwrap();
    for reader in readers {
        reader.unlock().await.unwrap();
    }
    grant(&rows, &claim("k")).await;
}

#[tokio::test]
async fn a_fence_accepts_each_live_entry_and_no_ended_one() {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let admin = backend(config(&server)).await;
    let (mut conn, mut other) = (app_connection(&server).await, app_connection(&server).await);
    let ended = a.obtain("coupon/7").read().await.unwrap();
    let reader = b.obtain("coupon/7").read().await.unwrap();
    for guard in [&ended, &reader] {
        sell(guard, &mut conn).await.unwrap();
    }
    assert_eq!(admin.release(ended.claim()).await.unwrap(), Release::Freed);
    let error = sell(&ended, &mut conn).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
    sell(&reader, &mut conn).await.unwrap();
    reader.unlock().await.unwrap();

    // A grant that was upgraded, and one that has waited in the queue, are in a record too.
    let upgradable = b.obtain("coupon/7").upgradable().await.unwrap();
    sell(&upgradable, &mut conn).await.unwrap();
    let upgraded = upgradable.upgrade().await.unwrap();
    sell(&upgraded, &mut conn).await.unwrap();
    let waiting = a.obtain("coupon/8");
    let held = b.obtain("coupon/8").lock().await.unwrap();
    let (waited, ()) = tokio::join!(
        async { waiting.lock_with(LockOptions::new().fair(true)).await.unwrap() },
        async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            sell(&held, &mut other).await.unwrap();
            held.unlock().await.unwrap();
        }
    );
    sell(&waited, &mut conn).await.unwrap();
    let permit = b.semaphore("coupon/9", 3).acquire().await.unwrap();
    sell(&permit, &mut conn).await.unwrap();
    assert_eq!(sales(&server).await, "8");
}

/// Readers do not wait for each other's transactions, but a writer waits for all of them.
#[tokio::test]
async fn a_writer_waits_for_the_fenced_transactions_of_ended_readers() {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let (mut first, mut second) = (app_connection(&server).await, app_connection(&server).await);
    let readers =
        [a.obtain("coupon/7").read().await.unwrap(), b.obtain("coupon/7").read().await.unwrap()];
    let mut transaction = first.begin().await.unwrap();
    readers[0].fence(&mut transaction).await.unwrap();
    timeout(TEST_TIMEOUT, sell(&readers[1], &mut second)).await.unwrap().unwrap();
    transaction.execute(SELL).await.unwrap();
    // On MariaDB and MySQL, the fence of one reader delays the grants of other readers.
    assert_eq!(can_join(&server).await, DETECTS_TRANSACTIONS);

    let lock = b.obtain("coupon/7");
    let commit = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        transaction.commit().await.unwrap();
    };
    let take_over = async {
        let [one, other] = readers;
        // On MariaDB and MySQL, the release of a fenced claim may fail, and is repeated later.
        let (_, _) = tokio::join!(one.unlock(), other.unlock());
        let writer = timeout(TEST_TIMEOUT, lock.lock()).await.unwrap().unwrap();
        assert_eq!(sales(&server).await, "2", "the sales existed before the writer was");
        writer
    };
    let (writer, ()) = tokio::join!(take_over, commit);
    sell(&writer, &mut second).await.unwrap();
}

/// Returns whether another reader is granted the key while a fenced transaction of a reader is
/// open.
async fn can_join(server: &Server) -> bool {
    let backend = backend(config(server)).await;
    let reader = reader("coupon/7");
    match backend.try_acquire(&reader).await {
        Ok(Attempt::Granted(_)) => {
            assert_eq!(backend.release(&reader).await.unwrap(), Release::Freed);
            true
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
            false
        }
    }
}
