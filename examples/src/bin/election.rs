//! A leader among several candidates, a planned change of the leader, and an observer.

use std::time::Duration;

use lock_registry::LockRegistryExt as _;
use lock_registry::election::{Leadership, Term};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = lock_registry::connect("memory:election").await?;
    let other_host = lock_registry::connect("memory:election").await?;

    // ANCHOR: run
    let election = registry.election("scheduler").label("host 1").data("10.0.0.1:8080");
    let candidate = election.clone();
    let running = tokio::spawn(async move {
        candidate
            .run(|term: Term| async move {
                println!("host 1 leads"); // send term.token() with each write
                let mut jobs = tokio::time::interval(Duration::from_secs(1));
                loop {
                    tokio::select! {
                        () = term.stopping() => return, // ends between two jobs
                        _ = jobs.tick() => {}
                    }
                }
            })
            .await
    });
    // ANCHOR_END: run

    // ANCHOR: observe
    let mut leadership = election.leadership();
    leadership.wait_for(|now| matches!(now, Leadership::Leader(_))).await?;
    let leader = other_host.election("scheduler").leader().await?.expect("host 1 leads");
    println!("the leader is at {}", String::from_utf8_lossy(&leader.data));
    // ANCHOR_END: observe

    // ANCHOR: step_down
    let successor = other_host.election("scheduler").label("host 2");
    let next =
        tokio::spawn(
            async move { successor.run_term(|term: Term| async move { term.token() }).await },
        );
    tokio::time::sleep(Duration::from_millis(200)).await; // host 2 waits for the role
    election.step_down(); // host 1 ends its work, and releases the role
    let token = next.await??.expect("its work has ended");
    println!("host 2 led, under a larger token: {}", token > leader.token);
    // ANCHOR_END: step_down
    running.abort();
    Ok(())
}
