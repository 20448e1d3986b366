//! The background releaser: runs jobs that their callers do not poll, such as releases. A job is an
//! opaque future: this module only polls it.
//!
//! Submitting a job sends the job to a channel. Sending does not block, spawn or panic, with or
//! without a runtime. A runtime that shuts down drops the jobs. The `Drop` of a job passes on the
//! local permit of the job. The claim of the job then ends with its lease.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};
use tokio::sync::mpsc;

use crate::active_count::ActiveCount;
use crate::panic_safe::{catch_panic, discard_panic};
use crate::stall_detector::StallDetector;

/// A future that must complete even if its caller is gone.
pub(crate) type BackgroundJob = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone)]
pub(crate) struct BackgroundReleaser(Arc<ReleaserQueue>);

struct ReleaserQueue {
    jobs: mpsc::UnboundedSender<CountedJob>,
    pending: Arc<ActiveCount>,
    /// The number of the `pending` jobs that release a claim.
    pending_releases: Arc<ActiveCount>,
    stall_detector: StallDetector,
}

impl Drop for ReleaserQueue {
    fn drop(&mut self) {
        self.stall_detector.stop();
    }
}

impl BackgroundReleaser {
    /// Returns a background releaser and its task. The task runs until the last clone of the
    /// releaser is dropped and all jobs are done.
    pub(crate) fn new() -> (Self, impl Future<Output = ()> + Send) {
        let (jobs, receiver) = mpsc::unbounded_channel();
        let queue = ReleaserQueue {
            jobs,
            pending: Arc::default(),
            pending_releases: Arc::default(),
            stall_detector: StallDetector::default(),
        };
        (Self(Arc::new(queue)), run(receiver))
    }

    /// Submits `job`, which releases a claim.
    pub(crate) fn submit_release(&self, job: BackgroundJob) {
        self.0.pending_releases.enter();
        self.submit(job, Some(Arc::clone(&self.0.pending_releases)));
    }

    /// Submits a job that releases no claim and that its caller does not poll, such as a store
    /// call.
    pub(crate) fn submit_call(&self, call: BackgroundJob) {
        self.submit(call, None);
    }

    fn submit(&self, job: BackgroundJob, pending_releases: Option<Arc<ActiveCount>>) {
        self.0.pending.enter();
        // Without a runtime, the send fails and the job is dropped here.
        let pending = Arc::clone(&self.0.pending);
        let _ = self.0.jobs.send(CountedJob { job, pending, pending_releases });
    }

    /// Returns the stall detector of the registry. If a future is not polled, the stall detector
    /// submits the work of that future to this releaser.
    pub(crate) fn stall_detector(&self) -> &StallDetector {
        &self.0.stall_detector
    }

    /// Returns whether a runtime runs the task of this releaser.
    pub(crate) fn is_running(&self) -> bool {
        !self.0.jobs.is_closed()
    }

    /// Returns the number of pending jobs that release a claim.
    pub(crate) fn pending_releases(&self) -> usize {
        self.0.pending_releases.count()
    }

    /// Waits until no job is pending.
    pub(crate) async fn wait_until_drained(&self) {
        self.0.pending.wait_until_zero().await;
    }
}

/// A job that counts as pending from its submission until its drop.
struct CountedJob {
    job: BackgroundJob,
    pending: Arc<ActiveCount>,
    pending_releases: Option<Arc<ActiveCount>>,
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
        // The job is dropped before the counts change: when `Registry::idle` returns, the job no
        // longer holds a permit or a claim.
        let job = std::mem::replace(&mut self.job, Box::pin(std::future::ready(())));
        catch_panic(|| drop(job));
        if let Some(pending_releases) = &self.pending_releases {
            pending_releases.leave();
        }
        self.pending.leave();
    }
}

async fn run(mut receiver: mpsc::UnboundedReceiver<CountedJob>) {
    let mut jobs = FuturesUnordered::new();
    let mut open = true;
    while open || !jobs.is_empty() {
        tokio::select! {
            biased;
            job = receiver.recv(), if open => match job {
                // A panic of the backend ends only this job.
                Some(job) => {
                    let job = AssertUnwindSafe(job).catch_unwind();
                    jobs.push(job.map(|result| result.map_err(discard_panic)));
                }
                None => open = false,
            },
            _ = poll_fn(|cx| Pin::new(&mut jobs).poll_next(cx)), if !jobs.is_empty() => {}
        }
    }
}
