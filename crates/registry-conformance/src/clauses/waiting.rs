//! A wait ends with the lock, at its deadline, or with an error. Local waiters are served in order
//! and share their store requests.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use futures_util::poll;
use registry_core::{Claim, LockBackend, LockError, LockRegistry as _, Registry};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::faulty::{Fault, Faults, FaultyBackend, Operation};
use crate::harness::RemoteLock;
use crate::lab::{Lab, busy, freed, granted, is_free, key};

/// In a store with wake-ups, a release ends the `wait` of another claim of the same client.
pub async fn a_store_that_wakes_ends_the_wait_when_the_holder_releases(lab: &Lab) {
    let client = lab.client().await;
    wakes(lab, &*client, &*client).await;
}

/// In a store with wake-ups, a release ends the `wait` of a claim of another client.
pub async fn a_store_that_wakes_ends_the_waits_of_other_clients(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    // The first direction runs twice, because the first wait of a client may set up its
    // subscription.
    wakes(lab, &*first, &*second).await;
    wakes(lab, &*second, &*first).await;
    wakes(lab, &*first, &*second).await;
}

async fn wakes(lab: &Lab, holding: &dyn LockBackend, waiting: &dyn LockBackend) {
    let holder = Claim::new(key("orders:42"), lab.long());
    let waiter = Claim::new(key("orders:42"), lab.long());
    granted(holding, &holder).await;
    let refusal = busy(waiting, &waiter).await;
    let wait = timeout(lab.patience(), waiting.wait(&waiter, &refusal));
    let release = async {
        sleep(Duration::from_millis(50)).await;
        freed(holding, &holder).await;
    };
    let (woken, ()) = join(wait, release).await;
    woken.expect("a release wakes those who wait");
    granted(waiting, &waiter).await;
    freed(waiting, &waiter).await;
}

/// In a store with wake-ups, a release between the busy answer and the call of `wait` ends the
/// `wait`.
pub async fn a_release_between_busy_and_wait_is_not_missed(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    for _ in 0..5 {
        let holder = Claim::new(key("orders:42"), lab.long());
        let waiter = Claim::new(key("orders:42"), lab.long());
        granted(&*first, &holder).await;
        let refusal = busy(&*second, &waiter).await;
        freed(&*first, &holder).await;
        let wait = timeout(lab.patience(), second.wait(&waiter, &refusal));
        wait.await.expect("the release came before the wait and was missed");
    }
}

/// In a store with wake-ups, one client waits for five keys, and each `wait` ends with the release
/// of its key.
pub async fn waits_of_many_keys_end_each_with_its_own_release(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    let holders: Vec<_> =
        (0..5).map(|n| Claim::new(key(&format!("orders:n{n}")), lab.long())).collect();
    let mut waiters = Vec::new();
    for holder in &holders {
        granted(&*first, holder).await;
        let waiter = Claim::new(holder.key().clone(), lab.long());
        let refusal = busy(&*second, &waiter).await;
        waiters.push((waiter, refusal));
    }
    let waits = join_all(waiters.iter().map(async |(waiter, refusal)| {
        timeout(lab.patience(), second.wait(waiter, refusal)).await.expect("its key was released");
    }));
    let releases = async {
        sleep(Duration::from_millis(50)).await;
        for holder in holders.iter().rev() {
            freed(&*first, holder).await;
        }
    };
    join(waits, releases).await;
}

/// Dropping a `wait` future at any time leaves nothing behind: after the holder's release, the key
/// is free. The engine drops no other future of a backend.
pub async fn a_wait_may_be_dropped_at_any_time(lab: &Lab) {
    let client = lab.client().await;
    let holder = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &holder).await;
    for n in 0..10 {
        let waiter = Claim::new(key("orders:42"), lab.long());
        let refusal = busy(&*client, &waiter).await;
        drop(timeout(Duration::from_millis(n), client.wait(&waiter, &refusal)).await);
    }
    freed(&*client, &holder).await;
    assert!(is_free(&*client, holder.key()).await, "a dropped wait holds something");
}

