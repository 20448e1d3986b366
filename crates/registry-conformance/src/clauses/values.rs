//! The value block of a key: only an exclusive holder writes it, every client reads it, and it
//! survives releases and restarts.

use registry_core::{
    Claim, ClaimMode, FencingToken, LockBackend, LockError, LockValue, LostReason, Queueing,
    ValueWrite,
};

use crate::context::{TestContext, admin, assert_busy, assert_freed, assert_granted, key, values};
use crate::faulty::{Faults, Operation};

/// A key has no value until a holder has written one.
pub async fn a_key_has_no_value_before_the_first_write(context: &TestContext) {
    let client = context.client().await;
    assert_eq!(read(&*client, "orders:42").await, None);
    let claim = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(&*client, &claim).await;
    assert_eq!(read(&*client, "orders:42").await, None);
    assert_freed(&*client, &claim).await;
}

/// The value of a holder is visible to every client at once, with the token of its writer, and
/// stays after the release.
pub async fn a_value_is_visible_to_all_clients_and_survives_the_release(context: &TestContext) {
    let (writer, reader) = (context.client().await, context.client().await);
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*writer, &claim).await.token;
    assert_written(&*writer, &claim, token, b"tick 7").await;
    let value = Some(LockValue::new(b"tick 7".to_vec(), token));
    assert_eq!(read(&*writer, "orders:42").await, value);
    assert_eq!(read(&*reader, "orders:42").await, value);
    assert_freed(&*writer, &claim).await;
    assert_eq!(read(&*reader, "orders:42").await, value);
    let next = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(&*reader, &next).await;
    assert_eq!(read(&*reader, "orders:42").await, value);
    assert_freed(&*reader, &next).await;
}

/// A value may contain any bytes, from none up to `LockValue::BYTES_MAX`. A later write replaces
/// it.
pub async fn a_value_has_any_bytes_up_to_the_maximum(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders: é\n\"{}%42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    let all_bytes: Vec<u8> = (0..=u8::MAX).cycle().take(LockValue::BYTES_MAX).collect();
    for bytes in [all_bytes, Vec::new(), vec![0], b"'; --".to_vec()] {
        assert_written(&*client, &claim, token, &bytes).await;
        let value = read(&*client, claim.key().as_str()).await.expect("a value was written");
        assert_eq!(value.bytes, bytes);
    }
    assert_freed(&*client, &claim).await;
}

/// A repeated write succeeds, because the engine repeats a write whose reply was lost.
pub async fn a_repeated_write_is_written_again(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    for _ in 0..3 {
        assert_written(&*client, &claim, token, b"once").await;
    }
    assert_freed(&*client, &claim).await;
}

/// A claim that was released, was never granted, or waits, writes nothing.
pub async fn only_a_holder_writes_the_value(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    assert_written(&*client, &claim, token, b"first").await;
    let waiting = Claim::new(key("orders:42"), context.long_lease());
    let waiting = waiting.with_queueing(Queueing::Join);
    assert_busy(&*client, &waiting).await;
    assert_write_refused(&*client, &waiting, token).await;
    client.release(&waiting).await.expect("a waiting claim is released");
    assert_freed(&*client, &claim).await;
    assert_write_refused(&*client, &claim, token).await;
    assert_write_refused(&*client, &Claim::new(key("orders:43"), context.long_lease()), token)
        .await;
    let value = read(&*client, "orders:42").await.map(|value| value.bytes);
    assert_eq!(value, Some(b"first".to_vec()));
    assert_eq!(read(&*client, "orders:43").await, None);
}

/// A holder writes while other claims wait in the store.
pub async fn a_holder_writes_while_others_wait(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    let waiting = Claim::new(key("orders:42"), context.long_lease());
    let waiting = waiting.with_queueing(Queueing::Join);
    assert_busy(&*client, &waiting).await;
    assert_written(&*client, &claim, token, b"beside a waiter").await;
    client.release(&waiting).await.expect("a waiting claim is released");
    assert_freed(&*client, &claim).await;
}

