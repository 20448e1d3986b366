//! How long to wait for a lock: not at all, or for a limited time. A busy lock is a value; a store
//! error is an error.

use std::time::Duration;

use lock_registry::LockError;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two registries over one store compete like two processes.
    let registry = lock_registry::connect("memory:deadline").await?;
    let other_process = lock_registry::connect("memory:deadline").await?;
    let held = other_process.obtain("report").lock().await?;

    // ANCHOR: try
    let lock = registry.obtain("report");

    // Does not wait. Sends one request to the store.
    match lock.try_lock().await? {
        Some(guard) => guard.unlock().await?,
        None => println!("busy: another client writes the report"),
    }

    // Waits for a limited time. One deadline covers the local queue and the wait in the store.
    if lock.try_lock_for(Duration::from_millis(50)).await?.is_none() {
        println!("still busy after 50 ms");
    }

    // Which client holds it, and for how long at most?
    for holder in lock.holders().await? {
        println!(
            "its lease ends within 30 s: {}",
            holder.lease_left <= Some(Duration::from_secs(30))
        );
    }
    // ANCHOR_END: try

    held.unlock().await?;

    // ANCHOR: errors
    match lock.try_lock_for(Duration::from_secs(2)).await {
        Ok(Some(guard)) => {
            println!("acquired");
            guard.unlock().await?;
        }
        Ok(None) => println!("held by other clients for two seconds"),
        // A store error. Whether another client holds the lock is unknown.
        Err(error) if error.is_retryable() => println!("try again later: {error}"),
        Err(LockError::Closed) => println!("this registry was closed"),
        Err(error) => return Err(error.into()),
    }
    // ANCHOR_END: errors
    Ok(())
}
