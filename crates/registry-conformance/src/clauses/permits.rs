//! Permits: together they never take more than the units of their key, each permit expires on its
//! own, and a waiter is woken when its units are free.
#![expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use registry_core::{
    Attempt, Claim, ClaimMode, Holder, LockError, LockGuard, LockOptions, LockRegistryExt as _,
    LostReason, Queueing, Registry, Release, Renewal, Semaphore,
};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};

use crate::context::{
    CriticalSection, TestContext, admin, assert_busy, assert_freed, assert_granted, assert_renewed,
    attempt, is_free, key, release, renew, renew_all, unlock,
};
use crate::faulty::{Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

/// Permits of several clients are granted until all units are taken. A further permit is busy. A
/// released unit can be taken again.
pub async fn permits_are_granted_until_all_units_are_taken(context: &TestContext) {
    let clients = [context.client().await, context.client().await];
    let mut permits = Vec::new();
    for (n, take) in [1, 2, 1].into_iter().enumerate() {
        let client = &clients[n % 2];
        permits.push((client, context.acquire_in(&**client, permit(take, 4)).await));
    }
    for client in &clients {
        assert_busy(&**client, &context.claim(permit(1, 4))).await;
    }
    let (client, released) = &permits[2];
    assert_freed(&***client, released).await;
    let next = context.acquire_in(&*clients[1], permit(1, 4)).await;
    assert_busy(&*clients[0], &context.claim(permit(1, 4))).await;
    assert_freed(&*clients[1], &next).await;
    for (client, permit) in &permits[..2] {
        assert_freed(&***client, permit).await;
    }
    assert!(is_free(&*clients[0], next.key()).await, "a released permit holds the key");
}

/// A claim that takes more than the free units is busy and takes none of them. A claim that takes
/// exactly the free units is granted.
pub async fn a_claim_takes_all_of_its_units_or_none(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let held = context.acquire_in(&*first, permit(3, 5)).await;
    for take in [3, 4, 5] {
        let busy = assert_busy(&*second, &context.claim(permit(take, 5))).await;
        assert!(!busy.is_queued, "a claim that does not queue has a place: {busy:?}");
        assert_eq!(busy.units_in_store, None, "the stated total is that of the store");
    }
    let fitting = context.acquire_in(&*second, permit(2, 5)).await;
    assert_busy(&*second, &context.claim(permit(1, 5))).await;
    assert_freed(&*first, &held).await;
    let three = context.acquire_in(&*first, permit(3, 5)).await;
    assert_freed(&*first, &three).await;
    assert_freed(&*second, &fitting).await;
    let all = context.acquire_in(&*second, permit(5, 5)).await;
    assert_busy(&*first, &context.claim(permit(1, 5))).await;
    assert_freed(&*second, &all).await;
}

/// Of many concurrent claims of three clients, with different numbers of units, the granted ones
/// never take more units than the key has.
pub async fn concurrent_permits_never_exceed_the_units(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    let section = Arc::new(CriticalSection::default());
    let mut tasks = JoinSet::new();
    for n in 0..12_u32 {
        let client = Arc::clone(&clients[n as usize % 3]);
        let section = Arc::clone(&section);
        let claims: Vec<_> =
            (0..10).map(|round| context.claim(permit((n + round) % 4 + 1, 5))).collect();
        tasks.spawn(async move {
            let mut grants = 0;
            for claim in claims {
                if !matches!(attempt(&*client, &claim).await, Attempt::Granted(_)) {
                    yield_now().await;
                    continue;
                }
                grants += 1;
                section.share(claim.mode().units() as usize, 5, yield_now()).await;
                assert_freed(&*client, &claim).await;
            }
            grants
        });
    }
    assert!(tasks.join_all().await.iter().sum::<usize>() > 0, "nothing was granted");
}

/// If one client requests many permits concurrently, as many as fit are granted.
pub async fn of_many_concurrent_permits_as_many_as_fit_are_granted(context: &TestContext) {
    let client = context.client().await;
    let mut tasks = JoinSet::new();
    for _ in 0..12 {
        let (client, claim) = (Arc::clone(&client), context.claim(permit(1, 5)));
        tasks.spawn(async move {
            let is_granted = matches!(attempt(&*client, &claim).await, Attempt::Granted(_));
            is_granted.then_some(claim)
        });
    }
    let permits: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(permits.len(), 5, "{permits:?}");
    for permit in &permits {
        assert_freed(&*client, permit).await;
    }
    assert!(is_free(&*client, &key("orders:42")).await, "a released permit holds the key");
}

/// A permit whose acquire is repeated takes its units once, and one release frees them.
pub async fn a_repeated_permit_takes_its_units_once(context: &TestContext) {
    let client = context.client().await;
    let held = context.claim(permit(2, 4));
    let token = assert_granted(&*client, &held).await.token;
    for _ in 0..2 {
        let again = assert_granted(&*client, &held).await;
        assert!(!context.capabilities().fencing || again.token == token, "{again:?}");
    }
    let other = context.acquire_in(&*client, permit(2, 4)).await;
    assert_granted(&*client, &held).await;
    assert_freed(&*client, &held).await;
    assert_eq!(release(&*client, &held).await, Release::NotHeld);
    assert_busy(&*client, &context.claim(permit(3, 4))).await;
    let next = context.acquire_in(&*client, permit(2, 4)).await;
    assert_freed(&*client, &next).await;
    assert_freed(&*client, &other).await;
}

/// A permit with a short lease expires and frees its units. Permits with long leases stay held.
pub async fn each_permit_expires_by_itself(context: &TestContext) {
    let client = context.client().await;
    let long = context.acquire_in(&*client, permit(2, 5)).await;
    let short = context.claim(permit(3, 5)).with_lease(context.short_lease());
    assert_granted(&*client, &short).await;
    context.wait_until_expired_alongside(&*client, &short, 1).await;
    assert_eq!(renew(&*client, &short).await, Renewal::Gone);
    assert_eq!(release(&*client, &short).await, Release::NotHeld);
    assert_busy(&*client, &context.claim(permit(4, 5))).await;
    let next = context.acquire_in(&*client, permit(3, 5)).await;
    assert_renewed(&*client, &long).await;
    assert_freed(&*client, &next).await;
    assert_freed(&*client, &long).await;
}

/// A renewal extends the lease of its own permit and of no other.
pub async fn a_renewal_extends_only_its_own_permit(context: &TestContext) {
    let client = context.client().await;
    let permits =
        [(); 2].map(|()| context.claim(permit(1, 2)).with_lease(context.renewable_lease()));
    assert_granted(&*client, &permits[0]).await;
    assert_granted(&*client, &permits[1]).await;
    assert_renewed(&*client, &permits[1].clone().with_lease(context.long_lease())).await;
    context.wait_until_expired_alongside(&*client, &permits[0], 1).await;
    assert_eq!(renew(&*client, &permits[0]).await, Renewal::Gone);
    assert_renewed(&*client, &permits[1]).await;
    assert_busy(&*client, &context.claim(permit(2, 2))).await;
    assert_freed(&*client, &permits[1]).await;
}

/// A release frees only the units of its own permit. Releasing a claim that was never granted frees
/// none.
pub async fn a_release_returns_its_own_units(context: &TestContext) {
    let client = context.client().await;
    let permits = [
        context.acquire_in(&*client, permit(1, 6)).await,
        context.acquire_in(&*client, permit(2, 6)).await,
        context.acquire_in(&*client, permit(3, 6)).await,
    ];
    assert_eq!(release(&*client, &context.claim(permit(3, 6))).await, Release::NotHeld);
    assert_busy(&*client, &context.claim(permit(1, 6))).await;
    assert_freed(&*client, &permits[1]).await;
    assert_busy(&*client, &context.claim(permit(3, 6))).await;
    let next = context.acquire_in(&*client, permit(2, 6)).await;
    for held in [&permits[0], &permits[2], &next] {
        assert_renewed(&*client, held).await;
        assert_freed(&*client, held).await;
    }
}

/// While permits are held, a claim that states a different total of units is busy. The response
/// contains the total that the held permits state, and the store keeps no record of the claim. Once
/// no permit is held, such a claim is granted.
pub async fn a_different_total_of_units_is_busy_with_the_total_in_the_store(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let held = context.acquire_in(&*first, permit(1, 5)).await;
    for of in [1, 4, 6] {
        for queueing in [Queueing::Skip, Queueing::ExclusiveIntent, Queueing::Join] {
            let other = context.claim(permit(1, of)).with_queueing(queueing);
            let busy = assert_busy(&*second, &other).await;
            assert_eq!(busy.units_in_store, Some(5), "{busy:?}");
        }
    }
    let same = context.acquire_in(&*second, permit(4, 5)).await;
    assert_freed(&*second, &same).await;
    assert_freed(&*first, &held).await;
    let other = context.acquire_in(&*second, permit(2, 4)).await;
    assert_eq!(assert_busy(&*first, &context.claim(permit(1, 5))).await.units_in_store, Some(4));
    assert_freed(&*second, &other).await;
}

/// Permits and exclusive claims exclude each other on one key.
pub async fn permits_and_writers_exclude_each_other(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let held = context.acquire_in(&*first, permit(1, 3)).await;
    assert_busy(&*second, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*first, &held).await;
    let writer = context.acquire_in(&*second, ClaimMode::Exclusive).await;
    let busy = assert_busy(&*first, &context.claim(permit(1, 3))).await;
    assert_eq!(busy.units_in_store, None, "an exclusive claim states no units");
    assert_freed(&*second, &writer).await;
    assert!(is_free(&*first, writer.key()).await, "a released claim holds the key");
}

/// Permits exclude readers and upgradable claims of one key, and are excluded by them.
pub async fn permits_and_readers_exclude_each_other(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let mut modes = vec![ClaimMode::Shared];
    if context.capabilities().upgradable {
        modes.push(ClaimMode::Upgradable);
    }
    for mode in modes {
        let held = context.acquire_in(&*first, permit(1, 3)).await;
        assert_busy(&*second, &context.claim(mode)).await;
        assert_freed(&*first, &held).await;
        let reader = context.acquire_in(&*second, mode).await;
        assert_busy(&*first, &context.claim(permit(1, 3))).await;
        assert_freed(&*second, &reader).await;
    }
}

/// A waiting exclusive claim blocks new permits, and is granted after the last permit ends.
pub async fn a_waiting_writer_blocks_new_permits(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let held = context.acquire_in(&*first, permit(1, 3)).await;
    let writer = context.claim(ClaimMode::Exclusive).with_queueing(Queueing::ExclusiveIntent);
    assert!(assert_busy(&*second, &writer).await.is_queued, "the waiting writer has no place");
    assert_busy(&*first, &context.claim(permit(1, 3))).await;
    assert_freed(&*first, &held).await;
    assert_busy(&*first, &context.claim(permit(1, 3))).await;
    assert_granted(&*second, &writer).await;
    assert_freed(&*second, &writer).await;
    let next = context.acquire_in(&*first, permit(1, 3)).await;
    assert_freed(&*first, &next).await;
}

/// The units of one key do not affect those of another.
pub async fn units_of_different_keys_are_counted_separately(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> = (0..5_u32)
        .map(|n| {
            let key = key(&format!("orders:n{n}"));
            Claim::new(key, context.long_lease()).with_mode(permit(n + 1, n + 1))
        })
        .collect();
    for claim in &claims {
        assert_granted(&*client, claim).await;
        assert_busy(
            &*client,
            &Claim::new(claim.key().clone(), claim.lease()).with_mode(claim.mode()),
        )
        .await;
    }
    let answers = renew_all(&*client, &claims).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Renewal::Renewed(_)))), "{answers:?}");
    for claim in &claims {
        assert_freed(&*client, claim).await;
    }
}

