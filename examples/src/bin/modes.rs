//! Readers and writers, permits, a fair lock, and several keys at once.

use lock_registry::{LockOptions, LockRegistryExt as _};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:modes").await?;
    let other_process = lock_registry::connect("memory:modes").await?;

    // ANCHOR: readers
    let prices = registry.obtain("prices");
    let reader = prices.read().await?;
    let other_reader = other_process.obtain("prices").read().await?;
    println!("a writer is excluded: {}", prices.try_lock().await?.is_none());
    reader.unlock().await?;
    other_reader.unlock().await?;
    // ANCHOR_END: readers

    // ANCHOR: upgrade
    let guard = prices.upgradable().await?; // reads alongside other readers
    let guard = guard.upgrade().await?; // waits until they have left, and blocks new ones
    println!(
        "readers are excluded: {}",
        other_process.obtain("prices").try_read().await?.is_none()
    );
    let guard = guard.downgrade().await?; // lets readers in, without a release in between
    println!("mode: {}", guard.mode());
    guard.unlock().await?;
    // ANCHOR_END: upgrade

    // ANCHOR: permits
    let uploads = registry.semaphore("uploads", 3); // three units for all processes together
    let large = uploads.acquire_many(2).await?;
    let small = other_process.semaphore("uploads", 3).acquire().await?;
    println!("all units are taken: {}", uploads.try_acquire().await?.is_none());
    for holder in uploads.holders().await? {
        println!("holder: {}", holder.mode);
    }
    large.unlock().await?;
    small.unlock().await?;
    // ANCHOR_END: permits

    // ANCHOR: fair
    let fair = LockOptions::new().fair(true); // first come, first served, over all processes
    registry.obtain("orders/42").lock_with(fair).await?.unlock().await?;
    // ANCHOR_END: fair

    // ANCHOR: many
    let accounts = registry.obtain_all(["accounts/7", "accounts/3"]);
    let guard = accounts.lock().await?; // both or none
    println!("keys: {}", accounts.keys().collect::<Vec<_>>().join(", "));
    guard.unlock().await?;
    // ANCHOR_END: many
    Ok(())
}
