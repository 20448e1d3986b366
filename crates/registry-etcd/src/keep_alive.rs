//! Keeps leases alive: queues requests and sends them over a few streams, each of which answers in
//! order. This module handles leases and does not know claims.
//!
//! A follower forwards each request to the leader before it reads the next one of that stream. One
//! stream therefore carries one request per round trip between the members, and a long queue is
//! distributed over further streams. The lease that ends first is sent first. Its time counts from
//! the moment of sending, however long it was queued.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::poll_fn;
use registry_core::{BackendError, Moment};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::Streaming;

use crate::lease::Lease;
use crate::link::{Limits, Link, Wire};
use crate::wire::{KEEP_ALIVE, LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The queue of requests and the tasks that send them. Dropping it ends the tasks.
pub(crate) struct KeepAlive {
    queue: Arc<Queue>,
    _streams: JoinSet<()>,
}

/// Whether a lease is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeptAlive {
    Yes,
    /// The member does not know the lease. A member that lags behind may not know it yet.
    Unknown,
}

/// A response, and the time at which its request was sent.
#[derive(Debug, Clone, Copy)]
struct Answer {
    sent: Moment,
    /// In seconds. Zero or negative for a lease that the member does not know.
    ttl: i64,
    term: u64,
}

impl KeepAlive {
    pub(crate) fn new(link: Link) -> Self {
        let queue = Arc::<Queue>::default();
        let mut streams = JoinSet::new();
        for number in 0..STREAMS_MAX {
            streams.spawn(send_all(link.clone(), Arc::clone(&queue), number));
        }
        Self { queue, _streams: streams }
    }

    /// Extends `lease` to its full duration. The result counts once it is [proven](Lease::prove).
    ///
    /// A stream that is silent for too long is dropped, and the request is sent again over another
    /// one.
    pub(crate) async fn keep_alive(
        &self,
        lease: &mut Lease,
        limits: Limits,
    ) -> Result<KeptAlive, BackendError> {
        let answered = self.queue.push(lease.id, lease.ends(), limits.silence);
        let answer = timeout(limits.total, answered).await;
        let answer = answer
            .map_err(|_| BackendError::transient("etcd: a lease was not kept alive in time"))?;
        let answer = answer.map_err(|_| {
            BackendError::transient("etcd: a lease could not be kept alive").as_refused()
        })?;
        let Ok(seconds @ 1..) = u64::try_from(answer.ttl) else {
            return Ok(KeptAlive::Unknown);
        };
        lease.kept_alive(answer.sent, Duration::from_secs(seconds), answer.term);
        Ok(KeptAlive::Yes)
    }

    /// Requests to extend a lease that would otherwise end at `ends`. The caller reads the outcome
    /// later.
    pub(crate) fn ask(&self, lease: i64, ends: Moment, silence: Duration) -> Asked {
        Asked { at: Moment::now(), answered: self.queue.push(lease, ends, silence) }
    }
}

/// A request whose outcome is read later.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) at: Moment,
    answered: oneshot::Receiver<Answer>,
}

/// The outcome of a `LeaseKeepAlive` request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Outcome {
    /// The lease lasts for its full duration from this moment on, at minimum.
    KeptAlive(Moment),
    /// The member does not know the lease.
    Unknown,
}

impl Asked {
    /// Returns the outcome; `None` while the request is unanswered.
    pub(crate) fn outcome(&mut self) -> Option<Outcome> {
        let answer = self.answered.try_recv().ok()?;
        Some(if answer.ttl > 0 { Outcome::KeptAlive(answer.sent) } else { Outcome::Unknown })
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}

/// All unanswered requests, at most one per lease.
struct Queue {
    requests: Mutex<Requests>,
    /// Notifies the stream of this number that a request is ready.
    ready: [Notify; STREAMS_MAX],
}

#[derive(Default)]
struct Requests {
    /// The requests that are not sent, ordered by the end of the lease.
    unsent: BTreeSet<(Moment, i64)>,
    by_lease: HashMap<i64, Request>,
    /// Since when the queue has never been empty.
    busy_since: Option<Instant>,
    /// The further stream that is notified next.
    turn: usize,
}

struct Request {
    ends: Moment,
    silence: Duration,
    answers: Vec<oneshot::Sender<Answer>>,
}

impl Request {
    fn is_awaited(&self) -> bool {
        self.answers.iter().any(|answer| !answer.is_closed())
    }
}

impl Requests {
    fn insert(&mut self, ends: Moment, lease: i64) {
        self.unsent.insert((ends, lease));
        self.busy_since.get_or_insert_with(Instant::now);
    }