/// Each permit has its own token, larger than all tokens that earlier permits reserved.
pub async fn tokens_of_permits_are_unique_and_increase(context: &TestContext) {
    let clients = [context.client().await, context.client().await];
    let mut last = 0;
    for round in 0..3_u32 {
        // In a store with a queue, a grant has one token.
        let extra_tokens = if context.capabilities().fair { 0 } else { round };
        let mut permits = Vec::new();
        for n in 0..3 {
            let client = &clients[n % 2];
            let claim = context.claim(permit(n as u32 + 1, 6)).with_token_block(extra_tokens + 1);
            let token = assert_granted(&**client, &claim).await.token.get();
            assert!(token > last, "{token} after {last}");
            last = token + u64::from(extra_tokens);
            permits.push((client, claim));
        }
        for (client, claim) in &permits {
            assert_freed(&***client, claim).await;
        }
    }
}

/// In a store with wake-ups, the release of one unit ends the `wait` of a claim for one unit, also
/// if the release comes before the `wait`.
pub async fn a_released_unit_wakes_a_claim_for_one_unit(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let kept = context.acquire_in(&*first, permit(2, 3)).await;
    for during in [false, true] {
        let held = context.acquire_in(&*first, permit(1, 3)).await;
        let waiting_claim = context.claim(permit(1, 3));
        let busy = assert_busy(&*second, &waiting_claim).await;
        let wait = timeout(context.max_wait(), second.wait(&waiting_claim, &busy));
        if during {
            let released = async {
                sleep(Duration::from_millis(50)).await;
                assert_freed(&*first, &held).await;
            };
            join(wait, released).await.0.expect("a release ends the wait");
        } else {
            assert_freed(&*first, &held).await;
            wait.await.expect("a release before the wait ends the wait");
        }
        assert_granted(&*second, &waiting_claim).await;
        assert_freed(&*second, &waiting_claim).await;
    }
    assert_freed(&*first, &kept).await;
}

