//! Many callers, callers that are no longer polled, and callers whose runtime ends.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use registry_core::{Attempt, LockBackend, LockRegistry, Registry};
use sqlx::{ConnectOptions, Executor};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::troubles::{unlock, write_lock};
use super::{Folder, LEASE, busy, claim, grant};
use crate::sqlite::backend::SqliteBackend;
use crate::sqlite::link;

const SOON: Duration = Duration::from_secs(20);

fn registry(backend: SqliteBackend) -> Registry {
    Registry::builder(Arc::new(backend)).build().unwrap()
}

fn is_pending<F: Future + ?Sized>(future: std::pin::Pin<&mut F>) -> bool {
    matches!(future.poll(&mut Context::from_waker(Waker::noop())), Poll::Pending)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_callers_of_different_keys_at_once_are_all_served() {
    const CALLERS: u32 = 10_000;
    const IN_TURN: u32 = 1_000;
    let folder = Folder::new();
    let registry = registry(folder.process().await);
    let bystander = registry.obtain("bystander").lock().await.unwrap();

    let started = Instant::now();
    for n in 0..IN_TURN {
        registry.obtain(&format!("in turn {n}")).lock().await.unwrap().unlock().await.unwrap();
    }
    let in_turn = started.elapsed() / IN_TURN;

    let started = Instant::now();
    let mut callers = JoinSet::new();
    for n in 0..CALLERS {
        let lock = registry.obtain(&format!("at once {n}"));
        callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    let at_once = started.elapsed() / CALLERS;
    println!("a pair in turn {in_turn:?}, a pair of {CALLERS} at once {at_once:?}");
    // The aim is half the throughput. The factor is larger because other programs may use the
    // processors.
    assert!(at_once < in_turn * 10, "in turn {in_turn:?}, at once {at_once:?}");
    assert!(bystander.is_held());
    bystander.unlock().await.unwrap();
    assert!(registry.close(SOON).await.is_clean());
}

#[tokio::test]
async fn a_release_that_is_not_polled_any_more_frees_the_key_for_other_processes() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let held = claim("k");
    grant(&a, &held).await;
    // Another process writes when the release begins, so the release must be retried.
    let mut other = write_lock(&folder.file()).await;
    let mut release = a.release(&held);
    assert!(is_pending(release.as_mut()));
    tokio::time::sleep(Duration::from_millis(10)).await;
    unlock(&mut other).await;

    let told = busy_or_free(&b).await;
    let freed = async {
        if let Some((asked, told)) = told {
            b.wait(&asked, &told).await;
            grant(&b, &asked).await;
        }
    };
    timeout(SOON, freed).await.expect("the release goes on without its caller");
    assert_eq!(release.await.unwrap(), registry_core::Release::Freed);
}

async fn busy_or_free(
    backend: &SqliteBackend,
) -> Option<(registry_core::Claim, registry_core::Busy)> {
    let asked = claim("k");
    match backend.try_acquire(&asked).await.unwrap() {
        Attempt::Granted(_) => None,
        Attempt::Busy(busy) => Some((asked, busy)),
    }
}

#[tokio::test]
async fn an_attempt_that_is_dropped_is_carried_to_its_end() {
    let folder = Folder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let dropped = claim("k");
    let mut other = write_lock(&folder.file()).await;
    {
        let attempt = pin!(a.try_acquire(&dropped));
        assert!(is_pending(attempt));
    }
    unlock(&mut other).await;
    let granted = async {
        while b.inspect(dropped.key()).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, granted).await.unwrap();
    assert!(LEASE > SOON);
    busy(&b, &claim("k")).await;
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn a_runtime_that_ends_fails_no_caller_in_another_one() {
    const ROUNDS: usize = 10;
    const CALLERS: usize = 40;
    let home = runtime();
    let folder = Folder::new();
    let registry = home.block_on(async { registry(folder.process().await) });
    for _ in 0..ROUNDS {
        let pairs = |registry: &Registry, runtime: &Runtime, name: &str, times: usize| {
            let mut callers = JoinSet::new();
            for n in 0..CALLERS {
                let lock = registry.obtain(&format!("{name} {n}"));
                let work = async move {
                    for _ in 0..times {
                        lock.lock().await.unwrap().unlock().await.unwrap();
                    }
                };
                callers.spawn_on(work, runtime.handle());
            }
            callers
        };
        let (ends, stays) = (runtime(), runtime());
        // Another process writes from time to time, so that calls wait and are retried.
        let writes = async {
            let mut other = link::options(&folder.file()).connect().await.unwrap();
            for _ in 0..10 {
                while other.execute("BEGIN IMMEDIATE").await.is_err() {
                    tokio::task::yield_now().await;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
                unlock(&mut other).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let ended = pairs(&registry, &ends, "ends", usize::MAX);
        let mut stayed = pairs(&registry, &stays, "stays", 10);
        stays.block_on(writes);
        ends.shutdown_background();
        drop(ended);
        stays.block_on(async {
            while let Some(caller) = timeout(SOON, stayed.join_next()).await.unwrap() {
                caller.unwrap();
            }
        });
    }
    home.block_on(async { assert!(registry.close(SOON).await.is_clean()) });
}

#[test]
fn waiters_in_a_runtime_without_io_cause_no_panics() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.to_string().contains("IO is disabled") {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        before(panic);
    }));
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let folder = Folder::new();
        let (a, b) = (folder.process().await, folder.process().await);
        for _ in 0..5 {
            let (mine, yours) = (claim("k"), claim("k"));
            grant(&a, &mine).await;
            let told = busy(&b, &yours).await;
            let release = async { a.release(&mine).await.unwrap() };
            timeout(SOON, async { tokio::join!(b.wait(&yours, &told), release) }).await.unwrap();
        }
    });
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}
