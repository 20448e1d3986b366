//! Inspection returns the holders of keys, and a forced release ends their grants.

use std::collections::HashMap;
use std::time::Duration;

use registry_core::{
    Claim, FencingToken, Holder, LockBackend, LockError, LockOptions, LostReason, Release, Renewal,
};
use tokio::time::timeout;

use crate::context::{
    TestContext, admin, assert_busy, assert_freed, assert_granted, assert_renewed, is_free, key,
    release, renew, unlock,
};

/// `inspect` through another client returns the key of the holder, and its token if the store has
/// fencing. A remaining lease, if returned, is above zero and at most the lease.
pub async fn inspect_returns_the_holder(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let claim =
        Claim::new(key("orders:42"), context.long_lease()).with_label(Some("host:1".into()));
    let grant = assert_granted(&*first, &claim).await;
    let holder = inspect(&*second, "orders:42").await.expect("it is held");
    assert_eq!(&holder.key, claim.key());
    assert!(holder.token.is_none_or(|token| token == grant.token), "{holder:?} of {grant:?}");
    if context.capabilities().fencing {
        assert_eq!(holder.token, Some(grant.token));
    }
    if let Some(left) = holder.lease_left {
        assert!(left > Duration::ZERO && left <= context.long_lease(), "{holder:?}");
    }
    assert_freed(&*first, &claim).await;
}

/// A store with labels returns each label as it was given, and `None` for a holder without a label.
/// An empty label may also be returned as `None`.
pub async fn labels_are_returned_unchanged(context: &TestContext) {
    let client = context.client().await;
    let longest = "é".repeat(LockOptions::LABEL_BYTES_MAX / 2);
    for label in ["host:1", "", "nightly \"report\" 🔒\n\0'", &longest] {
        let claim =
            Claim::new(key("orders:42"), context.long_lease()).with_label(Some(label.into()));
        assert_granted(&*client, &claim).await;
        let holder = inspect(&*client, "orders:42").await.expect("it is held");
        // Some stores cannot distinguish an empty label from none.
        assert_eq!(holder.label.unwrap_or_default(), label);
        assert_freed(&*client, &claim).await;
    }
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    let holder = inspect(&*client, "orders:42").await.expect("it is held");
    assert_eq!(holder.label, None, "`inspect` returned a label for a claim without a label");
    assert_freed(&*client, &claim).await;
}

/// A renewal changes the remaining lease of the holder, but neither its token nor its label.
pub async fn inspect_returns_the_new_lease_after_a_renewal(context: &TestContext) {
    let client = context.client().await;
    let claim =
        Claim::new(key("orders:42"), context.renewable_lease()).with_label(Some("host:1".into()));
    let grant = assert_granted(&*client, &claim).await;
    assert_renewed(&*client, &claim.clone().with_lease(context.long_lease())).await;
    let holder = inspect(&*client, "orders:42").await.expect("it is held");
    if let Some(left) = holder.lease_left {
        assert!(left > context.renewable_lease(), "{holder:?}");
    }
    if context.capabilities().fencing {
        assert_eq!(holder.token, Some(grant.token));
    }
    if context.capabilities().labels {
        assert_eq!(holder.label.as_deref(), Some("host:1"));
    }
    assert_freed(&*client, &claim).await;
}

/// `inspect` and `list` return no holder of a key that was never held, was released, or whose grant
/// has expired.
pub async fn inspect_returns_no_holder_of_a_free_key(context: &TestContext) {
    let client = context.client().await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_freed(&*client, &claim).await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    let claim = context.acquire_with_lease(&*client, context.short_lease()).await;
    context.wait_until_expired(&*client, &claim).await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    assert_eq!(admin(&*client).list().await.expect("list answers"), []);
}

/// `inspect` and `list` neither lock a free key nor extend the lease of a held one.
pub async fn inspection_neither_locks_nor_extends(context: &TestContext) {
    let client = context.client().await;
    for _ in 0..3 {
        inspect(&*client, "orders:42").await;
        admin(&*client).list().await.expect("list answers");
    }
    assert!(is_free(&*client, &key("orders:42")).await);
    let claim = context.acquire_with_lease(&*client, context.short_lease()).await;
    // `wait_until_expired` calls `inspect` repeatedly, which must not extend the grant.
    context.wait_until_expired(&*client, &claim).await;
    assert_eq!(renew(&*client, &claim).await, Renewal::Gone);
}

