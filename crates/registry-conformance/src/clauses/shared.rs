//! Shared locks: readers hold together, readers and writers exclude each other, and a waiting
//! writer blocks new readers.
#![expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use futures_util::poll;
use registry_core::{
    Attempt, Claim, ClaimMode, Holder, LockBackend, LockError, LockGuard, LockOptions, LostReason,
    Owner, Queueing, Registry, Release, Renewal,
};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};

use crate::context::{
    CriticalSection, TestContext, admin, assert_busy, assert_freed, assert_granted, assert_renewed,
    attempt, is_free, key, release, renew, renew_all, unlock,
};
use crate::faulty::{Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

/// Readers of two clients hold a key at the same time, and the key is free after both released it.
pub async fn readers_of_two_clients_hold_together(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let readers = [
        context.acquire_in(&*first, ClaimMode::Shared).await,
        context.acquire_in(&*second, ClaimMode::Shared).await,
        context.acquire_in(&*second, ClaimMode::Shared).await,
    ];
    assert_freed(&*second, &readers[1]).await;
    assert_freed(&*first, &readers[0]).await;
    assert_freed(&*second, &readers[2]).await;
    assert!(is_free(&*first, readers[0].key()).await, "the released readers hold the key");
}

/// While a reader holds a key, exclusive claims of its client and of other clients are busy.
pub async fn a_reader_excludes_writers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    for client in [&first, &second] {
        assert_busy(&**client, &context.claim(ClaimMode::Exclusive)).await;
    }
    assert_freed(&*first, &reader).await;
    let writer = context.acquire_in(&*second, ClaimMode::Exclusive).await;
    assert_freed(&*second, &writer).await;
}

/// While an exclusive claim holds a key, shared claims of its client and of other clients are busy.
pub async fn a_writer_excludes_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let writer = context.acquire_in(&*first, ClaimMode::Exclusive).await;
    for client in [&first, &second] {
        let busy = assert_busy(&**client, &context.claim(ClaimMode::Shared)).await;
        assert!(!busy.is_queued, "a reader that skips the queue has a place");
    }
    assert_freed(&*first, &writer).await;
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    assert_freed(&*second, &reader).await;
}

/// An exclusive claim is granted only after the last of three readers released the key.
pub async fn a_writer_is_granted_after_the_last_reader(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holding = |n: usize| if n.is_multiple_of(2) { &*first } else { &*second };
    let mut readers = Vec::new();
    for n in 0..3 {
        readers.push(context.acquire_in(holding(n), ClaimMode::Shared).await);
    }
    let writer = context.claim(ClaimMode::Exclusive);
    for (n, reader) in readers.iter().enumerate() {
        assert_busy(&*second, &writer).await;
        assert_freed(holding(n), reader).await;
    }
    assert_granted(&*second, &writer).await;
    assert_freed(&*second, &writer).await;
}

/// Of concurrent shared and exclusive claims of three clients, an exclusive one never holds next to
/// another claim.
pub async fn concurrent_readers_and_writers_never_hold_together(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    let section = Arc::new(CriticalSection::default());
    let mut tasks = JoinSet::new();
    for n in 0..12 {
        let (client, section) = (Arc::clone(&clients[n % 3]), Arc::clone(&section));
        let modes: Vec<_> = (0..10)
            .map(
                |round| if (n + round) % 3 == 0 { ClaimMode::Exclusive } else { ClaimMode::Shared },
            )
            .collect();
        let claims: Vec<_> = modes.into_iter().map(|mode| context.claim(mode)).collect();
        tasks.spawn(async move {
            let mut grants = 0;
            for claim in claims {
                if !matches!(attempt(&*client, &claim).await, Attempt::Granted(_)) {
                    yield_now().await;
                    continue;
                }
                grants += 1;
                match claim.mode() {
                    ClaimMode::Exclusive => section.write(yield_now()).await,
                    _ => section.share(1, usize::MAX, yield_now()).await,
                }
                assert_freed(&*client, &claim).await;
            }
            grants
        });
    }
    assert!(tasks.join_all().await.iter().sum::<usize>() > 0, "nothing was granted");
}

/// An exclusive claim that waits for a reader blocks new readers of every client. It is granted
/// after the reader has released the key, and the reader can repeat its acquire until then.
pub async fn a_waiting_writer_blocks_new_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    let writer = enqueue_writer(context, &*second, context.long_lease()).await;
    for client in [&first, &second] {
        assert_busy(&**client, &context.claim(ClaimMode::Shared)).await;
    }
    assert_granted(&*first, &reader).await;
    assert_renewed(&*first, &reader).await;
    assert_freed(&*first, &reader).await;
    assert_busy(&*first, &context.claim(ClaimMode::Shared)).await;
    assert_granted(&*second, &writer).await;
    assert_busy(&*first, &context.claim(ClaimMode::Shared)).await;
    assert_freed(&*second, &writer).await;
    let next = context.acquire_in(&*first, ClaimMode::Shared).await;
    assert_freed(&*first, &next).await;
}

