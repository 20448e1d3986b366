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
static TICKS: Mutex<Vec<String>> = Mutex::new(Vec::new());

// ANCHOR: job
fn every_second(registry: Arc<Registry>) -> Result<Job, JobSchedulerError> {
    Job::new_async("* * * * * *", move |_id, _scheduler| {
        let registry = Arc::clone(&registry);
        Box::pin(async move {
            // The period is that of the schedule. The store's clock decides which period is the
            // current one.
            let job = registry.once("report").every(Duration::from_secs(1));
            match job.run(|run| async move { record_tick(run.tick().to_string()) }).await {
                Ok(Outcome::AlreadyDone { .. }) => println!("another replica has run it"),
                Ok(_) => {}
                Err(error) => eprintln!("{error}"),
            }
        })
    })
}
// ANCHOR_END: job

fn record_tick(tick: String) {
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
    while TICKS.lock().unwrap_or_else(PoisonError::into_inner).len() < 3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for mut replica in replicas {
        replica.shutdown().await?;
    }
    let ticks = TICKS.lock().unwrap_or_else(PoisonError::into_inner);
    let unique: BTreeSet<_> = ticks.iter().collect();
    println!("each tick ran once: {}", unique.len() == ticks.len());
    Ok(())
}
