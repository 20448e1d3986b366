//! Inspection returns the holders of keys, and a forced release ends their grants.

use std::collections::HashMap;
use std::time::Duration;

use registry_core::{
    Claim, FencingToken, Holder, LockBackend, LockError, LockOptions, LockRegistry as _,
    LostReason, Release, Renewal,
};
use tokio::time::timeout;

use crate::lab::{Lab, attempt, busy, freed, granted, is_free, key, release, renew, renewed};

/// `inspect` through another client returns the key of the holder, and its token if the store has
/// fencing. A remaining lease, if returned, is above zero and at most the lease.
pub async fn a_holder_is_told_as_it_is(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    let claim = Claim::new(key("orders:42"), lab.long()).with_label(Some("host:1".into()));
    let grant = granted(&*first, &claim).await;
    let holder = inspect(&*second, "orders:42").await.expect("somebody holds it");
    assert_eq!(&holder.key, claim.key());
    assert!(holder.token.is_none() || holder.token == grant.token, "{holder:?} of {grant:?}");
    if lab.capabilities().fencing {
        assert_eq!(holder.token, grant.token);
    }
    if let Some(left) = holder.lease_left {
        assert!(left > Duration::ZERO && left <= lab.long(), "{holder:?}");
    }
    freed(&*first, &claim).await;
}

/// A store with labels returns each label as it was given, and `None` for a holder without a label.
/// An empty label may also be returned as `None`.
pub async fn a_label_comes_back_as_it_was_given(lab: &Lab) {
    let client = lab.client().await;
    let longest = "é".repeat(LockOptions::LABEL_BYTES_MAX / 2);
    for label in ["host:1", "", "nightly \"report\" 🔒\n\0'", &longest] {
        let claim = Claim::new(key("orders:42"), lab.long()).with_label(Some(label.into()));
        granted(&*client, &claim).await;
        let holder = inspect(&*client, "orders:42").await.expect("somebody holds it");
        // Some stores cannot distinguish an empty label from none.
        assert_eq!(holder.label.unwrap_or_default(), label);
        freed(&*client, &claim).await;
    }
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    let holder = inspect(&*client, "orders:42").await.expect("somebody holds it");
    assert_eq!(holder.label, None, "the label of a holder that gave none");
    freed(&*client, &claim).await;
}

/// A renewal changes the remaining lease of the holder, but neither its token nor its label.
pub async fn a_renewed_holder_is_told_with_its_new_lease(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.renewed()).with_label(Some("host:1".into()));
    let grant = granted(&*client, &claim).await;
    renewed(&*client, &claim.clone().with_lease(lab.long())).await;
    let holder = inspect(&*client, "orders:42").await.expect("somebody holds it");
    if let Some(left) = holder.lease_left {
        assert!(left > lab.renewed(), "{holder:?}");
    }
    if lab.capabilities().fencing {
        assert_eq!(holder.token, grant.token);
    }
    if lab.capabilities().labels {
        assert_eq!(holder.label.as_deref(), Some("host:1"));
    }
    freed(&*client, &claim).await;
}

/// `inspect` returns `None` for a key that was never held, was released, or has expired. `list`
/// then returns no holder.
pub async fn nobody_is_told_of_a_free_key(lab: &Lab) {
    let client = lab.client().await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    freed(&*client, &claim).await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    let claim = Claim::new(key("orders:42"), lab.short());
    granted(&*client, &claim).await;
    lab.let_expire(&*client, &claim).await;
    assert_eq!(inspect(&*client, "orders:42").await, None);
    assert_eq!(client.list().await.expect("list answers"), []);
}

/// `inspect` and `list` neither lock a free key nor extend the lease of a held one.
pub async fn inspecting_holds_and_changes_nothing(lab: &Lab) {
    let client = lab.client().await;
    for _ in 0..3 {
        inspect(&*client, "orders:42").await;
        client.list().await.expect("list answers");
    }
    assert!(is_free(&*client, &key("orders:42")).await);
    let claim = Claim::new(key("orders:42"), lab.short());
    granted(&*client, &claim).await;
    // `let_expire` calls `inspect` repeatedly, which must not keep the grant alive.
    lab.let_expire(&*client, &claim).await;
    assert_eq!(renew(&*client, &claim).await, Renewal::Gone);
}