/// The place of a waiting exclusive claim lapses when the claim does not repeat its attempt within
/// its lease. New readers can then hold the key next to the old one.
pub async fn the_place_of_a_waiting_writer_lapses_with_its_lease(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    enqueue_writer(context, &*second, context.renewable_lease()).await;
    let next = context.claim(ClaimMode::Shared);
    assert_busy(&*second, &next).await;
    sleep(context.renewable_lease()).await;
    context.wait_until_granted(&*second, &next).await;
    assert_renewed(&*first, &reader).await;
    assert_freed(&*second, &next).await;
    assert_freed(&*first, &reader).await;
}

/// A waiting exclusive claim that repeats its attempt within its lease blocks new readers for more
/// than two leases.
pub async fn a_waiting_writer_that_repeats_its_attempt_keeps_its_place(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    let writer = enqueue_writer(context, &*second, context.renewable_lease()).await;
    for _ in 0..9 {
        sleep(context.renewable_lease() / 4).await;
        assert_busy(&*first, &context.claim(ClaimMode::Shared)).await;
        assert!(assert_busy(&*second, &writer).await.is_queued, "the writer lost its place");
    }
    assert_freed(&*first, &reader).await;
    assert_granted(&*second, &writer).await;
    assert_freed(&*second, &writer).await;
}

/// Releasing a waiting exclusive claim returns `NotHeld`, and new readers are granted at once.
pub async fn a_released_waiting_writer_lets_readers_in_at_once(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    let writer = enqueue_writer(context, &*second, context.long_lease()).await;
    assert_busy(&*first, &context.claim(ClaimMode::Shared)).await;
    assert_eq!(release(&*second, &writer).await, Release::NotHeld);
    let next = context.acquire_in(&*first, ClaimMode::Shared).await;
    assert_freed(&*first, &next).await;
    assert_freed(&*first, &reader).await;
    assert!(is_free(&*first, reader.key()).await, "a released claim holds the key");
}

/// An exclusive claim that skips the queue and finds a reader blocks no new readers.
pub async fn a_writer_that_does_not_wait_blocks_no_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    for _ in 0..3 {
        let busy = assert_busy(&*second, &context.claim(ClaimMode::Exclusive)).await;
        assert!(!busy.is_queued, "{busy:?}");
        let next = context.acquire_in(&*second, ClaimMode::Shared).await;
        assert_freed(&*second, &next).await;
    }
    assert_freed(&*first, &reader).await;
    assert!(is_free(&*first, reader.key()).await, "a busy claim holds the key");
}

/// A shared claim that is acquired three times is one grant with one token: one release ends it.
pub async fn a_repeated_shared_acquire_is_one_grant(context: &TestContext) {
    let client = context.client().await;
    let other = context.acquire_in(&*client, ClaimMode::Shared).await;
    let reader = context.claim(ClaimMode::Shared);
    let token = assert_granted(&*client, &reader).await.token;
    for _ in 0..2 {
        let again = assert_granted(&*client, &reader).await;
        assert!(!context.capabilities().fencing || again.token == token, "{again:?}, {token:?}");
    }
    assert_freed(&*client, &reader).await;
    assert_eq!(release(&*client, &reader).await, Release::NotHeld);
    assert_eq!(renew(&*client, &reader).await, Renewal::Gone);
    assert_freed(&*client, &other).await;
    assert!(is_free(&*client, reader.key()).await, "the release left a grant of the claim");
}

/// A reader with a short lease expires, and a reader with a long lease keeps the key.
pub async fn each_reader_expires_by_itself(context: &TestContext) {
    let client = context.client().await;
    let long = context.acquire_in(&*client, ClaimMode::Shared).await;
    let short = context.claim(ClaimMode::Shared).with_lease(context.short_lease());
    assert_granted(&*client, &short).await;
    context.wait_until_expired_alongside(&*client, &short, 1).await;
    assert_eq!(renew(&*client, &short).await, Renewal::Gone);
    assert_eq!(release(&*client, &short).await, Release::NotHeld);
    assert_renewed(&*client, &long).await;
    assert_busy(&*client, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*client, &long).await;
    assert!(is_free(&*client, long.key()).await, "an expired reader holds the key");
}

/// An exclusive claim is granted after all readers have expired.
pub async fn a_writer_is_granted_after_the_readers_expire(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for _ in 0..2 {
        let reader = context.claim(ClaimMode::Shared).with_lease(context.short_lease());
        assert_granted(&*first, &reader).await;
    }
    let writer = context.claim(ClaimMode::Exclusive);
    context.wait_until_granted(&*second, &writer).await;
    assert_freed(&*second, &writer).await;
}

/// A renewal extends the lease of its own reader and of no other.
pub async fn a_renewal_extends_only_its_own_reader(context: &TestContext) {
    let client = context.client().await;
    let readers =
        [(); 2].map(|()| context.claim(ClaimMode::Shared).with_lease(context.renewable_lease()));
    assert_granted(&*client, &readers[0]).await;
    assert_granted(&*client, &readers[1]).await;
    assert_renewed(&*client, &readers[0].clone().with_lease(context.long_lease())).await;
    context.wait_until_expired_alongside(&*client, &readers[1], 1).await;
    assert_eq!(renew(&*client, &readers[1]).await, Renewal::Gone);
    assert_renewed(&*client, &readers[0]).await;
    assert_freed(&*client, &readers[0]).await;
}

