//! An orderly shutdown: the registry grants no new locks, waiting calls return an error, holders
//! have a time limit, and then the remaining locks are released.

use std::time::Duration;

use lock_registry::{LockError, LostReason};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:shutdown").await?;
    let other_process = lock_registry::connect("memory:shutdown").await?;

    let quick = registry.obtain("quick").lock().await?;
    let slow = registry.obtain("slow").lock().await?;
    let waiter = tokio::spawn({
        let lock = registry.obtain("slow");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let worker = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(20)).await;
        quick.unlock().await
    });

    // ANCHOR: close
    let report = registry.close(Duration::from_millis(500)).await;
    println!(
        "released: {}, lost: {}, abandoned: {}",
        report.released, report.lost, report.abandoned
    );
    // ANCHOR_END: close

    worker.await??;
    // ANCHOR: after
    // Waiting calls returned `Closed`. A remaining holder was notified of its loss before the key
    // was released.
    assert!(matches!(waiter.await?, Err(LockError::Closed)));
    assert_eq!(slow.lost().await, LostReason::Closed);
    let next = other_process.obtain("slow").lock().await?;
    println!("free for other processes");
    next.unlock().await?;
    // A closed registry grants no more locks.
    assert!(matches!(registry.obtain("quick").lock().await, Err(LockError::Closed)));
    // ANCHOR_END: after
    Ok(())
}
