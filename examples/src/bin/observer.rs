//! Observing locks: implement one method to receive the events of a registry.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lock_registry::{
    RegistryConfig,
    observe::{LockEvent, Observer},
};

// ANCHOR: observer
/// Counts events that need an alarm. `on` runs synchronously where the event happens, so it must be
/// quick.
#[derive(Debug, Default)]
struct Alarm {
    lost: AtomicU64,
    left_to_lease: AtomicU64,
}

impl Observer for Alarm {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::Granted { key, attempts, .. } => {
                println!("granted {key} at attempt {attempts}")
            }
            LockEvent::Lost { key, reason, .. } => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                println!("lost {key}: {reason}");
            }
            LockEvent::LeftToLease { .. } => {
                self.left_to_lease.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}
// ANCHOR_END: observer

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // ANCHOR: use
    let alarm = Arc::new(Alarm::default());
    let registry = RegistryConfig::from_url("memory:")?
        .observer(Arc::clone(&alarm) as Arc<dyn Observer>)
        .connect()
        .await?;
    // ANCHOR_END: use

    let guard = registry.obtain("orders/42").lock().await?;
    // An operator force-releases the lock, and then its holder renews it.
    registry.force_release("orders/42").await?;
    let renewal_failed = guard.extend(Duration::from_secs(30)).await.is_err();
    println!(
        "renewal failed: {renewal_failed}, losses counted: {}",
        alarm.lost.load(Ordering::Relaxed)
    );
    Ok(())
}
