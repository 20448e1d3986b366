//! Locks for programs without async: the same registry behind a blocking facade.

use std::time::Duration;

use lock_registry::blocking::BlockingRegistry;
use lock_registry::{LockError, connect};

// ANCHOR: main
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The facade has its own runtime with one thread, which renews leases while this thread works.
    let registry = BlockingRegistry::open(connect("sqlite:locks.db"))?;

    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let lock = registry.obtain("orders/42");
            std::thread::spawn(move || -> Result<(), LockError> {
                let guard = lock.lock()?;
                println!("worker {worker} holds it: {}", guard.is_held());
                guard.unlock()
            })
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a worker panicked")??;
    }

    let report = registry.close(Duration::from_secs(5))?;
    println!("clean: {}", report.is_clean());
    Ok(())
}
// ANCHOR_END: main