/// `list` returns each held key of the namespace exactly once, regardless of the client that holds
/// it, and no other key.
pub async fn list_returns_every_held_key_and_no_other(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    assert_eq!(admin(&*first).list().await.expect("list answers"), []);
    let holding = |n: i32| if n % 2 == 0 { &*first } else { &*second };
    let mut held: HashMap<String, (Claim, FencingToken)> = HashMap::new();
    for n in 0..30 {
        let claim = Claim::new(key(&format!("orders:n{n}")), context.long_lease());
        let grant = assert_granted(holding(n), &claim).await;
        held.insert(claim.key().to_string(), (claim, grant.token));
    }
    for n in (0..30).step_by(3) {
        let (claim, _) = held.remove(&format!("orders:n{n}")).expect("the key is held");
        assert_freed(holding(n), &claim).await;
    }
    let listed = admin(&*first).list().await.expect("list answers");
    assert_eq!(listed.len(), held.len(), "{listed:?}");
    for holder in listed {
        let (_, token) = held
            .get(holder.key.as_str())
            .unwrap_or_else(|| panic!("`list` returned {holder:?}, whose key is not held"));
        assert!(
            holder.token.is_none_or(|shown| shown == *token),
            "`list` returned {holder:?}, whose grant has {token:?}"
        );
    }
    for n in 0..30 {
        if let Some((claim, _)) = held.remove(&format!("orders:n{n}")) {
            assert_freed(holding(n), &claim).await;
        }
    }
}

/// If a busy answer names a holder, it names the current one: its key, its token and its label.
pub async fn a_holder_named_in_a_busy_answer_is_the_current_one(context: &TestContext) {
    let client = context.client().await;
    let claim =
        Claim::new(key("orders:42"), context.long_lease()).with_label(Some("host:1".into()));
    let grant = assert_granted(&*client, &claim).await;
    let other =
        Claim::new(key("orders:42"), context.long_lease()).with_label(Some("host:2".into()));
    if let Some(holder) = assert_busy(&*client, &other).await.holder {
        assert_eq!(&holder.key, claim.key());
        assert!(holder.token.is_none_or(|token| token == grant.token), "{holder:?} of {grant:?}");
        assert!(holder.label.as_deref().is_none_or(|label| label == "host:1"), "{holder:?}");
    }
    assert_freed(&*client, &claim).await;
}

/// `force_release` through another client returns `Freed`, and the key can be acquired at once.
pub async fn a_forced_release_frees_the_key_at_once(context: &TestContext) {
    let (holding, operator) = (context.client().await, context.client().await);
    context.acquire_with_lease(&*holding, context.long_lease()).await;
    assert_eq!(force_release(&*operator, "orders:42").await, Release::Freed);
    let next = context.acquire_with_lease(&*holding, context.long_lease()).await;
    assert_freed(&*holding, &next).await;
}

/// After a forced release, renewing the old claim returns `Gone`, and releasing it returns
/// `NotHeld`. The results do not change once the next claim is granted, and that claim stays held.
pub async fn a_claim_ends_with_a_forced_release(context: &TestContext) {
    let client = context.client().await;
    let old_claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    force_release(&*client, "orders:42").await;
    assert_eq!(renew(&*client, &old_claim).await, Renewal::Gone);
    assert_eq!(release(&*client, &old_claim).await, Release::NotHeld);
    let next = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_eq!(renew(&*client, &old_claim).await, Renewal::Gone);
    assert_eq!(release(&*client, &old_claim).await, Release::NotHeld);
    assert_freed(&*client, &next).await;
}

/// `force_release` of a free key returns `NotHeld` and leaves other keys held.
pub async fn a_forced_release_of_a_free_key_frees_nothing(context: &TestContext) {
    let client = context.client().await;
    assert_eq!(force_release(&*client, "orders:42").await, Release::NotHeld);
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_eq!(force_release(&*client, "orders:43").await, Release::NotHeld);
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &claim).await;
    assert_eq!(force_release(&*client, "orders:42").await, Release::NotHeld);
}

/// In a store with wake-ups, a forced release between the busy answer and the call of `wait` ends
/// the `wait`.
pub async fn a_forced_release_ends_a_wait(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    assert_granted(&*first, &Claim::new(key("orders:42"), context.long_lease())).await;
    let waiter = Claim::new(key("orders:42"), context.long_lease());
    let busy = assert_busy(&*second, &waiter).await;
    force_release(&*first, "orders:42").await;
    timeout(context.max_wait(), second.wait(&waiter, &busy))
        .await
        .expect("a forced release ends the wait");
}

