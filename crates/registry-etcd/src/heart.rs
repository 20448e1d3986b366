//! Keeps leases alive: one stream for all of them, on which each request is answered. Knows no claims.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::poll_fn;
use registry_core::{BackendError, Moment};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::lease::Lease;
use crate::link::Link;
use crate::wire::{KEEP_ALIVE, LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The task that has the stream. It ends with this handle.
pub(crate) struct Heart {
    link: Link,
    // Without a limit: each caller waits for one answer.
    beats: mpsc::UnboundedSender<Beat>,
    /// The number of the connection that has the stream.
    number: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

struct Beat {
    lease: i64,
    answer: oneshot::Sender<LeaseKeepAliveResponse>,
}

/// Whether a lease goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beating {
    Yes,
    /// The member does not know it. One that lags behind may not know it yet.
    Unknown,
}

impl Heart {
    pub(crate) fn new(link: Link) -> Self {
        let (beats, orders) = mpsc::unbounded_channel();
        let number = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(beat(link.clone(), orders, Arc::clone(&number)));
        Self { link, beats, number, task }
    }

    /// Asks for `lease` to last for its whole time again. What it is told counts when it is [proven](Lease::prove).
    pub(crate) async fn keep_alive(
        &self,
        lease: &mut Lease,
        limit: Duration,
    ) -> Result<Beating, BackendError> {
        let sent = Moment::now();
        let (answer, answered) = oneshot::channel();
        let gone = || BackendError::transient("etcd: a lease could not be kept alive").as_refused();
        self.beats.send(Beat { lease: lease.id, answer }).map_err(|_| gone())?;
        let Ok(answer) = timeout(limit, answered).await else {
            // The stream of a member that stands still is as silent as it.
            self.link.leave(self.number.load(Ordering::Relaxed), true);
            return Err(BackendError::transient("etcd: a lease was not kept alive in time"));
        };
        let answer = answer.map_err(|_| gone())?;
        let Ok(seconds @ 1..) = u64::try_from(answer.ttl) else {
            return Ok(Beating::Unknown);
        };
        let term = answer.header.unwrap_or_default().raft_term;
        lease.kept_alive(sent, Duration::from_secs(seconds), term);
        Ok(Beating::Yes)
    }

    /// Asks for a lease to last for its whole time again. What comes of it can be looked at later.
    pub(crate) fn ask(&self, lease: i64) -> Asked {
        let sent = Moment::now();
        let (answer, answered) = oneshot::channel();
        // Where there is no stream any more, none is needed.
        _ = self.beats.send(Beat { lease, answer });
        Asked { sent, answered }
    }
}

/// A lease was asked to be kept alive.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) sent: Moment,
    answered: oneshot::Receiver<LeaseKeepAliveResponse>,
}

impl Asked {
    /// What has come of it. `None` as long as that is not known.
    pub(crate) fn outcome(&mut self) -> Option<Beating> {
        let answer = self.answered.try_recv().ok()?;
        Some(if answer.ttl > 0 { Beating::Yes } else { Beating::Unknown })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Heart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heart").finish_non_exhaustive()
    }
}

async fn beat(link: Link, mut beats: mpsc::UnboundedReceiver<Beat>, number: Arc<AtomicU64>) {
    while let Some(first) = beats.recv().await {
        // Whoever waits for an answer that does not come sees its sender go.
        match talk(&link, &mut beats, first, &number).await {
            Talk::Over => {}
            Talk::NobodyLeft => return,
        }
    }
}

enum Talk {
    Over,
    NobodyLeft,
}

/// Has a stream until it ends.
async fn talk(
    link: &Link,
    beats: &mut mpsc::UnboundedReceiver<Beat>,
    first: Beat,
    number: &AtomicU64,
) -> Talk {
    let Ok(wire) = link.wire().await else { return Talk::Over };
    number.store(wire.number, Ordering::Relaxed);
    let mut departures = link.departures();
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    // Answers come in the order of the requests.
    let mut waiting: HashMap<i64, VecDeque<oneshot::Sender<LeaseKeepAliveResponse>>> =
        HashMap::new();
    let ask = |beat: Beat, waiting: &mut HashMap<i64, VecDeque<_>>| {
        waiting.entry(beat.lease).or_default().push_back(beat.answer);
        requests.send(LeaseKeepAliveRequest { id: beat.lease }).is_ok()
    };
    // Before the stream is opened: a member answers to that when it has something to say.
    ask(first, &mut waiting);
    let Ok(mut answers) = link.stream(&wire, KEEP_ALIVE, outgoing).await else {
        link.leave(wire.number, true);
        return Talk::Over;
    };
    loop {
        tokio::select! {
            beat = beats.recv() => {
                let Some(beat) = beat else { return Talk::NobodyLeft };
                if !ask(beat, &mut waiting) {
                    return Talk::Over;
                }
            }
            answer = answers.message() => {
                let Ok(Some(answer)) = answer else {
                    link.leave(wire.number, true);
                    return Talk::Over;
                };
                let answer: LeaseKeepAliveResponse = answer;
                if let Some(line) = waiting.get_mut(&answer.id) {
                    if let Some(first) = line.pop_front() {
                        // Whoever does not wait any more needs no answer.
                        _ = first.send(answer);
                    }
                    if line.is_empty() {
                        waiting.remove(&answer.id);
                    }
                }
            }
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                return Talk::Over;
            }
        }
    }
}
