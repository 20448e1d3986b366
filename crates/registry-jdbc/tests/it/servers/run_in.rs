//! `run_in`: a tick that runs in the caller's transaction is done if and only if the transaction
//! commits.

use registry_core::LockRegistryExt as _;
use registry_core::once::{Outcome, Tick};
use registry_jdbc::RunIn;
use registry_jdbc::sqlx::{Connection as _, Executor};

use super::common::{app_connection, config, registry};
use super::fence::{sales, start_server};
use super::server::SELL;

#[tokio::test]
async fn a_tick_is_done_exactly_if_its_transaction_is_committed() {
    let server = start_server().await;
    let (first, second) = (registry(config(&server)).await, registry(config(&server)).await);
    let mut conn = app_connection(&server).await;
    for commits in [false, true] {
        let mut transaction = conn.begin().await.unwrap();
        let outcome = first.once("interest").tick(7).run_in(&mut transaction).await.unwrap();
        let Outcome::Ran(run) = outcome else { panic!("{outcome:?}") };
        assert_eq!(run.tick(), &Tick::Number(7));
        transaction.execute(SELL).await.unwrap();
        // While the transaction is open, the tick is neither done nor available.
        let other = second.once("interest").tick(7).run(async |_| ()).await.unwrap();
        assert_eq!(other, Outcome::Busy);
        if commits {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
        run.unlock().await.unwrap();
    }
    assert_eq!(sales(&server).await, "1");
    let other = second.once("interest").tick(7).run(async |_| ()).await.unwrap();
    assert!(matches!(other, Outcome::AlreadyDone { tick: Tick::Number(7), .. }), "{other:?}");
    let mut transaction = conn.begin().await.unwrap();
    let again = first.once("interest").tick(7).run_in(&mut transaction).await.unwrap();
    assert!(matches!(again, Outcome::AlreadyDone { .. }), "{again:?}");
    transaction.rollback().await.unwrap();
}

/// The lock of a run is released early, and its transaction is still open: the next run waits for
/// the transaction, and then finds the tick done.
#[tokio::test]
async fn a_run_whose_lock_is_dropped_before_the_commit_is_not_repeated() {
    let server = start_server().await;
    let (first, second) = (registry(config(&server)).await, registry(config(&server)).await);
    let mut conn = app_connection(&server).await;
    let mut transaction = conn.begin().await.unwrap();
    let outcome = first.once("interest").tick(7).run_in(&mut transaction).await.unwrap();
    let Outcome::Ran(run) = outcome else { panic!("{outcome:?}") };
    drop(run);
    let options = registry_core::LockOptions::new().wait(super::common::TEST_TIMEOUT);
    let next = tokio::spawn(async move {
        second.once("interest").tick(7).options(options).run(async |_| ()).await
    });
    transaction.execute(SELL).await.unwrap();
    transaction.commit().await.unwrap();
    let next = next.await.unwrap().unwrap();
    assert!(matches!(next, Outcome::AlreadyDone { .. }), "{next:?}");
    assert_eq!(sales(&server).await, "1");
}