/// A batch renews several readers of one key, and answers in the order of its claims.
pub async fn a_batch_renews_readers_of_one_key(context: &TestContext) {
    let client = context.client().await;
    let (first, second) = (
        context.acquire_in(&*client, ClaimMode::Shared).await,
        context.acquire_in(&*client, ClaimMode::Shared).await,
    );
    let never_granted = context.claim(ClaimMode::Shared);
    let answers = renew_all(&*client, &[first.clone(), never_granted, second.clone()]).await;
    assert!(
        matches!(
            answers[..],
            [Ok(Renewal::Renewed(_)), Ok(Renewal::Gone), Ok(Renewal::Renewed(_))]
        ),
        "{answers:?}"
    );
    assert_freed(&*client, &first).await;
    assert_freed(&*client, &second).await;
}

/// Releasing one reader ends its grant only. A repeated release returns `NotHeld`.
pub async fn a_release_of_one_reader_keeps_the_others(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let released = context.acquire_in(&*first, ClaimMode::Shared).await;
    let others = [
        context.acquire_in(&*first, ClaimMode::Shared).await,
        context.acquire_in(&*second, ClaimMode::Shared).await,
    ];
    assert_freed(&*first, &released).await;
    assert_eq!(release(&*first, &released).await, Release::NotHeld);
    assert_renewed(&*first, &others[0]).await;
    assert_renewed(&*second, &others[1]).await;
    assert_freed(&*first, &others[0]).await;
    assert_busy(&*first, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*second, &others[1]).await;
}

/// Releasing a claim that was never granted ends no reader, in whichever mode it is.
pub async fn a_release_of_another_claim_ends_no_reader(context: &TestContext) {
    let client = context.client().await;
    let reader = context.acquire_in(&*client, ClaimMode::Shared).await;
    for mode in [ClaimMode::Shared, ClaimMode::Exclusive] {
        assert_eq!(release(&*client, &context.claim(mode)).await, Release::NotHeld);
        assert_eq!(renew(&*client, &context.claim(mode)).await, Renewal::Gone);
    }
    assert_renewed(&*client, &reader).await;
    assert_busy(&*client, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*client, &reader).await;
}

/// The token of each grant is larger than all tokens that earlier grants reserved, for readers that
/// hold together, a writer after them, and readers after the writer.
pub async fn tokens_of_readers_and_writers_increase(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let mut last = 0;
    // A store with a queue has no local hand-over, so it need not reserve blocks of tokens.
    let block = if context.capabilities().fair { 1 } else { 5 };
    for _ in 0..3 {
        let mut readers = Vec::new();
        for client in [&first, &second, &first] {
            let reader = context.claim(ClaimMode::Shared).with_token_block(block);
            let token = assert_granted(&**client, &reader).await.token.get();
            assert!(token > last, "{token} after {last}");
            last = token + u64::from(block) - 1;
            readers.push((client, reader));
        }
        // All reserved tokens were used.
        for (client, reader) in &readers {
            assert_freed(&***client, reader).await;
        }
        let writer = context.claim(ClaimMode::Exclusive).with_token_block(block);
        let token = assert_granted(&*second, &writer).await.token.get();
        assert!(token > last, "{token} after {last}");
        last = token + u64::from(block) - 1;
        assert_freed(&*second, &writer).await;
    }
}

/// A forced release ends the grants of all readers of the key and of no other key.
pub async fn a_forced_release_ends_all_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let readers = [
        context.acquire_in(&*first, ClaimMode::Shared).await,
        context.acquire_in(&*first, ClaimMode::Shared).await,
    ];
    let other = Claim::new(key("orders:43"), context.long_lease()).with_mode(ClaimMode::Shared);
    assert_granted(&*first, &other).await;
    assert_eq!(force_release(&*second).await, Release::Freed);
    for reader in &readers {
        assert_eq!(renew(&*first, reader).await, Renewal::Gone);
        assert_eq!(release(&*first, reader).await, Release::NotHeld);
    }
    let writer = context.acquire_in(&*second, ClaimMode::Exclusive).await;
    assert_freed(&*second, &writer).await;
    assert_freed(&*first, &other).await;
    assert_eq!(force_release(&*second).await, Release::NotHeld);
}

