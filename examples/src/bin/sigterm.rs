//! A service that shuts down in order when its pod is stopped. It finishes the job in progress,
//! starts no other job, and releases its locks. This program sends the signal to itself.

use std::time::Duration;

use lock_registry::{LockError, LockRegistryExt as _, Registry};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:").await?;
    let (started, mut jobs) = mpsc::channel(1);
    // ANCHOR: stop
    let mut terminate = signal(SignalKind::terminate())?;
    let worker = tokio::spawn(work(registry.clone(), started));
    // ANCHOR_END: stop
    jobs.recv().await;
    let pid = std::process::id().to_string();
    std::process::Command::new("kill").args(["-TERM", &pid]).status()?;

    // ANCHOR: close
    terminate.recv().await;
    // This takes at most 15 s for the jobs, and three time-outs of 3 s for the store. Kubernetes
    // waits for 30 s by default.
    let report = registry.close(Duration::from_secs(15)).await;
    println!("clean: {}, released: {}", report.is_clean(), report.released);
    println!("jobs finished: {}", worker.await?);
    // ANCHOR_END: close
    Ok(())
}

// ANCHOR: work
/// Runs jobs until the registry is closed. Returns the number of jobs.
async fn work(registry: Registry, started: mpsc::Sender<()>) -> u32 {
    let mut jobs = 0;
    loop {
        let job = registry.execute_locked("orders", async |_guard| {
            let _ = started.try_send(());
            tokio::time::sleep(Duration::from_millis(200)).await;
        });
        match job.await {
            Ok(_) => jobs += 1,
            Err(LockError::Closed) => return jobs,
            Err(error) => eprintln!("{error}"),
        }
    }
}
// ANCHOR_END: work
