//! The waiting callers of a backend by key, and the lifetime of the task that wakes them.
//!
//! The backend implements the task, which detects releases by a subscription or by polls. After a
//! wake-up, the engine makes an attempt. Backends call this module. The engine does not call it.
//!
//! Used by SQLite, the database servers and Redis. In etcd and ZooKeeper, each waiter has its own
//! watch. The in-process store notifies the waiters of a record directly.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::task::{self, JoinHandle};
use tokio::time::timeout;

use crate::panic_safe::with_panic_safe_waker;

/// The running [waits](crate::LockBackend::wait) of a backend, by key. `W` is the state that the
/// backend keeps for a waiter, for example the version of the record at its last attempt.
///
/// The backend must register a waiter first, then check whether the key has changed since the
/// attempt, and then await the waiter. In this order, no wake-up is missed. This type locks no
/// mutex while it calls wakers, so a woken task may use the `Waiters` at once.
///
/// # Examples
/// ```
/// # use std::sync::atomic::{AtomicU64, Ordering};
/// # use registry_core::{Key, Waiters};
/// #[derive(Default)]
/// struct Backend {
///     releases: AtomicU64,
///     waiters: Waiters<Key>,
/// }
///
/// impl Backend {
///     // Called by `LockBackend::wait`. `seen_releases` was read before the attempt.
///     async fn wait(&self, key: &Key, seen_releases: u64) {
///         let waiter = self.waiters.register(key.clone(), ());
///         if self.releases.load(Ordering::SeqCst) == seen_releases {
///             waiter.woken().await;
///         }
///     }
///
///     // Called when the store reports a release.
///     fn on_release(&self, key: &Key) {
///         self.releases.fetch_add(1, Ordering::SeqCst);
///         self.waiters.wake(key);
///     }
/// }
/// ```
pub struct Waiters<K, W = ()> {
    table: Mutex<WaiterTable<K, W>>,
    /// A waiter was registered, the last waiter was removed, or [`Waiters::notify_task`] was
    /// called.
    changed: Notify,
}

struct WaiterTable<K, W> {
    /// The waiters by key and by a number that is unique in the table.
    entries: BTreeMap<(K, u64), Entry<W>>,
    next_number: u64,
    task: Option<JoinHandle<()>>,
}

/// A waiter's state, and a channel. Dropping the sender wakes the waiter.
type Entry<W> = (W, oneshot::Sender<Infallible>);

/// A registered waiter. Dropping the `Waiter` removes it from the [`Waiters`].
#[derive(Debug)]
#[must_use = "dropping the waiter removes it"]
pub struct Waiter<'a, K: Ord, W> {
    waiters: &'a Waiters<K, W>,
    id: (K, u64),
    woken: oneshot::Receiver<Infallible>,
}

impl<K: Ord + Clone, W> Waiters<K, W> {
    /// Registers a waiter of `key`. Each later wake-up of the key ends its wait, even a wake-up
    /// before the call of [`Waiter::woken`].
    pub fn register(&self, key: K, state: W) -> Waiter<'_, K, W> {
        let (wake, woken) = oneshot::channel();
        let mut table = self.table();
        let id = (key, table.next_number);
        table.next_number += 1;
        table.entries.insert(id.clone(), (state, wake));
        drop(table);
        self.changed.notify_one();
        Waiter { waiters: self, id, woken }
    }

    /// Wakes the waiters of `key`.
    pub fn wake(&self, key: &K) {
        let ids = (key.clone(), 0)..=(key.clone(), u64::MAX);
        let woken: Vec<_> = self.table().entries.extract_if(ids, |_, _| true).collect();
        drop(woken);
    }

    /// Wakes the waiters for which `predicate` returns true. `predicate` runs while a mutex is
    /// locked, and must not use these `Waiters`.
    pub fn wake_if(&self, mut predicate: impl FnMut(&K, &mut W) -> bool) {
        let mut table = self.table();
        let woken = table.entries.extract_if(.., |(key, _), (state, _)| predicate(key, state));
        let woken: Vec<_> = woken.collect();
        drop(table);
        drop(woken);
    }

    /// Wakes all waiters.
    pub fn wake_all(&self) {
        let woken = std::mem::take(&mut self.table().entries);
        drop(woken);
    }

    /// Calls `visit` for each waiter, in the order of the keys. `visit` runs while a mutex is
    /// locked, and must not use these `Waiters`.
    pub fn for_each(&self, mut visit: impl FnMut(&K, &mut W)) {
        let mut table = self.table();
        table.entries.iter_mut().for_each(|((key, _), (state, _))| visit(key, state));
    }

    /// Returns whether `key` has a waiter.
    pub fn contains(&self, key: &K) -> bool {
        let ids = (key.clone(), 0)..=(key.clone(), u64::MAX);
        self.table().entries.range(ids).next().is_some()
    }
}

