//! Fencing tokens of one key only increase: across clients, releases, expiry, restarts and data
//! loss.

use std::sync::Arc;

use registry_core::{Claim, FencingToken, LockBackend};

use crate::context::{
    TestContext, admin, assert_busy, assert_freed, assert_granted, assert_renewed, key, renew,
};

/// Each grant has a token, and a later grant of the same key has a larger one.
pub async fn every_grant_has_a_token(context: &TestContext) {
    let client = context.client().await;
    let mut tokens = Vec::new();
    for name in ["orders:1", "orders:2", "orders:1"] {
        tokens.push(acquire_and_release(context, &*client, name, 1).await);
    }
    assert!(tokens[2] > tokens[0], "{tokens:?}");
}

/// After a release, the next grant has a larger token. The clause repeats this 200 times on one
/// key.
pub async fn tokens_increase_after_a_release(context: &TestContext) {
    let client = context.client().await;
    let mut last = acquire_and_release(context, &*client, "orders:42", 1).await;
    // Without pauses between the grants, a token clock with too coarse a resolution repeats a
    // token.
    for _ in 0..200 {
        let next = acquire_and_release(context, &*client, "orders:42", 1).await;
        assert!(next > last, "{next} after {last}");
        last = next;
    }
}

/// The tokens of a key increase while three clients acquire and release it in turn.
pub async fn tokens_increase_across_clients(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    let mut last = acquire_and_release(context, &*clients[0], "orders:42", 1).await;
    for n in 1..60 {
        let next = acquire_and_release(context, &*clients[n % 3], "orders:42", 1).await;
        assert!(next > last, "{next} after {last}");
        last = next;
    }
}

/// The grant that follows an expired grant has a larger token.
pub async fn tokens_increase_after_an_expiry(context: &TestContext) {
    let client = context.client().await;
    let expiring = Claim::new(key("orders:42"), context.short_lease());
    let last = assert_granted(&*client, &expiring).await.token;
    let successor = Claim::new(key("orders:42"), context.long_lease());
    let next = context.wait_until_granted(&*client, &successor).await.token;
    assert!(next > last, "{next} after {last}");
    assert_freed(&*client, &successor).await;
}

/// The grant that follows a forced release has a larger token, because the former holder may still
/// be working.
pub async fn tokens_increase_after_a_forced_release(context: &TestContext) {
    let client = context.client().await;
    let broken = Claim::new(key("orders:42"), context.long_lease());
    let last = assert_granted(&*client, &broken).await.token;
    admin(&*client).force_release(broken.key()).await.expect("a held lock is broken");
    let next = acquire_and_release(context, &*client, "orders:42", 1).await;
    assert!(next > last, "{next} after {last}");
}

/// A claim that is granted again after its release has a larger token than before.
pub async fn tokens_increase_when_one_claim_is_granted_again(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let last = assert_granted(&*client, &claim).await.token;
    assert_freed(&*client, &claim).await;
    let next = assert_granted(&*client, &claim).await.token;
    assert!(next > last, "{next} after {last}");
    assert_freed(&*client, &claim).await;
}

/// After a restart with data, the next token is larger than all tokens that were used before.
pub async fn tokens_increase_after_a_restart(context: &TestContext) {
    let client = context.client().await;
    // A store with a queue has no local hand-over, so it need not reserve blocks of tokens.
    let block = if context.capabilities().fair { 1 } else { 1_000 };
    let last = acquire_and_release(context, &*client, "orders:42", block).await;
    close_client(client).await;
    context.restart().await;
    let next = acquire_and_release(context, &*context.client().await, "orders:42", 1).await;
    let free_from = last.get() + u64::from(block);
    assert!(next.get() >= free_from, "{next} after {last} and its block of {block}");
}

/// After a restart without data, the next token is larger than the last one. Such a store derives
/// its tokens from its clock, not only from its data.
pub async fn tokens_increase_after_a_restart_without_data(context: &TestContext) {
    let client = context.client().await;
    let last = acquire_and_release(context, &*client, "orders:42", 1).await;
    close_client(client).await;
    context.wipe().await;
    let next = acquire_and_release(context, &*context.client().await, "orders:42", 1).await;
    assert!(next > last, "{next} after {last}");
}

/// A repeated acquire of a granted claim returns the same token, through each client that may use
/// the claim.
pub async fn a_repeated_acquire_has_the_same_token(context: &TestContext) {
    let first = context.client().await;
    let second = context.another_client(&first).await;
    let claim = Claim::new(key("orders:42"), context.long_lease()).with_token_block(5);
    let grant = assert_granted(&*first, &claim).await;
    assert_eq!(assert_granted(&*first, &claim).await.token, grant.token);
    assert_eq!(assert_granted(&*second, &claim).await.token, grant.token);
    assert_freed(&*first, &claim).await;
}