/// A waiter acquires the lock after another caller of the same process unlocks it.
pub async fn a_waiter_gets_the_lock_when_this_process_unlocks_it(lab: &Lab) {
    let registry = lab.registry().await;
    handed_from_to(&registry, &registry).await;
}

/// A waiter acquires the lock after another process unlocks it.
pub async fn a_waiter_gets_the_lock_when_another_process_unlocks_it(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    handed_from_to(&there, &here).await;
    handed_from_to(&here, &there).await;
}

async fn handed_from_to(from: &Registry, to: &Registry) {
    let guard = from.obtain("orders:42").lock().await.expect("a free lock is had");
    let lock = to.obtain("orders:42");
    let mut waiting = pin!(lock.lock());
    assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
    let (next, unlocked) = join(waiting, async {
        sleep(Duration::from_millis(50)).await;
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    next.expect("the waiter gets the lock").unlock().await.expect("a held lock is unlocked");
}

/// `try_lock_for` with a wait of zero makes one attempt and acquires a free lock.
pub async fn a_wait_of_zero_still_gets_a_free_lock(lab: &Lab) {
    let registry = lab.registry().await;
    let guard =
        registry.obtain("orders:42").try_lock_for(Duration::ZERO).await.expect("no trouble");
    guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
}

/// `try_lock_for` with a wait of zero or one nanosecond returns `Ok(None)` for a held lock, in the
/// holder's process and in another. It does not wait without limit.
pub async fn a_wait_of_zero_does_not_wait(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = there.obtain("orders:42").lock().await.expect("a free lock is had");
    for registry in [&here, &there] {
        for wait in [Duration::ZERO, Duration::from_nanos(1)] {
            let lock = registry.obtain("orders:42");
            let none = timeout(lab.patience(), lock.try_lock_for(wait)).await.expect("it waits");
            assert!(none.expect("busy is no error").is_none());
        }
    }
    guard.unlock().await.expect("a held lock is unlocked");
}

/// If this process holds the lock, `try_lock_for` returns `Ok(None)` at its deadline and not
/// before.
pub async fn a_wait_for_this_process_ends_with_none_at_its_deadline(lab: &Lab) {
    let registry = lab.registry().await;
    ends_at_its_deadline(lab, &registry, &registry).await;
}

/// If another process holds the lock, `try_lock_for` returns `Ok(None)` at its deadline and not
/// before.
pub async fn a_wait_for_another_process_ends_with_none_at_its_deadline(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    ends_at_its_deadline(lab, &there, &here).await;
}

async fn ends_at_its_deadline(lab: &Lab, holding: &Registry, waiting: &Registry) {
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    let wait = Duration::from_millis(600);
    let begun = Instant::now();
    let none = timeout(lab.patience(), waiting.obtain("orders:42").try_lock_for(wait)).await;
    let none = none.expect("the wait ends").expect("busy is no error");
    assert!(none.is_none(), "two guards of one key");
    assert!(begun.elapsed() >= wait, "given up after {:?}", begun.elapsed());
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// Callers of one process acquire the lock in the order of their arrival.
pub async fn callers_of_one_process_are_served_in_the_order_of_their_arrival(lab: &Lab) {
    let registry = lab.registry().await;
    assert_eq!(served(&registry, 6, &[]).await, [0, 1, 2, 3, 4, 5]);
}

/// Waiters that give up do not change the order of the other waiters.
pub async fn a_caller_that_gives_up_leaves_the_others_in_order(lab: &Lab) {
    let registry = lab.registry().await;
    assert_eq!(served(&registry, 6, &[0, 3, 5]).await, [1, 2, 4]);
}

/// Queues `callers` behind a guard, drops those in `gone`, and returns the order in which the
/// others acquire the lock.
async fn served(registry: &Registry, callers: usize, gone: &[usize]) -> Vec<usize> {
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let order = tokio::sync::Mutex::new(Vec::new());
    let mut waiting = Vec::new();
    for n in 0..callers {
        let (lock, order) = (registry.obtain("orders:42"), &order);
        let mut caller = Box::pin(async move {
            let guard = lock.lock().await.expect("the lock is had at last");
            order.lock().await.push(n);
            guard.unlock().await.expect("a held lock is unlocked");
        });
        // The first poll queues the caller.
        assert!(poll!(caller.as_mut()).is_pending(), "two guards of one key");
        waiting.push(Some(caller));
    }
    for n in gone {
        waiting[*n] = None;
    }
    guard.unlock().await.expect("a held lock is unlocked");
    join_all(waiting.into_iter().flatten()).await;
    order.into_inner()
}

/// One unlock ends the wait of one of two processes. The other process continues to wait and
/// acquires the lock at the next unlock.
pub async fn one_unlock_lets_one_of_two_processes_in(lab: &Lab) {
    let holder = lab.registry().await;
    let waiters = [lab.registry().await, lab.registry().await];
    let guard = holder.obtain("orders:42").lock().await.expect("a free lock is had");
    let mut tasks = JoinSet::new();
    for registry in &waiters {
        let lock = registry.obtain("orders:42");
        let wait = lab.patience();
        tasks.spawn(async move { lock.try_lock_for(wait).await });
    }
    sleep(Duration::from_millis(100)).await;
    guard.unlock().await.expect("a held lock is unlocked");
    for _ in 0..2 {
        let next = tasks.join_next().await.expect("two wait").expect("no panic");
        let next = next.expect("no trouble").expect("its turn comes while it waits");
        // While one process holds the lock, the wait of the other must not end, neither with the
        // lock nor without.
        let other = timeout(Duration::from_millis(100), tasks.join_next()).await;
        assert!(!matches!(other, Ok(Some(_))), "the other one is back: {other:?}");
        next.unlock().await.expect("a held lock is unlocked");
    }
}

/// A waiter whose wake-ups are lost acquires the lock, because it also polls.
pub async fn a_lost_wake_up_costs_no_more_than_a_poll(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().always(Operation::Wait, Fault::LoseWake)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.long()), lab.registry().await);
    handed_from_to(&there, &here).await;
}

/// A premature wake-up neither ends the wait nor grants the lock. The waiter tries to acquire, and
/// then continues to wait.
pub async fn a_wake_up_for_nothing_neither_ends_the_wait_nor_grants(lab: &Lab) {
    let early = Fault::WakeEarly(Duration::from_millis(20));
    let faulty = lab.faulty(Faults::none().always(Operation::Wait, early)).await;
    let (here, there) = (lab.registry_over(&faulty, lab.long()), lab.registry().await);
    ends_at_its_deadline(lab, &there, &here).await;
    handed_from_to(&there, &here).await;
}

/// A waiter retries after a refused request, a lost request and a lost reply, and acquires the
/// lock.
pub async fn a_waiter_bears_passing_trouble_of_the_store(lab: &Lab) {
    let faults = Faults::none()
        .at(Operation::Acquire, 1, Fault::Refuse)
        .at(Operation::Acquire, 2, Fault::LoseRequest)
        .at(Operation::Acquire, 3, Fault::LoseReply);
    let faulty = lab.faulty(faults).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let guard = registry.obtain("orders:42").try_lock_for(lab.patience()).await;
    let guard = guard.expect("the trouble passed").expect("nobody else wants the lock");
    guard.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&registry, "orders:42").await;
}