/// A holder whose lease has ended writes nothing, neither while the next claim holds the key nor
/// after its release.
pub async fn an_expired_holder_does_not_write_the_value(context: &TestContext) {
    let client = context.client().await;
    let expiring = Claim::new(key("orders:42"), context.short_lease());
    let token = assert_granted(&*client, &expiring).await.token;
    assert_written(&*client, &expiring, token, b"in time").await;
    let successor = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*client, &successor).await;
    assert_write_refused(&*client, &expiring, token).await;
    let value = read(&*client, "orders:42").await.map(|value| value.bytes);
    assert_eq!(value, Some(b"in time".to_vec()));
    assert_freed(&*client, &successor).await;
    assert_write_refused(&*client, &expiring, token).await;
}

/// A holder whose lock was broken writes nothing.
pub async fn a_holder_of_a_broken_lock_does_not_write_the_value(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    admin(&*client).force_release(claim.key()).await.expect("a held lock is broken");
    assert_write_refused(&*client, &claim, token).await;
    assert_eq!(read(&*client, "orders:42").await, None);
}

/// A write does not replace a value whose token is larger. Such a write is late: its token belongs
/// to an earlier hold of the claim.
pub async fn a_late_write_does_not_replace_a_newer_value(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease()).with_token_block(5);
    let first = assert_granted(&*client, &claim).await.token;
    let second = first.checked_add(1).expect("a token after the first one");
    assert_written(&*client, &claim, second, b"second hold").await;
    assert_write_refused(&*client, &claim, first).await;
    assert_eq!(
        read(&*client, "orders:42").await,
        Some(LockValue::new(b"second hold".to_vec(), second))
    );
    assert_freed(&*client, &claim).await;
}

/// A shared holder cannot write the value, but can read it.
pub async fn a_shared_holder_does_not_write_the_value(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease()).with_mode(ClaimMode::Shared);
    let token = assert_granted(&*client, &claim).await.token;
    assert_write_refused(&*client, &claim, token).await;
    assert_eq!(read(&*client, "orders:42").await, None);
    assert_freed(&*client, &claim).await;
}

/// Values of different keys are independent, even if a key looks like a name that the store derives
/// from another key.
pub async fn values_of_different_keys_are_independent(context: &TestContext) {
    let client = context.client().await;
    let names = ["orders:1", "orders:2", "orders:1:token", "orders:1:value"];
    for name in names {
        let claim = Claim::new(key(name), context.long_lease());
        let token = assert_granted(&*client, &claim).await.token;
        assert_written(&*client, &claim, token, name.as_bytes()).await;
        assert_freed(&*client, &claim).await;
    }
    for name in names {
        let value = read(&*client, name).await.map(|value| value.bytes);
        assert_eq!(value, Some(name.as_bytes().to_vec()));
    }
}

/// A key with a value is not listed as a held lock, and is not held.
pub async fn a_value_is_not_a_lock(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    assert_written(&*client, &claim, token, b"done").await;
    assert_freed(&*client, &claim).await;
    assert_eq!(admin(&*client).list().await.expect("locks are listed"), []);
    assert_eq!(admin(&*client).inspect(claim.key()).await.expect("a key is inspected"), []);
}

/// A value survives a restart of the store with its data.
pub async fn a_value_survives_a_restart(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    assert_written(&*client, &claim, token, b"kept").await;
    assert_freed(&*client, &claim).await;
    client.close().await;
    drop(client);
    context.restart().await;
    let client = context.client().await;
    assert_eq!(read(&*client, "orders:42").await, Some(LockValue::new(b"kept".to_vec(), token)));
}

