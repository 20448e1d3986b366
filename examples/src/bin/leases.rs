//! What a lease is, how its holder learns that it is over, and how work stops when it is.

use std::time::Duration;

use lock_registry::{LockError, LockOptions, LockRegistry, LostReason};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = lock_registry::connect("memory:leases").await?;
    let theirs = lock_registry::connect("memory:leases").await?;

    // ANCHOR: protect
    let guard = ours.obtain("import").lock().await?;
    // Runs the work for as long as the lock is held, and drops it at its current `.await` if the lock is lost.
    let rows = guard.protect(import_rows()).await?;
    println!("{rows} rows");
    guard.unlock().await?;
    // ANCHOR_END: protect

    // Without renewal a lease ends by itself, as it does when the store is out of reach.
    let options = LockOptions::new().renew(false).lease(Duration::from_millis(300));

    // ANCHOR: lost
    let Some(guard) = ours.obtain("import").lock_with(options.clone()).await? else {
        return Err("nobody else wants it".into());
    };
    let lost = guard.lost(); // does not borrow the guard: watch it wherever you like
    let watcher = tokio::spawn(async move {
        let reason = lost.await;
        println!("told of the loss: {reason}");
        reason
    });
    // ANCHOR_END: lost

    // The holder is told before anybody else can have the lock.
    let next = theirs.obtain("import").lock().await?;
    println!("held by us: {}, by them: {}", guard.is_held(), next.is_held());
    assert_eq!(watcher.await?, LostReason::Expired);

    // ANCHOR: unlock
    // A release that comes too late says so: what was done since the loss was not protected.
    match guard.unlock().await {
        Err(LockError::Lost { key, reason, .. }) => println!("{key}: {reason}"),
        other => other?,
    }
    // ANCHOR_END: unlock
    // It also had no effect: the successor still holds.
    assert!(next.is_held());
    next.unlock().await?;

    // ANCHOR: stopped
    let Some(guard) = ours.obtain("import").lock_with(options).await? else {
        return Err("nobody else wants it".into());
    };
    match guard.protect(std::future::pending::<()>()).await {
        Ok(()) => unreachable!("this work never ends by itself"),
        Err(error) => println!("stopped: {error}"),
    }
    // ANCHOR_END: stopped

    // ANCHOR: renew
    let guard = ours.obtain("import").lock().await?;
    // Renewed in the background for as long as the guard lives. This asks for a longer lease from now on.
    guard.renew(Duration::from_secs(120)).await?;
    println!("more than a minute left: {}", guard.valid_for() > Duration::from_secs(60));
    guard.unlock().await?;
    // ANCHOR_END: renew
    Ok(())
}

async fn import_rows() -> u64 {
    17
}
