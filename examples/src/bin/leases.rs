//! How a lease ends, how its holder is notified, and how the holder's work then stops.

use std::time::Duration;

use lock_registry::{LockError, LockOptions, LostReason};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:leases").await?;
    let other_process = lock_registry::connect("memory:leases").await?;

    // ANCHOR: protect
    let guard = registry.obtain("import").lock().await?;
    // Runs the work while the lock is held, and drops it at its current `.await` if the lock is
    // lost.
    let rows = guard.protect(import_rows()).await?;
    println!("{rows} rows");
    guard.unlock().await?;
    // ANCHOR_END: protect

    // Without renewal a lease expires, as it does when the store is unreachable.
    let options = LockOptions::new().auto_renew(false).lease(Duration::from_millis(300));

    // ANCHOR: lost
    let Some(guard) = registry.obtain("import").try_lock_with(options.clone()).await? else {
        return Err("`import` is already locked".into());
    };
    let lost = guard.lost(); // does not borrow the guard: await it anywhere
    let watcher = tokio::spawn(async move {
        let reason = lost.await;
        println!("lost: {reason}");
        reason
    });
    // ANCHOR_END: lost

    // The holder is notified before another client can be granted the lock.
    let next = other_process.obtain("import").lock().await?;
    println!("first guard held: {}, second: {}", guard.is_held(), next.is_held());
    assert_eq!(watcher.await?, LostReason::Expired);

    // ANCHOR: unlock
    // A late release returns an error: the work done since the loss was not protected.
    match guard.unlock().await {
        Err(LockError::Lost { key, reason, .. }) => println!("{key}: {reason}"),
        other => other?,
    }
    // ANCHOR_END: unlock
    // The late release also had no effect: the successor still holds the lock.
    assert!(next.is_held());
    next.unlock().await?;

    // ANCHOR: stopped
    let Some(guard) = registry.obtain("import").try_lock_with(options).await? else {
        return Err("`import` is already locked".into());
    };
    match guard.protect(std::future::pending::<()>()).await {
        Ok(()) => unreachable!("this work never ends by itself"),
        Err(error) => println!("stopped: {error}"),
    }
    // ANCHOR_END: stopped

    // ANCHOR: renew
    let guard = registry.obtain("import").lock().await?;
    // The lock is renewed in the background until the guard is dropped. This call asks for a longer
    // lease from now on.
    guard.extend(Duration::from_secs(120)).await?;
    println!("more than a minute left: {}", guard.valid_for() > Duration::from_secs(60));
    guard.unlock().await?;
    // ANCHOR_END: renew
    Ok(())
}

async fn import_rows() -> u64 {
    17
}