/// `try_lock_for` returns `LockError::Backend`, not `Ok(None)`, if the store is unreachable for the
/// whole wait.
pub async fn an_outage_for_the_whole_wait_is_an_error(lab: &Lab) {
    let faulty = lab.faulty(Faults::outage()).await;
    let registry = lab.registry_over(&faulty, lab.long());
    match registry.obtain("orders:42").try_lock_for(Duration::from_millis(700)).await {
        Err(LockError::Backend { .. }) => {}
        other => panic!("an outage is reported as {other:?}"),
    }
}

/// A store error that is not retryable ends the wait at once, after one attempt.
pub async fn lasting_trouble_ends_the_wait_at_once(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().always(Operation::Acquire, Fault::Deny)).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let lock = registry.obtain("orders:42");
    match timeout(lab.patience(), lock.lock()).await.expect("it waits for what cannot pass") {
        Err(error @ LockError::Backend { .. }) => assert!(!error.is_retryable(), "{error:?}"),
        other => panic!("a store that denies is reported as {other:?}"),
    }
    assert_eq!(faulty.calls(Operation::Acquire), 1, "it asks again and again");
}

/// Fifty waiters of one process send about as many requests to the store as one: at most two
/// attempts per poll interval, plus five.
pub async fn many_waiters_of_one_process_ask_the_store_as_rarely_as_one(lab: &Lab) {
    let there = lab.registry().await;
    let guard = there.obtain("orders:42").lock().await.expect("a free lock is had");
    let faulty = lab.faulty(Faults::none()).await;
    let poll = Duration::from_millis(200);
    let client: Arc<dyn LockBackend> = Arc::<FaultyBackend>::clone(&faulty);
    let here = lab.builder(client).poll(poll).build().expect("the registry is built");
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let lock = here.obtain("orders:42");
        tasks.spawn(async move {
            let guard = lock.lock().await.expect("the lock is had at last");
            guard.unlock().await.expect("a held lock is unlocked");
        });
    }
    sleep(poll * 10).await;
    let asked = faulty.calls(Operation::Acquire);
    // Jitter can halve the interval, and the store can send a few premature wake-ups.
    let polls = begun.elapsed().as_millis() / poll.as_millis();
    assert!(u128::from(asked) <= 2 * polls + 5, "{asked} attempts in {polls} poll intervals");
    assert!(asked > 0, "nobody asks");
    guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(tasks.join_all().await.len(), 50, "all get their turn");
}

