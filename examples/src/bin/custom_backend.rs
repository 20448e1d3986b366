//! Your own store behind the same trait. The backend itself is in `examples/src/table.rs`.

use lock_registry::{LockRegistry, Registry};
use lock_registry_examples::table::Table;

// ANCHOR: main
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let table = Table::start();
    let ours = Registry::builder(table.clone()).build()?;
    let theirs = Registry::builder(table).build()?;

    // Waiting, renewal, loss, re-entrancy, hand-over and clean-up come from the engine.
    let guard = ours.obtain("orders/42").lock().await?;
    println!("busy: {}", theirs.obtain("orders/42").try_lock().await?.is_none());
    guard.unlock().await?;
    let guard = theirs.obtain("orders/42").lock().await?;
    println!("held: {}", guard.is_held());
    guard.unlock().await?;
    Ok(())
}
// ANCHOR_END: main
