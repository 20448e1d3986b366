//! Whatever is dropped, wherever it was: nothing stays taken.
#![expect(clippy::async_yields_async, reason = "the sweep polls what is made; making it must not")]

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockGuard, LockOptions, LockRegistry as _, Owner, Registry};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::faulty::{Fault, Faults, Operation};
use crate::lab::Lab;
use crate::sweep::{Swept, sweep};

/// Dropping is letting go.
pub async fn a_dropped_guard_frees_the_lock(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = here.obtain("orders:42").lock().await.expect("a free lock is had");
    drop(guard);
    here.idle().await;
    let next = there.obtain("orders:42").try_lock().await.expect("no trouble");
    next.expect("the janitor is idle").unlock().await.expect("a held lock is unlocked");
}

/// A guard that is dropped passes the lock on inside its process too.
pub async fn a_dropped_guard_lets_the_next_caller_in(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is had");
    let mut waiting = pin!(lock.lock());
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    drop(guard);
    let next = timeout(lab.patience(), waiting).await.expect("the guard was dropped");
    next.expect("no trouble").unlock().await.expect("a held lock is unlocked");
}

/// A panic unwinds through the guard.
pub async fn a_panic_in_the_critical_section_frees_the_lock(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let lock = here.obtain("orders:42");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _guard = lock.lock().await.expect("a free lock is had");
        // Without a message: the panic is what is tested.
        std::panic::resume_unwind(Box::new(()));
    });
    let end = tasks.join_next().await.expect("one task runs");
    assert!(end.is_err_and(|error| error.is_panic()));
    lab.free_soon(&there, "orders:42").await;
    lab.free_soon(&here, "orders:42").await;
}

/// A guard may die on a thread that knows no runtime.
pub async fn a_guard_dropped_outside_the_runtime_frees_the_lock(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = here.obtain("orders:42").lock().await.expect("a free lock is had");
    std::thread::spawn(move || drop(guard)).join().expect("dropping does not panic");
    lab.free_soon(&there, "orders:42").await;
}

/// So may a future that was never finished.
pub async fn a_waiter_dropped_outside_the_runtime_leaves_nothing(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = there.obtain("orders:42").lock().await.expect("a free lock is had");
    let lock = here.obtain("orders:42");
    let mut waiting = Box::pin(async move { lock.lock().await.map(drop) });
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    std::thread::spawn(move || drop(waiting)).join().expect("dropping does not panic");
    guard.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:42").await;
}

/// A future that is kept and not polled, as in a `select!` whose other branch is at work, is in nobody's way: other keys
/// are locked, and held locks are renewed.
pub async fn a_future_that_is_not_polled_holds_up_no_other_key(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let held = registry.obtain("orders:1").lock().await.expect("a free lock is had");
    for n in 2..5 {
        let lock = registry.obtain(&format!("orders:n{n}"));
        let mut parked = pin!(lock.lock());
        // With its request on the way, if the store is one that takes time.
        let first = poll!(parked.as_mut());
        let other = registry.obtain(&format!("other:{n}")).try_lock().await.expect("no trouble");
        other.expect("nobody holds it").unlock().await.expect("a held lock is unlocked");
        if n == 2 {
            sleep(lab.renewed() * 2).await;
            assert!(held.is_held(), "nothing is renewed while a future is not polled");
        }
        drop(first);
    }
    held.unlock().await.expect("a held lock is unlocked");
}

