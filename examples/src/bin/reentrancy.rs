//! Re-entry. By default a lock is not re-entrant; an owner makes it re-entrant.

use std::time::Duration;

use lock_registry::{LockError, LockOptions, Owner, Registry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:").await?;
    let lock = registry.obtain("orders/42");

    // ANCHOR: none
    let guard = lock.lock().await?;
    // Without an owner, a second call on the same task waits like any other.
    assert!(lock.try_lock().await?.is_none());
    guard.unlock().await?;
    // ANCHOR_END: none

    // ANCHOR: owner
    let owner = Owner::new();
    let options = LockOptions::new().owner(&owner).wait(Duration::ZERO);
    if let Some(outer) = lock.try_lock_with(options.clone()).await?
        && let Some(inner) = lock.try_lock_with(options).await?
    {
        println!("same token: {}", outer.fencing_token() == inner.fencing_token());
        outer.unlock().await?; // in any order
        println!("still held: {}", inner.is_held());
        inner.unlock().await?; // the last guard frees the key
    }
    // ANCHOR_END: owner

    // ANCHOR: guard
    let guard = lock.lock().await?;
    let inner = guard.reenter()?; // another guard of the same lock; sends no request to the store
    let helper = tokio::spawn(async move { inner.unlock().await });
    guard.unlock().await?;
    helper.await??;
    // ANCHOR_END: guard

    // ANCHOR: scope
    // For layers without a common parameter: all calls inside belong to one owner.
    let total = Owner::scope(ship_order(&registry)).await?;
    println!("shipped {total}");
    // ANCHOR_END: scope
    println!("free: {}", lock.holders().await?.is_empty());
    Ok(())
}

// ANCHOR: layers
async fn ship_order(registry: &Registry) -> Result<u32, LockError> {
    let guard = registry.obtain("orders/42").lock().await?;
    let items = pack_items(registry).await?; // locks the same key again
    guard.unlock().await?;
    Ok(items)
}

async fn pack_items(registry: &Registry) -> Result<u32, LockError> {
    let guard = registry.obtain("orders/42").lock().await?;
    guard.unlock().await?;
    Ok(3)
}
// ANCHOR_END: layers