/// In a store with wake-ups, a claim for three units is woken when the third unit is released.
pub async fn a_claim_for_three_units_is_woken_when_the_third_is_released(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(context.acquire_in(&*first, permit(1, 4)).await);
    }
    let waiting_claim = context.claim(permit(3, 4));
    let releases = async {
        for permit in &held[..3] {
            sleep(Duration::from_millis(50)).await;
            assert_freed(&*first, permit).await;
        }
    };
    let acquired = async {
        // A `wait` may end before enough units are free. One of the remaining releases then ends
        // the next `wait`.
        for _ in 0..100 {
            let busy = match attempt(&*second, &waiting_claim).await {
                Attempt::Granted(_) => return,
                Attempt::Busy(busy) => busy,
                Attempt::Gone => panic!("only a conversion returns `Gone`: {waiting_claim:?}"),
            };
            let wait = timeout(context.max_wait(), second.wait(&waiting_claim, &busy));
            wait.await.expect("a release ends the wait");
        }
        panic!("a claim for three units was woken 100 times and never granted");
    };
    join(acquired, releases).await;
    assert_busy(&*second, &context.claim(permit(1, 4))).await;
    assert_freed(&*second, &waiting_claim).await;
    assert_freed(&*first, &held[3]).await;
}

/// `inspect` returns all permits with their units, in the order of their tokens. `list` returns
/// them in any order.
pub async fn inspect_returns_the_units_of_each_permit(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let modes = [permit(2, 7), permit(1, 7), permit(4, 7)];
    let mut permits = Vec::new();
    for (mode, client) in modes.into_iter().zip([&first, &second, &first]) {
        permits.push((client, context.acquire_in(&**client, mode).await));
    }
    let modes_of =
        |holders: Vec<Holder>| holders.iter().map(|holder| holder.mode).collect::<Vec<_>>();
    let inspect =
        async || admin(&*second).inspect(&key("orders:42")).await.expect("inspect answers");
    assert_eq!(modes_of(inspect().await), modes);
    assert_eq!(admin(&*second).list().await.expect("list answers").len(), 3);
    assert_freed(&**permits[1].0, &permits[1].1).await;
    assert_eq!(modes_of(inspect().await), [modes[0], modes[2]]);
}