/// A future that is kept and not polled must not stand in the store's queue for ever: its claim is released after a lease.
pub async fn a_parked_lock_leaves_the_stores_queue(lab: &Lab) {
    let (here, there) = (lab.registry_of(lab.short()).await, lab.registry().await);
    let held = there.obtain("orders:42").lock().await.expect("a free lock is had");
    let lock = here.obtain("orders:42");
    let mut parked = pin!(lock.lock());
    // Long enough for it to be told "busy".
    assert!(timeout(ASKED, parked.as_mut()).await.is_err(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&lab.registry().await, "orders:42").await;
    // It is not lost: polled again, it starts over.
    let late = timeout(lab.patience(), parked).await.expect("no other caller wants the lock");
    late.expect("no trouble").unlock().await.expect("a held lock is unlocked");
}

/// A grant that the store gives to a future that is not polled any more ends with its lease, session or not.
pub async fn a_parked_lock_gives_back_a_grant_that_it_does_not_take(lab: &Lab) {
    let late = Fault::DelayReply(Duration::from_millis(50));
    let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, late)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.short()), lab.registry().await);
    let lock = here.obtain("orders:42");
    let mut parked = pin!(lock.lock());
    assert!(poll!(parked.as_mut()).is_pending(), "the store answers late");
    lab.free_soon(&here, "orders:42").await;
    lab.free_soon(&there, "orders:42").await;
    let late = timeout(lab.patience(), parked).await.expect("no other caller wants the lock");
    late.expect("no trouble").unlock().await.expect("a held lock is unlocked");
}

/// A future that contends for its process and is not polled passes its turn on after a lease.
pub async fn a_parked_lock_lets_the_next_caller_of_its_process_pass(lab: &Lab) {
    let (here, there) = (lab.registry_of(lab.short()).await, lab.registry().await);
    let held = there.obtain("orders:42").lock().await.expect("a free lock is had");
    let lock = here.obtain("orders:42");
    let mut parked = pin!(lock.lock());
    assert!(timeout(ASKED, parked.as_mut()).await.is_err(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&here, "orders:42").await;
    let late = timeout(lab.patience(), parked).await.expect("no other caller wants the lock");
    late.expect("no trouble").unlock().await.expect("a held lock is unlocked");
}

/// What a waiter was given and does not take is passed on after a lease: a turn, a claim, a further guard of its owner's lock.
pub async fn a_parked_waiter_passes_on_what_it_was_given(lab: &Lab) {
    let (here, there) = (lab.registry_of(lab.short()).await, lab.registry().await);
    let lock = here.obtain("orders:42");
    let held = lock.lock().await.expect("a free lock is had");
    let mut parked = pin!(lock.lock());
    assert!(poll!(parked.as_mut()).is_pending(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&here, "orders:42").await;
    lab.free_soon(&there, "orders:42").await;
    let late = timeout(lab.patience(), parked).await.expect("no other caller wants the lock");
    late.expect("no trouble").unlock().await.expect("a held lock is unlocked");

    let owner = Owner::new();
    let own = || lock.lock_with(LockOptions::new().owner(&owner));
    let held = lock.lock().await.expect("a free lock is had");
    let (mut first, mut parked) = (pin!(own()), pin!(own()));
    assert!(poll!(first.as_mut()).is_pending(), "two guards of one key");
    assert!(poll!(parked.as_mut()).is_pending(), "two guards of one key");
    held.unlock().await.expect("a held lock is unlocked");
    let first = timeout(lab.patience(), first).await.expect("the lock is free");
    let first = first.expect("no trouble").expect("without a deadline");
    first.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:42").await;
    let late = timeout(lab.patience(), parked).await.expect("no other caller wants the lock");
    let late = late.expect("no trouble").expect("without a deadline");
    late.unlock().await.expect("a held lock is unlocked");
}

/// An unlock that was begun goes on when its future is not polled any more.
pub async fn a_parked_unlock_frees_the_lock(lab: &Lab) {
    let late = Fault::DelayReply(Duration::from_millis(50));
    let faulty = lab.faulty(Faults::none().at(Operation::Release, 1, late)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.short()), lab.registry().await);
    let guard = here.obtain("orders:42").lock().await.expect("a free lock is had");
    let mut parked = pin!(guard.unlock());
    assert!(poll!(parked.as_mut()).is_pending(), "the store answers late");
    lab.free_soon(&here, "orders:42").await;
    lab.free_soon(&there, "orders:42").await;
    let told = timeout(lab.patience(), parked).await.expect("the release is answered");
    // Its lease may have ended first.
    assert!(matches!(told, Ok(()) | Err(LockError::Lost { .. })), "{told:?}");
}

/// Handles are not guards: dropping them lets nothing go.
pub async fn a_dropped_handle_or_registry_lets_nothing_go(lab: &Lab) {
    let (here, there) = (lab.registry_of(lab.renewed()).await, lab.registry().await);
    let lock = here.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is had");
    drop(lock);
    drop(here);
    sleep(lab.renewed() * 2).await;
    assert!(guard.is_held(), "nobody renews for a guard that outlives its registry");
    assert!(there.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    guard.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:42").await;
}

/// Somebody who gives up waiting was never there.
pub async fn a_dropped_waiter_leaves_no_record(lab: &Lab) {
    let (holder, waiter) = (lab.registry().await, lab.registry().await);
    let guard = holder.obtain("orders:42").lock().await.expect("a free lock is had");
    for _ in 0..5 {
        let lock = waiter.obtain("orders:42");
        let gone = timeout(Duration::from_millis(20), lock.lock()).await;
        assert!(gone.is_err(), "two guards of one key");
    }
    guard.unlock().await.expect("a held lock is unlocked");
    waiter.idle().await;
    let third = lab.registry().await;
    let next = third.obtain("orders:42").try_lock().await.expect("no trouble");
    next.expect("those who waited are gone").unlock().await.expect("a held lock is unlocked");
}

/// Somebody who gives up its place lets those behind it come forward.
pub async fn a_dropped_waiter_lets_the_next_one_pass(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is had");
    let mut first = Box::pin(lock.lock());
    let mut second = Box::pin(lock.lock());
    assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
    // Its turn comes, and it is gone before it takes it.
    guard.unlock().await.expect("a held lock is unlocked");
    drop(first);
    let next = timeout(lab.patience(), second).await.expect("the one in front is gone");
    next.expect("no trouble").unlock().await.expect("a held lock is unlocked");
}

/// A caller that goes away while the store is still deciding.
pub async fn an_acquisition_dropped_in_flight_is_given_back(lab: &Lab) {
    for delay in [Fault::DelayRequest, Fault::DelayReply] {
        let late = delay(Duration::from_millis(200));
        let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, late)).await;
        let registry = lab.registry_over(&faulty, lab.long());
        let lock = registry.obtain("orders:42");
        let gone = timeout(Duration::from_millis(50), lock.lock()).await;
        assert!(gone.is_err(), "the store answers late");
        lab.free_soon(&registry, "orders:42").await;
        let other = lab.registry().await;
        lab.free_soon(&other, "orders:42").await;
    }
}

