//! You may drop a future at any `.await` and a guard anywhere: no lock stays behind.

use std::time::Duration;

use lock_registry::LockRegistry;
use tokio::time::timeout;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = lock_registry::connect("memory:cancellation").await?;
    let theirs = lock_registry::connect("memory:cancellation").await?;

    // ANCHOR: waiter
    let held = theirs.obtain("orders/42").lock().await?;
    // `timeout` drops the future of `lock`, which leaves the local queue. A claim that was already
    // sent to the store is completed and then released.
    let gave_up =
        timeout(Duration::from_millis(50), ours.obtain("orders/42").lock()).await.is_err();
    println!("gave up: {gave_up}");
    held.unlock().await?;
    ours.idle().await; // only tests need to wait for the clean-up
    println!("free: {}", theirs.obtain("orders/42").holder().await?.is_none());
    // ANCHOR_END: waiter

    // ANCHOR: guard
    {
        let _guard = ours.obtain("orders/42").lock().await?;
        // An early return, a `?`, a panic: the dropped guard is released in the background.
    }
    let guard = theirs.obtain("orders/42").lock().await?; // waits for that release, not for the lease
    println!("released by drop");
    guard.unlock().await?;
    // ANCHOR_END: guard

    // ANCHOR: outside
    let guard = ours.obtain("orders/42").lock().await?;
    // Drop neither blocks nor needs a runtime.
    std::thread::spawn(move || drop(guard)).join().map_err(|_| "a drop does not panic")?;
    ours.idle().await;
    println!(
        "released from a plain thread: {}",
        theirs.obtain("orders/42").holder().await?.is_none()
    );
    // ANCHOR_END: outside
    Ok(())
}