/// A forced release ends all permits of the key, and all units can be taken again.
pub async fn a_forced_release_ends_all_permits(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let permits = [
        context.acquire_in(&*first, permit(1, 3)).await,
        context.acquire_in(&*first, permit(2, 3)).await,
    ];
    let freed_by_force = admin(&*second).force_release(&key("orders:42")).await;
    assert_eq!(freed_by_force.expect("force_release answers"), Release::Freed);
    for permit in &permits {
        assert_eq!(renew(&*first, permit).await, Renewal::Gone);
        assert_eq!(release(&*first, permit).await, Release::NotHeld);
    }
    let all = context.acquire_in(&*second, permit(3, 3)).await;
    assert_freed(&*second, &all).await;
}

/// Callers of two processes that take different numbers of units never hold more units than the
/// semaphore has. Each caller acquires its units.
pub async fn a_semaphore_limits_the_callers_of_several_processes(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let section = Arc::new(CriticalSection::default());
    let mut tasks = JoinSet::new();
    for n in 0..8_u32 {
        let semaphore = semaphore(&registries[n as usize % 2], 3);
        let section = Arc::clone(&section);
        tasks.spawn(async move {
            for round in 0..4 {
                let take = (n + round) % 3 + 1;
                let guard = semaphore.acquire_many(take).await.expect("the units are acquired");
                assert_eq!(guard.mode(), permit(take, 3));
                section.share(take as usize, 3, sleep(Duration::from_millis(1))).await;
                unlock(guard).await;
            }
        });
    }
    assert_eq!(tasks.join_all().await.len(), 8, "all callers get their units");
}

