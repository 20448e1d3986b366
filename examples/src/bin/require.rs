//! Code that needs more than the minimum guarantees checks the capabilities of its store at start.

use std::time::Duration;

use lock_registry::{GuaranteeClass, LockRegistry, Reach};

// ANCHOR: require
/// Rejects a store that cannot fence or whose locks reach no further than this process.
fn check(locks: &dyn LockRegistry) -> Result<(), String> {
    let store = locks.capabilities();
    if !store.fencing {
        return Err(format!("payments need fencing tokens, which {} does not have", store.store));
    }
    if store.class < GuaranteeClass::Volatile || store.reach < Reach::Host {
        return Err(format!("payments need stronger guarantees than those of {}", store.store));
    }
    Ok(())
}
// ANCHOR_END: require

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    for url in ["sqlite:locks.db", "memory:", "pass-through:"] {
        let locks = lock_registry::connect(url).await?;
        match check(&locks) {
            Ok(()) => println!("{url} is suitable"),
            Err(problem) => println!("{problem}"),
        }
        _ = locks.close(Duration::from_secs(1)).await;
    }
    Ok(())
}
