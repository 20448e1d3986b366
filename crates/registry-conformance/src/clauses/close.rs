//! `close` waits for guards, notifies the remaining holders, releases their locks, and ends in
//! bounded time.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join;
use futures_util::poll;
use registry_core::{LockError, LockOptions, LockRegistry as _, LockRegistryExt as _, LostReason};
use tokio::time::{sleep, timeout};

use crate::faulty::{Fault, Faults, Operation};
use crate::lab::Lab;

/// `close` waits for guards until its time limit. A lock that is unlocked in this time counts as
/// released, and its key is free.
pub async fn close_waits_for_guards_to_be_let_go(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = here.obtain("orders:42").lock().await.expect("a free lock is had");
    let (report, unlocked) = join(here.close(lab.patience()), async {
        sleep(Duration::from_millis(50)).await;
        assert!(guard.is_held(), "closing takes away what is still in use");
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.released, 1, "{report:?}");
    let next = there.obtain("orders:42").try_lock().await.expect("no trouble");
    next.expect("the registry is closed").unlock().await.expect("a held lock is unlocked");
}

/// At its time limit, `close` releases the locks whose guards still exist. These guards are lost
/// with `LostReason::Closed`, and their keys are free.
pub async fn close_takes_what_is_not_let_go(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let mut guards = Vec::new();
    for n in 0..3 {
        guards.push(here.obtain(&format!("orders:n{n}")).lock().await.expect("a free lock is had"));
    }
    let report = here.close(Duration::from_millis(50)).await;
    assert_eq!((report.lost, report.abandoned), (3, 0), "{report:?}");
    for (n, guard) in guards.into_iter().enumerate() {
        assert!(!guard.is_held());
        assert_eq!(guard.lost().await, LostReason::Closed);
        let next = there.obtain(&format!("orders:n{n}")).try_lock().await.expect("no trouble");
        next.expect("the registry is closed").unlock().await.expect("a held lock is unlocked");
        assert!(matches!(
            guard.unlock().await,
            Err(LockError::Lost { reason: LostReason::Closed, .. })
        ));
    }
}

/// `close` releases the locks of guards that were dropped before, so that their keys are free when
/// it returns.
pub async fn close_gives_back_what_was_dropped_before(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    for n in 0..10 {
        drop(here.obtain(&format!("orders:n{n}")).lock().await.expect("a free lock is had"));
    }
    let report = here.close(lab.patience()).await;
    assert!(report.is_clean(), "{report:?}");
    for n in 0..10 {
        let next = there.obtain(&format!("orders:n{n}")).try_lock().await.expect("no trouble");
        next.expect("the registry is closed").unlock().await.expect("a held lock is unlocked");
    }
}

/// After `close`, all calls that lock return `LockError::Closed`.
pub async fn a_closed_registry_gives_no_lock(lab: &Lab) {
    let registry = lab.registry().await;
    let before = registry.obtain("orders:42");
    let report = registry.close(lab.patience()).await;
    assert!(report.is_clean() && report.released == 0, "{report:?}");
    for lock in [before, registry.obtain("orders:43")] {
        assert!(matches!(lock.lock().await, Err(LockError::Closed)));
        assert!(matches!(lock.try_lock().await, Err(LockError::Closed)));
        assert!(matches!(lock.try_lock_for(lab.short()).await, Err(LockError::Closed)));
        assert!(matches!(lock.lock_with(LockOptions::new()).await, Err(LockError::Closed)));
    }
    let executed = registry.execute_locked("orders:42", async |_| ()).await;
    assert!(matches!(executed, Err(LockError::Closed)));
}

/// `close` ends waits at once with `LockError::Closed`, for locks held by this process and by
/// another.
pub async fn close_sends_waiters_away(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let foreign = there.obtain("orders:1").lock().await.expect("a free lock is had");
    let own = here.obtain("orders:2").lock().await.expect("a free lock is had");
    let (for_foreign, for_own) = (here.obtain("orders:1"), here.obtain("orders:2"));
    let (mut first, mut second) = (pin!(for_foreign.lock()), pin!(for_own.lock()));
    // Long enough for the first waiter to receive a busy answer and to wait for the store.
    assert!(
        timeout(Duration::from_millis(100), first.as_mut()).await.is_err(),
        "two guards of one key"
    );
    assert!(poll!(second.as_mut()).is_pending(), "two guards of one key");
    let closing = here.close(lab.patience());
    let waiters = async {
        let (first, second) = join(first, second).await;
        assert!(matches!(first, Err(LockError::Closed)), "{first:?}");
        assert!(matches!(second, Err(LockError::Closed)), "{second:?}");
        own.unlock().await
    };
    let (report, unlocked) = join(closing, timeout(lab.patience(), waiters)).await;
    unlocked.expect("waiters are sent away").expect("a held lock is unlocked");
    assert!(report.is_clean(), "{report:?}");
    foreign.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:1").await;
}

/// Two concurrent calls of `close` and a later one all return a clean report.
pub async fn closing_twice_is_harmless(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    guard.unlock().await.expect("a held lock is unlocked");
    let other = registry.clone();
    let (first, second) = join(registry.close(lab.patience()), other.close(lab.patience())).await;
    assert!(first.is_clean() && second.is_clean(), "{first:?} {second:?}");
    assert!(registry.close(Duration::ZERO).await.is_clean());
}

/// A `close` future that was polled and is then left unpolled does not block another call of
/// `close`, whatever step it has reached.
pub async fn a_parked_close_holds_up_no_other(lab: &Lab) {
    for polls in 1..=POLLS_MAX {
        let registry = lab.registry().await;
        let mut parked = pin!(registry.close(Duration::ZERO));
        let mut is_done = false;
        for _ in 0..polls {
            is_done = poll!(parked.as_mut()).is_ready();
            if is_done {
                break;
            }
            sleep(Duration::from_millis(2)).await;
        }
        if is_done {
            return;
        }
        let other = timeout(lab.patience(), registry.close(Duration::ZERO)).await;
        assert!(other.expect("the other call closes the registry").is_clean());
        parked.await;
    }
    panic!("close is not done after {POLLS_MAX} polls");
}

/// `close` ends in bounded time if the store does not answer, and its report counts the abandoned
/// locks. They end with their leases.
pub async fn close_ends_in_time_though_the_store_hangs(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    drop(registry.obtain("orders:1").lock().await.expect("a free lock is had"));
    registry.idle().await;
    let kept = registry.obtain("orders:2").lock().await.expect("a free lock is had");
    let dropped = registry.obtain("orders:3").lock().await.expect("a free lock is had");
    let hang = Fault::DelayRequest(Duration::from_secs(7_200));
    faulty.apply(Faults::none().always(Operation::Release, hang).always(Operation::Renew, hang));
    drop(dropped);
    let closing = registry.close(Duration::from_millis(200));
    let report = timeout(lab.patience(), closing).await.expect("close ends in time");
    assert!(!report.is_clean() && report.abandoned >= 1, "{report:?}");
    assert!(!kept.is_held());
    // The keys become free when their leases end.
    let other = lab.registry().await;
    lab.free_soon(&other, "orders:2").await;
    lab.free_soon(&other, "orders:3").await;
}

/// Closing one registry does not affect another process, whose lock stays held and renewed.
pub async fn closing_one_registry_leaves_the_others_alone(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry_of(lab.renewed()).await);
    let mine = here.obtain("orders:1").lock().await.expect("a free lock is had");
    let theirs = there.obtain("orders:2").lock().await.expect("a free lock is had");
    here.close(Duration::ZERO).await;
    assert!(!mine.is_held());
    sleep(lab.renewed() * 2).await;
    assert!(theirs.is_held(), "the other process lost its lock");
    theirs.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:1").await;
}

const POLLS_MAX: usize = 1_000;