/// One process holds several permits, each with its own token and lease. `try_acquire` returns
/// `Ok(None)` when too few units are left.
pub async fn a_process_holds_several_permits(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let (ours, theirs) = (semaphore(&local, 4), semaphore(&remote, 4));
    let guards = [
        ours.acquire().await.expect("a unit is free"),
        ours.acquire().await.expect("a unit is free"),
        ours.acquire_many(2).await.expect("two units are free"),
    ];
    let tokens: HashSet<_> = guards.iter().map(LockGuard::fencing_token).collect();
    assert_eq!(tokens.len(), 3, "two permits with one token: {guards:?}");
    for semaphore in [&ours, &theirs] {
        assert!(semaphore.try_acquire().await.expect("busy is no error").is_none());
        let wait = Duration::from_millis(50);
        assert!(semaphore.try_acquire_for(wait).await.expect("busy is no error").is_none());
    }
    let [first, second, two] = guards;
    unlock(second).await;
    assert!(theirs.try_acquire_many(2).await.expect("busy is no error").is_none());
    let next = theirs.try_acquire().await.expect("the store answers").expect("a unit is free");
    assert!(first.is_held() && two.is_held());
    for guard in [first, two, next] {
        unlock(guard).await;
    }
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// Taking zero units, taking more units than the semaphore has, and resizing to zero units return
/// `InvalidOption` without a request.
pub async fn units_out_of_range_are_refused_before_any_request(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    for (of, take) in [(3, 0), (3, 4), (3, u32::MAX), (0, 0), (0, 1)] {
        let semaphore = semaphore(&registry, of);
        assert_invalid(semaphore.try_acquire_many(take).await);
        assert_invalid(semaphore.acquire_many(take).await);
    }
    assert_invalid(semaphore(&registry, 3).resize(0).await);
    assert_eq!(faulty.requests(), 0, "a request was sent");
}

/// While a permit is held, a semaphore of the same key that states a different total of units
/// returns `LockError::UnitsMismatch` with both totals, with and without a wait. After the release,
/// its permits are granted.
pub async fn a_different_total_of_units_is_an_error(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let held = semaphore(&local, 3).acquire().await.expect("a unit is free");
    for registry in [&local, &remote] {
        let other = semaphore(registry, 5);
        assert_units_mismatch(other.try_acquire().await, 5, 3);
        let waited = timeout(context.max_wait(), other.acquire()).await;
        assert_units_mismatch(waited.expect("it does not wait"), 5, 3);
    }
    unlock(held).await;
    let other = semaphore(&remote, 5).acquire_many(5).await.expect("five units are free");
    assert_units_mismatch(semaphore(&local, 3).try_acquire().await, 3, 5);
    unlock(other).await;
}

/// In a store without a queue, a waiter for one unit gets a released unit, although a caller of
/// another process has waited longer for three. That caller gets its units when they are released.
pub async fn a_released_unit_goes_to_a_caller_that_takes_one(context: &TestContext) {
    let holding = semaphore(&context.registry().await, 3);
    let (registry_for_three, busy_of_three) = context.counting_registry().await;
    let (registry_for_one, busy_of_one) = context.counting_registry().await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(holding.acquire().await.expect("a unit is free"));
    }
    let spawn_caller = |registry: &Registry, take| {
        let (semaphore, wait) = (semaphore(registry, 3), context.max_wait());
        tokio::spawn(
            async move { semaphore.acquire_with(take, LockOptions::new().wait(wait)).await },
        )
    };
    let three = spawn_caller(&registry_for_three, 3);
    context.eventually("the first caller waits", async || busy_of_three.get() > 0).await;
    let one = spawn_caller(&registry_for_one, 1);
    context.eventually("the second caller waits", async || busy_of_one.get() > 0).await;
    unlock(held.pop().expect("three permits")).await;
    let one = one.await.expect("no panic").expect("one unit was released");
    assert!(!three.is_finished(), "more units are held than the semaphore has");
    unlock(one).await;
    for guard in held {
        unlock(guard).await;
    }
    unlock(three.await.expect("no panic").expect("all units were released")).await;
}