/// A key in two namespaces of one store is two locks. A client of one namespace can neither renew
/// nor release claims of the other.
pub async fn namespaces_share_no_locks(context: &TestContext) {
    let (local, remote) = (context.client().await, context.other_namespace().await);
    let own_claim = Claim::new(key("orders:42"), context.long_lease());
    let other_claim = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(&*local, &own_claim).await;
    assert_granted(&*remote, &other_claim).await;
    assert_eq!(release(&*remote, &own_claim).await, Release::NotHeld);
    assert_eq!(renew(&*remote, &own_claim).await, Renewal::Gone);
    assert_freed(&*remote, &other_claim).await;
    assert_busy(&*local, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*local, &own_claim).await;
}

/// `list`, `inspect` and `force_release` do not reach the keys of another namespace.
pub async fn inspection_and_forced_release_do_not_cross_namespaces(context: &TestContext) {
    let (local, remote) = (context.client().await, context.other_namespace().await);
    let claim = context.acquire_with_lease(&*local, context.long_lease()).await;
    assert_eq!(admin(&*remote).list().await.expect("list answers"), []);
    assert_eq!(inspect(&*remote, "orders:42").await, None);
    assert_eq!(force_release(&*remote, "orders:42").await, Release::NotHeld);
    assert_eq!(admin(&*local).list().await.expect("list answers").len(), 1);
    assert_freed(&*local, &claim).await;
}

/// `holders` of a lock and `list` of a registry return the current holder, with its label and token
/// if the store has them. `holders` returns none for a free lock.
pub async fn holders_and_list_return_the_current_holder(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let lock = local.obtain("orders:42");
    assert_eq!(lock.holders().await.expect("holders answers"), []);
    let options = LockOptions::new().label("nightly report");
    let guard = remote.obtain("orders:42").lock_with(options).await.expect("the store answers");
    let holders = lock.holders().await.expect("holders answers");
    let [holder] = holders.as_slice() else { panic!("one holder: {holders:?}") };
    assert_eq!(holder.key.as_str(), "orders:42");
    if context.capabilities().labels {
        assert_eq!(holder.label.as_deref(), Some("nightly report"));
    }
    if context.capabilities().fencing {
        assert_eq!(holder.token, Some(guard.fencing_token()));
    }
    let listed = local.list().await.expect("list answers");
    assert_eq!(listed.iter().map(|holder| holder.key.as_str()).collect::<Vec<_>>(), ["orders:42"]);
    guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(lock.holders().await.expect("holders answers"), []);
}

/// `force_release` of a registry returns `true` for a lock that another process holds, and `false`
/// the second time. The holder's guard is lost with `LostReason::Gone`, and the key is free.
pub async fn a_forced_release_frees_the_lock_and_ends_the_guard(context: &TestContext) {
    let (holding, operator) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    assert!(
        operator.force_release("orders:42").await.expect("force_release answers"),
        "it was held"
    );
    assert!(
        !operator.force_release("orders:42").await.expect("force_release answers"),
        "it is not held"
    );
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    let next = operator.obtain("orders:42").try_lock().await.expect("the store answers");
    unlock(next.expect("the lock was released by force")).await;
}

/// A waiter acquires a lock after a forced release, without waiting for the end of the lease.
pub async fn a_waiter_acquires_the_lock_after_a_forced_release(context: &TestContext) {
    let (holding, waiting) = (context.client().await, context.registry().await);
    assert_granted(&*holding, &Claim::new(key("orders:42"), context.long_lease())).await;
    let lock = waiting.obtain("orders:42");
    let (guard, released) =
        futures_util::future::join(lock.try_lock_for(context.max_wait()), async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            force_release(&*holding, "orders:42").await
        })
        .await;
    assert_eq!(released, Release::Freed);
    let guard = guard.expect("the store answers").expect("the lock was released by force");
    guard.unlock().await.expect("a held lock is unlocked");
}

async fn inspect(client: &dyn LockBackend, name: &str) -> Option<Holder> {
    let mut holders = admin(client).inspect(&key(name)).await.expect("inspect answers");
    assert!(holders.len() <= 1, "an exclusive lock has one holder: {holders:?}");
    holders.pop()
}

async fn force_release(client: &dyn LockBackend, name: &str) -> Release {
    admin(client).force_release(&key(name)).await.expect("force_release answers")
}
