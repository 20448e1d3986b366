//! Framework code that names only the trait. The argument of the program chooses the store:
//! `framework memory:`, `framework sqlite:locks.db`, `framework pass-through:`.

use std::sync::Arc;
use std::time::Duration;

use lock_registry::{LockError, LockOptions, LockRegistry};

// ANCHOR: component
/// A scheduler that runs a job on one node of many. It depends on no store.
struct Scheduler {
    locks: Arc<dyn LockRegistry>,
}

/// The result of one run.
enum JobOutcome {
    Done(u64),
    HeldByAnotherNode,
}

impl Scheduler {
    /// Runs `job`, unless another node runs it or started it less than `min_interval` ago.
    async fn run_once(&self, job: &str, min_interval: Duration) -> Result<JobOutcome, LockError> {
        let lock = self.locks.obtain(&format!("jobs/{job}"));
        // Without `min_hold`, the key of a short job is free again before the next node tries to
        // lock it.
        let options = LockOptions::new().wait(Duration::ZERO).min_hold(min_interval);
        let Some(guard) = lock.try_lock_with(options).await? else {
            return Ok(JobOutcome::HeldByAnotherNode);
        };
        // Drops the work if the lock is lost.
        let rows = guard.protect(rows_written()).await?;
        // An error here means that the lock may have been lost before the end of the work.
        guard.unlock().await?;
        Ok(JobOutcome::Done(rows))
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
    // The only line that depends on a store.
    let locks: Arc<dyn LockRegistry> = Arc::new(lock_registry::connect(&url).await?);

    let capabilities = locks.capabilities();
    println!(
        "{}: class {}, excludes {}",
        capabilities.store, capabilities.class, capabilities.reach
    );

    let scheduler = Scheduler { locks: Arc::clone(&locks) };
    // Cron starts the job on every node; here the nodes run one after the other.
    for node in 1..=3 {
        match scheduler.run_once("nightly", Duration::from_secs(3_600)).await? {
            JobOutcome::Done(rows) => println!("node {node}: {rows} rows written"),
            JobOutcome::HeldByAnotherNode => println!("node {node}: another node has run it"),
        }
    }

    // The key stays locked until `min_hold` is over. This `close` does not wait for that.
    _ = locks.close(Duration::ZERO).await;
    Ok(())
}
// ANCHOR_END: main
