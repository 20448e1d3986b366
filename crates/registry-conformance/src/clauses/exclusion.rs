//! Mutual exclusion: one key of one store has at most one holder, across callers, clients and
//! processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Attempt, Claim, LockError, Registry};
use tokio::task::{JoinSet, yield_now};

use crate::context::{TestContext, assert_busy, assert_freed, assert_granted, attempt, key};
use crate::faulty::Faults;
use crate::harness::RemoteLock;

/// While a claim holds a key, other claims of the same client for this key are busy.
pub async fn a_second_claim_is_busy_while_the_first_holds(context: &TestContext) {
    let client = context.client().await;
    let first = context.acquire_with_lease(&*client, context.long_lease()).await;
    for _ in 0..3 {
        assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    }
    assert_freed(&*client, &first).await;
}

/// While a claim holds a key, claims of another client for this key are busy. After the release,
/// the other client acquires the key, and the first client is busy.
pub async fn a_claim_of_another_client_is_busy_while_the_first_holds(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_with_lease(&*first, context.long_lease()).await;
    assert_busy(&*second, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*first, &holder).await;
    let next = context.acquire_with_lease(&*second, context.long_lease()).await;
    assert_busy(&*first, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*second, &next).await;
}

/// The number of rounds that must have a winner.
const DECIDED_ROUNDS: usize = 10;

/// Of twelve concurrent claims for one key, sent through three clients, the store grants exactly
/// one. If [votes may split](crate::Store::may_split_votes), it is possible that none is granted.
pub async fn of_many_concurrent_claims_exactly_one_is_granted(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    let may_split_votes = context.store().may_split_votes();
    let rounds_max = if may_split_votes { 40 } else { DECIDED_ROUNDS };
    let mut decided = 0;
    for round in 0..rounds_max {
        let claims: Vec<_> =
            (0..12).map(|_| Claim::new(key("orders:42"), context.long_lease())).collect();
        let mut tasks = JoinSet::new();
        for (n, claim) in claims.into_iter().enumerate() {
            let client = Arc::clone(&clients[n % clients.len()]);
            tasks.spawn(async move {
                match attempt(&*client, &claim).await {
                    Attempt::Granted(_) => Some(claim),
                    Attempt::Busy(_) | Attempt::Gone => None,
                }
            });
        }
        let winners: Vec<Claim> = tasks.join_all().await.into_iter().flatten().collect();
        assert!(winners.len() <= 1, "winners of round {round}: {winners:?}");
        let Some(winner) = winners.first() else {
            assert!(may_split_votes, "round {round} has no winner");
            continue;
        };
        assert_freed(&*clients[0], winner).await;
        decided += 1;
        if decided == DECIDED_ROUNDS {
            return;
        }
    }
    panic!("only {decided} of {rounds_max} rounds have a winner");
}

/// One client holds claims of 20 different keys at the same time. Releasing one leaves the others
/// held.
pub async fn claims_of_different_keys_are_held_at_once(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> =
        (0..20).map(|n| Claim::new(key(&format!("orders:n{n}")), context.long_lease())).collect();
    for claim in &claims {
        assert_granted(&*client, claim).await;
    }
    assert_freed(&*client, &claims[7]).await;
    for (n, claim) in claims.iter().enumerate().filter(|(n, _)| *n != 7) {
        assert_busy(&*client, &Claim::new(claim.key().clone(), context.long_lease())).await;
        assert_freed(&*client, &claims[n]).await;
    }
}

/// `try_lock` returns `Ok(None)` while another caller of this process holds the lock, and a guard
/// after the unlock.
pub async fn try_lock_returns_none_while_this_process_holds_the_lock(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for _ in 0..3 {
        let second = registry.obtain("orders:42").try_lock().await.expect("busy is no error");
        assert!(second.is_none(), "two guards of one key");
    }
    guard.unlock().await.expect("a held lock is unlocked");
    let again = registry.obtain("orders:42").try_lock().await.expect("a free lock is no error");
    again.expect("a free lock is acquired").unlock().await.expect("a held lock is unlocked");
}

/// `try_lock` returns `Ok(None)` while another process holds the lock, and a guard after the
/// unlock.
pub async fn try_lock_returns_none_while_another_process_holds_the_lock(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for _ in 0..3 {
        let second = local.obtain("orders:42").try_lock().await.expect("busy is no error");
        assert!(second.is_none(), "two guards of one key");
    }
    guard.unlock().await.expect("a held lock is unlocked");
    let again = local.obtain("orders:42").try_lock().await.expect("a free lock is no error");
    again.expect("a free lock is acquired").unlock().await.expect("a held lock is unlocked");
}

