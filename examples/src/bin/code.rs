//! A registry built in code, without a URL: the backend and the defaults of its locks.

use std::sync::Arc;
use std::time::Duration;

use lock_registry::{LockOptions, Registry, backend::MemoryBackend};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // ANCHOR: builder
    let registry = Registry::builder(Arc::new(MemoryBackend::new()))
        .lease(Duration::from_secs(10))
        .auto_renew(true)
        .poll(Duration::from_millis(500))
        .handoff(0) // no hand-over inside this process
        .timeout(Duration::from_secs(2))
        .label("worker 7")
        .build()?;
    // ANCHOR_END: builder

    // ANCHOR: options
    let options = LockOptions::new()
        .wait(Duration::from_secs(2)) // return `None` after two seconds
        .lease(Duration::from_secs(60)) // how long the key stays locked if this process dies
        .max_hold(Duration::from_secs(3_600)) // the lock is lost after an hour, even with renewal
        .min_hold(Duration::from_millis(200)) // locked this long, even if released earlier
        .label("nightly report");
    if let Some(guard) = registry.obtain("report").try_lock_with(options).await? {
        println!(
            "held as {:?}",
            registry.obtain("report").holders().await?.pop().and_then(|holder| holder.label)
        );
        guard.unlock().await?;
    }
    // ANCHOR_END: options

    // `min_hold` keeps the key locked after the guard is dropped; the registry releases it in the
    // background.
    println!("still locked: {}", !registry.obtain("report").holders().await?.is_empty());
    registry.idle().await;
    println!("free: {}", registry.obtain("report").holders().await?.is_empty());
    Ok(())
}
