//! The background releaser: completes jobs whose caller is gone, such as releases. It knows nothing
//! about locks and only polls the futures that it receives.
//!
//! Submitting a job is one channel send, which does not block, spawn or panic, with or without a
//! runtime. When the runtime is gone, jobs are dropped. Their `Drop` passes on the local permits
//! that they hold, and the claims end with their leases.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};
use tokio::sync::mpsc;

use crate::contained::{contain, discard};
use crate::gauge::Gauge;
use crate::watch::Watch;

/// A future that must complete even if its caller is gone.
pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone)]
pub(crate) struct Janitor(Arc<Desk>);

struct Desk {
    jobs: mpsc::UnboundedSender<Counted>,
    pending: Arc<Gauge>,
    /// The number of `pending` jobs that release a claim.
    claims: Arc<Gauge>,
    watch: Watch,
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.watch.stop();
    }
}

impl Janitor {
    /// Returns a background releaser and its task, which runs until the releaser is dropped and all
    /// jobs are done.
    pub(crate) fn new() -> (Self, impl Future<Output = ()> + Send) {
        let (jobs, inbox) = mpsc::unbounded_channel();
        let desk =
            Desk { jobs, pending: Arc::default(), claims: Arc::default(), watch: Watch::default() };
        (Self(Arc::new(desk)), work(inbox))
    }

    /// Submits `job`, which releases a claim.
    pub(crate) fn hand_over(&self, job: Job) {
        self.0.claims.enter();
        self.take_over(job, Some(Arc::clone(&self.0.claims)));
    }

    /// Submits a call to the store whose caller is gone. Another job releases the claim that it may
    /// concern.
    pub(crate) fn finish(&self, call: Job) {
        self.take_over(call, None);
    }

    fn take_over(&self, job: Job, claims: Option<Arc<Gauge>>) {
        self.0.pending.enter();
        // Without a runtime, the send fails and the job is dropped here.
        let _ = self.0.jobs.send(Counted { job, pending: Arc::clone(&self.0.pending), claims });
    }

    /// Returns the watch that checks futures that are not polled. It submits their state to this
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
    pub(crate) async fn idle(&self) {
        self.0.pending.none_left().await;
    }
}

/// A job that is counted from its submission until its drop, done or not.
struct Counted {
    job: Job,
    pending: Arc<Gauge>,
    claims: Option<Arc<Gauge>>,
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").finish_non_exhaustive()
    }
}

impl Future for Counted {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<()> {
        self.job.as_mut().poll(cx)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // The job is dropped, with all that it holds, before `idle` sees it as done.
        let job = std::mem::replace(&mut self.job, Box::pin(std::future::ready(())));
        contain(|| drop(job));
        if let Some(claims) = &self.claims {
            claims.leave();
        }
        self.pending.leave();
    }
}

async fn work(mut inbox: mpsc::UnboundedReceiver<Counted>) {
    let mut jobs = FuturesUnordered::new();
    let mut open = true;
    while open || !jobs.is_empty() {
        tokio::select! {
            biased;
            job = inbox.recv(), if open => match job {
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
