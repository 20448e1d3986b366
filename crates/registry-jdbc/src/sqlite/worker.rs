//! The thread of a backend, which drives a runtime of its own.
//!
//! A caller's runtime may end, may not be driven, or may have no I/O. This thread runs the work
//! that must continue regardless: the calls of `serial_executor` that their callers do not poll,
//! the pauses of `connection`, and the task of `waiters`.

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
    /// Never sent to; the thread ends when the last sender is dropped.
    alive: mpsc::Sender<Infallible>,
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
        let (alive, mut alive_receiver) = mpsc::channel(1);
        // The runtime is sent only after the thread has started. A failed spawn would otherwise
        // drop it, and dropping a runtime within another one panics.
        let (runtime_sender, runtime_receiver) = std::sync::mpsc::sync_channel::<Runtime>(1);
        let started = std::thread::Builder::new().name("lock-sqlite".to_owned()).spawn(move || {
            if let Ok(runtime) = runtime_receiver.recv() {
                runtime.block_on(alive_receiver.recv());
            }
        });
        if let Err(error) = started {
            runtime.shutdown_background();
            return Err(failed(error));
        }
        // The thread waits for the runtime, so this cannot fail.
        let _ = runtime_sender.send(runtime);
        Ok(Self { runtime: handle, alive })
    }

    /// Runs `task` on the thread.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let alive = self.alive.clone();
        self.runtime.spawn(async move {
            task.await;
            drop(alive);
        })
    }

    /// Waits for `pause` by the clock of the thread's runtime, whichever runtime polls the future.
    pub(super) fn sleep(&self, pause: Duration) -> tokio::time::Sleep {
        let _entered = self.runtime.enter();
        tokio::time::sleep(pause)
    }
}