/// The loss of one permit is reported to its guard and to no other. Its units can be taken again.
pub async fn a_lost_permit_is_reported_to_its_guard_only(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let semaphore = semaphore(&registry, 3);
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(semaphore.acquire().await.expect("a unit is free"));
    }
    let lost = guards.remove(1);
    context.break_claim(lost.claim()).await;
    context.assert_lost(&lost, context.renewable_lease(), LostReason::Gone).await;
    for guard in &guards {
        let answer = context.renew_with_retries(guard, context.renewable_lease()).await;
        answer.expect("the other permits are held");
    }
    let next = semaphore.try_acquire_for(context.max_wait()).await.expect("the store answers");
    unlock(next.expect("the lost unit is free")).await;
    assert!(matches!(lost.unlock().await, Err(LockError::Lost { .. })));
    for guard in guards {
        unlock(guard).await;
    }
}

/// In a store that reports invalidations, a forced release is reported at once to all permits of a
/// process, however long their leases are.
pub async fn a_forced_release_is_reported_to_all_permits_at_once(context: &TestContext) {
    let (holding, operator) = (context.registry().await, context.registry().await);
    let semaphore = semaphore(&holding, 5);
    let mut guards = Vec::new();
    for _ in 0..4 {
        guards.push(semaphore.acquire().await.expect("a unit is free"));
    }
    unlock(guards.remove(1)).await;
    // A store with injected faults may break the lock and still return an error.
    while operator.force_release("orders:42").await.is_err() {}
    for guard in &guards {
        context.assert_lost(guard, Duration::ZERO, LostReason::Gone).await;
    }
}

/// The units of a process that has died become free when its lease ends, and a waiting caller takes
/// them. Other permits stay held.
pub async fn the_units_of_a_dead_holder_return_after_its_lease(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let (dying, waiting) =
        (context.registry_over(&faulty, context.short_lease()), context.registry().await);
    let dead = semaphore(&dying, 3).acquire_many(2).await.expect("two units are free");
    faulty.apply(Faults::outage());
    let waiting = semaphore(&waiting, 3);
    let alive = waiting.acquire().await.expect("one unit is free");
    let options = LockOptions::new().wait(context.short_lease() + context.max_wait());
    let taken = waiting.try_acquire_with(2, options).await.expect("the store answers");
    let taken = taken.expect("the lease of the dead holder ends");
    assert!(!dead.is_held(), "more units are held than the semaphore has");
    assert!(alive.is_held());
    unlock(taken).await;
    unlock(alive).await;
}

/// Permits are renewed beyond their leases.
pub async fn permits_are_renewed_beyond_their_leases(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let ours = semaphore(&local, 3);
    let guards = [
        ours.acquire().await.expect("a unit is free"),
        ours.acquire_many(2).await.expect("two units are free"),
    ];
    sleep(context.renewable_lease() * 2).await;
    assert!(semaphore(&remote, 3).try_acquire().await.expect("busy is no error").is_none());
    for guard in guards {
        assert!(guard.is_held());
        unlock(guard).await;
    }
}