/// `inspect` returns all readers of a key with mode, token and label, in the order of their tokens.
/// `list` returns them in any order. Neither returns a writer that waits.
pub async fn inspect_returns_all_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let mut readers = Vec::new();
    for (n, client) in [&first, &second, &first].into_iter().enumerate() {
        let label = format!("reader {n}");
        let claim = context.claim(ClaimMode::Shared).with_label(Some(label.as_str().into()));
        let token = assert_granted(&**client, &claim).await.token;
        readers.push((client, claim, token, label));
    }
    enqueue_writer(context, &*second, context.long_lease()).await;
    let listed = admin(&*second).list().await.expect("list answers");
    assert_eq!(listed.len(), readers.len(), "{listed:?}");
    let holders = inspect(&*second).await;
    assert_eq!(holders.len(), readers.len(), "{holders:?}");
    for (holder, (_, claim, token, label)) in holders.iter().zip(&readers) {
        assert_eq!((&holder.key, holder.mode), (claim.key(), ClaimMode::Shared), "{holder:?}");
        if context.capabilities().fencing {
            assert_eq!(holder.token, Some(*token));
        }
        if context.capabilities().labels {
            assert_eq!(holder.label.as_ref(), Some(label));
        }
        if let Some(left) = holder.lease_left {
            assert!(left > Duration::ZERO && left <= context.long_lease(), "{holder:?}");
        }
    }
    let (client, claim, ..) = &readers[1];
    assert_freed(&***client, claim).await;
    assert_eq!(inspect(&*first).await.len(), 2, "the released reader is returned");
}

/// `inspect` returns the mode of the current holder, while readers and exclusive holders alternate.
pub async fn inspect_returns_the_mode_of_each_holder(context: &TestContext) {
    let client = context.client().await;
    for mode in [ClaimMode::Shared, ClaimMode::Exclusive, ClaimMode::Shared, ClaimMode::Exclusive] {
        let claim = context.acquire_in(&*client, mode).await;
        let modes: Vec<_> = inspect(&*client).await.iter().map(|holder| holder.mode).collect();
        assert_eq!(modes, [mode]);
        assert_freed(&*client, &claim).await;
    }
}

/// In a store with wake-ups, the release of the last reader ends the `wait` of a writer. The
/// release may come before or during the wait.
pub async fn the_last_reader_wakes_a_waiting_writer(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for pause in [None, Some(Duration::from_millis(50))] {
        let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
        let writer = context.claim(ClaimMode::Exclusive).with_queueing(Queueing::ExclusiveIntent);
        let busy = assert_busy(&*second, &writer).await;
        let wait = timeout(context.max_wait(), second.wait(&writer, &busy));
        match pause {
            None => {
                assert_freed(&*first, &reader).await;
                wait.await.expect("a release before the wait ends the wait");
            }
            Some(pause) => {
                let released = async {
                    sleep(pause).await;
                    assert_freed(&*first, &reader).await;
                };
                let (woken, ()) = join(wait, released).await;
                woken.expect("a release ends the wait");
            }
        }
        assert_granted(&*second, &writer).await;
        assert_freed(&*second, &writer).await;
    }
}

/// In a store with wake-ups, the release of a waiting writer ends the `wait` of a reader that it
/// blocked.
pub async fn a_writer_that_gives_up_wakes_a_waiting_reader(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*first, ClaimMode::Shared).await;
    let writer = enqueue_writer(context, &*first, context.long_lease()).await;
    let next = context.claim(ClaimMode::Shared);
    let busy = assert_busy(&*second, &next).await;
    let wait = timeout(context.max_wait(), second.wait(&next, &busy));
    let released = async {
        sleep(Duration::from_millis(50)).await;
        assert_eq!(release(&*first, &writer).await, Release::NotHeld);
    };
    let (woken, ()) = join(wait, released).await;
    woken.expect("the end of the writer's place ends the wait");
    assert_granted(&*second, &next).await;
    assert_freed(&*second, &next).await;
    assert_freed(&*first, &reader).await;
}