/// A grant that nobody heard of is given back, long before its lease is over.
pub async fn a_grant_whose_reply_was_lost_is_given_back(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, Fault::LoseReply)).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let other = lab.registry().await;
    match registry.obtain("orders:42").try_lock().await {
        Err(LockError::Backend { .. }) => {}
        Ok(Some(guard)) => guard.unlock().await.expect("a held lock is unlocked"),
        other => panic!("a lost reply is reported as {other:?}"),
    }
    lab.free_soon(&other, "orders:42").await;
}

/// A request that reaches the store only after its own release is cleaned up within its lease.
pub async fn an_acquire_that_arrives_after_its_release_ends_with_its_lease(lab: &Lab) {
    let late = Fault::RepeatLate(Duration::from_millis(100));
    let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, late)).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    guard.unlock().await.expect("a held lock is unlocked");
    faulty.settled().await;
    lab.free_soon(&lab.registry().await, "orders:42").await;
}

/// The memory of a registry is what is in use.
pub async fn no_slot_is_left_when_all_is_dropped(lab: &Lab) {
    let registry = lab.registry().await;
    let held = lab.registry().await;
    let foreign = held.obtain("orders:n3").lock().await.expect("a free lock is had");
    for n in 0..20 {
        let lock = registry.obtain(&format!("orders:n{}", n % 4));
        match n % 4 {
            0 => drop(lock.lock().await.expect("a free lock is had")),
            1 => lock
                .lock()
                .await
                .expect("a free lock is had")
                .unlock()
                .await
                .expect("a held lock is unlocked"),
            2 => assert!(lock.try_lock().await.expect("no trouble").is_some()),
            _ => assert!(lock.try_lock().await.expect("busy is no error").is_none()),
        }
        registry.idle().await;
    }
    assert_eq!(registry.slots(), 0);
    foreign.unlock().await.expect("a held lock is unlocked");
}

