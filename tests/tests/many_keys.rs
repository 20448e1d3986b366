//! A registry that has used a million keys needs no more memory than a new one. The test measures
//! the memory of the whole process, so it is in a binary of its own.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use registry_core::{MemoryBackend, Registry};

/// All keys are distinct over the whole test.
const KEYS: u64 = 1_000_000;

/// After this many keys, the allocator and the maps have reached their final size.
const WARM_UP: u64 = 100_000;

/// Keys that are in use at the same time.
const AT_ONCE: u64 = 1_000;

/// Less than ten bytes per key. A leaked local lock takes hundreds, a leaked key alone about
/// thirty.
const GROWTH_MAX: u64 = 8 * 1_024 * 1_024;

/// The smallest page size. With larger pages, the growth is underestimated. The counts of local
/// locks and records are exact in any case.
const PAGE_MIN: u64 = 4_096;

/// The resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * PAGE_MIN
}

/// Obtains a batch of new keys, locks most of them, and releases them by `unlock` or by drop.
async fn lock_and_release_all(registry: &Registry, keys: std::ops::Range<u64>) {
    let mut guards = Vec::new();
    for key in keys {
        let lock = registry.obtain(&format!("orders/{key}/lines"));
        let again = registry.obtain(lock.key());
        if key % 10 == 0 {
            // Obtained only.
            continue;
        }
        guards.push(again.lock().await.unwrap());
        assert!(key % 100 != 1 || lock.try_lock().await.unwrap().is_none());
    }
    for (n, guard) in guards.into_iter().enumerate() {
        if n % 2 == 0 {
            guard.unlock().await.unwrap();
        } else {
            drop(guard);
        }
    }
    registry.idle().await;
}

#[tokio::test]
async fn a_million_keys_leave_no_local_lock_record_or_memory() {
    let store = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let mut warm = 0;
    for from in (0..KEYS).step_by(usize::try_from(AT_ONCE).unwrap()) {
        if from == WARM_UP {
            warm = resident_bytes();
        }
        lock_and_release_all(&registry, from..from + AT_ONCE).await;
    }
    assert_eq!(registry.local_locks(), 0, "local locks");
    assert_eq!(registry.held(), 0, "held");
    assert_eq!(store.records(), 0, "records in the store");
    let growth = resident_bytes().saturating_sub(warm);
    assert!(growth <= GROWTH_MAX, "{growth} bytes more after {} keys", KEYS - WARM_UP);
}
