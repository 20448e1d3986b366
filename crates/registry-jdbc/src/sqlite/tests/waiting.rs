//! A release wakes the waiters of its key. All time limits allow for slow machines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{LockAdmin, LockBackend};
use tokio::time::timeout;

use super::{LEASE, TestFolder, busy, claim, grant, key};
use crate::sqlite::clock::ManualClock;

const TIMEOUT: Duration = Duration::from_secs(10);
const QUIET_TIME: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_release_wakes_a_waiter_of_another_process() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    for _ in 0..20 {
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        grant(&a, &claim_a).await;
        let busy_reply = busy(&b, &claim_b).await;
        let release = async {
            tokio::task::yield_now().await;
            a.release(&claim_a).await.unwrap();
        };
        timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
            .await
            .unwrap();
        grant(&b, &claim_b).await;
        b.release(&claim_b).await.unwrap();
    }
}

#[tokio::test]
async fn a_forced_release_wakes_a_waiter() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    let broken = async { a.force_release(&key("k")).await.unwrap() };
    timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), broken) }).await.unwrap();
}

#[tokio::test]
async fn a_change_before_the_wait_is_not_missed() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    a.release(&claim_a).await.unwrap();
    timeout(TIMEOUT, b.wait(&claim_b, &busy_reply))
        .await
        .expect("it was free before the wait began");

    grant(&a, &claim("k")).await;
    timeout(TIMEOUT, b.wait(&claim_b, &busy_reply))
        .await
        .expect("the key has another grant than the busy reply");
}

#[tokio::test]
async fn a_waiter_sleeps_while_the_lock_is_held_or_only_renewed() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    let renew = async {
        for n in 0..20 {
            a.renew(std::slice::from_ref(&claim_a)).await.remove(0).unwrap();
            let other = claim(&format!("other{n}"));
            grant(&a, &other).await;
            a.release(&other).await.unwrap();
        }
    };
    let both = async { tokio::join!(b.wait(&claim_b, &busy_reply), renew) };
    assert!(timeout(QUIET_TIME, both).await.is_err());
    assert_eq!(b.waiters.count(), 0, "a dropped waiter is removed");
}

#[tokio::test]
async fn wake_ups_are_confirmed_while_a_waiter_waits_and_the_kernel_reports_commits() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    assert!(!busy_reply.wakes_confirmed(&claim_b), "no waiter exists yet");
    let mut wait = std::pin::pin!(b.wait(&claim_b, &busy_reply));
    let confirmed = async {
        while !busy_reply.wakes_confirmed(&claim_b) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, async {
        tokio::select! { () = &mut wait => panic!("it is held"), () = confirmed => {} }
    })
    .await
    .expect("wake-ups are confirmed");
}

#[tokio::test]
async fn a_release_wakes_only_the_waiters_of_its_key() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, Arc::new(folder.process().await));
    let mut held = Vec::new();
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..150 {
        let (claim_a, claim_b) = (claim(&format!("k{n}")), claim(&format!("k{n}")));
        grant(&a, &claim_a).await;
        let busy_reply = busy(&b, &claim_b).await;
        let b = Arc::clone(&b);
        waiters.spawn(async move {
            b.wait(&claim_b, &busy_reply).await;
            n
        });
        held.push(claim_a);
    }
    for n in [149, 0, 77] {
        a.release(&held[n]).await.unwrap();
        let woken = timeout(TIMEOUT, waiters.join_next()).await.unwrap().unwrap().unwrap();
        assert_eq!(woken, n);
    }
    assert!(timeout(QUIET_TIME, waiters.join_next()).await.is_err());
    assert_eq!(b.waiters.count(), 147);
}

#[tokio::test]
async fn the_watcher_task_runs_only_while_a_waiter_waits() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    assert!(!b.waiters.has_task());
    assert!(timeout(Duration::from_millis(10), b.wait(&claim_b, &busy_reply)).await.is_err());
    assert!(b.waiters.has_task());
    let task_ended = async {
        while b.waiters.has_task() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, task_ended).await.unwrap();
    // A new wait starts the task again.
    let release = async { a.release(&claim_a).await.unwrap() };
    timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) }).await.unwrap();
}

#[tokio::test]
async fn a_watch_of_a_removed_log_falls_back_to_intervals() {
    let folder = TestFolder::new();
    let mut watch = super::super::commit_watch::CommitWatch::start(&folder.file());
    assert!(watch.is_interval(), "the log does not exist yet");

    std::fs::write(folder.file(), "").unwrap();
    watch = super::super::commit_watch::CommitWatch::start(&folder.file());
    assert!(!watch.is_interval());
    std::fs::write(folder.file(), "x").unwrap();
    timeout(TIMEOUT, watch.changed()).await.unwrap();
    std::fs::remove_file(folder.file()).unwrap();
    let fallen_back = async {
        while !watch.is_interval() {
            watch.changed().await;
        }
    };
    timeout(TIMEOUT, fallen_back).await.unwrap();
    timeout(TIMEOUT, watch.changed()).await.expect("a removed log is polled");
}

#[test]
fn a_waiter_in_a_runtime_without_io_polls() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let folder = TestFolder::new();
        let (a, b) = (folder.process().await, folder.process().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        grant(&a, &claim_a).await;
        let busy_reply = busy(&b, &claim_b).await;
        let release = async { a.release(&claim_a).await.unwrap() };
        timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
            .await
            .unwrap();
    });
}

#[tokio::test]
async fn an_expired_lease_is_detected_at_the_first_read() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let (a, b) = (folder.process_with_clock(&clock).await, folder.process_with_clock(&clock).await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    grant(&a, &claim_a).await;
    let busy_reply = busy(&b, &claim_b).await;
    clock.advance(LEASE);
    timeout(TIMEOUT, b.wait(&claim_b, &busy_reply)).await.unwrap();
}

/// Prints the duration of wake-ups, for manual runs: `cargo test … -- --ignored --nocapture
/// latency`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a promise"]
async fn latency_of_a_wake_up() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let mut spans = Vec::new();
    for _ in 0..500 {
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        grant(&a, &claim_a).await;
        let busy_reply = busy(&b, &claim_b).await;
        let release = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            a.release(&claim_a).await.unwrap();
            Instant::now()
        };
        let wait = async {
            b.wait(&claim_b, &busy_reply).await;
            grant(&b, &claim_b).await;
            Instant::now()
        };
        let (released, granted) = tokio::join!(release, wait);
        spans.push(granted.saturating_duration_since(released));
        b.release(&claim_b).await.unwrap();
    }
    spans.sort_unstable();
    println!("p50 {:?} p99 {:?} max {:?}", spans[250], spans[495], spans[499]);
}
