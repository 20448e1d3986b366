//! Your own store behind the same trait. The backend itself is in `examples/src/table.rs`.

use lock_registry::Registry;
use lock_registry_examples::table::Table;

// ANCHOR: main
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let table = Table::start();
    let registry = Registry::builder(table.clone()).build()?;
    let other_process = Registry::builder(table).build()?;

    // Waiting, renewal, loss, re-entrancy, hand-over and clean-up come from the engine.
    let guard = registry.obtain("orders/42").lock().await?;
    println!("busy: {}", other_process.obtain("orders/42").try_lock().await?.is_none());
    guard.unlock().await?;
    let guard = other_process.obtain("orders/42").lock().await?;
    println!("held: {}", guard.is_held());
    guard.unlock().await?;
    Ok(())
}
// ANCHOR_END: main