/// A mode that the store does not have is refused with the name of the capability, before any
/// request. A conversion is refused in the same way by a store without upgradable locks.
pub async fn a_mode_that_the_store_does_not_have_is_refused_before_any_request(
    context: &TestContext,
) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("orders:42");
    let semaphore = registry_core::LockRegistryExt::semaphore(&registry, "orders:42", 3);
    let capabilities = context.capabilities();
    for (name, has, result) in [
        ("shared", capabilities.shared, lock.try_read().await),
        ("upgradable", capabilities.upgradable, lock.try_upgradable_with(LockOptions::new()).await),
        ("permits", capabilities.permits, semaphore.try_acquire().await),
    ] {
        match result {
            Ok(Some(guard)) if has => unlock(guard).await,
            Err(LockError::Unsupported { capability, .. }) if !has => assert_eq!(capability, name),
            // The guard of an earlier mode in this list still exists and excludes this mode.
            Ok(None) if has => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    if !(capabilities.shared || capabilities.upgradable || capabilities.permits) {
        assert_eq!(faulty.requests(), 0, "a request was sent");
    }
    if !capabilities.upgradable {
        let guard = lock.lock().await.expect("a free lock is acquired");
        let attempts = faulty.calls(Operation::Acquire);
        match guard.downgrade().await {
            Err(LockError::Unsupported { capability: "upgradable", .. }) => {}
            other => panic!("a conversion: {other:?}"),
        }
        assert_eq!(faulty.calls(Operation::Acquire), attempts, "an attempt was sent");
    }
}

/// `read` of two processes and of two callers returns guards that are held together. The key is
/// free after the last unlock.
pub async fn readers_of_two_processes_hold_together(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let mut guards = Vec::new();
    for registry in [&first, &second, &first, &second] {
        let guard = registry.obtain("orders:42").read().await.expect("readers share the lock");
        assert_eq!(guard.mode(), ClaimMode::Shared);
        guards.push(guard);
    }
    assert!(guards.iter().all(LockGuard::is_held));
    for guard in guards {
        assert_try_lock(&first, &second, false).await;
        unlock(guard).await;
    }
    assert_try_lock(&first, &second, true).await;
}

/// `try_read` returns `Ok(None)` while a writer of this or another process holds the lock, and a
/// guard after the unlock.
pub async fn try_read_returns_none_while_a_writer_holds_the_lock(context: &TestContext) {
    let (holding, other) = (context.registry().await, context.registry().await);
    let writer = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for registry in [&holding, &other] {
        let none = registry.obtain("orders:42").try_read().await.expect("busy is no error");
        assert!(none.is_none(), "a reader next to a writer");
        let wait = Duration::from_millis(20);
        let none = registry.obtain("orders:42").try_read_for(wait).await.expect("busy is no error");
        assert!(none.is_none(), "a reader next to a writer");
    }
    unlock(writer).await;
    let guard = other.obtain("orders:42").try_read().await.expect("the store answers");
    unlock(guard.expect("the lock is free")).await;
}

/// `try_read` of a lock that a writer holds leaves no record: after the unlock, the key is free.
/// `try_lock` of a lock that a reader holds blocks no new readers.
pub async fn an_attempt_that_does_not_wait_leaves_no_record(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let writer = first.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for _ in 0..10 {
        assert!(second.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    }
    unlock(writer).await;
    let reader = first.obtain("orders:42").try_read().await.expect("the store answers");
    let reader = reader.expect("the lock is free");
    for _ in 0..3 {
        assert_try_lock(&first, &second, false).await;
        let next = second.obtain("orders:42").try_read().await.expect("the store answers");
        unlock(next.expect("no writer waits")).await;
    }
    unlock(reader).await;
    assert_try_lock(&first, &second, true).await;
}

/// A `lock` call that waits for readers blocks new readers of other processes. It acquires the lock
/// when the last reader unlocks, and readers can enter after it.
pub async fn a_waiting_lock_call_blocks_readers_of_other_processes(context: &TestContext) {
    let (reading, writing) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let lock = writing.obtain("orders:42");
    let mut waiting = tokio::spawn(async move { lock.lock().await });
    context.wait_until_readers_are_blocked(&third).await;
    assert!(poll!(&mut waiting).is_pending(), "a writer next to a reader");
    assert!(reader.is_held());
    unlock(reader).await;
    let writer = timeout(context.max_wait(), waiting).await.expect("the last reader has unlocked");
    let writer = writer.expect("no panic").expect("the lock is acquired");
    assert!(third.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    unlock(writer).await;
    context.wait_until_readers_enter(&third).await;
}

/// A waiting writer acquires the lock although readers of two processes hold it without a pause.
pub async fn readers_without_a_pause_do_not_starve_a_writer(context: &TestContext) {
    let writing = context.registry().await;
    let mut readers = JoinSet::new();
    for _ in 0..2 {
        let registry = context.registry().await;
        for _ in 0..2 {
            let lock = registry.obtain("orders:42");
            readers.spawn(async move {
                loop {
                    let guard = lock.read().await.expect("the lock is acquired");
                    sleep(Duration::from_millis(20)).await;
                    unlock(guard).await;
                }
            });
        }
    }
    sleep(Duration::from_millis(50)).await;
    for _ in 0..3 {
        let writer = writing.obtain("orders:42").try_lock_for(context.max_wait()).await;
        unlock(writer.expect("the store answers").expect("readers do not starve the writer")).await;
    }
    readers.shutdown().await;
}

/// Dropping a `lock` future that waits for readers lets new readers in.
pub async fn a_dropped_waiting_lock_call_lets_readers_in(context: &TestContext) {
    let (reading, writing) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let lock = writing.obtain("orders:42");
    let waiting = tokio::spawn(async move { lock.lock().await });
    context.wait_until_readers_are_blocked(&third).await;
    waiting.abort();
    context.wait_until_readers_enter(&third).await;
    unlock(reader).await;
    context.assert_becomes_free(&third, "orders:42").await;
}

/// If a `lock` future that waits for readers is not polled, it blocks new readers for at most one
/// and a half leases. If the future is polled again, it acquires the lock after the last reader.
pub async fn an_unpolled_waiting_lock_call_lets_readers_in(context: &TestContext) {
    let (reading, writing) =
        (context.registry().await, context.registry_with_lease(context.short_lease()).await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let lock = writing.obtain("orders:42");
    let mut unpolled = pin!(lock.lock());
    // Long enough for the store to answer the attempt.
    let early = timeout(Duration::from_millis(300), unpolled.as_mut()).await;
    assert!(early.is_err(), "a writer next to a reader");
    context.wait_until_readers_enter(&third).await;
    unlock(reader).await;
    let writer = timeout(context.max_wait(), unpolled).await.expect("no reader is left");
    unlock(writer.expect("the store answers")).await;
}

/// A `try_lock_for` call that waits for a reader returns `Ok(None)` at its deadline and lets new
/// readers in.
pub async fn a_lock_call_that_gives_up_lets_readers_in(context: &TestContext) {
    let (reading, writing) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let wait = Duration::from_millis(600);
    let none = writing.obtain("orders:42").try_lock_for(wait).await.expect("busy is no error");
    assert!(none.is_none(), "a writer next to a reader");
    context.wait_until_readers_enter(&third).await;
    assert!(reader.is_held());
    unlock(reader).await;
}

/// Dropping a `read` future that waits for a writer leaves nothing behind: after the unlock, the
/// key is free.
pub async fn a_dropped_waiting_read_call_leaves_nothing_behind(context: &TestContext) {
    let (writing, (reading, count)) = (context.registry().await, context.counting_registry().await);
    let writer = writing.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = reading.obtain("orders:42");
    let waiting = tokio::spawn(async move { lock.read().await });
    context.eventually("the reader waits in the store", async || count.get() > 0).await;
    waiting.abort();
    unlock(writer).await;
    context.assert_becomes_free(&writing, "orders:42").await;
    context.assert_becomes_free(&reading, "orders:42").await;
}

/// When a writer unlocks, waiting `read` calls of this and another process acquire the lock and
/// hold it together.
pub async fn waiting_readers_acquire_the_lock_after_a_writer(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let writer = first.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let mut tasks = JoinSet::new();
    for registry in [&first, &second, &second] {
        let (lock, wait) = (registry.obtain("orders:42"), context.max_wait());
        tasks.spawn(async move { lock.try_read_for(wait).await });
    }
    sleep(Duration::from_millis(50)).await;
    unlock(writer).await;
    let mut readers = Vec::new();
    while let Some(reader) = tasks.join_next().await {
        let reader = reader.expect("no panic").expect("the store answers");
        // Kept, so that each further reader must share the lock.
        readers.push(reader.expect("the writer has unlocked"));
    }
    for reader in readers {
        unlock(reader).await;
    }
    context.assert_becomes_free(&first, "orders:42").await;
}

/// Readers of one process share one grant of the store. The unlock of the last reader releases the
/// grant.
pub async fn readers_of_one_process_share_one_grant(context: &TestContext) {
    let (registry, other) = (context.registry().await, context.registry().await);
    let [first, second, third] = acquire_shared_guards(context, &registry).await;
    let lock = other.obtain("orders:42");
    assert_eq!(lock.holders().await.expect("holders answers").len(), 1);
    unlock(second).await;
    assert_eq!(lock.holders().await.expect("holders answers").len(), 1);
    assert!(first.is_held() && third.is_held());
    unlock(first).await;
    assert_try_lock(&registry, &other, false).await;
    unlock(third).await;
    assert_eq!(lock.holders().await.expect("holders answers"), []);
}

/// Guards of readers have different tokens, even if they share a grant. A later writer has a larger
/// token, and a reader after this writer has a larger one again.
pub async fn tokens_of_readers_differ_and_the_next_writer_has_a_larger_one(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let mut seen = HashSet::new();
    let mut max = None;
    for _ in 0..3 {
        let mut guards = Vec::new();
        for registry in [&first, &first, &second, &first, &second] {
            let guard = registry.obtain("orders:42").read().await.expect("the lock is acquired");
            assert!(seen.insert(guard.fencing_token()), "two guards with one token");
            guards.push(guard);
        }
        max = max.max(guards.iter().map(LockGuard::fencing_token).max());
        for guard in guards {
            unlock(guard).await;
        }
        let writer = second.obtain("orders:42").lock().await.expect("the lock is acquired");
        assert!(Some(writer.fencing_token()) > max, "{writer:?} after {max:?}");
        max = Some(writer.fencing_token());
        seen.insert(writer.fencing_token());
        unlock(writer).await;
        let reader = first.obtain("orders:42").read().await.expect("the lock is acquired");
        assert!(Some(reader.fencing_token()) > max, "{reader:?} after {max:?}");
        seen.insert(reader.fencing_token());
        unlock(reader).await;
    }
}

/// The loss of a shared grant is reported to all guards that share it. Their `unlock` returns
/// `LockError::Lost`, and new readers of the process acquire the lock.
pub async fn a_lost_shared_grant_is_reported_to_all_its_readers(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guards = acquire_shared_guards(context, &registry).await;
    context.break_claim(guards[0].claim()).await;
    for guard in &guards {
        context.assert_lost(guard, context.renewable_lease(), LostReason::Gone).await;
        assert!(!guard.is_held());
    }
    let next = registry.obtain("orders:42").try_read_for(context.max_wait()).await;
    let next = next.expect("the store answers").expect("the lost grant is not joined");
    for guard in guards {
        assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    }
    assert!(next.is_held());
    unlock(next).await;
}

/// The loss of one process's reader does not affect the readers of another process.
pub async fn a_lost_reader_does_not_affect_readers_of_other_processes(context: &TestContext) {
    let lease = context.renewable_lease();
    let (first, second) =
        (context.registry_with_lease(lease).await, context.registry_with_lease(lease).await);
    let lost = first.obtain("orders:42").read().await.expect("a free lock is acquired");
    let kept = second.obtain("orders:42").read().await.expect("readers share the lock");
    context.break_claim(lost.claim()).await;
    context.assert_lost(&lost, lease, LostReason::Gone).await;
    context.renew_with_retries(&kept, lease).await.expect("the other reader is held");
    drop(lost);
    first.idle().await;
    assert_try_lock(&first, &second, false).await;
    unlock(kept).await;
    context.assert_becomes_free(&first, "orders:42").await;
}

/// A forced release is reported to the readers of all processes, and the key is free.
pub async fn a_forced_release_is_reported_to_all_readers(context: &TestContext) {
    let lease = context.renewable_lease();
    let (first, second) =
        (context.registry_with_lease(lease).await, context.registry_with_lease(lease).await);
    let mut guards = Vec::new();
    for registry in [&first, &first, &second] {
        guards.push(registry.obtain("orders:42").read().await.expect("readers share the lock"));
    }
    // A store with injected faults may break the lock and still return an error.
    while second.force_release("orders:42").await.is_err() {}
    for guard in &guards {
        context.assert_lost(guard, lease, LostReason::Gone).await;
    }
    context.assert_becomes_free(&second, "orders:42").await;
    for guard in guards {
        assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    }
}

/// In a store that reports invalidations, a forced release is reported at once to all grants that
/// one process has of the key, however long their leases are.
pub async fn a_forced_release_is_reported_to_all_grants_of_a_process_at_once(
    context: &TestContext,
) {
    let (holding, operator) = (context.registry().await, context.registry().await);
    let lock = holding.obtain("orders:42");
    let mut guards = Vec::new();
    // Readers with different labels do not share a grant.
    for label in ["first", "second", "third"] {
        let options = LockOptions::new().label(label);
        guards.push(lock.read_with(options).await.expect("readers share the lock"));
    }
    if context.capabilities().upgradable {
        guards.push(lock.upgradable().await.expect("readers share the lock"));
    }
    // A store with injected faults may break the lock and still return an error.
    while operator.force_release("orders:42").await.is_err() {}
    for guard in &guards {
        context.assert_lost(guard, Duration::ZERO, LostReason::Gone).await;
    }
}

/// A shared lock is renewed while any of its guards is held, beyond two leases.
pub async fn a_shared_lock_is_renewed_beyond_its_lease(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let lock = local.obtain("orders:42");
    let first = lock.read().await.expect("a free lock is acquired");
    let second = lock.read().await.expect("readers share the lock");
    sleep(context.renewable_lease()).await;
    unlock(first).await;
    sleep(context.renewable_lease() * 2).await;
    assert!(second.is_held());
    assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    unlock(second).await;
}

/// A waiting writer acquires the lock after the lease of a dead reader. The guard of the reader is
/// then no longer held.
pub async fn a_writer_acquires_the_lock_of_a_dead_reader(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let (reading, writing) =
        (context.registry_over(&faulty, context.short_lease()), context.registry().await);
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    faulty.apply(Faults::outage());
    let wait = context.short_lease() + context.max_wait();
    let writer = writing.obtain("orders:42").try_lock_for(wait).await.expect("the store answers");
    assert!(!reader.is_held(), "a reader next to a writer");
    unlock(writer.expect("the reader's lease ends")).await;
}

/// An owner re-enters its shared lock without a request. Its exclusive `lock` call returns an
/// error, because it would wait for itself.
pub async fn an_owner_reenters_its_shared_lock_as_a_reader_only(context: &TestContext) {
    let registry = context.registry().await;
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner);
    let lock = registry.obtain("orders:42");
    let first = lock.read_with(with_owner()).await.expect("a free lock is acquired");
    let second = lock.read_with(with_owner()).await.expect("an owner re-enters");
    assert_eq!(first.fencing_token(), second.fencing_token());
    match timeout(context.max_wait(), lock.lock_with(with_owner())).await.expect("it does not wait")
    {
        Err(LockError::HeldByOwner { held: ClaimMode::Shared, .. }) => {}
        other => panic!("an owner waits for itself: {other:?}"),
    }
    drop(first);
    assert!(second.is_held());
    unlock(second).await;
    let writer = lock.lock_with(with_owner()).await.expect("the lock is free");
    let inner = lock.read_with(with_owner()).await.expect("an owner re-enters its exclusive lock");
    assert_eq!(inner.mode(), ClaimMode::Exclusive);
    unlock(inner).await;
    unlock(writer).await;
}

/// `close` waits for readers, and releases the remaining ones at its limit. A waiting reader and a
/// waiting writer return `LockError::Closed`.
pub async fn close_ends_readers_and_waiting_callers(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let (waiting, count) = context.counting_registry().await;
    let readers = [
        local.obtain("orders:42").read().await.expect("a free lock is acquired"),
        local.obtain("orders:42").read().await.expect("readers share the lock"),
    ];
    let lock = waiting.obtain("orders:42");
    let writer = tokio::spawn(async move { lock.lock().await });
    context.eventually("the writer waits in the store", async || count.get() > 0).await;
    let lock = waiting.obtain("orders:42");
    let mut behind = pin!(lock.read());
    assert!(poll!(behind.as_mut()).is_pending(), "a reader overtakes the writer");
    _ = waiting.close(context.max_wait()).await;
    assert!(matches!(behind.await, Err(LockError::Closed)));
    assert!(matches!(writer.await.expect("no panic"), Err(LockError::Closed)));
    let report = local.close(Duration::from_millis(50)).await;
    assert_eq!(report.abandoned, 0, "{report:?}");
    for reader in readers {
        assert_eq!(reader.lost().await, LostReason::Closed);
    }
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// The critical section of a writer overlaps with no other section, across two processes with
/// several callers each.
pub async fn critical_sections_of_readers_and_writers_never_overlap(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let section = Arc::new(CriticalSection::default());
    let mut tasks = JoinSet::new();
    for n in 0..8 {
        let (lock, section) = (registries[n % 2].obtain("orders:42"), Arc::clone(&section));
        tasks.spawn(async move {
            for round in 0..4 {
                let work = sleep(Duration::from_millis(1));
                let guard = if (n / 2 + round) % 3 == 0 {
                    let guard = lock.lock().await.expect("the lock is acquired");
                    section.write(work).await;
                    guard
                } else {
                    let guard = lock.read().await.expect("the lock is acquired");
                    section.share(1, usize::MAX, work).await;
                    guard
                };
                unlock(guard).await;
            }
        });
    }
    assert_eq!(tasks.join_all().await.len(), 8, "all callers acquire the lock");
}

/// A `read` future may be dropped at every poll while a writer of another process holds the lock
/// and then unlocks it. The key is soon free.
pub async fn read_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let make = async || {
        let writer = remote.obtain("orders:42").lock().await.expect("the lock is acquired");
        tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            unlock(writer).await;
        });
        let lock = local.obtain("orders:42");
        async move { lock.read().await }
    };
    sweep(make, 1_000, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            unlock(output.expect("the store answers")).await;
        }
        context.assert_becomes_free(&remote, "orders:42").await;
        context.assert_becomes_free(&local, "orders:42").await;
    })
    .await;
}