/// After a waiting `acquire_many` future is dropped, the units that it waited for can be taken.
/// Dropping a guard frees its units.
pub async fn a_dropped_caller_or_guard_returns_its_units(context: &TestContext) {
    let (holding, (waiting, busy_count)) =
        (context.registry().await, context.counting_registry().await);
    let held = semaphore(&holding, 3).acquire_many(2).await.expect("two units are free");
    let waiting = semaphore(&waiting, 3);
    let caller = waiting.clone();
    let caller = tokio::spawn(async move { caller.acquire_many(3).await });
    context.eventually("the caller waits in the store", async || busy_count.get() > 0).await;
    caller.abort();
    let one = waiting.try_acquire_for(context.max_wait()).await.expect("the store answers");
    let one = one.expect("one unit is free");
    drop(held);
    let options = LockOptions::new().wait(context.max_wait());
    let two = waiting.try_acquire_with(2, options).await.expect("the store answers");
    unlock(two.expect("the dropped guard returns its units")).await;
    unlock(one).await;
}

/// `resize` waits until no permit is held, and blocks new ones meanwhile. Afterwards, the semaphore
/// and its clones have the new number of units. Calls that waited behind the resize use it too.
pub async fn a_semaphore_is_resized_when_no_permit_is_held(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let ours = semaphore(&local, 2);
    let held = semaphore(&remote, 2).acquire().await.expect("a unit is free");
    let clone = ours.clone();
    let resize = tokio::spawn(async move { clone.resize(4).await });
    let blocked = semaphore(&remote, 2);
    context
        .eventually("a waiting resize blocks new permits", async || {
            match blocked.try_acquire().await.expect("the store answers") {
                Some(guard) => {
                    unlock(guard).await;
                    false
                }
                None => true,
            }
        })
        .await;
    assert!(!resize.is_finished(), "resized while a permit is held");
    unlock(held).await;
    let resized = timeout(context.max_wait(), resize).await.expect("no permit is held");
    resized.expect("no panic").expect("the store answers");
    assert_eq!(ours.units(), 4);
    let all = ours.try_acquire_many(4).await.expect("the store answers");
    unlock(all.expect("four units are free")).await;
    assert_waiting_callers_are_resized(context).await;
}

async fn assert_waiting_callers_are_resized(context: &TestContext) {
    let registry = context.registry().await;
    let ours = semaphore(&registry, 1);
    let held = ours.acquire().await.expect("a unit is free");
    let mut waiting = Vec::new();
    let resizing = ours.clone();
    let mut resize = Box::pin(async move { resizing.resize(3).await });
    // One poll puts each call into the queue of this process, in this order.
    assert!(futures_util::poll!(&mut resize).is_pending());
    for _ in 0..3 {
        let clone = ours.clone();
        let mut call = Box::pin(async move { clone.acquire().await });
        assert!(futures_util::poll!(&mut call).is_pending());
        waiting.push(tokio::spawn(call));
    }
    let resize = tokio::spawn(resize);
    unlock(held).await;
    let resized = timeout(context.max_wait(), resize).await.expect("no permit is held");
    resized.expect("no panic").expect("the store answers");
    for call in waiting {
        let guard = timeout(context.max_wait(), call).await.expect("three units are free");
        let guard = guard.expect("no panic").expect("a unit is free");
        assert_eq!(guard.mode(), permit(1, 3));
        unlock(guard).await;
    }
    let all = ours.try_acquire_many(3).await.expect("the store answers");
    unlock(all.expect("three units are free")).await;
}

