//! Three replicas of a service with the same apalis schedule. Each tick runs on one of them.

use std::collections::BTreeSet;
use std::error::Error;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use apalis::prelude::{Data, WorkerBuilder};
use apalis_cron::{CronScheduler, Tick};
use cron::Schedule;
use lock_registry::once::Outcome;
use lock_registry::{LockRegistryExt as _, Registry};
use tokio::task::JoinSet;

/// The ticks that have run.
static TICKS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

// ANCHOR: handler
async fn report(
    tick: Tick,
    registry: Data<Arc<Registry>>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let job = registry.once("report").tick(tick.get_timestamp());
    let outcome = job.run(|_run| async { record_tick(tick.get_timestamp()) }).await?;
    if let Outcome::AlreadyDone { .. } = outcome {
        println!("another replica has run it");
    }
    Ok(())
}
// ANCHOR_END: handler

fn record_tick(tick: u64) {
    TICKS.lock().unwrap_or_else(PoisonError::into_inner).push(tick);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut replicas = JoinSet::new();
    for number in 1..=3 {
        let registry = Arc::new(lock_registry::connect("memory:shop").await?);
        // ANCHOR: worker
        let worker = WorkerBuilder::new(format!("replica-{number}"))
            .backend(CronScheduler::new(Schedule::from_str("* * * * * *")?))
            .data(registry)
            .build(report);
        // ANCHOR_END: worker
        replicas.spawn(async move { worker.run().await });
    }
    while TICKS.lock().unwrap_or_else(PoisonError::into_inner).len() < 3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    replicas.shutdown().await;
    let ticks = TICKS.lock().unwrap_or_else(PoisonError::into_inner);
    let unique: BTreeSet<_> = ticks.iter().collect();
    println!("each tick ran once: {}", unique.len() == ticks.len());
    Ok(())
}
