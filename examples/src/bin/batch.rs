//! A batch over many accounts, while other processes work on some of them. Also a transfer, which
//! needs two accounts at once.

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use lock_registry::{LockError, LockOptions, LockRegistryExt as _};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:batch").await?;
    let other_process = lock_registry::connect("memory:batch").await?;
    let in_use = other_process.obtain("accounts/7").lock().await?;

    // ANCHOR: batch
    // Eight accounts at once. An account that another process uses is left for a second pass.
    let registry = &registry;
    let close_month = |account: u32| async move {
        let lock = registry.obtain(&format!("accounts/{account}"));
        let Some(guard) = lock.try_lock().await? else { return Ok(Some(account)) };
        guard.protect(tokio::time::sleep(Duration::from_millis(1))).await?; // the work
        guard.unlock().await?;
        Ok::<_, LockError>(None)
    };
    let mut results = stream::iter(0..100).map(close_month).buffer_unordered(8);
    let mut left = Vec::new();
    while let Some(result) = results.next().await {
        left.extend(result?);
    }
    println!("left for the second pass: {left:?}");
    // ANCHOR_END: batch
    in_use.unlock().await?;

    // ANCHOR: transfer
    // Both accounts or none. The order of the names does not matter, so two transfers in opposite
    // directions cannot wait for each other.
    let accounts = registry.obtain_all(["accounts/7", "accounts/3"]);
    let wait = LockOptions::new().wait(Duration::from_secs(5));
    if let Some(guard) = accounts.try_lock_with(wait).await? {
        println!("locked: {}", accounts.keys().collect::<Vec<_>>().join(", "));
        guard.unlock().await?;
    }
    // ANCHOR_END: transfer
    Ok(())
}