impl<K: Ord, W> Waiters<K, W> {
    /// Returns the number of waiters.
    pub fn len(&self) -> usize {
        self.table().entries.len()
    }

    /// Returns whether no waiter is registered.
    pub fn is_empty(&self) -> bool {
        self.table().entries.is_empty()
    }

    /// Starts the task that wakes the waiters, unless the task runs. Call this method after
    /// registering a waiter.
    pub fn ensure_task(&self, spawn: impl FnOnce() -> JoinHandle<()>) {
        let mut table = self.table();
        if table.task.as_ref().is_none_or(JoinHandle::is_finished) {
            table.task = Some(spawn());
        }
    }

    /// Returns whether the task runs.
    pub fn has_task(&self) -> bool {
        self.table().task.as_ref().is_some_and(|task| !task.is_finished())
    }

    /// Waits until a waiter is registered. Returns false after `linger` without a waiter. The
    /// calling task must then end, and the next waiter starts another task.
    ///
    /// Only the task that [`ensure_task`](Self::ensure_task) started may call this method.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn wait_for_waiter(&self, linger: Duration) -> bool {
        let was_idle = self.is_empty();
        while self.is_empty() {
            if timeout(linger, self.changed.notified()).await.is_err() && self.try_stop() {
                return false;
            }
        }
        if was_idle {
            // The next call of `changed` must also report the new waiter.
            self.changed.notify_one();
        }
        true
    }

    /// Returns whether no waiter is registered. If true, the calling task must end, and the next
    /// waiter starts another task.
    ///
    /// Only the task that [`ensure_task`](Self::ensure_task) started may call this method.
    pub fn try_stop(&self) -> bool {
        let mut table = self.table();
        let is_idle = table.entries.is_empty();
        // An aborted task may still run its last poll. It must not clear the handle of the task
        // that has replaced it.
        if is_idle && table.task.as_ref().map(JoinHandle::id) == task::try_id() {
            // `task` is cleared while the mutex is locked, so that no new waiter relies on the
            // ending task.
            table.task = None;
        }
        is_idle
    }

    /// Waits until a waiter is registered, the last waiter is removed, or
    /// [`notify_task`](Self::notify_task) is called. Only the task calls this method.
    ///
    /// # Cancel safety
    /// Dropping the future loses no change.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Ends the wait of the task for a [change](Self::changed).
    pub fn notify_task(&self) {
        self.changed.notify_one();
    }

    /// Ends the task, and wakes all waiters. Waiters of other registries over the same backend can
    /// then wait again, and start the task again.
    pub fn close(&self) {
        let mut table = self.table();
        let (task, woken) = (table.task.take(), std::mem::take(&mut table.entries));
        drop(table);
        if let Some(task) = task {
            task.abort();
        }
        drop(woken);
    }

    fn table(&self) -> MutexGuard<'_, WaiterTable<K, W>> {
        // No code can panic halfway through a change of the table, so a poisoned table is
        // consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, W> Default for Waiters<K, W> {
    fn default() -> Self {
        let table = WaiterTable { entries: BTreeMap::new(), next_number: 0, task: None };
        Self { table: Mutex::new(table), changed: Notify::new() }
    }
}

