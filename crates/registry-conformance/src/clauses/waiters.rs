//! The list of waiting claims, with their keys, modes and labels.

use std::time::Duration;

use registry_core::{
    Claim, ClaimMode, Key, LockBackend, LockOptions, Queueing, Registry, WaiterStore, WaitingClaim,
};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, is_free, key, release, unlock,
};

/// Every client lists a claim that waits for a held key, with its mode, both for this key and for
/// all keys. The holder is not listed.
pub async fn a_waiting_claim_is_listed_with_its_key_and_mode(context: &TestContext) {
    let (holding, waiting, operator) =
        (context.client().await, context.client().await, context.client().await);
    let holder = context.acquire_with_lease(&*holding, context.long_lease()).await;
    assert_eq!(listed(&*operator, Some("orders:42")).await, []);
    let claim = context.claim(ClaimMode::Exclusive);
    start_waiting(&*waiting, &claim).await;
    for name in [Some("orders:42"), None] {
        let found = listed(&*operator, name).await;
        let [found] = found.as_slice() else { panic!("one claim waits: {found:?}") };
        assert_eq!((found.key.as_str(), found.mode), ("orders:42", ClaimMode::Exclusive));
        if let Some(left) = found.expires_in {
            assert!(left <= context.long_lease() + Duration::from_secs(1), "{left:?}");
        }
    }
    assert_eq!(listed(&*operator, Some("orders:43")).await, []);
    stop_waiting(&*waiting, &claim).await;
    assert_freed(&*holding, &holder).await;
}

/// A claim that gives up is not listed any more. Giving up may be repeated.
pub async fn a_claim_that_gives_up_is_not_listed_any_more(context: &TestContext) {
    let (holding, waiting) = (context.client().await, context.client().await);
    let holder = context.acquire_with_lease(&*holding, context.long_lease()).await;
    let (first, second) =
        (context.claim(ClaimMode::Exclusive), context.claim(ClaimMode::Exclusive));
    start_waiting(&*waiting, &first).await;
    start_waiting(&*waiting, &second).await;
    start_waiting(&*waiting, &second).await;
    assert_eq!(listed(&*holding, Some("orders:42")).await.len(), 2);
    for left in [1, 1, 0] {
        stop_waiting(&*waiting, if left == 1 { &first } else { &second }).await;
        assert_eq!(listed(&*holding, Some("orders:42")).await.len(), left);
    }
    assert_freed(&*holding, &holder).await;
}

/// Waiting readers and permits are listed with their modes and units.
pub async fn waiting_claims_of_all_modes_are_listed(context: &TestContext) {
    let client = context.client().await;
    let holder = context.acquire_with_lease(&*client, context.long_lease()).await;
    for mode in [ClaimMode::Shared, ClaimMode::Permits { take: 2, of: 5 }] {
        let claim = context.claim(mode);
        start_waiting(&*client, &claim).await;
        let found = listed(&*client, Some("orders:42")).await;
        assert_eq!(found.iter().map(|waiter| waiter.mode).collect::<Vec<_>>(), [mode]);
        stop_waiting(&*client, &claim).await;
    }
    assert_freed(&*client, &holder).await;
}

/// Labels and keys with special characters are listed unchanged.
pub async fn listed_labels_and_keys_are_unchanged(context: &TestContext) {
    let client = context.client().await;
    for name in ["orders: é\n\"{}%42", "a:waiters", "🔑 '; -- \u{202e}"] {
        if client.check_key(&key(name)).is_err() {
            continue;
        }
        let holder = Claim::new(key(name), context.long_lease());
        assert_granted(&*client, &holder).await;
        let label = format!("label of {name}");
        let claim =
            Claim::new(key(name), context.long_lease()).with_label(Some(label.as_str().into()));
        start_waiting(&*client, &claim).await;
        for filter in [Some(name), None] {
            let found = listed(&*client, filter).await;
            let [found] = found.as_slice() else { panic!("one claim waits: {found:?}") };
            assert_eq!((found.key.as_str(), found.label.as_deref()), (name, Some(&*label)));
        }
        stop_waiting(&*client, &claim).await;
        assert_freed(&*client, &holder).await;
    }
}

/// A registration is a record for operators only: it neither blocks a claim nor holds the key.
pub async fn a_registered_claim_affects_no_grant(context: &TestContext) {
    let client = context.client().await;
    let claim = context.claim(ClaimMode::Exclusive);
    start_waiting(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await);
    let holder = context.acquire_with_lease(&*client, context.long_lease()).await;
    stop_waiting(&*client, &claim).await;
    assert_busy(&*client, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*client, &holder).await;
    assert!(is_free(&*client, claim.key()).await);
}

