//! A waiter that requests its place in the store's queue while the holder renews its lease.

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, LockBackend, Queueing, Release, Renewal};
use tokio::join;

/// Asserts that a claim that joins the queue undoes no renewal of the exclusive holder. A store
/// with one record per key reads the record, adds the waiter and writes the record. A renewal in
/// between must not be lost.
///
/// # Panics
/// Panics if a renewal was undone, or on an error of a backend. Exception: a renewal with a
/// retryable error is repeated.
pub async fn assert_a_waiter_undoes_no_renewal(
    holding: &dyn LockBackend,
    waiting: &dyn LockBackend,
) {
    let (short, long) = (Duration::from_secs(60), Duration::from_secs(600));
    let key = Key::new("renewed").expect("the key is valid");
    let admin = holding.admin().expect("the store reports holders");
    for round in 0..100 {
        let claim = Claim::new(key.clone(), short);
        let granted = holding.try_acquire(&claim).await.expect("the store answers");
        assert!(matches!(granted, Attempt::Granted(_)), "the key is free: {granted:?}");
        let extended = claim.clone().with_lease(long);
        let waiter = Claim::new(key.clone(), short).with_queueing(Queueing::Join);
        let renew = async {
            // Up to three round trips delay the renewal, so that it falls between the round trips
            // of the attempt.
            for _ in 0..round % 4 {
                admin.inspect(&key).await.expect("the store answers");
            }
            // A store may skip a row that the attempt has locked.
            loop {
                match holding.renew(std::slice::from_ref(&extended)).await.remove(0) {
                    Err(error) if error.is_retryable() => {}
                    renewed => break renewed,
                }
            }
        };
        let (attempt, renewed) = join!(waiting.try_acquire(&waiter), renew);
        match attempt.expect("the store answers") {
            Attempt::Busy(busy) => assert!(busy.is_queued, "the waiter is not queued"),
            other => panic!("the key is held: {other:?}"),
        }
        assert!(matches!(renewed, Ok(Renewal::Renewed(left)) if left > short), "{renewed:?}");
        let holders = admin.inspect(&key).await.expect("the store answers");
        let left = holders.first().and_then(|holder| holder.lease_left);
        assert!(left.is_some_and(|left| left > short), "round {round}: undone, {left:?} left");
        assert_eq!(waiting.release(&waiter).await.expect("the store answers"), Release::NotHeld);
        assert_eq!(holding.release(&claim).await.expect("the store answers"), Release::Freed);
    }
}