/// A `lock` future may be dropped at every poll while it waits for a reader. Readers can soon
/// enter, and the key is free after the reader's unlock.
pub async fn a_lock_call_behind_a_reader_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let make = async || {
        let reader = remote.obtain("orders:42").read().await.expect("the lock is acquired");
        tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            unlock(reader).await;
        });
        let lock = local.obtain("orders:42");
        async move { lock.lock().await }
    };
    sweep(make, 1_000, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            unlock(output.expect("the store answers")).await;
        }
        context.wait_until_readers_enter(&third).await;
        context.assert_becomes_free(&local, "orders:42").await;
    })
    .await;
}

/// A reader's attempt whose reply was lost is repeated, and leaves no second grant.
pub async fn a_read_with_a_lost_reply_leaves_no_grant(context: &TestContext) {
    let lost = crate::faulty::Fault::LoseReply;
    let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, lost)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let reader = local.obtain("orders:42").try_read_for(context.max_wait()).await;
    unlock(reader.expect("the lost reply is retried").expect("the lock is free")).await;
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// Makes a new exclusive claim wait for shared claims, and returns it. Panics unless it has a place
/// in the queue.
async fn enqueue_writer(context: &TestContext, client: &dyn LockBackend, lease: Duration) -> Claim {
    let writer = context.claim(ClaimMode::Exclusive).with_lease(lease);
    let writer = writer.with_queueing(Queueing::ExclusiveIntent);
    assert!(assert_busy(client, &writer).await.is_queued, "the waiting writer has no place");
    writer
}

