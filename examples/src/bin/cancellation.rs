//! Futures may be dropped at any `.await` and guards anywhere: nothing stays locked behind them.

use std::time::Duration;

use lock_registry::LockRegistry;
use tokio::time::timeout;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ours = lock_registry::connect("memory:cancellation").await?;
    let theirs = lock_registry::connect("memory:cancellation").await?;

    // ANCHOR: waiter
    let held = theirs.obtain("orders/42").lock().await?;
    // `timeout` drops the future of `lock`. Its place in the line is given up, and a claim that is already on its way to the
    // store is carried through and given back.
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
        // An early return, a `?`, a panic: the guard is dropped and hands its release to the background.
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
