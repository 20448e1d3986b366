//! Several stores behind one registry: the first pattern that matches a key chooses its store.

use std::sync::Arc;

use lock_registry::{LockRegistry, RoutingRegistry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // ANCHOR: routes
    let in_process = Arc::new(lock_registry::connect("memory:").await?);
    let on_host = Arc::new(lock_registry::connect("sqlite:locks.db").await?);
    let off = Arc::new(lock_registry::connect("pass-through:").await?);

    let locks = RoutingRegistry::new(in_process)
        .route("payments/*", on_host) // the first pattern that matches wins
        .route("metrics/*", off);
    // ANCHOR_END: routes

    for key in ["payments/7", "metrics/cpu", "anything else"] {
        let guard = locks.obtain(key).lock().await?;
        println!("{} is locked", guard.key());
        guard.unlock().await?;
    }
    // ANCHOR: met
    // The guarantee that holds for every key: the weakest class of all stores.
    println!("class {}", locks.capabilities().class);
    // ANCHOR_END: met
    Ok(())
}