/// The registration of a process that has ended lapses with the lease of its claim. Until then, a
/// repeated registration extends it.
pub async fn a_registration_lapses_with_its_lease(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.short_lease());
    start_waiting(&*client, &claim).await;
    let longer = claim.clone().with_lease(context.long_lease());
    start_waiting(&*client, &longer).await;
    let found = listed(&*client, None).await;
    let [found] = found.as_slice() else { panic!("one claim waits: {found:?}") };
    assert!(found.expires_in > Some(context.short_lease()), "{found:?}");
    stop_waiting(&*client, &longer).await;
    start_waiting(&*client, &claim).await;
    context
        .eventually("the registration lapses", async || listed(&*client, None).await.is_empty())
        .await;
}

/// The waiters of one namespace are not listed in another.
pub async fn namespaces_share_no_waiters(context: &TestContext) {
    let (local, remote) = (context.client().await, context.other_namespace().await);
    let holder = context.acquire_with_lease(&*local, context.long_lease()).await;
    let claim = context.claim(ClaimMode::Exclusive);
    start_waiting(&*local, &claim).await;
    assert_eq!(listed(&*remote, Some("orders:42")).await, []);
    assert_eq!(listed(&*remote, None).await, []);
    assert_eq!(listed(&*local, None).await.len(), 1);
    stop_waiting(&*local, &claim).await;
    assert_freed(&*local, &holder).await;
}

/// A caller that waits longer than a second is listed with its label, until its future is dropped.
pub async fn a_waiting_caller_is_listed_until_it_gives_up(context: &TestContext) {
    let (holding, waiting) = (context.registry().await, context.registry().await);
    let held = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = waiting.obtain("orders:42");
    {
        let mut wait = Box::pin(lock.lock_with(LockOptions::new().label("nightly report")));
        let until_listed = context.eventually("the waiter is listed", async || {
            let found = waiters_of(&holding).await;
            found.iter().any(|waiter| waiter.waited_for >= Some(Duration::from_millis(900)))
        });
        tokio::select! {
            () = until_listed => {}
            guard = &mut wait => panic!("the lock is held: {guard:?}"),
        }
        let found = waiters_of(&holding).await;
        let [found] = found.as_slice() else { panic!("one caller waits: {found:?}") };
        if context.capabilities().labels {
            assert_eq!(found.label.as_deref(), Some("nightly report"));
        }
        assert_eq!(holding.list_waiters().await.expect("the store lists waiters").len(), 1);
    }
    context.eventually("no waiter is listed", async || waiters_of(&holding).await.is_empty()).await;
    unlock(held).await;
}

/// A waiting caller that acquires the lock is no longer listed as a waiter.
pub async fn a_waiting_caller_that_acquires_the_lock_is_not_listed_any_more(context: &TestContext) {
    let (holding, waiting) = (context.registry().await, context.registry().await);
    let held = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let lock = waiting.obtain("orders:42");
    let wait = tokio::spawn(async move { lock.lock().await });
    context
        .eventually("the waiter is listed", async || !waiters_of(&holding).await.is_empty())
        .await;
    unlock(held).await;
    let guard = wait.await.expect("no panic").expect("the lock was released");
    context.eventually("no waiter is listed", async || waiters_of(&holding).await.is_empty()).await;
    unlock(guard).await;
}

/// Makes `claim` wait for its key: in the queue of the store, or as a registered waiter if the
/// store has no queue.
async fn start_waiting(client: &dyn LockBackend, claim: &Claim) {
    if client.capabilities().fair {
        assert_busy(client, &claim.clone().with_queueing(Queueing::Join)).await;
    } else {
        let registered = waiters(client).register(claim, Duration::ZERO).await;
        registered.expect("a claim is registered");
    }
}

/// Ends the wait of `claim`.
async fn stop_waiting(client: &dyn LockBackend, claim: &Claim) {
    if client.capabilities().fair {
        release(client, claim).await;
    } else {
        waiters(client).unregister(claim).await.expect("a registration is removed");
    }
}

fn waiters(client: &dyn LockBackend) -> &dyn WaiterStore {
    client.waiters().expect("a store that lists waiters")
}

async fn listed(client: &dyn LockBackend, name: Option<&str>) -> Vec<WaitingClaim> {
    let name: Option<Key> = name.map(key);
    waiters(client).waiting(name.as_ref()).await.expect("the store lists waiters")
}

async fn waiters_of(registry: &Registry) -> Vec<WaitingClaim> {
    registry.obtain("orders:42").waiters().await.expect("the store lists waiters")
}
