//! A renewal extends the lease of a held grant and has no other effect.

use std::time::Duration;

use registry_core::{Claim, LockBackend as _, LockError, LockOptions, Renewal};
use tokio::time::{Instant, sleep};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, assert_renewed, is_free, key, release,
    renew, renew_all,
};
use crate::faulty::{Fault, Faults, Operation};

/// A renewal with a longer lease extends the grant beyond its first lease.
pub async fn a_renewal_extends_a_grant(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.renewable_lease()).await;
    let left = assert_renewed(&*client, &claim.clone().with_lease(context.long_lease())).await;
    assert!(left > context.renewable_lease(), "{left:?} of {:?}", context.long_lease());
    sleep(context.renewable_lease() * 3 / 2).await;
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &claim).await;
}

/// A grant can be renewed through another client, because the claim id alone identifies the claim.
pub async fn a_grant_is_renewed_through_another_client(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let claim = context.acquire_with_lease(&*first, context.long_lease()).await;
    assert_renewed(&*second, &claim).await;
    assert_freed(&*first, &claim).await;
}

/// A renewal with a shorter lease does not shorten the current lease, because renewals may arrive
/// out of order.
pub async fn a_renewal_never_shortens_a_lease(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_renewed(&*client, &claim.clone().with_lease(context.short_lease())).await;
    sleep(context.short_lease() * 2).await;
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &claim).await;
}

/// Renewing an expired grant returns `Gone` and leaves the key free. Another client may have held
/// the key in the meantime.
pub async fn a_renewal_does_not_revive_an_expired_grant(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.short_lease()).await;
    context.wait_until_expired(&*client, &claim).await;
    assert_eq!(
        renew(&*client, &claim.clone().with_lease(context.long_lease())).await,
        Renewal::Gone
    );
    assert!(is_free(&*client, claim.key()).await, "the renewal made a new grant");
}

/// Renewing an expired grant returns `Gone` and leaves the key free, also after a successor has
/// acquired and released the key.
pub async fn a_renewal_does_not_revive_a_grant_after_its_successor(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.short_lease()).await;
    let next = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*client, &next).await;
    assert_freed(&*client, &next).await;
    assert_eq!(
        renew(&*client, &claim.clone().with_lease(context.long_lease())).await,
        Renewal::Gone
    );
    assert!(is_free(&*client, claim.key()).await, "the renewal made a new grant");
}

/// Renewing a released grant returns `Gone` and leaves the key free. A renewal may arrive after the
/// release of its own claim.
pub async fn a_renewal_does_not_revive_a_released_grant(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_freed(&*client, &claim).await;
    assert_eq!(renew(&*client, &claim).await, Renewal::Gone);
    assert!(is_free(&*client, claim.key()).await, "the renewal made a new grant");
}

/// Renewing a claim that was never granted returns `Gone` and leaves the key free.
pub async fn renewing_a_claim_that_was_never_granted_grants_nothing(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    assert_eq!(renew(&*client, &claim).await, Renewal::Gone);
    assert!(is_free(&*client, claim.key()).await, "the renewal made a grant");
}

/// Renewing a claim that does not hold the key returns `Gone` and does not extend the holder's
/// lease.
pub async fn renewing_another_claim_does_not_extend_the_holders_lease(context: &TestContext) {
    let client = context.client().await;
    context.acquire_with_lease(&*client, context.short_lease()).await;
    let other_claim = Claim::new(key("orders:42"), context.long_lease());
    assert_eq!(renew(&*client, &other_claim).await, Renewal::Gone);
    // If the renewal had extended the holder's lease, the key would stay held for the lease of
    // `other_claim`.
    let next = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*client, &next).await;
    assert_freed(&*client, &next).await;
}

/// A batch returns one answer per claim, in the order of the claims. Held claims are renewed. A
/// released claim, and a claim whose key another claim holds, is `Gone`.
pub async fn a_batch_is_answered_in_the_order_of_its_claims(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> =
        (0..12).map(|n| Claim::new(key(&format!("orders:n{n}")), context.long_lease())).collect();
    for (n, claim) in claims.iter().enumerate() {
        match n % 4 {
            0 | 3 => drop(assert_granted(&*client, claim).await),
            1 => {
                assert_granted(&*client, claim).await;
                assert_freed(&*client, claim).await;
            }
            // Held by another claim.
            _ => drop(
                assert_granted(&*client, &Claim::new(claim.key().clone(), context.long_lease()))
                    .await,
            ),
        }
    }
    // Neither in the order of the grants nor in the order of the keys.
    let mut batch = claims;
    batch.reverse();
    batch.swap(1, 8);
    let answers = renew_all(&*client, &batch).await;
    for (claim, answer) in batch.iter().zip(answers) {
        let n: usize =
            claim.key().as_str()["orders:n".len()..].parse().expect("the key ends in a number");
        let held = matches!(n % 4, 0 | 3);
        match answer.expect("the store answers") {
            Renewal::Renewed(left) => {
                assert!(held && left > Duration::ZERO, "{claim:?} is not held")
            }
            Renewal::Gone => assert!(!held, "{claim:?} is held"),
        }
    }
}

