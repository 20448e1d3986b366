//! A release wakes waiters soon, and only as many as needed. All bounds allow for slow machines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::LockBackend;
use tokio::time::timeout;

use super::{Folder, LEASE, busy, claim, grant, key};
use crate::sqlite::clock::ManualClock;

const SOON: Duration = Duration::from_secs(10);
const A_WHILE: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_release_wakes_a_waiter_of_another_process() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    for _ in 0..20 {
        let (mine, yours) = (claim("k"), claim("k"));
        grant(&a, &mine).await;
        let told = busy(&b, &yours).await;
        let release = async {
            tokio::task::yield_now().await;
            a.release(&mine).await.unwrap();
        };
        timeout(SOON, async { tokio::join!(b.wait(&yours, &told), release) }).await.unwrap();
        grant(&b, &yours).await;
        b.release(&yours).await.unwrap();
    }
}

#[tokio::test]
async fn a_broken_lock_wakes_too() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    let broken = async { a.force_release(&key("k")).await.unwrap() };
    timeout(SOON, async { tokio::join!(b.wait(&yours, &told), broken) }).await.unwrap();
}

#[tokio::test]
async fn what_happened_before_the_wait_is_not_missed() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    a.release(&mine).await.unwrap();
    timeout(SOON, b.wait(&yours, &told)).await.expect("it was free before the wait began");

    grant(&a, &claim("k")).await;
    timeout(SOON, b.wait(&yours, &told)).await.expect("another grant than the one that was told");
}

#[tokio::test]
async fn a_waiter_sleeps_while_the_lock_is_held_or_only_renewed() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    let renew = async {
        for n in 0..20 {
            a.renew(std::slice::from_ref(&mine)).await.remove(0).unwrap();
            let other = claim(&format!("other{n}"));
            grant(&a, &other).await;
            a.release(&other).await.unwrap();
        }
    };
    let both = async { tokio::join!(b.wait(&yours, &told), renew) };
    assert!(timeout(A_WHILE, both).await.is_err());
    assert_eq!(b.wakes.waiters(), 0, "a dropped waiter leaves nothing behind");
}

#[tokio::test]
async fn wake_ups_are_confirmed_while_somebody_waits_and_the_kernel_tells_of_commits() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    assert!(!b.wakes_confirmed(&yours, &told), "nobody listens yet");
    let mut wait = std::pin::pin!(b.wait(&yours, &told));
    let confirmed = async {
        while !b.wakes_confirmed(&yours, &told) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, async {
        tokio::select! { () = &mut wait => panic!("it is held"), () = confirmed => {} }
    })
    .await
    .expect("the engine need not poll");
}

#[tokio::test]
async fn many_waiters_of_many_keys_are_each_woken_by_their_own() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, Arc::new(folder.process().await));
    let mut held = Vec::new();
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..150 {
        let (mine, yours) = (claim(&format!("k{n}")), claim(&format!("k{n}")));
        grant(&a, &mine).await;
        let told = busy(&b, &yours).await;
        let b = Arc::clone(&b);
        waiters.spawn(async move {
            b.wait(&yours, &told).await;
            n
        });
        held.push(mine);
    }
    for n in [149, 0, 77] {
        a.release(&held[n]).await.unwrap();
        let woken = timeout(SOON, waiters.join_next()).await.unwrap().unwrap().unwrap();
        assert_eq!(woken, n);
    }
    assert!(timeout(A_WHILE, waiters.join_next()).await.is_err());
    assert_eq!(b.wakes.waiters(), 147);
}

#[tokio::test]
async fn the_task_is_there_only_while_somebody_waits() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    assert!(!b.wakes.is_watching());
    assert!(timeout(Duration::from_millis(10), b.wait(&yours, &told)).await.is_err());
    assert!(b.wakes.is_watching());
    let gone = async {
        while b.wakes.is_watching() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, gone).await.unwrap();
    // A new wait starts the task again.
    let release = async { a.release(&mine).await.unwrap() };
    timeout(SOON, async { tokio::join!(b.wait(&yours, &told), release) }).await.unwrap();
}

#[tokio::test]
async fn a_log_that_was_removed_is_found_again_when_it_returns() {
    let folder = Folder::new();
    let mut watch = super::super::watch::Watch::start(&folder.file());
    assert!(watch.is_by_time(), "there is nothing to watch yet");

    std::fs::write(folder.file(), "").unwrap();
    watch = super::super::watch::Watch::start(&folder.file());
    assert!(!watch.is_by_time());
    std::fs::write(folder.file(), "x").unwrap();
    timeout(SOON, watch.changed()).await.unwrap();
    std::fs::remove_file(folder.file()).unwrap();
    let fallen_back = async {
        while !watch.is_by_time() {
            watch.changed().await;
        }
    };
    timeout(SOON, fallen_back).await.unwrap();
    timeout(SOON, watch.changed()).await.expect("time goes on without a log");
}

#[test]
fn a_runtime_without_io_waits_by_time() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let folder = Folder::new();
        let (a, b) = (folder.process().await, folder.process().await);
        let (mine, yours) = (claim("k"), claim("k"));
        grant(&a, &mine).await;
        let told = busy(&b, &yours).await;
        let release = async { a.release(&mine).await.unwrap() };
        timeout(SOON, async { tokio::join!(b.wait(&yours, &told), release) }).await.unwrap();
    });
}

#[tokio::test]
async fn a_lease_that_ended_is_seen_at_the_next_commit() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    let (a, b) = (folder.process_at(&clock).await, folder.process_at(&clock).await);
    let (mine, yours) = (claim("k"), claim("k"));
    grant(&a, &mine).await;
    let told = busy(&b, &yours).await;
    clock.advance(LEASE);
    timeout(SOON, b.wait(&yours, &told)).await.unwrap();
}

/// Prints the duration of wake-ups, for manual runs: `cargo test … -- --ignored --nocapture
/// latency`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a promise"]
async fn latency_of_a_wake_up() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let mut spans = Vec::new();
    for _ in 0..500 {
        let (mine, yours) = (claim("k"), claim("k"));
        grant(&a, &mine).await;
        let told = busy(&b, &yours).await;
        let release = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            a.release(&mine).await.unwrap();
            Instant::now()
        };
        let wait = async {
            b.wait(&yours, &told).await;
            grant(&b, &yours).await;
            Instant::now()
        };
        let (released, granted) = tokio::join!(release, wait);
        spans.push(granted.saturating_duration_since(released));
        b.release(&yours).await.unwrap();
    }
    spans.sort_unstable();
    println!("p50 {:?} p99 {:?} max {:?}", spans[250], spans[495], spans[499]);
}
