//! Measures the cost of the engine itself, over the in-process store. The references are a map
//! lookup and tokio's mutex.

use std::hint::black_box;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use dashmap::DashMap;
use registry_core::Registry;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn obtain(criterion: &mut Criterion) {
    let runtime = runtime();
    let _inside = runtime.enter();
    let registry = Registry::in_memory().unwrap();
    let keys: Vec<String> = (0..1_000).map(|key| format!("orders/{key}")).collect();
    let held_locks: Vec<_> = keys.iter().map(|key| registry.obtain(key)).collect();
    let map: DashMap<String, Arc<u64>> = keys.iter().cloned().zip((0..).map(Arc::new)).collect();
    let weak: DashMap<String, Weak<u64>> =
        map.iter().map(|entry| (entry.key().clone(), Arc::downgrade(entry.value()))).collect();
    let mut group = criterion.benchmark_group("obtain of a live key");
    let mut next = keys.iter().cycle();
    group.bench_function("reference", |bench| {
        bench.iter(|| map.get(next.next().unwrap().as_str()).map(|value| Arc::clone(&value)));
    });
    group.bench_function("a weak map", |bench| {
        bench.iter(|| weak.get(next.next().unwrap().as_str()).and_then(|value| value.upgrade()));
    });
    group.bench_function("obtain", |bench| {
        bench.iter(|| black_box(registry.obtain(next.next().unwrap())));
    });
    group.finish();
    drop(held_locks);
}

fn uncontended(criterion: &mut Criterion) {
    let runtime = runtime();
    let registry = runtime.block_on(async { Registry::in_memory().unwrap() });
    let lock = registry.obtain("orders/42");
    let mutex = tokio::sync::Mutex::new(());
    let mut group = criterion.benchmark_group("uncontended pair");
    group.bench_function("reference", |bench| {
        bench.to_async(&runtime).iter(|| async { drop(black_box(mutex.lock().await)) });
    });
    group.bench_function("lock and unlock", |bench| {
        bench
            .to_async(&runtime)
            .iter(|| async { lock.lock().await.unwrap().unlock().await.unwrap() });
    });
    group.finish();
}

/// Measures 64 tasks that compete for one key. One iteration is one critical section of one task.
fn contended(criterion: &mut Criterion) {
    const TASKS: u64 = 64;

    let runtime = runtime();
    let registry = runtime.block_on(async { Registry::in_memory().unwrap() });
    let lock = registry.obtain("orders/42");
    let mutex = Arc::new(tokio::sync::Mutex::new(()));

    async fn time_sections<F>(
        sections: u64,
        section: impl Fn() -> F + Clone + Send + 'static,
    ) -> Duration
    where
        F: Future<Output = ()> + Send,
    {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let own_sections = sections / TASKS + u64::from(task < sections % TASKS);
            let section = section.clone();
            tasks.spawn(async move {
                for _ in 0..own_sections {
                    section().await;
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        start.elapsed()
    }

    let mut group = criterion.benchmark_group("64 tasks on one key, for each pair");
    group.throughput(Throughput::Elements(1));
    group.bench_function("reference", |bench| {
        bench.to_async(&runtime).iter_custom(|sections| {
            let mutex = Arc::clone(&mutex);
            async move {
                time_sections(sections, move || {
                    let mutex = Arc::clone(&mutex);
                    async move { drop(black_box(mutex.lock().await)) }
                })
                .await
            }
        });
    });
    group.bench_function("lock and unlock", |bench| {
        bench.to_async(&runtime).iter_custom(|sections| {
            let lock = lock.clone();
            async move {
                time_sections(sections, move || {
                    let lock = lock.clone();
                    async move { lock.lock().await.unwrap().unlock().await.unwrap() }
                })
                .await
            }
        });
    });
    group.finish();
}

fn main() {
    let groups = [
        ("obtain of a live key", "a DashMap lookup with an `Arc` clone"),
        ("uncontended pair", "lock and unlock of a `tokio::sync::Mutex`"),
        ("64 tasks on one key, for each pair", "the same tasks with a `tokio::sync::Mutex`"),
    ];
    lock_registry_benches::run(&groups, |criterion| {
        obtain(criterion);
        uncontended(criterion);
        contended(criterion);
    });
    lock_registry_benches::write_results("local");
}
