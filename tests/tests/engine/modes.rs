//! Tests readers, upgrades, permits, fair queues, re-entry and locks on several keys, over the
//! in-process store on paused time.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, ClaimMode, FencingToken, Key, LockBackend,
    LockError, LockGuard, LockOptions, LockRegistryExt as _, MemoryBackend, Owner, Queueing,
    Registry, Release, Renewal,
};

fn two_processes() -> (Registry, Registry) {
    let store = MemoryBackend::new();
    let registry = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    (registry(), registry())
}

/// Releases the lock when the other calls of the test have begun to wait. Paused time advances only
/// once all of them wait.
async fn unlock_later(guard: LockGuard) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn readers_share_and_exclude_a_writer() {
    let (a, b) = two_processes();
    let first = a.obtain("k").read().await.unwrap();
    let second = b.obtain("k").read().await.unwrap();
    assert!(a.obtain("k").try_lock().await.unwrap().is_none());
    assert!(b.obtain("k").try_lock().await.unwrap().is_none());
    assert_eq!(first.mode(), ClaimMode::Shared);
    assert_eq!(a.obtain("k").holders().await.unwrap().len(), 2);
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    let writer = a.obtain("k").lock().await.unwrap();
    assert!(b.obtain("k").try_read().await.unwrap().is_none());
    writer.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn readers_of_one_registry_share_one_grant() {
    let (a, _) = two_processes();
    let lock = a.obtain("k");
    let guards =
        [lock.read().await.unwrap(), lock.read().await.unwrap(), lock.read().await.unwrap()];
    assert_eq!(lock.holders().await.unwrap().len(), 1);
    assert_eq!(a.held(), 1);
    let tokens: Vec<_> = guards.iter().map(|guard| guard.fencing_token()).collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert!(lock.try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_waiting_writer_blocks_new_readers_of_other_registries() {
    let (a, b) = two_processes();
    let reader = a.obtain("k").read().await.unwrap();
    let writer = {
        let lock = b.obtain("k");
        tokio::spawn(async move { lock.lock().await })
    };
    while a.obtain("k").try_read().await.unwrap().is_some() {
        tokio::task::yield_now().await;
    }
    reader.unlock().await.unwrap();
    let writer = writer.await.unwrap().unwrap();
    assert!(a.obtain("k").try_read().await.unwrap().is_none());
    writer.unlock().await.unwrap();
    assert!(a.obtain("k").try_read().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_waits_for_readers_and_blocks_new_ones() {
    let (a, b) = two_processes();
    let reader = b.obtain("k").read().await.unwrap();
    let guard = a.obtain("k").upgradable().await.unwrap();
    let before = guard.fencing_token();
    let lost = tokio::spawn(guard.lost());
    let upgrade = tokio::spawn(guard.upgrade());
    while b.obtain("k").try_read_with(LockOptions::new().label("x")).await.unwrap().is_some() {
        tokio::task::yield_now().await;
    }
    assert!(!upgrade.is_finished());
    reader.unlock().await.unwrap();
    let guard = upgrade.await.unwrap().unwrap();
    assert_eq!(guard.mode(), ClaimMode::Exclusive);
    assert!(guard.fencing_token() > before);
    assert!(b.obtain("k").try_read().await.unwrap().is_none());
    let guard = guard.downgrade().await.unwrap();
    assert_eq!(guard.mode(), ClaimMode::Shared);
    assert!(b.obtain("k").try_read().await.unwrap().is_some());
    assert!(matches!(guard.upgrade().await, Err(LockError::InvalidConversion { .. })));
    // The `lost` future of the guard also reports a loss after its conversion.
    let guard = a.obtain("k").upgradable().await.unwrap();
    drop(lost);
    let lost = tokio::spawn(guard.lost());
    let guard = guard.upgrade().await.unwrap();
    assert!(b.force_release("k").await.unwrap());
    lost.await.unwrap();
    assert!(!guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_that_times_out_leaves_the_guard_upgradable() {
    let (a, b) = two_processes();
    let reader = b.obtain("k").read().await.unwrap();
    let guard = a.obtain("k").upgradable().await.unwrap();
    let guard = guard.try_upgrade_for(Duration::from_secs(1)).await.unwrap().unwrap_err();
    assert_eq!(guard.mode(), ClaimMode::Upgradable);
    assert!(guard.is_held());
    assert!(b.obtain("k").try_read_with(LockOptions::new().label("x")).await.unwrap().is_some());
    drop(reader);
    guard.unlock().await.unwrap();
    b.idle().await;
    assert!(a.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn permits_never_exceed_the_units_and_return_one_by_one() {
    let (a, b) = two_processes();
    let (first, second) = (a.semaphore("k", 3), b.semaphore("k", 3));
    let two = first.acquire_many(2).await.unwrap();
    assert!(second.try_acquire_many(2).await.unwrap().is_none());
    let one = second.try_acquire().await.unwrap().unwrap();
    assert!(first.try_acquire().await.unwrap().is_none());
    let waiting = tokio::spawn(async move { second.acquire().await });
    tokio::task::yield_now().await;
    two.unlock().await.unwrap();
    let third = waiting.await.unwrap().unwrap();
    assert!(third.fencing_token() > one.fencing_token());
    let error = b.semaphore("k", 4).acquire().await.unwrap_err();
    assert!(matches!(error, LockError::UnitsMismatch { stated: 4, held: 3, .. }), "{error}");
    assert!(matches!(first.acquire_many(4).await, Err(LockError::InvalidOption(_))));
    drop((one, third));
    first.resize(1).await.unwrap();
    let _all = first.acquire().await.unwrap();
    assert!(first.try_acquire().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_fair_lock_is_granted_in_the_order_of_arrival() {
    let (a, b) = two_processes();
    let fair = || LockOptions::new().fair(true);
    let held = a.obtain("k").lock_with(fair()).await.unwrap();
    let waiting = {
        let lock = b.obtain("k");
        tokio::spawn(async move { lock.lock_with(fair()).await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    held.unlock().await.unwrap();
    // The queue entry of the waiter precedes a caller that arrives now.
    assert!(a.obtain("k").try_lock().await.unwrap().is_none());
    waiting.await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_owner_re_enters_what_it_holds_and_cannot_wait_for_itself() {
    let (a, _) = two_processes();
    let owner = Owner::new();
    let options = || LockOptions::new().owner(&owner);
    let lock = a.obtain("k");
    let reader = lock.read_with(options()).await.unwrap();
    let again = lock.read_with(options()).await.unwrap();
    assert_eq!(reader.fencing_token(), again.fencing_token());
    let error = lock.lock_with(options()).await.unwrap_err();
    assert!(matches!(error, LockError::HeldByOwner { .. }), "{error}");
    drop((reader, again));
    let writer = lock.lock_with(options()).await.unwrap();
    let inner = lock.read_with(options()).await.unwrap();
    assert_eq!(inner.mode(), ClaimMode::Exclusive);
    drop((writer, inner));
}

#[tokio::test(start_paused = true)]
async fn a_queued_call_fails_when_its_owner_acquires_the_lock_in_a_mode_that_excludes_it() {
    let (a, b) = two_processes();
    let owner = Owner::new();
    let options = || LockOptions::new().owner(&owner);
    let lock = a.obtain("k");
    // The owner's first call waits for the other process, or joins the grant of another reader that
    // does. The second waits for the first.
    for is_joined in [false, true] {
        let other = b.obtain("k").lock().await.unwrap();
        let other_reader = async {
            let guard = if is_joined { Some(lock.read().await.unwrap()) } else { None };
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(guard);
        };
        let release = unlock_later(other);
        let (read, write) = (lock.read_with(options()), lock.lock_with(options()));
        let write = tokio::time::timeout(Duration::from_secs(5), write);
        let ((), reader, writer, ()) = tokio::join!(other_reader, read, write, release);
        let reader = reader.unwrap();
        let error = writer.expect("the call does not wait for its owner").unwrap_err();
        assert!(matches!(error, LockError::HeldByOwner { held: ClaimMode::Shared, .. }), "{error}");
        reader.unlock().await.unwrap();
        drop(lock.lock_with(options()).await.unwrap());
        a.idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_during_an_upgrade_of_its_owner_enters_the_upgraded_lock() {
    let (a, b) = two_processes();
    let owner = Owner::new();
    let options = || LockOptions::new().owner(&owner);
    let lock = a.obtain("k");
    let reader = b.obtain("k").read().await.unwrap();
    let upgradable = lock.upgradable_with(options()).await.unwrap();
    let call = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        tokio::time::timeout(Duration::from_secs(60), lock.lock_with(options())).await
    };
    let release = unlock_later(reader);
    let (upgraded, call, ()) = tokio::join!(upgradable.upgrade(), call, release);
    let (upgraded, entered) = (upgraded.unwrap(), call.expect("no wait for its owner").unwrap());
    assert_eq!(entered.fencing_token(), upgraded.fencing_token());
    upgraded.unlock().await.unwrap();
    assert!(entered.is_held());
    entered.unlock().await.unwrap();
    a.idle().await;
    assert!(b.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_fails_while_its_owner_also_holds_a_shared_lock() {
    let (a, b) = two_processes();
    let owner = Owner::new();
    let options = || LockOptions::new().owner(&owner);
    let lock = a.obtain("k");
    let reader = lock.read_with(options()).await.unwrap();
    let upgradable = lock.upgradable_with(options()).await.unwrap();
    let upgrade = tokio::time::timeout(Duration::from_secs(60), upgradable.upgrade());
    let error = upgrade.await.expect("the upgrade does not wait for its owner").unwrap_err();
    assert!(
        matches!(error, LockError::InvalidConversion { from: ClaimMode::Upgradable, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("this owner also holds a shared lock"), "{error}");
    a.idle().await;
    assert!(
        b.obtain("k").try_upgradable_with(LockOptions::new()).await.unwrap().is_some(),
        "the failed upgrade holds"
    );
    b.idle().await;
    // A shared lock of another owner only delays the upgrade.
    let upgradable = lock.upgradable_with(LockOptions::new().owner(&Owner::new())).await.unwrap();
    let release = unlock_later(reader);
    let upgrade = tokio::time::timeout(Duration::from_secs(60), upgradable.upgrade());
    let (upgraded, ()) = tokio::join!(upgrade, release);
    assert_eq!(upgraded.unwrap().unwrap().mode(), ClaimMode::Exclusive);
}

#[tokio::test(start_paused = true)]
async fn a_reader_does_not_join_a_shared_grant_while_its_owner_upgrades() {
    let (a, _) = two_processes();
    let owner = Owner::new();
    let options = || LockOptions::new().owner(&owner);
    let lock = a.obtain("k");
    let upgradable = lock.upgradable_with(options()).await.unwrap();
    let other_reader = lock.read().await.unwrap();
    let read = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        lock.read_with(options()).await
    };
    let release = unlock_later(other_reader);
    let all = async { tokio::join!(upgradable.upgrade(), read, release) };
    let all = tokio::time::timeout(Duration::from_secs(60), all).await;
    let (upgraded, entered, ()) = all.expect("no call waits for its owner");
    let (upgraded, entered) = (upgraded.unwrap(), entered.unwrap());
    assert_eq!(entered.fencing_token(), upgraded.fencing_token());
    assert_eq!(entered.mode(), ClaimMode::Exclusive);
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_owner_wait_for_each_others_permits() {
    let (a, b) = two_processes();
    let permits = a.semaphore("k", 1);
    let other = b.semaphore("k", 1).acquire().await.unwrap();
    let hold_permit = async |begin: u64| {
        tokio::time::sleep(Duration::from_millis(begin)).await;
        let permit = permits.acquire().await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        permit.unlock().await
    };
    let release = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        other.unlock().await
    };
    // The second waits when the first receives its permit, and the third arrives later.
    let work = async { tokio::join!(hold_permit(0), hold_permit(50), hold_permit(500), release) };
    let (first, second, third, released) = Owner::scope(work).await;
    first.and(second).and(third).and(released).unwrap();
}

#[tokio::test(start_paused = true)]
async fn many_keys_are_held_together_or_not_at_all() {
    let (a, b) = two_processes();
    let all = a.obtain_all(["c", "a", "b", "a"]);
    assert_eq!(all.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    let busy = b.obtain("b").lock().await.unwrap();
    assert!(all.try_lock().await.unwrap().is_none());
    assert!(all.try_lock_for(Duration::from_secs(1)).await.unwrap().is_none());
    let others = b.obtain_all(["a", "c"]).try_lock().await.unwrap();
    drop(others.expect("the call that timed out holds no key"));
    b.idle().await;
    let waiting = tokio::spawn(async move { all.lock().await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    busy.unlock().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.is_held());
    assert_eq!(guard.fencing_tokens().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "b", "c"]);
    let lost = tokio::spawn(guard.lost());
    assert!(b.force_release("c").await.unwrap());
    assert_eq!(lost.await.unwrap().0, "c");
    assert!(!guard.is_held());
    assert!(guard.unlock().await.is_err());
    assert!(b.obtain_all(["a", "b", "c"]).try_lock().await.unwrap().is_some());
    let none: [&str; 0] = [];
    assert!(matches!(b.obtain_all(none).lock().await, Err(LockError::InvalidOption(_))));
}

#[tokio::test(start_paused = true)]
async fn callers_of_several_keys_in_any_order_do_not_deadlock() {
    let store = MemoryBackend::new();
    let tasks = (0..8_u64).map(|n| {
        let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
        tokio::spawn(async move {
            for round in 0..30 {
                let first = (n * 7 + round) % 6;
                let keys = [first, (first + 1 + n % 3) % 6, (first + 4) % 6];
                let keys = keys.map(|key| key.to_string());
                let guard = registry.obtain_all(keys).lock().await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
                guard.unlock().await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

/// If the pause grew with each lost round, callers that do not pause would always overtake the
/// caller.
#[tokio::test(start_paused = true)]
async fn a_caller_of_several_keys_that_lost_many_rounds_soon_tries_again() {
    let (a, b) = two_processes();
    let keys = [b.obtain("0"), b.obtain("1")];
    let mut held = keys[0].lock().await.unwrap();
    let all = a.obtain_all(["0", "1"]);
    let waiting = tokio::spawn(async move { all.lock().await });
    for round in 1..=12 {
        // Longer than any pause, so that the caller waits for the key that is held.
        tokio::time::sleep(Duration::from_secs(5)).await;
        let next = keys[round % 2].lock().await.unwrap();
        held.unlock().await.unwrap();
        held = next;
    }
    // The caller has lost another round, and pauses.
    tokio::time::sleep(Duration::from_millis(1)).await;
    held.unlock().await.unwrap();
    let unlocked_at = tokio::time::Instant::now();
    let guard = waiting.await.unwrap().unwrap();
    let waited = unlocked_at.elapsed();
    drop(guard);
    assert!(waited < Duration::from_millis(100), "{waited:?}");
}

async fn acquire(store: &MemoryBackend, claim: &Claim) -> FencingToken {
    match store.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant.token,
        other => panic!("not granted: {other:?}"),
    }
}

fn claim(key: &str, mode: ClaimMode, block: u32) -> Claim {
    let key = Key::new(key).unwrap();
    Claim::new(key, Duration::from_secs(30)).with_mode(mode).with_token_block(block)
}

/// A release makes the unused tokens of its block available again, unless later tokens are granted.
#[tokio::test(start_paused = true)]
async fn a_writer_with_a_waiter_returns_no_tokens_that_other_keys_have() {
    let store = MemoryBackend::new();
    let writer = claim("a", ClaimMode::Exclusive, 16);
    acquire(&store, &writer).await;
    let permit = claim("b", ClaimMode::Permits { take: 1, of: 2 }, 1);
    let before = acquire(&store, &permit).await;
    let waiter = claim("a", ClaimMode::Exclusive, 16).with_queueing(Queueing::Join);
    assert!(matches!(store.try_acquire(&waiter).await.unwrap(), Attempt::Busy(_)));
    store.release(&writer.with_token_block(1)).await.unwrap();
    let next = acquire(&store, &claim("b", ClaimMode::Permits { take: 1, of: 2 }, 1)).await;
    assert!(next > before, "{next} after {before}");
}

#[tokio::test(start_paused = true)]
async fn a_reader_returns_no_tokens_that_hand_overs_of_another_key_have_used() {
    let store = MemoryBackend::new();
    let writer = claim("a", ClaimMode::Exclusive, 16);
    let first = acquire(&store, &writer).await;
    let reader = claim("b", ClaimMode::Shared, 16);
    acquire(&store, &reader).await;
    // Ten hand-overs have used the ten tokens after the first.
    store.release(&writer.with_token_block(11)).await.unwrap();
    store.release(&reader.with_token_block(1)).await.unwrap();
    let next = acquire(&store, &claim("a", ClaimMode::Exclusive, 16)).await;
    assert!(next.get() > first.get() + 10, "{next} after ten hand-overs of {first}");
}

/// A late request of an upgrade that was given up makes the claim exclusive, with a token that the
/// holder does not know.
#[tokio::test(start_paused = true)]
async fn a_lock_that_a_late_upgrade_has_changed_is_released_when_a_downgrade_fails() {
    let store = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let guard = registry.obtain("k").upgradable().await.unwrap();
    let late = guard.claim().clone().converted_to(ClaimMode::Exclusive);
    acquire(&store, &late.restricted_to_grant(guard.fencing_token())).await;
    let downgraded = guard.downgrade().await;
    assert!(matches!(downgraded, Err(LockError::Lost { .. })), "{downgraded:?}");
    registry.idle().await;
    assert_eq!(registry.obtain("k").holders().await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_held_for_their_min_hold_only_if_all_were_acquired() {
    let (a, b) = two_processes();
    let options = LockOptions::new().min_hold(Duration::from_secs(60));
    let keys = a.obtain_all(["a", "b"]);
    let held = b.obtain("b").lock().await.unwrap();
    assert!(keys.try_lock_with(options.clone()).await.unwrap().is_none());
    assert!(b.obtain("a").try_lock().await.unwrap().is_some());
    b.idle().await;
    held.unlock().await.unwrap();
    keys.lock_with(options).await.unwrap().unlock().await.unwrap();
    for key in ["a", "b"] {
        assert!(b.obtain(key).try_lock().await.unwrap().is_none(), "{key:?} is free too early");
    }
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert!(b.obtain_all(["a", "b"]).try_lock().await.unwrap().is_some());
    let invalid =
        LockOptions::new().min_hold(Duration::from_secs(2)).max_hold(Duration::from_secs(1));
    let refused = keys.try_lock_with(invalid).await;
    assert!(matches!(refused, Err(LockError::InvalidOption { .. })), "{refused:?}");
}

/// The first conversions fail like requests on connections that broke while idle.
#[derive(Debug)]
struct StaleConnections {
    store: MemoryBackend,
    left: AtomicUsize,
}

#[async_trait]
impl LockBackend for StaleConnections {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let left = self.left.load(Ordering::Relaxed);
        if claim.is_conversion() && left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
            let error = BackendError::transient("the connection broke on purpose");
            return Err(error.as_stale_connection());
        }
        self.store.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.store.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.store.release(claim).await
    }
}

/// Without a wait, only a stale connection is a reason to repeat the conversion.
#[tokio::test(start_paused = true)]
async fn an_upgrade_without_a_wait_is_repeated_once_after_a_stale_connection() {
    for (stale, is_upgraded) in [(1, true), (2, false)] {
        let backend = StaleConnections { store: MemoryBackend::new(), left: stale.into() };
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let guard = registry.obtain("k").upgradable().await.unwrap();
        match guard.try_upgrade_for(Duration::ZERO).await {
            Ok(Ok(guard)) => assert!(is_upgraded && guard.mode() == ClaimMode::Exclusive),
            Err(error) => assert!(!is_upgraded && error.is_retryable(), "{stale}: {error}"),
            busy => panic!("no other client holds the lock: {busy:?}"),
        }
    }
}

/// The second call queues behind the first, which has the local permit. It must not receive this
/// permit, and wait in the store for its own owner.
#[tokio::test(start_paused = true)]
async fn waiting_calls_of_one_owner_acquire_an_upgradable_lock_together() {
    let (a, b) = two_processes();
    let held = b.obtain("k").lock().await.unwrap();
    let owner = Owner::new();
    let lock = a.obtain("k");
    let call = || lock.upgradable_with(LockOptions::new().owner(&owner));
    let both = async { tokio::join!(call(), call()) };
    let released = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        held.unlock().await.unwrap();
    };
    let both =
        tokio::time::timeout(Duration::from_secs(60), async { tokio::join!(both, released).0 });
    let (first, second) = both.await.expect("no call waits for its own owner");
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.fencing_token(), second.fencing_token());
    assert!(b.obtain("k").try_upgradable_with(LockOptions::new()).await.unwrap().is_none());
    first.unlock().await.unwrap();
    second.unlock().await.unwrap();
    assert!(b.obtain("k").try_upgradable_with(LockOptions::new()).await.unwrap().is_some());
}