/// `lock` may be dropped at every poll; the key is free again soon, and the next caller gets it.
pub async fn lock_may_be_dropped_at_every_poll(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let make = async || {
        let lock = here.obtain("orders:42");
        async move { lock.lock().await }
    };
    sweep(make, POLLS_MAX, async |end| {
        if let Swept::Completed { output, .. } = end {
            output.expect("a free lock is had").unlock().await.expect("a held lock is unlocked");
        }
        lab.free_soon(&there, "orders:42").await;
        lab.free_soon(&here, "orders:42").await;
    })
    .await;
}

/// The same behind a holder in another process, so that the drop hits every step of waiting.
pub async fn a_waiting_lock_may_be_dropped_at_every_poll(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let third = lab.registry().await;
    let unlocking = Mutex::new(JoinSet::new());
    let make = async || {
        let guard = there.obtain("orders:42").lock().await.expect("the lock is had at last");
        locked(&unlocking).spawn(unlock_soon(guard));
        let lock = here.obtain("orders:42");
        async move { lock.try_lock_for(Duration::from_secs(300)).await }
    };
    sweep(make, POLLS_MAX, async |end| {
        if let Swept::Completed { output, .. } = end {
            let guard = output.expect("no trouble").expect("the lock is given up while we wait");
            guard.unlock().await.expect("a held lock is unlocked");
        }
        lab.free_soon(&third, "orders:42").await;
        lab.free_soon(&here, "orders:42").await;
    })
    .await;
}

/// The same behind a holder in this process, where the claim is handed over.
pub async fn a_queued_lock_may_be_dropped_at_every_poll(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let unlocking = Mutex::new(JoinSet::new());
    let make = async || {
        let lock = here.obtain("orders:42");
        let guard = lock.lock().await.expect("the lock is had at last");
        locked(&unlocking).spawn(unlock_soon(guard));
        async move { lock.lock().await }
    };
    sweep(make, POLLS_MAX, async |end| {
        if let Swept::Completed { output, .. } = end {
            output
                .expect("the lock is had at last")
                .unlock()
                .await
                .expect("a held lock is unlocked");
        }
        lab.free_soon(&there, "orders:42").await;
        lab.free_soon(&here, "orders:42").await;
    })
    .await;
}

/// `try_lock_for` may be dropped at every poll while the store is slow: requests in flight are carried to their end.
pub async fn a_slow_try_lock_for_may_be_dropped_at_every_poll(lab: &Lab) {
    let slow = Fault::DelayRequest(Duration::from_millis(15));
    let slow_reply = Fault::DelayReply(Duration::from_millis(15));
    let faults =
        Faults::none().always(Operation::Acquire, slow).always(Operation::Acquire, slow_reply);
    let faulty = lab.faulty(faults).await;
    let (here, there) = (lab.registry_over(&faulty, lab.long()), lab.registry().await);
    let make = async || {
        let lock = here.obtain("orders:42");
        async move { lock.try_lock_for(Duration::from_secs(300)).await }
    };
    sweep(make, POLLS_MAX, async |end| {
        if let Swept::Completed { output, .. } = end {
            let guard = output.expect("no trouble").expect("no other caller wants the lock");
            guard.unlock().await.expect("a held lock is unlocked");
        }
        // Nobody has been told that the request is still on its way: first ours, which queue behind it, then the others.
        lab.free_soon(&here, "orders:42").await;
        lab.free_soon(&there, "orders:42").await;
    })
    .await;
}

/// `unlock` may be dropped at every poll: the lock is let go all the same.
pub async fn unlock_may_be_dropped_at_every_poll(lab: &Lab) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faulty = lab.faulty(Faults::none().always(Operation::Release, slow)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.long()), lab.registry().await);
    let make = async || {
        let guard = here.obtain("orders:42").lock().await.expect("the lock is had at last");
        guard.unlock()
    };
    sweep(make, POLLS_MAX, async |end| {
        if let Swept::Completed { output, .. } = end {
            output.expect("a held lock is unlocked");
        }
        lab.free_soon(&there, "orders:42").await;
        lab.free_soon(&here, "orders:42").await;
    })
    .await;
}

