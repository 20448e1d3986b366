//! Measures what a lock costs on a store: latency and throughput, next to a bare round trip.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use registry_core::{DistributedLock, Registry};
use tokio::task::JoinSet;

use crate::{is_full_run, quantile, row, time_alternately};

/// The number of tasks that lock at once, each with its own key.
const TASKS: usize = 64;

/// Measures uncontended pairs of lock and unlock, and records them. `round_trip` is one request to
/// the same store that does as little as possible.
///
/// Must be called in a task, as [`compare_modes`](crate::compare_modes) must.
pub async fn measure_pairs<R>(store: &str, registry: &Registry, round_trip: impl Fn() -> R)
where
    R: Future<Output = ()>,
{
    let locks: Vec<_> = (0..TASKS).map(|key| registry.obtain(&format!("orders/{key}"))).collect();
    // The first grant of a key costs more: it creates the record of the key.
    for lock in &locks {
        lock_and_unlock(lock).await;
    }
    let [round_trips, pairs] = time_alternately(round_trip, || lock_and_unlock(&locks[0])).await;
    let column = |name: &str| row("pairs", store).column(name);
    let round_trip = quantile(&round_trips, 0.5);
    column("bare round trip").measured(round_trip, "ns").record();
    let latency = column("lock and unlock").measured(quantile(&pairs, 0.5), "ns");
    latency.against("bare round trip", round_trip).record();
    column("p99").measured(quantile(&pairs, 0.99), "ns").record();
    let one = pairs_per_second(&locks[..1]).await;
    column("pairs of one task").measured(one, "/s").record();
    let all = pairs_per_second(&locks).await;
    column("pairs of 64 tasks").measured(all, "/s").record();
}

/// Returns how many pairs per second a task for each lock completes, in total.
async fn pairs_per_second(locks: &[DistributedLock]) -> f64 {
    let time = Duration::from_millis(if is_full_run() { 3_000 } else { 20 });
    let count = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for lock in locks {
        let (lock, count) = (lock.clone(), Arc::clone(&count));
        tasks.spawn(async move {
            while started.elapsed() < time {
                lock_and_unlock(&lock).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    tasks.join_all().await;
    count.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64()
}

async fn lock_and_unlock(lock: &DistributedLock) {
    lock.lock().await.unwrap().unlock().await.unwrap();
}
