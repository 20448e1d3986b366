//! The operations that clients run only in a trial of all modes: conversions and locks of several
//! keys. Also the checks of I9.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    ClaimMode, LockError, LockGuard, LockOptions, LockRegistryExt as _, MultiGuard,
};
use registry_testkit::history::HoldRecord;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::client::TrialClient;
use super::trial::{LEASE_MAX, TrialProcess};

/// The units of each semaphore.
pub(super) const UNITS: u32 = 3;

/// Returns whether the key with this number is a semaphore.
pub(super) fn is_semaphore(key: usize) -> bool {
    key % 3 == 2
}

impl TrialClient {
    pub(super) fn requested_mode(&mut self, key: usize) -> ClaimMode {
        match (is_semaphore(key), self.rng.u8(0..20)) {
            (true, 0) | (false, 0..6) => ClaimMode::Exclusive,
            (true, _) => ClaimMode::Permits { take: self.rng.u32(1..=UNITS), of: UNITS },
            (false, 6..15) => ClaimMode::Shared,
            (false, _) => ClaimMode::Upgradable,
        }
    }

    /// Converts the lock a random number of times, and works after each conversion. Returns `None`
    /// if a conversion ended the hold.
    pub(super) async fn convert(
        &mut self,
        mut guard: Arc<LockGuard>,
        mut hold_record: HoldRecord,
        lease: Duration,
    ) -> Option<(Arc<LockGuard>, HoldRecord)> {
        while self.state.has_all_modes && guard.is_held() {
            let draw = self.rng.u8(0..6);
            let to = match (guard.mode(), draw) {
                (ClaimMode::Upgradable, 0..3) => ClaimMode::Exclusive,
                (ClaimMode::Exclusive, 0) => ClaimMode::Upgradable,
                (ClaimMode::Exclusive | ClaimMode::Upgradable, 3) => ClaimMode::Shared,
                _ => break,
            };
            self.check_guard(&guard, &hold_record);
            let wait = self.chance(0.7).then(|| self.ms(0, 1_500));
            let convert_record = hold_record.convert(to);
            let before = Arc::into_inner(guard).expect("only weak references remain");
            let Some(result) = self.sometimes_dropped(convert_guard(before, to, wait)).await else {
                self.state.trace(self.number, "conversion dropped");
                return None;
            };
            match result {
                Ok(Ok(converted)) => {
                    assert_eq!(converted.mode(), to, "a conversion has the requested mode");
                    let token = Some(converted.fencing_token());
                    hold_record = convert_record.granted(token, || converted.valid_for());
                    guard = Arc::new(converted);
                    self.state.trace(self.number, "converted");
                }
                Ok(Err(unchanged)) => {
                    hold_record = convert_record.refused();
                    guard = Arc::new(unchanged);
                    self.state.trace(self.number, "not upgraded");
                }
                Err(LockError::Lost { .. }) => {
                    convert_record.failed();
                    self.state.lost.fetch_add(1, Ordering::Relaxed);
                    self.state.trace(self.number, "lost while converted");
                    return None;
                }
                Err(LockError::Backend { source, .. }) if source.is_retryable() => {
                    convert_record.failed();
                    self.state.trace(self.number, "conversion failed");
                    return None;
                }
                Err(error) => panic!("an error that nothing caused: {error:?}"),
            }
            self.state.track_one(&guard);
            self.work(&guard, &hold_record, lease).await;
        }
        Some((guard, hold_record))
    }

    /// Locks several keys, works under all of them, and releases them.
    pub(super) async fn round_of_several_keys(&mut self) {
        let mut keys: Vec<String> = (0..self.state.keys)
            .filter(|key| !is_semaphore(*key))
            .map(|key| key.to_string())
            .collect();
        self.rng.shuffle(&mut keys);
        let lease = self.ms(500, LEASE_MAX.as_millis() as u64);
        let mut options = LockOptions::new().lease(lease).fair(self.chance(0.2));
        if self.chance(0.7) {
            options = options.wait(self.ms(0, 2_000));
        }
        let lock = self.process.registry.obtain_all(keys.iter().map(String::as_str));
        let keys: Vec<String> = lock.keys().map(str::to_owned).collect();
        let number = self.number as u32;
        let acquire_record = |key: &String| self.state.recorder.acquire(number, key.as_str());
        let acquire_records: Vec<_> = keys.iter().map(acquire_record).collect();
        let Some(result) = self.sometimes_dropped(lock.lock_with(options)).await else {
            return self.state.trace(self.number, "acquisition of several keys dropped");
        };
        let guard = match result {
            Ok(guard) => Arc::new(guard),
            Err(LockError::WaitElapsed { .. }) => {
                acquire_records.into_iter().for_each(|record| record.busy());
                return self.state.trace(self.number, "several keys busy");
            }
            Err(LockError::Backend { source, .. }) if source.is_retryable() => {
                acquire_records.into_iter().for_each(|record| record.failed());
                return self.state.trace(self.number, "failed for several keys");
            }
            Err(error) => panic!("an error that nothing caused: {error:?}"),
        };
        assert!(guard.guards().iter().map(LockGuard::key).eq(&keys), "a guard of other keys");
        let granted = acquire_records.into_iter().zip(guard.guards());
        let hold_records: Vec<HoldRecord> = granted
            .map(|(record, guard)| {
                record.granted(Some(guard.fencing_token()), || guard.valid_for())
            })
            .collect();
        for held in guard.guards().iter().filter(|guard| guard.is_held()) {
            self.process.checking_backend.record_hold(held.claim());
        }
        self.state.granted_several(&guard);
        self.state.trace(self.number, "several keys granted");
        sleep(self.ms(0, 100)).await;
        for (guard, hold_record) in guard.guards().iter().zip(&hold_records) {
            self.check_guard(guard, hold_record);
            self.state.write(self.number, guard);
        }
        let guard = Arc::into_inner(guard).expect("only weak references remain");
        self.release_several(guard, hold_records).await;
    }