/// `holders` returns each permit with its units and label.
pub async fn holders_returns_each_permit(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let (ours, theirs) = (semaphore(&local, 5), semaphore(&remote, 5));
    let labelled = LockOptions::new().label("upload");
    let guards = [
        ours.acquire_with(3, labelled).await.expect("three units are free"),
        theirs.acquire().await.expect("a unit is free"),
    ];
    let holders = theirs.holders().await.expect("holders answers");
    let modes: Vec<_> = holders.iter().map(|holder| holder.mode).collect();
    assert_eq!(modes, [permit(3, 5), permit(1, 5)]);
    if context.capabilities().labels {
        assert_eq!(holders[0].label.as_deref(), Some("upload"));
    }
    for guard in guards {
        unlock(guard).await;
    }
    assert_eq!(ours.holders().await.expect("holders answers"), []);
}

/// `close` releases the permits of its registry at its time limit. A waiting caller returns
/// `LockError::Closed`. Permits of other registries stay held.
pub async fn close_returns_the_units_of_its_process(context: &TestContext) {
    let (remote, (local, busy_count)) =
        (context.registry().await, context.counting_registry().await);
    let theirs = semaphore(&remote, 4);
    let kept = theirs.acquire().await.expect("a unit is free");
    let ours = semaphore(&local, 4);
    let guards = [
        ours.acquire().await.expect("a unit is free"),
        ours.acquire_many(2).await.expect("two units are free"),
    ];
    let waiting = ours.clone();
    let waiting = tokio::spawn(async move { waiting.acquire_many(2).await });
    context.eventually("the caller waits in the store", async || busy_count.get() > 0).await;
    let report = local.close(Duration::from_millis(50)).await;
    assert_eq!((report.lost, report.abandoned), (2, 0), "{report:?}");
    assert!(matches!(waiting.await.expect("no panic"), Err(LockError::Closed)));
    for guard in guards {
        assert_eq!(guard.lost().await, LostReason::Closed);
    }
    let options = LockOptions::new().wait(context.max_wait());
    let next = theirs.try_acquire_with(3, options).await.expect("the store answers");
    unlock(next.expect("the units have returned")).await;
    unlock(kept).await;
}

/// An `acquire_many` future may be dropped at every poll while it waits for units of another
/// process. All units are soon free.
pub async fn acquire_many_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let (ours, theirs) = (semaphore(&local, 3), semaphore(&remote, 3));
    let make = async || {
        let held = theirs.acquire_many(2).await.expect("two units are free");
        tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            unlock(held).await;
        });
        let semaphore = ours.clone();
        async move { semaphore.acquire_many(3).await }
    };
    sweep(make, 1_000, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            unlock(output.expect("the store answers")).await;
        }
        let options = LockOptions::new().wait(context.max_wait());
        let all = theirs.try_acquire_with(3, options).await.expect("the store answers");
        unlock(all.expect("a dropped call holds no units")).await;
    })
    .await;
}

/// An attempt whose reply was lost is repeated, and takes its units only once.
pub async fn a_permit_with_a_lost_reply_takes_its_units_once(context: &TestContext) {
    let lost = crate::faulty::Fault::LoseReply;
    let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, lost)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let guard = semaphore(&local, 3).acquire_many(2).await.expect("the lost reply is retried");
    let one = semaphore(&remote, 3).try_acquire_for(context.max_wait()).await;
    let one = one.expect("the store answers").expect("the repeated attempt took its units once");
    unlock(guard).await;
    let options = LockOptions::new().wait(context.max_wait());
    let two = semaphore(&remote, 3).try_acquire_with(2, options).await.expect("it answers");
    unlock(two.expect("the units have returned")).await;
    unlock(one).await;
}

fn permit(take: u32, of: u32) -> ClaimMode {
    ClaimMode::Permits { take, of }
}

fn semaphore(registry: &Registry, units: u32) -> Semaphore {
    registry.semaphore("orders:42", units)
}

fn assert_invalid<T: std::fmt::Debug>(result: Result<T, LockError>) {
    assert!(matches!(result, Err(LockError::InvalidOption(_))), "{result:?}");
}

fn assert_units_mismatch<T: std::fmt::Debug>(result: Result<T, LockError>, ours: u32, theirs: u32) {
    match result {
        Err(LockError::UnitsMismatch { key, stated, held, .. }) => {
            assert_eq!((key.as_str(), stated, held), ("orders:42", ours, theirs));
        }
        other => panic!("another number of units is reported as {other:?}"),
    }
}
