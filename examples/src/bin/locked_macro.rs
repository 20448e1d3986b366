//! A function that runs under a lock whose key contains its argument.

use std::sync::Arc;

use lock_registry::{FencingToken, LockError, LockRegistry, locked};

// ANCHOR: function
struct Shop {
    locks: Arc<dyn LockRegistry>,
}

impl Shop {
    #[locked(key = "orders/{order}", registry = self.locks, wait = "200ms", token = token)]
    async fn ship(&self, order: u64) -> Result<String, LockError> {
        print_label(order, token).await;
        Ok(format!("order {order} is shipped"))
    }
}
// ANCHOR_END: function

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks: Arc<dyn LockRegistry> = Arc::new(lock_registry::connect("memory:").await?);
    let shop = Shop { locks: Arc::clone(&locks) };
    println!("{}", shop.ship(42).await?);

    let guard = locks.obtain("orders/42").lock().await?; // as another process would
    match shop.ship(42).await {
        Err(LockError::WaitElapsed { key, .. }) => println!("{key} is locked"),
        other => println!("{}", other?),
    }
    println!("{}", shop.ship(43).await?);
    guard.unlock().await?;
    Ok(())
}

/// Stands for a resource that refuses a token smaller than the largest token so far.
async fn print_label(_order: u64, _token: FencingToken) {}
