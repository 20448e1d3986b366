//! The smallest program: acquires and releases one lock. Start it twice at the same time: the
//! second process waits for the first.

// ANCHOR: all

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("sqlite:locks.db").await?;
    let guard = registry.obtain("orders/42").lock().await?; // waits until the lock is granted
    println!("order 42 is locked with token {}", guard.fencing_token());
    guard.unlock().await?; // an error if the lock had been lost in the meantime
    Ok(())
}
// ANCHOR_END: all