    async fn release_several(&mut self, guard: MultiGuard, hold_records: Vec<HoldRecord>) {
        let was_held = guard.is_held();
        for (guard, hold_record) in guard.guards().iter().zip(&hold_records) {
            if !guard.is_held() {
                self.state.lost.fetch_add(1, Ordering::Relaxed);
                hold_record.lost();
            }
        }
        let release_records: Vec<_> = hold_records.into_iter().map(HoldRecord::release).collect();
        match self.sometimes_dropped(guard.unlock()).await {
            Some(Ok(())) => {
                assert!(was_held, "I4: the release of a lost lock returned `Ok`");
                release_records.into_iter().for_each(|record| record.freed());
            }
            // The result of each key is unknown: the error may concern only one of them.
            Some(Err(LockError::Lost { .. } | LockError::Backend { .. })) | None => {}
            Some(Err(error)) => panic!("an error that nothing caused: {error:?}"),
        }
    }
}

async fn convert_guard(
    guard: LockGuard,
    to: ClaimMode,
    wait: Option<Duration>,
) -> Result<Result<LockGuard, LockGuard>, LockError> {
    match (to, wait) {
        (ClaimMode::Exclusive, Some(wait)) => guard.try_upgrade_for(wait).await,
        (ClaimMode::Exclusive, None) => guard.upgrade().await.map(Ok),
        (ClaimMode::Upgradable, _) => guard.downgrade_to_upgradable().await.map(Ok),
        _ => guard.downgrade().await.map(Ok),
    }
}

/// Checks that a writer acquires `key` although readers of another process follow each other
/// without a gap. I9.
pub(super) async fn check_writer_is_not_starved(processes: &[TrialProcess], key: &str) {
    let [writer, .., reader] = processes else { return };
    let mut readers = JoinSet::new();
    for number in 0..2_u64 {
        let lock = reader.registry.obtain(key);
        // The options differ, so that one reader does not join the grant of the other.
        let options = LockOptions::new().lease(LEASE_MAX + Duration::from_millis(number));
        readers.spawn(async move {
            sleep(Duration::from_millis(15 * number)).await;
            loop {
                let guard = lock.read_with(options.clone()).await.expect("the network is healed");
                sleep(Duration::from_millis(30)).await;
                guard.unlock().await.expect("nothing fails any more");
            }
        });
    }
    sleep(Duration::from_millis(50)).await;
    let limit = LEASE_MAX * 2;
    match timeout(limit, writer.registry.obtain(key).lock()).await {
        Ok(Ok(guard)) => guard.unlock().await.expect("nothing fails any more"),
        other => panic!("I9: readers starve a writer of {key:?}: {other:?}"),
    }
    readers.shutdown().await;
    for process in processes {
        let idle = timeout(limit, process.registry.idle()).await;
        assert!(idle.is_ok(), "I6: a release of a process never completes");
    }
}

/// Checks that callers of one process acquire `key` in the order of their calls. I9.
pub(super) async fn check_arrival_order(processes: &[TrialProcess], key: &str) {
    let [local, .., remote] = processes else { return };
    let held = remote.registry.obtain(key).lock().await.expect("the network is healed");
    let (sender, mut order) = mpsc::unbounded_channel();
    let mut callers = JoinSet::new();
    for number in 0..3 {
        let (lock, sender) = (local.registry.obtain(key), sender.clone());
        callers.spawn(async move {
            let guard = lock.lock().await.expect("the network is healed");
            sender.send(number).expect("the receiver exists");
            guard.unlock().await.expect("nothing fails any more");
        });
        sleep(Duration::from_millis(1)).await;
    }
    held.unlock().await.expect("nothing fails any more");
    for expected in 0..3 {
        let next = order.recv().await;
        assert_eq!(next, Some(expected), "I9: a caller was overtaken by a later one");
    }
    callers.join_all().await;
}

/// Checks that all units of the semaphore `key` can be taken one by one, and no more. I9.
pub(super) async fn check_units(processes: &[TrialProcess], key: &str) {
    let semaphores: Vec<_> =
        processes.iter().map(|process| process.registry.semaphore(key, UNITS)).collect();
    let mut taken = Vec::new();
    for semaphore in semaphores.iter().cycle().take(UNITS as usize) {
        match semaphore.try_acquire_for(Duration::from_secs(1)).await {
            Ok(Some(permit)) => taken.push(permit),
            other => panic!("I9: {} of {UNITS} units of {key:?}: {other:?}", taken.len()),
        }
    }
    for semaphore in &semaphores {
        let more = semaphore.try_acquire().await.expect("the network is healed");
        assert!(more.is_none(), "I9: {key:?} has more units than {UNITS}");
    }
    for released in join_all(taken.into_iter().map(LockGuard::unlock)).await {
        released.expect("nothing fails any more");
    }
}