/// `list` returns each held key of the namespace exactly once, whichever client holds it, and no
/// other key.
pub async fn a_list_has_every_held_key_and_no_other(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    assert_eq!(first.list().await.expect("list answers"), []);
    let holding = |n: i32| if n % 2 == 0 { &*first } else { &*second };
    let mut held: HashMap<String, (Claim, Option<FencingToken>)> = HashMap::new();
    for n in 0..30 {
        let claim = Claim::new(key(&format!("orders:n{n}")), lab.long());
        let grant = granted(holding(n), &claim).await;
        held.insert(claim.key().to_string(), (claim, grant.token));
    }
    for n in (0..30).step_by(3) {
        let (claim, _) = held.remove(&format!("orders:n{n}")).expect("it was put there");
        freed(holding(n), &claim).await;
    }
    let listed = first.list().await.expect("list answers");
    assert_eq!(listed.len(), held.len(), "{listed:?}");
    for holder in listed {
        let (_, token) =
            held.get(holder.key.as_str()).unwrap_or_else(|| panic!("{holder:?} holds nothing"));
        assert!(holder.token.is_none() || holder.token == *token, "{holder:?} has {token:?}");
    }
    for n in 0..30 {
        if let Some((claim, _)) = held.remove(&format!("orders:n{n}")) {
            freed(holding(n), &claim).await;
        }
    }
}

/// If a busy answer names a holder, it names the current one: its key, its token and its label.
pub async fn a_busy_answer_names_no_other_than_the_holder(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long()).with_label(Some("host:1".into()));
    let grant = granted(&*client, &claim).await;
    let refused = Claim::new(key("orders:42"), lab.long()).with_label(Some("host:2".into()));
    if let Some(holder) = busy(&*client, &refused).await.holder {
        assert_eq!(&holder.key, claim.key());
        assert!(holder.token.is_none() || holder.token == grant.token, "{holder:?} of {grant:?}");
        assert!(holder.label.as_deref().is_none_or(|label| label == "host:1"), "{holder:?}");
    }
    freed(&*client, &claim).await;
}

/// `force_release` through another client returns `Freed`, and the key can be acquired at once.
pub async fn a_forced_release_frees_the_key_at_once(lab: &Lab) {
    let (holding, breaking) = (lab.client().await, lab.client().await);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*holding, &claim).await;
    assert_eq!(force_release(&*breaking, "orders:42").await, Release::Freed);
    let next = Claim::new(key("orders:42"), lab.long());
    granted(&*holding, &next).await;
    freed(&*holding, &next).await;
}

/// After a forced release, renewing the old claim returns `Gone`, and releasing it returns
/// `NotHeld`. The same applies after the next claim was granted, which stays held.
pub async fn the_holder_of_a_broken_lock_is_powerless(lab: &Lab) {
    let client = lab.client().await;
    let broken = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &broken).await;
    force_release(&*client, "orders:42").await;
    assert_eq!(renew(&*client, &broken).await, Renewal::Gone);
    assert_eq!(release(&*client, &broken).await, Release::NotHeld);
    let next = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &next).await;
    assert_eq!(renew(&*client, &broken).await, Renewal::Gone);
    assert_eq!(release(&*client, &broken).await, Release::NotHeld);
    freed(&*client, &next).await;
}

/// `force_release` of a free key returns `NotHeld` and leaves other keys held.
pub async fn a_forced_release_of_a_free_key_frees_nothing(lab: &Lab) {
    let client = lab.client().await;
    assert_eq!(force_release(&*client, "orders:42").await, Release::NotHeld);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    assert_eq!(force_release(&*client, "orders:43").await, Release::NotHeld);
    busy(&*client, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*client, &claim).await;
    assert_eq!(force_release(&*client, "orders:42").await, Release::NotHeld);
}

/// In a store with wake-ups, a forced release between the busy answer and the call of `wait` ends
/// the `wait`.
pub async fn a_forced_release_wakes_those_who_wait(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    granted(&*first, &Claim::new(key("orders:42"), lab.long())).await;
    let waiter = Claim::new(key("orders:42"), lab.long());
    let refusal = busy(&*second, &waiter).await;
    force_release(&*first, "orders:42").await;
    timeout(lab.patience(), second.wait(&waiter, &refusal)).await.expect("breaking a lock wakes");
}