/// A released claim in a batch does not prevent the renewal of the others.
pub async fn a_released_claim_in_a_batch_does_not_prevent_other_renewals(context: &TestContext) {
    let client = context.client().await;
    let mut batch: Vec<_> = (0..3)
        .map(|n| Claim::new(key(&format!("orders:n{n}")), context.renewable_lease()))
        .collect();
    for claim in &batch {
        assert_granted(&*client, claim).await;
    }
    assert_freed(&*client, &batch[1]).await;
    batch.iter_mut().for_each(|claim| *claim = claim.clone().with_lease(context.long_lease()));
    renew_all(&*client, &batch).await;
    sleep(context.renewable_lease() * 3 / 2).await;
    for n in [0, 2] {
        assert_busy(&*client, &Claim::new(batch[n].key().clone(), context.long_lease())).await;
        assert_freed(&*client, &batch[n]).await;
    }
    assert!(is_free(&*client, batch[1].key()).await, "a released claim holds its key again");
}

/// Each claim of a batch is renewed for its own lease.
pub async fn each_claim_of_a_batch_has_its_own_lease(context: &TestContext) {
    let client = context.client().await;
    let long = Claim::new(key("long"), context.renewable_lease());
    let short = Claim::new(key("short"), context.renewable_lease());
    assert_granted(&*client, &long).await;
    assert_granted(&*client, &short).await;
    let batch = [long.clone().with_lease(context.long_lease()), short.clone()];
    for answer in renew_all(&*client, &batch).await {
        assert!(matches!(answer, Ok(Renewal::Renewed(_))), "{answer:?}");
    }
    let next = Claim::new(key("short"), context.long_lease());
    context.wait_until_granted(&*client, &next).await;
    assert_busy(&*client, &Claim::new(key("long"), context.long_lease())).await;
    assert_freed(&*client, &long).await;
    assert_freed(&*client, &next).await;
}

/// A renewed grant lasts at least as long as the lease that the renewal returned, less 1 % and 2
/// ms.
pub async fn a_renewed_grant_does_not_end_before_its_returned_lease(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.renewable_lease()).await;
    let before = Instant::now();
    let Renewal::Renewed(returned_lease) = renew(&*client, &claim).await else {
        panic!("{:?} is gone before its lease is over", claim.key());
    };
    let successor = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*client, &successor).await;
    let lasted = before.elapsed();
    assert!(
        lasted >= returned_lease - returned_lease / 100 - Duration::from_millis(2),
        "the returned lease was {returned_lease:?}, but the grant lasted {lasted:?}"
    );
    assert_freed(&*client, &successor).await;
}

/// A renewal of an empty batch returns no answers.
pub async fn an_empty_batch_has_no_answers(context: &TestContext) {
    assert!(context.client().await.renew(&[]).await.is_empty());
}

/// A backend answers batches of its `batch_max` completely and in order, for 1,500 claims in total.
/// This holds even if the store limits a request, for example the parameters of a SQL statement.
pub async fn a_large_batch_is_renewed_completely(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> = (0..1_500)
        .map(|n| Claim::new(key(&format!("orders:n{n}")), context.long_lease()))
        .collect();
    // Only 15 claims are held, because 1,500 grants would take long.
    for claim in claims.iter().step_by(100) {
        assert_granted(&*client, claim).await;
    }
    for (n, answer) in renew_all(&*client, &claims).await.into_iter().enumerate() {
        let held = matches!(answer.expect("the store answers"), Renewal::Renewed(_));
        assert_eq!(held, n % 100 == 0, "orders:n{n}");
    }
    for claim in claims.iter().step_by(100) {
        release(&*client, claim).await;
    }
}