/// `renew` may be dropped at every poll: the guard is as good as before.
pub async fn renew_may_be_dropped_at_every_poll(lab: &Lab) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faulty = lab.faulty(Faults::none().always(Operation::Renew, slow)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.long()), lab.registry().await);
    guarded_sweep(lab, &here, &there, async |guard| {
        lab.renew_by_hand(guard, lab.long()).await.expect("a held lock is renewed");
    })
    .await;
}

/// `protect` may be dropped at every poll: the work is dropped, the guard is as good as before.
pub async fn protect_may_be_dropped_at_every_poll(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    guarded_sweep(lab, &here, &there, async |guard| {
        let work = async {
            for _ in 0..3 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        guard.protect(work).await.expect("the lock is held");
    })
    .await;
}

#[expect(
    clippy::future_not_send,
    reason = "it is Send whenever the work is; the bound cannot be written yet"
)]
async fn guarded_sweep(
    lab: &Lab,
    here: &Registry,
    there: &Registry,
    work: impl AsyncFn(&LockGuard),
) {
    let kept: Mutex<Option<Arc<LockGuard>>> = Mutex::new(None);
    let work = &work;
    let make = async || {
        let guard = here.obtain("orders:42").lock().await.expect("the lock is had at last");
        let guard = Arc::new(guard);
        *locked(&kept) = Some(Arc::clone(&guard));
        async move { work(&guard).await }
    };
    sweep(make, POLLS_MAX, async |_| {
        let guard = locked(&kept).take().and_then(Arc::into_inner).expect("the future is gone");
        assert!(guard.is_held(), "the guard suffers from what was dropped");
        work(&guard).await;
        guard.unlock().await.expect("a held lock is unlocked");
        lab.free_soon(there, "orders:42").await;
    })
    .await;
}

/// `close` may be dropped at every poll: closing goes on when it is called again, and nothing stays taken.
pub async fn close_may_be_dropped_at_every_poll(lab: &Lab) {
    let there = lab.registry().await;
    let kept: Mutex<Option<(Registry, LockGuard)>> = Mutex::new(None);
    let make = async || {
        let here = lab.registry().await;
        let guard = here.obtain("orders:42").lock().await.expect("the lock is had at last");
        let dropped = here.obtain("orders:43").lock().await.expect("the lock is had at last");
        drop(dropped);
        *locked(&kept) = Some((here.clone(), guard));
        async move { here.close(Duration::from_millis(20)).await }
    };
    sweep(make, POLLS_MAX, async |_| {
        let (here, guard) = locked(&kept).take().expect("it was put there");
        here.close(Duration::from_millis(20)).await;
        assert!(!guard.is_held(), "a closed registry holds");
        lab.free_soon(&there, "orders:42").await;
        lab.free_soon(&there, "orders:43").await;
    })
    .await;
}

/// A re-entrant lock may be dropped at every poll: the outer guard keeps what it has.
pub async fn entering_again_may_be_dropped_at_every_poll(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let owner = Owner::new();
    let lock = here.obtain("orders:42");
    let own = || LockOptions::new().owner(&owner);
    let outer = lock.lock_with(own()).await.expect("no trouble").expect("the lock is free");
    let make = async || {
        let (lock, options) = (lock.clone(), own());
        async move { lock.lock_with(options).await }
    };
    sweep(make, POLLS_MAX, async |end| {
        drop(end);
        assert!(outer.is_held());
        assert!(there.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    })
    .await;
    outer.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&there, "orders:42").await;
}

/// The value; a panic elsewhere is its own failure.
fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn unlock_soon(guard: LockGuard) {
    sleep(Duration::from_millis(20)).await;
    guard.unlock().await.expect("a held lock is unlocked");
}

const POLLS_MAX: usize = 1_000;

/// Long enough for an attempt to be answered.
const ASKED: Duration = Duration::from_millis(300);