/// A key in two namespaces of one store is two locks. A client of one namespace can neither renew
/// nor release claims of the other.
pub async fn namespaces_share_no_locks(lab: &Lab) {
    let (here, there) = (lab.client().await, lab.stranger().await);
    let mine = Claim::new(key("orders:42"), lab.long());
    let theirs = Claim::new(key("orders:42"), lab.long());
    granted(&*here, &mine).await;
    granted(&*there, &theirs).await;
    assert_eq!(release(&*there, &mine).await, Release::NotHeld);
    assert_eq!(renew(&*there, &mine).await, Renewal::Gone);
    freed(&*there, &theirs).await;
    busy(&*here, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*here, &mine).await;
}

/// `list`, `inspect` and `force_release` do not reach the keys of another namespace.
pub async fn nothing_is_told_or_broken_across_namespaces(lab: &Lab) {
    let (here, there) = (lab.client().await, lab.stranger().await);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*here, &claim).await;
    assert_eq!(there.list().await.expect("list answers"), []);
    assert_eq!(inspect(&*there, "orders:42").await, None);
    assert_eq!(force_release(&*there, "orders:42").await, Release::NotHeld);
    assert_eq!(here.list().await.expect("list answers").len(), 1);
    freed(&*here, &claim).await;
}

/// `holder` of a lock and `list` of a registry return the current holder, with its label and token
/// if the store has them. `holder` returns `None` for a free lock.
pub async fn a_lock_tells_its_holder(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let lock = here.obtain("orders:42");
    assert_eq!(lock.holder().await.expect("holder answers"), None);
    let options = LockOptions::new().label("nightly report");
    let guard = there.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    let holder = lock.holder().await.expect("holder answers").expect("somebody holds it");
    assert_eq!(holder.key.as_str(), "orders:42");
    if lab.capabilities().labels {
        assert_eq!(holder.label.as_deref(), Some("nightly report"));
    }
    if lab.capabilities().fencing {
        assert_eq!(holder.token, guard.fencing_token());
    }
    let listed = here.list().await.expect("list answers");
    assert_eq!(listed.iter().map(|holder| holder.key.as_str()).collect::<Vec<_>>(), ["orders:42"]);
    guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(lock.holder().await.expect("holder answers"), None);
}

/// `force_release` of a registry returns `true` for a lock that another process holds, and `false`
/// the second time. The holder's guard is lost with `LostReason::Gone`, and the key is free.
pub async fn a_broken_lock_is_free_and_its_holder_is_told(lab: &Lab) {
    let (holding, breaking) = (lab.registry_of(lab.renewed()).await, lab.registry().await);
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    assert!(
        breaking.force_release("orders:42").await.expect("breaking answers"),
        "somebody held it"
    );
    assert!(
        !breaking.force_release("orders:42").await.expect("breaking answers"),
        "nobody holds it"
    );
    assert_eq!(guard.lost().await, LostReason::Gone);
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    let next = breaking.obtain("orders:42").try_lock().await.expect("no trouble");
    next.expect("the lock was broken").unlock().await.expect("a held lock is unlocked");
}

/// A waiter acquires a lock after a forced release, without waiting for the end of the lease.
pub async fn a_waiter_gets_a_broken_lock(lab: &Lab) {
    let (holding, waiting) = (lab.client().await, lab.registry().await);
    granted(&*holding, &Claim::new(key("orders:42"), lab.long())).await;
    let lock = waiting.obtain("orders:42");
    let (guard, broken) = futures_util::future::join(lock.try_lock_for(lab.patience()), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        force_release(&*holding, "orders:42").await
    })
    .await;
    assert_eq!(broken, Release::Freed);
    let guard = guard.expect("no trouble").expect("the lock was broken");
    guard.unlock().await.expect("a held lock is unlocked");
    drop(attempt(&*holding, &Claim::new(key("orders:42"), lab.short())).await);
}

async fn inspect(client: &dyn LockBackend, name: &str) -> Option<Holder> {
    client.inspect(&key(name)).await.expect("inspect answers")
}

async fn force_release(client: &dyn LockBackend, name: &str) -> Release {
    client.force_release(&key(name)).await.expect("breaking answers")
}