/// Two namespaces of one store have their own values.
pub async fn values_of_other_namespaces_are_not_visible(context: &TestContext) {
    let client = context.client().await;
    let other = context.other_namespace().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let token = assert_granted(&*client, &claim).await.token;
    assert_written(&*client, &claim, token, b"here").await;
    assert_freed(&*client, &claim).await;
    assert_eq!(read(&*other, "orders:42").await, None);
}

/// A guard writes and reads the value of its key, and other registries read it.
pub async fn a_guard_writes_the_value_and_every_registry_reads_it(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let guard = first.obtain("report").lock().await.expect("a free lock is acquired");
    guard.set_value("done").await.expect("the holder writes");
    let value = guard.value().await.expect("the holder reads").expect("a value was written");
    assert_eq!((&value.bytes[..], value.token), (&b"done"[..], guard.fencing_token()));
    guard.unlock().await.expect("the lock is released");
    let lock = second.obtain("report");
    assert_eq!(lock.value().await.expect("the value is read"), Some(value));
}

/// A guard whose lock was broken cannot write. The failed write also detects the loss.
pub async fn a_guard_of_a_broken_lock_cannot_write(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let guard = first.obtain("report").lock().await.expect("a free lock is acquired");
    second.force_release("report").await.expect("a held lock is broken");
    let error = guard.set_value("late").await.expect_err("the lock was broken");
    assert!(matches!(error, LockError::Lost { reason: LostReason::Gone, .. }), "{error}");
    assert!(!guard.is_held());
    assert_eq!(second.obtain("report").value().await.expect("the value is read"), None);
}

/// A value that is too long is refused before any request. A write by a guard that is not exclusive
/// is refused in the same way.
pub async fn an_invalid_value_is_refused_before_any_request(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("report");
    let guard = lock.lock().await.expect("a free lock is acquired");
    let error = guard.set_value(vec![0; LockValue::BYTES_MAX + 1]).await.expect_err("too long");
    assert!(matches!(error, LockError::InvalidOption(_)), "{error}");
    assert!(error.to_string().contains("4097 bytes"), "{error}");
    guard.set_value(vec![0; LockValue::BYTES_MAX]).await.expect("the maximum is accepted");
    guard.unlock().await.expect("the lock is released");
    if registry.capabilities().shared {
        let reader = lock.read().await.expect("a free lock is acquired");
        let error = reader.set_value("x").await.expect_err("a reader does not write");
        assert!(matches!(error, LockError::InvalidOption(_)), "{error}");
        reader.unlock().await.expect("the lock is released");
    }
    assert_eq!(faulty.calls(Operation::SetValue), 1, "only the valid value was sent");
}

/// A guard that has written is not handed over: the next local holder has a claim of its own.
pub async fn a_guard_that_has_written_is_not_handed_over(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("report");
    let guard = lock.lock().await.expect("a free lock is acquired");
    guard.set_value("first").await.expect("the holder writes");
    let id = guard.claim().id();
    let next = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock().await })
    };
    tokio::task::yield_now().await;
    guard.unlock().await.expect("the lock is released");
    let next = next.await.expect("no panic").expect("the next caller acquires");
    assert_ne!(next.claim().id(), id);
    next.set_value("second").await.expect("the holder writes");
    next.unlock().await.expect("the lock is released");
}

/// Reads the value of a key through the backend.
async fn read(client: &dyn LockBackend, name: &str) -> Option<LockValue> {
    values(client).value(&key(name)).await.expect("the value is read").value
}

async fn assert_written(
    client: &dyn LockBackend,
    claim: &Claim,
    token: FencingToken,
    value: &[u8],
) {
    let write = values(client).set_value(claim, token, value).await;
    assert_eq!(write.expect("the value is written"), ValueWrite::Written);
}

async fn assert_write_refused(client: &dyn LockBackend, claim: &Claim, token: FencingToken) {
    let write = values(client).set_value(claim, token, b"of no holder").await;
    assert_eq!(write.expect("the store responds"), ValueWrite::NotHeld);
}