/// A holder's token does not change when the holder renews or repeats its acquire, or when other
/// claims try to acquire or renew.
pub async fn a_holder_keeps_its_token(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let grant = assert_granted(&*client, &claim).await;
    for _ in 0..3 {
        assert_busy(
            &*client,
            &Claim::new(key("orders:42"), context.long_lease()).with_token_block(100),
        )
        .await;
        assert_renewed(&*client, &claim).await;
        renew(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    }
    assert_eq!(assert_granted(&*client, &claim).await.token, grant.token);
    assert_freed(&*client, &claim).await;
}

/// No grant receives a token of a block that an earlier grant reserved. The holder uses these
/// tokens for hand-overs, which the store does not see. If the release states fewer used tokens,
/// only the unused ones may be granted later.
pub async fn a_reserved_block_of_tokens_is_issued_to_no_other_grant(context: &TestContext) {
    let clients = [context.client().await, context.client().await];
    let mut free_from = 0;
    for (n, block) in [1, 33, 1_000_000, 2, 1].into_iter().enumerate() {
        let next = acquire_and_release(context, &*clients[n % 2], "orders:42", block).await;
        assert!(next.get() >= free_from, "{next} is inside the block that ends before {free_from}");
        free_from = next.get() + u64::from(block);
    }
    // A release states how many tokens were used. The store may issue the others to later grants.
    for (n, (block, used)) in
        [(1_000_000, 400_000), (256, 1), (1_000_000, 2), (1, 1)].into_iter().enumerate()
    {
        let client = &*clients[n % 2];
        let claim = Claim::new(key("orders:42"), context.long_lease()).with_token_block(block);
        let next = assert_granted(client, &claim).await.token;
        assert!(next.get() >= free_from, "{next} was used: {free_from} is the first free token");
        assert_freed(client, &claim.with_token_block(used)).await;
        free_from = next.get() + u64::from(used);
    }
}

/// A block of tokens stays reserved after its grant has expired: the next token is larger than all
/// tokens of the block.
pub async fn a_reserved_block_of_tokens_stays_reserved_after_an_expiry(context: &TestContext) {
    let client = context.client().await;
    let block = 1_000_000;
    let expiring = Claim::new(key("orders:42"), context.short_lease()).with_token_block(block);
    let last = assert_granted(&*client, &expiring).await.token;
    let successor = Claim::new(key("orders:42"), context.long_lease());
    let next = context.wait_until_granted(&*client, &successor).await.token;
    assert!(
        next.get() >= last.get() + u64::from(block),
        "{next} after {last} and its block of {block}"
    );
    assert_freed(&*client, &successor).await;
}

/// The guards of two processes that lock a key in turn have increasing tokens.
pub async fn guards_of_two_processes_have_increasing_tokens(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let mut last = None;
    for n in 0..20 {
        let guard =
            registries[n % 2].obtain("orders:42").lock().await.expect("a free lock is acquired");
        let next = guard.fencing_token();
        assert!(Some(next) > last, "{next} after {last:?}");
        last = Some(next);
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// The guards of twelve concurrent callers in two processes have tokens that increase in the order
/// of the guards, also after hand-overs.
pub async fn waiters_of_two_processes_have_increasing_tokens(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let tokens = Arc::new(tokio::sync::Mutex::new(Vec::new()));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..12 {
        let lock = registries[n % 2].obtain("orders:42");
        let tokens = Arc::clone(&tokens);
        tasks.spawn(async move {
            for _ in 0..4 {
                let guard = lock.lock().await.expect("the lock is acquired");
                tokens.lock().await.push(guard.fencing_token());
                guard.unlock().await.expect("a held lock is unlocked");
            }
        });
    }
    tasks.join_all().await;
    let tokens = tokens.lock().await;
    assert_eq!(tokens.len(), 48);
    assert!(tokens.is_sorted_by(|one, next| one < next), "in the order of the guards: {tokens:?}");
}

/// Acquires the key with a reserved block of tokens, releases it, and returns the token.
async fn acquire_and_release(
    context: &TestContext,
    client: &dyn LockBackend,
    name: &str,
    block: u32,
) -> FencingToken {
    let claim = Claim::new(key(name), context.long_lease()).with_token_block(block);
    let grant = assert_granted(client, &claim).await;
    assert_freed(client, &claim).await;
    grant.token
}

async fn close_client(client: Arc<dyn LockBackend>) {
    client.close().await;
    drop(client);
}
