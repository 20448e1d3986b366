//! A job that runs once per tick of its schedule, over all processes.

use std::time::Duration;

use lock_registry::LockRegistryExt as _;
use lock_registry::once::{CatchUp, Outcome};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:once").await?;
    let other_host = lock_registry::connect("memory:once").await?;

    // ANCHOR: every
    // Each host runs this code at about the same time, for example from cron.
    let report = registry.once("report").every(Duration::from_secs(3_600));
    match report.run(|run| async move { format!("token {}", run.fencing_token()) }).await? {
        Outcome::Ran(output) => println!("this host ran it: {}", output.starts_with("token")),
        Outcome::AlreadyDone { tick, .. } => println!("tick {tick} is done"),
        Outcome::Busy => println!("another host runs it now"),
        _ => {}
    }
    // ANCHOR_END: every

    // ANCHOR: tick
    // The tick comes from the caller's scheduler: the time that a cron expression matched, a
    // number, or a name such as a version.
    let backup = other_host.once("backup").tick(41);
    let outcome = backup.run(|run| async move { println!("backup {}", run.tick()) }).await?;
    println!("ran: {}", outcome == Outcome::Ran(()));
    let again = registry.once("backup").tick(41).run(|_| async {}).await?;
    println!("already done: {}", matches!(again, Outcome::AlreadyDone { .. }));
    // ANCHOR_END: tick

    // ANCHOR: failures
    // Work that fails leaves its tick available.
    let backup = registry.once("backup").tick(42);
    let failed = backup.try_run(|_| async { Err::<(), _>("disk full") }).await?;
    println!("failed: {failed:?}");
    // ANCHOR_END: failures

    // ANCHOR: catch_up
    // Ticks 42 and 43 were missed: tick 42 failed, and tick 43 was never run.
    let backup = registry.once("backup").tick(44).catch_up(CatchUp::All);
    let outcome = backup.run(|run| async move { println!("run {}", run.tick()) }).await?;
    println!("caught up: {}", outcome == Outcome::Ran(()));
    // ANCHOR_END: catch_up
    Ok(())
}
