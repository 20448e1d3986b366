//! The worker thread of a backend, which drives its own runtime.
//!
//! A caller's runtime may end, may not be driven, or may have no I/O. So this thread runs all work
//! that must not depend on a caller's runtime:
//! - the queued and unpolled calls of `serial_executor`,
//! - the pauses of `connection`,
//! - the task of `release_watcher`.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A handle of the thread. The thread ends when all handles are dropped and all its tasks have
/// ended.
#[derive(Debug, Clone)]
pub(super) struct WorkerThread {
    runtime: Handle,
    /// No message is ever sent. The thread ends when the last sender is dropped.
    keep_alive: mpsc::Sender<Infallible>,
}

impl WorkerThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Misconfigured` if the process reached its limit of threads or open files.
    pub(super) fn start() -> Result<Self, BackendError> {
        let failed = |error: std::io::Error| {
            BackendError::new(
                BackendErrorKind::Misconfigured,
                format!(
                    "starting the thread of a sqlite store failed: {error}; raise the process's limits of threads \
                     and open files"
                ),
            )
            .with_source(error)
            .as_refused()
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (keep_alive, mut all_dropped) = mpsc::channel(1);
        // The runtime is sent only after the thread has started. Otherwise a failed spawn would
        // drop the runtime, and the drop of a runtime inside another runtime panics.
        let (runtime_sender, runtime_receiver) = std::sync::mpsc::sync_channel::<Runtime>(1);
        let started = std::thread::Builder::new().name("lock-sqlite".to_owned()).spawn(move || {
            if let Ok(runtime) = runtime_receiver.recv() {
                runtime.block_on(all_dropped.recv());
            }
        });
        if let Err(error) = started {
            runtime.shutdown_background();
            return Err(failed(error));
        }
        // The thread waits for the runtime, so the send cannot fail.
        let _ = runtime_sender.send(runtime);
        Ok(Self { runtime: handle, keep_alive })
    }

    /// Runs `task` on the thread.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let keep_alive = self.keep_alive.clone();
        self.runtime.spawn(async move {
            task.await;
            drop(keep_alive);
        })
    }

    /// Waits for `pause` by a timer of this thread's runtime, whichever runtime polls the future.
    pub(super) fn sleep(&self, pause: Duration) -> tokio::time::Sleep {
        let _entered = self.runtime.enter();
        tokio::time::sleep(pause)
    }
}

#[cfg(test)]
mod tests {
    //! Tests with many callers, with callers that are no longer polled, and with callers whose
    //! runtime ends.

    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Waker};
    use std::time::{Duration, Instant};

    use registry_core::{Attempt, LockAdmin, LockBackend, LockOptions, Registry};
    use sqlx::{ConnectOptions, Executor};
    use tokio::runtime::{Builder, Runtime};
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    use crate::sqlite::backend::SqliteBackend;
    use crate::sqlite::connection;
    use crate::sqlite::tests::{
        LEASE, TestFolder, acquire, begin_write, claim, expect_busy, rollback,
    };

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn registry(backend: SqliteBackend) -> Registry {
        Registry::builder(Arc::new(backend)).build().unwrap()
    }

    fn is_pending<F: Future + ?Sized>(future: std::pin::Pin<&mut F>) -> bool {
        matches!(future.poll(&mut Context::from_waker(Waker::noop())), Poll::Pending)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn ten_thousand_concurrent_callers_of_different_keys_all_acquire() {
        const CALLERS: u32 = 10_000;
        const SEQUENTIAL: u32 = 1_000;
        let folder = TestFolder::new();
        // On a loaded machine, 10,000 queued statements take longer than the default timeouts.
        let config = folder.config().with_busy_timeout(TIMEOUT);
        let backend = Arc::new(SqliteBackend::open(config).await.unwrap());
        let registry = Registry::builder(backend).timeout(TIMEOUT * 2).lease(TIMEOUT * 8);
        let registry = registry.build().unwrap();
        let options = LockOptions::new().lease(LEASE).wait(TIMEOUT);
        let unrelated = registry.obtain("unrelated").lock_with(options).await.unwrap();

        let started = Instant::now();
        for n in 0..SEQUENTIAL {
            registry
                .obtain(&format!("sequential {n}"))
                .lock()
                .await
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }
        let sequential = started.elapsed() / SEQUENTIAL;

        let started = Instant::now();
        let mut callers = JoinSet::new();
        for n in 0..CALLERS {
            let lock = registry.obtain(&format!("concurrent {n}"));
            callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
        }
        while let Some(caller) = callers.join_next().await {
            caller.unwrap();
        }
        let concurrent = started.elapsed() / CALLERS;
        println!("per pair: sequential {sequential:?}, {CALLERS} concurrent {concurrent:?}");
        // Concurrent calls should take at most twice the time. The limit is larger because other
        // programs may use the processors.
        assert!(
            concurrent < sequential * 10,
            "sequential {sequential:?}, concurrent {concurrent:?}"
        );
        assert!(unrelated.is_held());
        unrelated.unlock().await.unwrap();
        assert!(registry.close(TIMEOUT).await.is_clean());
    }

    #[tokio::test]
    async fn an_unpolled_release_frees_the_key_for_other_processes() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let held = claim("k");
        acquire(&a, &held).await;
        // Another process writes when the release begins, so the release must be retried.
        let mut other = begin_write(&folder.file()).await;
        let mut release = a.release(&held);
        assert!(is_pending(release.as_mut()));
        tokio::time::sleep(Duration::from_millis(10)).await;
        rollback(&mut other).await;

        let busy_reply = busy_or_free(&b).await;
        let freed = async {
            if let Some((waiting, busy_reply)) = busy_reply {
                b.wait(&waiting, &busy_reply).await;
                acquire(&b, &waiting).await;
            }
        };
        timeout(TIMEOUT, freed).await.expect("the release runs to its end without its caller");
        assert_eq!(release.await.unwrap(), registry_core::Release::Freed);
    }

    async fn busy_or_free(
        backend: &SqliteBackend,
    ) -> Option<(registry_core::Claim, registry_core::Busy)> {
        let waiting = claim("k");
        match backend.try_acquire(&waiting).await.unwrap() {
            Attempt::Busy(busy) => Some((waiting, busy)),
            Attempt::Granted(_) | Attempt::Gone => None,
        }
    }

    #[tokio::test]
    async fn a_dropped_attempt_runs_to_its_end() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let dropped = claim("k");
        let mut other = begin_write(&folder.file()).await;
        {
            let attempt = pin!(a.try_acquire(&dropped));
            assert!(is_pending(attempt));
        }
        rollback(&mut other).await;
        let granted = async {
            while b.inspect(dropped.key()).await.unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(TIMEOUT, granted).await.unwrap();
        assert!(LEASE > TIMEOUT);
        expect_busy(&b, &claim("k")).await;
    }

    fn runtime() -> Runtime {
        Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    #[test]
    fn the_end_of_a_runtime_fails_no_caller_in_another_runtime() {
        const ROUNDS: usize = 10;
        const CALLERS: usize = 40;
        let registry_runtime = runtime();
        let folder = TestFolder::new();
        let registry = registry_runtime.block_on(async { registry(folder.open_backend().await) });
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
            let (ending_runtime, lasting_runtime) = (runtime(), runtime());
            // Another process writes from time to time, so that calls wait and are retried.
            let writes = async {
                let mut other = connection::options(&folder.file()).connect().await.unwrap();
                for _ in 0..10 {
                    while other.execute("BEGIN IMMEDIATE").await.is_err() {
                        tokio::task::yield_now().await;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    rollback(&mut other).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let ending_callers = pairs(&registry, &ending_runtime, "ending", usize::MAX);
            let mut lasting_callers = pairs(&registry, &lasting_runtime, "lasting", 10);
            lasting_runtime.block_on(writes);
            ending_runtime.shutdown_background();
            drop(ending_callers);
            lasting_runtime.block_on(async {
                while let Some(caller) =
                    timeout(TIMEOUT, lasting_callers.join_next()).await.unwrap()
                {
                    caller.unwrap();
                }
            });
        }
        registry_runtime.block_on(async { assert!(registry.close(TIMEOUT).await.is_clean()) });
    }

    #[test]
    fn a_waiter_in_a_runtime_without_io_does_not_panic() {
        static PANICS: AtomicUsize = AtomicUsize::new(0);
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.to_string().contains("IO is disabled") {
                PANICS.fetch_add(1, Ordering::Relaxed);
            }
            default_hook(panic);
        }));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let folder = TestFolder::new();
            let (a, b) = (folder.open_backend().await, folder.open_backend().await);
            for _ in 0..5 {
                let (claim_a, claim_b) = (claim("k"), claim("k"));
                acquire(&a, &claim_a).await;
                let busy_reply = expect_busy(&b, &claim_b).await;
                let release = async { a.release(&claim_a).await.unwrap() };
                timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
                    .await
                    .unwrap();
            }
        });
        assert_eq!(PANICS.load(Ordering::Relaxed), 0);
    }
}