/// A lock stays held beyond its lease while its guard exists, because the lease renewer renews it.
/// The token does not change.
pub async fn a_held_lock_is_renewed_beyond_its_lease(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let other = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let token = guard.fencing_token();
    for _ in 0..4 {
        sleep(context.renewable_lease() * 3 / 4).await;
        assert!(guard.is_held(), "the lock was lost without a fault");
        assert!(other.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    }
    assert_eq!(guard.fencing_token(), token, "a renewal is no new grant");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// `extend` with a longer lease extends the validity of the guard.
pub async fn a_manual_renewal_extends_the_validity_of_the_guard(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.renew_with_retries(&guard, context.long_lease()).await.expect("a held lock is renewed");
    assert!(
        guard.valid_for() > context.renewable_lease(),
        "{:?} after a renewal for {:?}",
        guard.valid_for(),
        context.long_lease()
    );
    sleep(context.renewable_lease() * 3 / 2).await;
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// `extend` with a shorter lease does not shorten the guard's current lease.
pub async fn a_manual_renewal_never_shortens_the_lease(context: &TestContext) {
    let registry = context.registry().await;
    let other = context.registry().await;
    let options = LockOptions::new().auto_renew(false);
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
    context
        .renew_with_retries(&guard, context.short_lease())
        .await
        .expect("a held lock is renewed");
    sleep(context.short_lease() * 2).await;
    assert!(guard.is_held(), "a renewal shortened the lease");
    assert!(other.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A lock stays held through an outage that is shorter than its lease.
pub async fn renewal_survives_an_outage_shorter_than_the_lease(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    faulty.apply(Faults::outage());
    context
        .eventually("the lease renewer sends a renewal", async || {
            faulty.calls(Operation::Renew) > 0
        })
        .await;
    faulty.clear_faults();
    sleep(context.renewable_lease() * 2).await;
    assert!(guard.is_held(), "the outage was shorter than the lease");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A lock stays held if the reply to its first renewal and the request of its third renewal are
/// lost.
pub async fn a_lost_renewal_reply_does_not_end_the_lock(context: &TestContext) {
    let faults = Faults::none().at_call(Operation::Renew, 1, Fault::LoseReply).at_call(
        Operation::Renew,
        3,
        Fault::LoseRequest,
    );
    let faulty = context.faulty(faults).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let limit = context.renewable_lease() * 6 + context.max_wait();
    context
        .within(limit, "the lease renewer continues", async || faulty.calls(Operation::Renew) >= 5)
        .await;
    assert!(guard.is_held(), "a lost reply is not a lost lock");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// No renewal reaches the store after `unlock` has returned.
pub async fn nothing_is_renewed_after_unlock(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context
        .eventually("the lease renewer sends a renewal", async || {
            faulty.calls(Operation::Renew) > 0
        })
        .await;
    guard.unlock().await.expect("a held lock is unlocked");
    let renewals = faulty.calls(Operation::Renew);
    sleep(context.renewable_lease() * 2).await;
    assert_eq!(faulty.calls(Operation::Renew), renewals, "renewals continue without a holder");
}

/// If a guard is dropped while the store refuses all releases, its lock is no longer renewed. The
/// lock then ends with its lease.
pub async fn nothing_is_renewed_after_a_refused_release(context: &TestContext) {
    let faulty = context.faulty(Faults::none().always(Operation::Release, Fault::Refuse)).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    drop(guard);
    sleep(context.renewable_lease() / 2).await;
    let renewals = faulty.calls(Operation::Renew);
    sleep(context.renewable_lease() * 2).await;
    assert_eq!(faulty.calls(Operation::Renew), renewals, "renewals continue without a holder");
    let other = context.registry().await;
    let guard = other
        .obtain("orders:42")
        .try_lock_for(context.max_wait())
        .await
        .expect("the store answers");
    guard.expect("the lease has expired").unlock().await.expect("a held lock is unlocked");
}

/// A lock with `auto_renew(false)` is not renewed and ends with its lease, as with Redisson's
/// `leaseTime`.
pub async fn a_lock_with_renewal_disabled_is_not_renewed(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
    let until = guard.valid_until();
    // The verification at `verify_after` is a call of `renew` too, but it does not extend the
    // lease.
    let verifications = u64::from(faulty.capabilities().renewal.verify_after.is_some());
    while guard.is_held() {
        assert!(guard.valid_until() < until + context.short_lease() / 4);
        sleep(context.short_lease() / 20).await;
    }
    let renewals = faulty.calls(Operation::Renew);
    assert!(renewals <= verifications, "{renewals} renewals");
    drop(guard);
}

/// The loss of one lock does not stop the renewal of other locks of the registry.
pub async fn one_lost_lock_does_not_stop_the_renewal_of_others(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let mut guards = Vec::new();
    for n in 0..3 {
        guards.push(
            registry.obtain(&format!("orders:n{n}")).lock().await.expect("a free lock is acquired"),
        );
    }
    context.break_claim(guards[1].claim()).await;
    guards[1].lost().await;
    sleep(context.renewable_lease() * 2).await;
    for guard in guards {
        let broken = guard.key() == "orders:n1";
        assert_eq!(guard.is_held(), !broken, "{guard:?}");
        match guard.unlock().await {
            Ok(()) => assert!(!broken),
            Err(LockError::Lost { .. }) => assert!(broken),
            Err(error) => panic!("{error:?}"),
        }
    }
}