impl<K: Ord, W> fmt::Debug for Waiters<K, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<K: Ord, W> Waiter<'_, K, W> {
    /// Waits until the waiter is woken.
    ///
    /// # Cancel safety
    /// Dropping the future removes the waiter.
    pub async fn woken(mut self) {
        // A panic of the waiting task's waker must not end the task that wakes the waiters.
        let _ = with_panic_safe_waker(&mut self.woken).await;
    }
}

impl<K: Ord, W> Drop for Waiter<'_, K, W> {
    fn drop(&mut self) {
        // The receiver is closed first, so that dropping the sender calls no waker.
        self.woken.close();
        let mut table = self.waiters.table();
        let removed = table.entries.remove(&self.id);
        let is_idle = table.entries.is_empty();
        drop(table);
        drop(removed);
        if is_idle {
            self.waiters.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    use tokio::runtime::Handle;

    use super::*;

    type TestWaiters = Waiters<&'static str, u32>;

    fn is_woken(waiter: Waiter<'_, &'static str, u32>) -> bool {
        pin!(waiter.woken()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_wake_up_before_or_during_a_wait_ends_all_waits_of_its_key() {
        let waiters = TestWaiters::default();
        let [first, second] = [1, 2].map(|state| waiters.register("a", state));
        let other = waiters.register("b", 3);
        waiters.wake(&"a");
        assert!(is_woken(first) && is_woken(second));
        assert!(!waiters.contains(&"a") && waiters.contains(&"b"));
        let later = waiters.register("a", 4);
        assert!(!is_woken(later), "the waiter was registered after the wake-up");
        assert!(!is_woken(other));
        assert!(waiters.is_empty(), "all waiters were dropped");
    }

    #[test]
    fn a_dropped_waiter_is_removed_in_every_state() {
        let waiters = TestWaiters::default();
        drop(waiters.register("a", 1));
        assert!(!waiters.contains(&"a"));
        drop(waiters.register("a", 1).woken());
        assert!(!waiters.contains(&"a"));
        {
            let mut wait = pin!(waiters.register("a", 1).woken());
            assert!(wait.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            assert_eq!(waiters.len(), 1);
        }
        assert!(!waiters.contains(&"a"));
        let (stays, leaves) = (waiters.register("a", 1), waiters.register("a", 2));
        drop(leaves);
        assert!(waiters.contains(&"a"), "the other waiter stays");
        drop(stays);
        assert!(waiters.is_empty());
    }

    #[test]
    fn wake_if_wakes_the_chosen_waiters_and_may_change_the_state_of_all_waiters() {
        let waiters = TestWaiters::default();
        let all: Vec<_> = ["c", "a", "b", "a"]
            .into_iter()
            .zip(0..)
            .map(|(k, n)| waiters.register(k, n))
            .collect();
        let mut keys = Vec::new();
        waiters.for_each(|key, _| keys.push(*key));
        assert_eq!(keys, ["a", "a", "b", "c"]);
        waiters.wake_if(|key, state| {
            *state += 10;
            *key == "a" && *state == 13
        });
        let mut states = Vec::new();
        waiters.for_each(|_, state| states.push(*state));
        assert_eq!(states, [11, 12, 10]);
        let woken: Vec<_> = all.into_iter().map(is_woken).collect();
        assert_eq!(woken, [false, false, false, true]);
    }

    #[test]
    fn wake_all_and_close_end_all_waits() {
        for end in [TestWaiters::wake_all, TestWaiters::close] {
            let waiters = TestWaiters::default();
            let all = ["a", "b"].map(|key| waiters.register(key, 0));
            end(&waiters);
            assert!(all.into_iter().all(is_woken));
        }
    }

    /// A waker that uses the `Waiters` and then panics.
    struct HostileWaker(Arc<TestWaiters>, AtomicUsize);

    impl Wake for HostileWaker {
        fn wake(self: Arc<Self>) {
            self.1.fetch_add(1, Ordering::Relaxed);
            drop(self.0.register("a", 0));
            std::panic::panic_any("a waker of the caller's task");
        }
    }

    #[test]
    fn a_waker_may_use_the_waiters_and_its_panic_stops_no_wake_up() {
        let waiters = Arc::new(TestWaiters::default());
        let hostile = Arc::new(HostileWaker(Arc::clone(&waiters), AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&hostile));
        let wake_ups: [fn(&TestWaiters); 4] = [
            TestWaiters::wake_all,
            TestWaiters::close,
            |waiters| waiters.wake(&"a"),
            |waiters| waiters.wake_if(|_, _| true),
        ];
        for wake_up in wake_ups {
            hostile.1.store(0, Ordering::Relaxed);
            let mut waits = [0, 1].map(|n| Box::pin(waiters.register("a", n).woken()));
            for wait in &mut waits {
                assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            }
            wake_up(&waiters);
            assert_eq!(hostile.1.load(Ordering::Relaxed), 2);
        }
        // Dropping a wait calls no waker.
        let mut wait = Box::pin(waiters.register("a", 0).woken());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(wait);
        assert_eq!(hostile.1.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_between_the_check_and_the_wait_is_missed() {
        let waiters = Arc::new(TestWaiters::default());
        for _ in 0..2_000 {
            let is_free = Arc::new(AtomicBool::new(false));
            let release = Handle::current().spawn({
                let (waiters, is_free) = (Arc::clone(&waiters), Arc::clone(&is_free));
                async move {
                    is_free.store(true, Ordering::SeqCst);
                    waiters.wake(&"a");
                }
            });
            let waiter = waiters.register("a", 0);
            if !is_free.load(Ordering::SeqCst) {
                timeout(Duration::from_secs(10), waiter.woken())
                    .await
                    .expect("the wake-up ends the wait");
            }
            release.await.unwrap();
        }
    }

    /// Starts a task that lingers for a second without a waiter. Returns the number of changes that
    /// the task has seen.
    fn start(waiters: &Arc<TestWaiters>) -> Arc<AtomicUsize> {
        let seen = Arc::<AtomicUsize>::default();
        waiters.ensure_task(|| {
            let (waiters, seen) = (Arc::clone(waiters), Arc::clone(&seen));
            Handle::current().spawn(async move {
                while waiters.wait_for_waiter(Duration::from_secs(1)).await {
                    waiters.changed().await;
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        seen
    }

    /// Lets the task run until it waits.
    async fn settle() {
        for _ in 0..10 {
            task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_ends_after_the_last_waiter_and_is_started_again() {
        let waiters = Arc::<TestWaiters>::default();
        let waiter = waiters.register("a", 0);
        let seen = start(&waiters);
        settle().await;
        assert_eq!(seen.load(Ordering::Relaxed), 1, "the task sees the first waiter");
        drop(waiter);
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert!(waiters.has_task(), "the task lingers");
        let seen_before = seen.load(Ordering::Relaxed);
        let waiter = waiters.register("a", 0);
        assert_eq!(start(&waiters).load(Ordering::Relaxed), 0);
        settle().await;
        assert!(
            seen.load(Ordering::Relaxed) > seen_before,
            "the task sees the waiter that ends the linger time"
        );
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(waiters.has_task(), "a waiter is registered");
        drop(waiter);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!waiters.has_task());
        let _waiter = waiters.register("a", 0);
        let seen = start(&waiters);
        settle().await;
        assert_eq!(seen.load(Ordering::Relaxed), 1, "another task runs");
    }

    #[tokio::test(start_paused = true)]
    async fn closing_ends_the_task_until_the_next_waiter() {
        let waiters = Arc::<TestWaiters>::default();
        let waiter = waiters.register("a", 0);
        start(&waiters);
        waiters.close();
        waiter.woken().await;
        assert!(!waiters.has_task());
        let _waiter = waiters.register("a", 0);
        start(&waiters);
        settle().await;
        assert!(waiters.has_task());
    }

    #[tokio::test(start_paused = true)]
    async fn an_aborted_task_does_not_detach_its_successor() {
        let waiters = Arc::<TestWaiters>::default();
        drop(waiters.register("a", 0));
        start(&waiters);
        // This task represents a task that `close` has aborted and that is still in its last poll.
        let used_by_task = Arc::clone(&waiters);
        let must_end = Handle::current().spawn(async move { used_by_task.try_stop() });
        assert!(must_end.await.unwrap());
        assert!(waiters.has_task());
    }
}
