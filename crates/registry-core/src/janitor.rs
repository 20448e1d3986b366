//! Finishes what guards and dropped callers leave behind. Knows nothing about locks: it polls the futures it is given.
//!
//! Handing a job over is one send: it neither blocks, spawns nor panics, with or without a runtime. When the runtime is
//! gone, jobs are dropped, what they hold is passed on by their own `Drop`, and the store's lease does the rest.

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

/// A piece of work that must not be lost with its caller.
pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone)]
pub(crate) struct Janitor(Arc<Desk>);

struct Desk {
    jobs: mpsc::UnboundedSender<Counted>,
    pending: Arc<Gauge>,
    /// Those of `pending` that give a claim back.
    claims: Arc<Gauge>,
    watch: Watch,
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.watch.stop();
    }
}

impl Janitor {
    /// A janitor and the task that does its work until the janitor is dropped and all jobs are done.
    pub(crate) fn new() -> (Self, impl Future<Output = ()> + Send) {
        let (jobs, inbox) = mpsc::unbounded_channel();
        let desk =
            Desk { jobs, pending: Arc::default(), claims: Arc::default(), watch: Watch::default() };
        (Self(Arc::new(desk)), work(inbox))
    }

    /// Takes over `job`, which gives a claim back.
    pub(crate) fn hand_over(&self, job: Job) {
        self.0.claims.enter();
        self.take_over(job, Some(Arc::clone(&self.0.claims)));
    }

    /// Takes over a call to the store whose caller has gone. A claim that it may concern is somebody else's job.
    pub(crate) fn finish(&self, call: Job) {
        self.take_over(call, None);
    }

    fn take_over(&self, job: Job, claims: Option<Arc<Gauge>>) {
        self.0.pending.enter();
        // Without a runtime the send fails and the job is dropped here.
        let _ = self.0.jobs.send(Counted { job, pending: Arc::clone(&self.0.pending), claims });
    }

    /// What looks after callers that do not poll their futures, and hands to this janitor what they hold.
    pub(crate) fn watch(&self) -> &Watch {
        &self.0.watch
    }

    /// Whether there is a runtime that does the work.
    pub(crate) fn is_alive(&self) -> bool {
        !self.0.jobs.is_closed()
    }

    /// How many jobs that give a claim back are not done yet.
    pub(crate) fn claims(&self) -> usize {
        self.0.claims.alive()
    }

    /// Waits until no job is left.
    pub(crate) async fn idle(&self) {
        self.0.pending.none_left().await;
    }
}

/// A job that is counted from the moment it is handed over until it is dropped, done or not.
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
        // What the job holds must be given up before anybody hears that it is done.
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
                // A backend that panics spoils its own job, not the others'.
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