/// During an outage, `try_lock` returns a retryable `LockError::Backend`, not `Ok(None)`. After the
/// outage, it returns a guard.
pub async fn an_outage_is_an_error_and_never_busy(context: &TestContext) {
    let faulty = context.faulty(Faults::outage()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    match registry.obtain("orders:42").try_lock().await {
        Err(error @ LockError::Backend { .. }) => assert!(error.is_retryable(), "{error:?}"),
        other => panic!("an outage is reported as {other:?}"),
    }
    faulty.clear_faults();
    let guard = registry.obtain("orders:42").try_lock().await.expect("the outage is over");
    guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
}

/// All handles that a registry and its clones return for one key are the same lock. While a guard
/// of one handle exists, `try_lock` on another returns `Ok(None)`, also after the first handle was
/// dropped.
pub async fn two_handles_of_one_key_are_one_lock(context: &TestContext) {
    let registry = context.registry().await;
    let (first, second) = (registry.obtain("orders:42"), registry.obtain("orders:42"));
    let guard = first.lock().await.expect("a free lock is acquired");
    assert!(second.try_lock().await.expect("busy is no error").is_none(), "two guards of one key");
    drop(first);
    let third = registry.clone().obtain("orders:42");
    assert!(third.try_lock().await.expect("busy is no error").is_none(), "two guards of one key");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// One registry holds guards of 20 different keys at the same time.
pub async fn one_caller_holds_many_keys_at_once(context: &TestContext) {
    let registry = context.registry().await;
    let locks: Vec<_> = (0..20).map(|n| registry.obtain(&format!("orders:n{n}"))).collect();
    let guards = join_all(locks.iter().map(|lock| lock.lock())).await;
    for guard in guards {
        let guard = guard.expect("a free lock is acquired");
        assert!(guard.is_held());
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// Of 21 concurrent `try_lock` calls of three registries, exactly one returns a guard. If
/// [votes may split](crate::Store::may_split_votes), it is possible that none returns one.
pub async fn of_many_concurrent_try_locks_exactly_one_returns_a_guard(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await, context.registry().await];
    let rounds_max = if context.store().may_split_votes() { 20 } else { 1 };
    for _ in 0..rounds_max {
        let mut tasks = JoinSet::new();
        for n in 0..21 {
            let lock = registries[n % registries.len()].obtain("orders:42");
            tasks.spawn(async move { lock.try_lock().await.expect("busy is no error") });
        }
        let mut winners: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        assert!(winners.len() <= 1, "{winners:?}");
        if let Some(guard) = winners.pop() {
            guard.unlock().await.expect("a held lock is unlocked");
            return;
        }
    }
    panic!("none of {rounds_max} rounds has a winner");
}

/// The critical sections of eight tasks of two registries never overlap, and every task completes
/// its rounds.
pub async fn critical_sections_of_several_processes_never_overlap(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    assert_never_overlap(&registries, 4, 6).await;
}

/// The critical sections of 16 tasks in one process never overlap, and every task completes its
/// rounds. Here a claim may be handed over from task to task.
pub async fn critical_sections_of_one_process_never_overlap(context: &TestContext) {
    let registries = [context.registry().await];
    assert_never_overlap(&registries, 16, 8).await;
}

async fn assert_never_overlap(registries: &[Registry], tasks_each: usize, rounds: usize) {
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for registry in registries {
        for _ in 0..tasks_each {
            let lock = registry.obtain("orders:42");
            let inside = Arc::clone(&inside);
            tasks.spawn(async move {
                for _ in 0..rounds {
                    let guard = lock.lock().await.expect("the lock is acquired");
                    assert_eq!(
                        inside.fetch_add(1, Ordering::SeqCst),
                        0,
                        "two critical sections overlap"
                    );
                    yield_now().await;
                    assert_eq!(
                        inside.fetch_sub(1, Ordering::SeqCst),
                        1,
                        "two critical sections overlapped"
                    );
                    guard.unlock().await.expect("a held lock is unlocked");
                }
                rounds
            });
        }
    }
    let done: usize = tasks.join_all().await.into_iter().sum();
    assert_eq!(done, registries.len() * tasks_each * rounds, "all tasks complete their rounds");
}

/// A lock that a separate operating-system process holds is busy here. After that process unlocks
/// it, `try_lock` returns a guard here.
pub async fn a_lock_that_another_process_holds_is_busy_here(context: &TestContext) {
    let mut remote = context.remote(context.long_lease()).await;
    let local = context.registry().await;
    assert!(matches!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    assert!(local.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    assert!(remote.unlock("orders:42").await, "the other process did not hold the lock");
    let guard = local.obtain("orders:42").try_lock().await.expect("a free lock is no error");
    guard.expect("a free lock is acquired").unlock().await.expect("a held lock is unlocked");
}

/// A lock that is held here is busy in a separate operating-system process. After the unlock, that
/// process acquires it.
pub async fn a_lock_that_is_held_here_is_busy_in_another_process(context: &TestContext) {
    let mut remote = context.remote(context.long_lease()).await;
    let local = context.registry().await;
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    assert_eq!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Busy);
    guard.unlock().await.expect("a held lock is unlocked");
    assert!(matches!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    assert!(remote.unlock("orders:42").await, "the other process did not hold the lock");
}