/// Twenty waiters of one key do not delay callers of other keys in the same process.
pub async fn waiters_of_one_key_do_not_hold_up_another(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = there.obtain("held").lock().await.expect("a free lock is had");
    let lock = here.obtain("held");
    let waiting = pin!(join_all((0..20).map(|_| lock.lock())));
    let others = pin!(async {
        for n in 0..10 {
            let other = here.obtain(&format!("orders:n{n}")).try_lock().await.expect("no trouble");
            other.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
        }
    });
    match timeout(lab.patience(), select(waiting, others)).await {
        Ok(Either::Right(_)) => {}
        Ok(Either::Left((guards, _))) => panic!("two guards of one key: {guards:?}"),
        Err(_) => panic!("other keys wait for those who wait"),
    }
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter here acquires the lock after a separate operating-system process unlocks it.
pub async fn a_waiter_gets_the_lock_when_a_real_process_unlocks_it(lab: &Lab) {
    let mut there = lab.remote(lab.long()).await;
    let here = lab.registry().await;
    assert!(matches!(there.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    let lock = here.obtain("orders:42");
    let waiting = lock.try_lock_for(lab.patience());
    let (guard, unlocked) = join(waiting, async {
        sleep(Duration::from_millis(200)).await;
        there.unlock("orders:42").await
    })
    .await;
    assert!(unlocked, "the other process held it until then");
    let guard = guard.expect("no trouble").expect("the lock is given up while we wait");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter in a separate operating-system process acquires the lock after it is unlocked here.
pub async fn a_real_process_gets_the_lock_when_it_is_unlocked_here(lab: &Lab) {
    let mut there = lab.remote(lab.long()).await;
    let here = Arc::new(lab.registry().await);
    let guard = here.obtain("orders:42").lock().await.expect("a free lock is had");
    let wait = lab.patience();
    let (held, unlocked) = join(there.lock("orders:42", wait), async {
        sleep(Duration::from_millis(200)).await;
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    assert!(matches!(held, RemoteLock::Held { .. }));
    assert!(there.unlock("orders:42").await, "the other process held it until then");
}
