//! At most three calls of a service at once, over all processes.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use lock_registry::{LockError, LockRegistryExt as _, Registry};

static CALLS: AtomicU32 = AtomicU32::new(0);
static PEAK_CALLS: AtomicU32 = AtomicU32::new(0);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Each registry stands for a process.
    let first = lock_registry::connect("memory:rate").await?;
    let second = lock_registry::connect("memory:rate").await?;
    try_join_all((0..12).map(|call| send_mail(if call % 2 == 0 { &first } else { &second })))
        .await?;
    println!("12 calls, at most {} at once", PEAK_CALLS.load(Ordering::Relaxed));
    Ok(())
}

// ANCHOR: call
async fn send_mail(registry: &Registry) -> Result<(), LockError> {
    let permit = registry.semaphore("mail-service", 3).acquire().await?;
    permit.protect(call_the_service()).await?; // a permit has a lease, as a lock has
    permit.unlock().await
}
// ANCHOR_END: call

async fn call_the_service() {
    let calls = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    PEAK_CALLS.fetch_max(calls, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(50)).await;
    CALLS.fetch_sub(1, Ordering::Relaxed);
}
