//! The background releaser: completes jobs whose caller is gone, such as releases. Jobs are
//! futures; this file knows nothing about locks.
//!
//! Submitting a job sends it to a channel, which does not block, spawn or panic, with or without a
//! runtime. When the runtime shuts down, jobs are dropped. Their `Drop` passes on the local permits
//! that they hold, and their claims end with their leases.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};
use tokio::sync::mpsc;

use crate::active_count::ActiveCount;
use crate::contained::{catch_panic, discard};
use crate::watch::Watch;

/// A future that must complete even if its caller is gone.
pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone)]
pub(crate) struct BackgroundReleaser(Arc<ReleaserQueue>);

struct ReleaserQueue {
    jobs: mpsc::UnboundedSender<CountedJob>,
    pending: Arc<ActiveCount>,
    /// The number of `pending` jobs that release a claim.
    claims: Arc<ActiveCount>,
    watch: Watch,
}

impl Drop for ReleaserQueue {
    fn drop(&mut self) {
        self.watch.stop();
    }
}

impl BackgroundReleaser {
    /// Returns a background releaser and its task, which runs until the releaser is dropped and all
    /// jobs are done.
    pub(crate) fn new() -> (Self, impl Future<Output = ()> + Send) {
        let (jobs, receiver) = mpsc::unbounded_channel();
        let queue = ReleaserQueue {
            jobs,
            pending: Arc::default(),
            claims: Arc::default(),
            watch: Watch::default(),
        };
        (Self(Arc::new(queue)), work(receiver))
    }

    /// Submits `job`, which releases a claim.
    pub(crate) fn submit_release(&self, job: Job) {
        self.0.claims.enter();
        self.submit(job, Some(Arc::clone(&self.0.claims)));
    }

    /// Submits a call to the store whose caller is gone. It releases no claim itself.
    pub(crate) fn finish(&self, call: Job) {
        self.submit(call, None);
    }

    fn submit(&self, job: Job, claims: Option<Arc<ActiveCount>>) {
        self.0.pending.enter();
        // Without a runtime, the send fails and the job is dropped here.
        let _ = self.0.jobs.send(CountedJob { job, pending: Arc::clone(&self.0.pending), claims });
    }

    /// Returns the watch that detects futures that are not polled. It submits their work to this
    /// releaser.
    pub(crate) fn watch(&self) -> &Watch {
        &self.0.watch
    }

    /// Returns whether a runtime runs the task.
    pub(crate) fn is_alive(&self) -> bool {
        !self.0.jobs.is_closed()
    }

    /// Returns the number of pending jobs that release a claim.
    pub(crate) fn claims(&self) -> usize {
        self.0.claims.alive()
    }

    /// Waits until no job is pending.
    pub(crate) async fn drained(&self) {
        self.0.pending.wait_until_zero().await;
    }
}

/// A job that is counted from its submission until its drop, done or not.
struct CountedJob {
    job: Job,
    pending: Arc<ActiveCount>,
    claims: Option<Arc<ActiveCount>>,
}

impl std::fmt::Debug for CountedJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CountedJob").finish_non_exhaustive()
    }
}

impl Future for CountedJob {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<()> {
        self.job.as_mut().poll(cx)
    }
}

impl Drop for CountedJob {
    fn drop(&mut self) {
        // Dropped before the count: when `Registry::idle` returns, the job holds nothing any more.
        let job = std::mem::replace(&mut self.job, Box::pin(std::future::ready(())));
        catch_panic(|| drop(job));
        if let Some(claims) = &self.claims {
            claims.leave();
        }
        self.pending.leave();
    }
}

async fn work(mut receiver: mpsc::UnboundedReceiver<CountedJob>) {
    let mut jobs = FuturesUnordered::new();
    let mut open = true;
    while open || !jobs.is_empty() {
        tokio::select! {
            biased;
            job = receiver.recv(), if open => match job {
                // If the backend panics, only this job ends.
                Some(job) => {
                    let job = AssertUnwindSafe(job).catch_unwind();
                    jobs.push(job.map(|end| end.map_err(discard)));
                }
                None => open = false,
            },
            _ = poll_fn(|cx| Pin::new(&mut jobs).poll_next(cx)), if !jobs.is_empty() => {}
        }
    }
}