    /// Returns how many further streams are needed: none until the first one has been too slow for
    /// `BUSY`.
    fn further_streams(&self) -> usize {
        let is_slow = self.busy_since.is_some_and(|since| since.elapsed() > BUSY);
        if is_slow { (self.unsent.len() / WINDOW).min(STREAMS_MAX - 1) } else { 0 }
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self { requests: Mutex::default(), ready: std::array::from_fn(|_| Notify::new()) }
    }
}

impl Queue {
    /// Adds a request, or joins the unanswered request for the same lease.
    fn push(&self, lease: i64, ends: Moment, silence: Duration) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        let mut requests = self.requests();
        match requests.by_lease.entry(lease) {
            Entry::Occupied(mut request) => {
                let request = request.get_mut();
                request.silence = request.silence.min(silence);
                request.answers.retain(|answer| !answer.is_closed());
                request.answers.push(answer);
            }
            Entry::Vacant(entry) => {
                entry.insert(Request { ends, silence, answers: vec![answer] });
                requests.insert(ends, lease);
                self.ready[0].notify_one();
            }
        }
        answered
    }

    /// Takes the next request for the stream `number`. The first stream takes any request. A
    /// further stream takes requests only if the queue is too long for the streams before it.
    fn next(&self, number: usize) -> Option<Sent> {
        let mut requests = self.requests();
        while number == 0 || number <= requests.further_streams() {
            let Some((_, lease)) = requests.unsent.pop_first() else {
                requests.busy_since = None;
                break;
            };
            let request = requests.by_lease.get(&lease).filter(|request| request.is_awaited());
            let Some(silence) = request.map(|request| request.silence) else {
                requests.by_lease.remove(&lease);
                continue;
            };
            let further = requests.further_streams();
            if further > 0 {
                requests.turn = requests.turn % further + 1;
                self.ready[requests.turn].notify_one();
            }
            return Some(Sent { lease, at: Moment::now(), silence });
        }
        None
    }

    fn answer(&self, lease: i64, answer: Answer) {
        let request = self.requests().by_lease.remove(&lease);
        for waiting in request.into_iter().flat_map(|request| request.answers) {
            // The caller may no longer wait.
            _ = waiting.send(answer);
        }
    }

    /// Returns unanswered requests of a stream to the queue.
    fn push_back(&self, sent: impl IntoIterator<Item = Sent>) {
        let mut requests = self.requests();
        for Sent { lease, .. } in sent {
            if let Some(ends) = requests.by_lease.get(&lease).map(|request| request.ends) {
                requests.insert(ends, lease);
            }
        }
        self.ready[0].notify_one();
    }

    /// Fails all unsent requests. Dropping their senders notifies the callers.
    fn fail_unsent(&self) {
        let mut requests = self.requests();
        for (_, lease) in std::mem::take(&mut requests.unsent) {
            requests.by_lease.remove(&lease);
        }
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that was sent and is unanswered.
#[derive(Debug, Clone, Copy)]
struct Sent {
    lease: i64,
    at: Moment,
    silence: Duration,
}

/// The unanswered requests of one stream, in order. Dropping it returns them to the queue.
struct InFlight<'a> {
    queue: &'a Queue,
    sent: VecDeque<Sent>,
}

impl InFlight<'_> {
    fn has_room(&self) -> bool {
        self.sent.len() < WINDOW
    }

