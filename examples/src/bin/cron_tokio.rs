//! Three replicas of a service with the same tokio-cron-scheduler job. Each tick runs on one of
//! them.

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_registry::once::Outcome;
use lock_registry::{LockRegistryExt as _, Registry};
use tokio_cron_scheduler::{Job, JobScheduler, JobSchedulerError};

/// The ticks that have run.
static TICKS: Mutex<Vec<i64>> = Mutex::new(Vec::new());

// ANCHOR: job
fn every_second(registry: Arc<Registry>) -> Result<Job, JobSchedulerError> {
    Job::new_async("* * * * * *", move |id, mut scheduler| {
        let registry = Arc::clone(&registry);
        Box::pin(async move {
            // All replicas know the same time of the next tick, so it identifies this tick.
            let Ok(Some(next)) = scheduler.next_tick_for_job(id).await else { return };
            let job = registry.once("report").tick(next.timestamp().unsigned_abs());
            match job.run(|_run| async { ran(next.timestamp()) }).await {
                Ok(Outcome::AlreadyDone { .. }) => println!("another replica has run it"),
                Ok(_) => {}
                Err(error) => eprintln!("{error}"),
            }
        })
    })
}
// ANCHOR_END: job

fn ran(tick: i64) {
    TICKS.lock().unwrap_or_else(PoisonError::into_inner).push(tick);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut replicas = Vec::new();
    for _ in 0..3 {
        let registry = Arc::new(lock_registry::connect("memory:shop").await?);
        let replica = JobScheduler::new().await?;
        replica.add(every_second(registry)?).await?;
        replica.start().await?;
        replicas.push(replica);
    }
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    for mut replica in replicas {
        replica.shutdown().await?;
    }
    let ticks = TICKS.lock().unwrap_or_else(PoisonError::into_inner);
    let unique: BTreeSet<_> = ticks.iter().collect();
    println!("each tick ran once: {}", ticks.len() >= 3 && unique.len() == ticks.len());
    Ok(())
}