/// Acquires three guards of readers of `registry` that share one grant. Repeats this if a machine
/// is so slow that a reader gets a grant of its own.
async fn acquire_shared_guards(context: &TestContext, registry: &Registry) -> [LockGuard; 3] {
    let lock = registry.obtain("orders:42");
    let mut guards = None;
    context
        .eventually("readers share a grant", async || {
            let mut readers = Vec::new();
            for _ in 0..3 {
                readers.push(lock.read().await.expect("readers share the lock"));
            }
            if readers.iter().all(|reader| reader.claim().id() == readers[0].claim().id()) {
                guards = <[LockGuard; 3]>::try_from(readers).ok();
                return true;
            }
            for reader in readers {
                unlock(reader).await;
            }
            false
        })
        .await;
    guards.expect("the value was set")
}

/// Asserts that `try_lock` of both registries returns a guard if `succeeds`, and `None` otherwise.
async fn assert_try_lock(first: &Registry, second: &Registry, succeeds: bool) {
    for registry in [first, second] {
        let guard = registry.obtain("orders:42").try_lock().await.expect("the store answers");
        assert_eq!(guard.is_some(), succeeds, "{guard:?}");
        if let Some(guard) = guard {
            unlock(guard).await;
        }
    }
}

async fn inspect(client: &dyn LockBackend) -> Vec<Holder> {
    admin(client).inspect(&key("orders:42")).await.expect("inspect answers")
}

async fn force_release(client: &dyn LockBackend) -> Release {
    admin(client).force_release(&key("orders:42")).await.expect("force_release answers")
}
