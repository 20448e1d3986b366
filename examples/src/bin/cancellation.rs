//! A dropped future or guard never leaves a lock behind.

use std::time::Duration;

use tokio::time::timeout;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:cancellation").await?;
    let other_process = lock_registry::connect("memory:cancellation").await?;

    // ANCHOR: waiter
    let held = other_process.obtain("orders/42").lock().await?;
    // `timeout` drops the future of `lock`, which leaves the local queue. A claim that was already
    // sent to the store is completed and then released.
    let timed_out =
        timeout(Duration::from_millis(50), registry.obtain("orders/42").lock()).await.is_err();
    println!("timed out: {timed_out}");
    held.unlock().await?;
    registry.idle().await; // only tests need to wait for the clean-up
    println!("free: {}", other_process.obtain("orders/42").holders().await?.is_empty());
    // ANCHOR_END: waiter

    // ANCHOR: guard
    {
        let _guard = registry.obtain("orders/42").lock().await?;
        // On an early return, `?` or panic, the dropped guard is released in the background.
    }
    let guard = other_process.obtain("orders/42").lock().await?; // waits for that release, not for the lease
    println!("released by drop");
    guard.unlock().await?;
    // ANCHOR_END: guard

    // ANCHOR: outside
    let guard = registry.obtain("orders/42").lock().await?;
    // Drop neither blocks nor needs a runtime.
    std::thread::spawn(move || drop(guard)).join().map_err(|_| "a drop does not panic")?;
    registry.idle().await;
    println!(
        "released from a plain thread: {}",
        other_process.obtain("orders/42").holders().await?.is_empty()
    );
    // ANCHOR_END: outside
    Ok(())
}
