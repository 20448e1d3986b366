//! Framework code names the trait and nothing else. The store is chosen by whoever starts the program:
//! `framework memory:`, `framework sqlite:locks.db`, `framework pass-through:`.

use std::sync::Arc;
use std::time::Duration;

use lock_registry::{LockError, LockRegistry, LockRegistryExt};

// ANCHOR: component
/// A scheduler that runs a job on one node of many. It has no idea what a store is.
struct Scheduler {
    locks: Arc<dyn LockRegistry>,
}

/// What came of one run.
enum Outcome {
    Done(u64),
    AnotherNodeHasIt,
}

impl Scheduler {
    async fn run_once(&self, job: &str) -> Result<Outcome, LockError> {
        let key = format!("jobs/{job}");
        // The work is stopped when the lock is lost, and its result is not hidden by a failing release.
        let done = self
            .locks
            .execute_locked_for(&key, Duration::ZERO, async |_guard| rows_written().await)
            .await?;
        let Some(done) = done else {
            return Ok(Outcome::AnotherNodeHasIt);
        };
        // An error here means that the end of the work may have been unprotected.
        done.unlocked?;
        Ok(Outcome::Done(done.output))
    }
}
// ANCHOR_END: component

async fn rows_written() -> u64 {
    17
}

// ANCHOR: main
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    // The one line that knows that there are stores.
    let locks: Arc<dyn LockRegistry> = Arc::new(lock_registry::connect(&url).await?);

    let capabilities = locks.capabilities();
    println!(
        "{}: class {}, excludes {}",
        capabilities.store, capabilities.class, capabilities.reach
    );

    let scheduler = Scheduler { locks: Arc::clone(&locks) };
    match tokio::spawn(async move { scheduler.run_once("nightly").await }).await?? {
        Outcome::Done(rows) => println!("{rows} rows written"),
        Outcome::AnotherNodeHasIt => println!("another node does it"),
    }

    locks.close(Duration::from_secs(5)).await;
    Ok(())
}
// ANCHOR_END: main