    fn answered(&mut self, answer: LeaseKeepAliveResponse) {
        let Some(at) = self.sent.iter().position(|sent| sent.lease == answer.id) else { return };
        if let Some(Sent { lease, at: sent, .. }) = self.sent.remove(at) {
            let term = answer.header.unwrap_or_default().raft_term;
            self.queue.answer(lease, Answer { sent, ttl: answer.ttl, term });
        }
    }

    /// Returns how long the stream may be silent; `None` if no response is due.
    fn silence(&self) -> Option<Duration> {
        self.sent.iter().map(|sent| sent.silence).min()
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.queue.push_back(self.sent.drain(..));
    }
}

/// Sends requests, over one stream after the other.
async fn send_all(link: Link, queue: Arc<Queue>, number: usize) {
    let mut pause = PAUSE_MIN;
    loop {
        let Some(first) = queue.next(number) else {
            queue.ready[number].notified().await;
            continue;
        };
        let mut in_flight = InFlight { queue: &queue, sent: VecDeque::from([first]) };
        match link.wire().await {
            Ok(wire) => {
                if stream(&link, &wire, number, &mut in_flight).await {
                    pause = PAUSE_MIN;
                } else {
                    // A member or a proxy may end each stream at once, and each stream costs a
                    // connection and a login.
                    drop(in_flight);
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
            Err(_) => {
                drop(in_flight);
                queue.fail_unsent();
            }
        }
    }
}

/// Serves one stream until it ends. Returns false if no response arrived over it, unless another
/// caller replaced its connection.
async fn stream(link: &Link, wire: &Wire, number: usize, in_flight: &mut InFlight<'_>) -> bool {
    let mut departures = link.departures();
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    let send = |sent: Sent| requests.send(LeaseKeepAliveRequest { id: sent.lease }).is_ok();
    // Sent before the stream opens, because a member answers the opening only with its first
    // response.
    if !in_flight.sent.iter().all(|sent| send(*sent)) {
        return false;
    }
    let silence = in_flight.silence().unwrap_or_else(|| link.patience());
    let opened = timeout(silence, link.stream(wire, KEEP_ALIVE, outgoing)).await;
    let Ok(Ok(answers)) = opened else {
        link.leave(wire.number, true);
        return false;
    };
    let mut has_answered = false;
    let mut answers: Streaming<LeaseKeepAliveResponse> = answers;
    wire.heard();
    let mut heard = Instant::now();
    loop {
        while in_flight.has_room()
            && let Some(sent) = in_flight.queue.next(number)
        {
            if in_flight.sent.is_empty() {
                // No response was due until now.
                heard = Instant::now();
            }
            in_flight.sent.push_back(sent);
            if !send(sent) {
                return has_answered;
            }
        }
        let silent = async {
            match in_flight.silence() {
                Some(silence) => sleep_until(heard + silence).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            answer = answers.message() => {
                let Ok(Some(answer)) = answer else {
                    link.leave(wire.number, true);
                    return has_answered;
                };
                has_answered = true;
                heard = Instant::now();
                wire.heard();
                in_flight.answered(answer);
            }
            () = in_flight.queue.ready[number].notified(), if in_flight.has_room() => {}
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                return true;
            }
            () = silent => {
                // Other traffic with the member succeeds, so only this stream hangs.
                if !in_flight.silence().is_some_and(|silence| wire.was_heard_within(silence)) {
                    link.leave(wire.number, true);
                }
                return has_answered;
            }
        }
    }
}

/// The limits of the pause after a stream without a response. The pause doubles each time.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The maximum number of streams. A leader answers thousands of requests per second on the first
/// one.
const STREAMS_MAX: usize = 16;
/// How long the queue must be continuously non-empty before further streams are opened.
const BUSY: Duration = Duration::from_millis(200);
/// The maximum number of unanswered requests per stream.
const WINDOW: usize = 8;
