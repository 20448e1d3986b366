//! Extends leases: queues `LeaseKeepAlive` requests and sends them over a few streams. Each stream
//! returns responses in order. This module does not depend on claims.
//!
//! A follower forwards each request to the leader before it reads the next request of the stream.
//! One stream therefore carries one request per round trip between the members. Additional streams
//! share a long queue. The request for the lease that expires first is sent first. An extension
//! starts when its request is sent, not when the request is queued.

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

use crate::client::{EtcdClient, MemberConnection, Reconnect, RequestLimits};
use crate::lease::EtcdLease;
use crate::proto::{KEEP_ALIVE, LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The queue of requests and the tasks that send the requests. Dropping this value ends the tasks.
pub(crate) struct KeepAlive {
    queue: Arc<RequestQueue>,
    _streams: JoinSet<()>,
}

/// Whether a lease is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseStatus {
    Alive,
    /// The member does not know the lease. A lagging member may not know a new lease yet.
    NotFound,
}

/// A response, and the time at which its request was sent.
#[derive(Debug, Clone, Copy)]
struct TimedResponse {
    sent_at: Moment,
    /// In seconds. Zero or negative for a lease that the member does not know.
    ttl: i64,
    term: u64,
}

impl KeepAlive {
    pub(crate) fn new(client: EtcdClient) -> Self {
        let queue = Arc::<RequestQueue>::default();
        let mut streams = JoinSet::new();
        for stream_index in 0..STREAMS_MAX {
            streams.spawn(run_streams(client.clone(), Arc::clone(&queue), stream_index));
        }
        Self { queue, _streams: streams }
    }

    /// Extends `lease` to its full duration. The extension counts after a [response of a
    /// majority](EtcdLease::record_majority_response).
    ///
    /// If a stream receives nothing for `idle_timeout`, its task drops the stream and sends the
    /// request again over another stream.
    pub(crate) async fn extend(
        &self,
        lease: &mut EtcdLease,
        limits: RequestLimits,
    ) -> Result<LeaseStatus, BackendError> {
        let receiver = self.queue.push(lease.id, lease.expires_at(), limits.idle_timeout);
        let response = timeout(limits.total, receiver).await;
        let response = response.map_err(|_| {
            BackendError::transient("etcd: no response to LeaseKeepAlive in time; check the member's load and the network")
        })?;
        let response = response.map_err(|_| {
            BackendError::transient(
                "etcd: no connection for LeaseKeepAlive; check that a member runs",
            )
            .as_refused()
        })?;
        let Ok(ttl_seconds @ 1..) = u64::try_from(response.ttl) else {
            return Ok(LeaseStatus::NotFound);
        };
        lease.record_extension(response.sent_at, Duration::from_secs(ttl_seconds), response.term);
        Ok(LeaseStatus::Alive)
    }

    /// Queues a request to extend `lease`. Requests are sent in the order of their `expires_at`.
    /// The caller reads the outcome later.
    pub(crate) fn request_extension(
        &self,
        lease: i64,
        expires_at: Moment,
        idle_timeout: Duration,
    ) -> PendingKeepAlive {
        PendingKeepAlive {
            queued_at: Moment::now(),
            receiver: self.queue.push(lease, expires_at, idle_timeout),
        }
    }
}

/// A request whose outcome is read later.
#[derive(Debug)]
pub(crate) struct PendingKeepAlive {
    pub(crate) queued_at: Moment,
    receiver: oneshot::Receiver<TimedResponse>,
}

/// The outcome of a `LeaseKeepAlive` request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeepAliveOutcome {
    /// A member has extended the lease to its full duration at this time or later. No majority has
    /// confirmed the extension.
    Extended(Moment),
    /// The member does not know the lease.
    LeaseNotFound,
}

impl PendingKeepAlive {
    /// Returns the outcome once. Returns `None` while the request is unanswered, and if it has
    /// failed.
    pub(crate) fn take_outcome(&mut self) -> Option<KeepAliveOutcome> {
        let response = self.receiver.try_recv().ok()?;
        Some(if response.ttl > 0 {
            KeepAliveOutcome::Extended(response.sent_at)
        } else {
            KeepAliveOutcome::LeaseNotFound
        })
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}

/// All unanswered requests, at most one per lease.
struct RequestQueue {
    requests: Mutex<PendingRequests>,
    /// Wakes the task of the stream with this index when a request is ready.
    ready: [Notify; STREAMS_MAX],
}

#[derive(Default)]
struct PendingRequests {
    /// The requests that are not sent, ordered by the end of the lease.
    unsent: BTreeSet<(Moment, i64)>,
    by_lease: HashMap<i64, QueuedRequest>,
    /// The time of the first request that was queued after a stream last found no unsent request.
    /// `None` if none was queued since then.
    backlog_since: Option<Instant>,
    /// The index of the additional stream that was woken last.
    last_woken_stream: usize,
}

struct QueuedRequest {
    expires_at: Moment,
    idle_timeout: Duration,
    waiters: Vec<oneshot::Sender<TimedResponse>>,
}

impl QueuedRequest {
    fn is_awaited(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.is_closed())
    }
}

impl PendingRequests {
    fn insert(&mut self, expires_at: Moment, lease: i64) {
        self.unsent.insert((expires_at, lease));
        self.backlog_since.get_or_insert_with(Instant::now);
    }

    /// Returns how many additional streams are needed. Returns 0 unless the backlog is older than
    /// `BACKLOG_AGE_MIN`.
    fn additional_streams_needed(&self) -> usize {
        let is_slow = self.backlog_since.is_some_and(|since| since.elapsed() > BACKLOG_AGE_MIN);
        if is_slow { (self.unsent.len() / IN_FLIGHT_MAX).min(STREAMS_MAX - 1) } else { 0 }
    }
}

impl Default for RequestQueue {
    fn default() -> Self {
        Self { requests: Mutex::default(), ready: std::array::from_fn(|_| Notify::new()) }
    }
}

impl RequestQueue {
    /// Adds a request, or joins the unanswered request for the same lease.
    fn push(
        &self,
        lease: i64,
        expires_at: Moment,
        idle_timeout: Duration,
    ) -> oneshot::Receiver<TimedResponse> {
        let (waiter, receiver) = oneshot::channel();
        let mut requests = self.requests();
        match requests.by_lease.entry(lease) {
            Entry::Occupied(mut request) => {
                let request = request.get_mut();
                request.idle_timeout = request.idle_timeout.min(idle_timeout);
                request.waiters.retain(|waiter| !waiter.is_closed());
                request.waiters.push(waiter);
            }
            Entry::Vacant(entry) => {
                entry.insert(QueuedRequest { expires_at, idle_timeout, waiters: vec![waiter] });
                requests.insert(expires_at, lease);
                self.ready[0].notify_one();
            }
        }
        receiver
    }

    /// Removes and returns the next request for the stream `stream_index`. Stream 0 takes any
    /// request. An additional stream takes requests only if the queue is too long for the streams
    /// with lower indexes.
    fn pop_next(&self, stream_index: usize) -> Option<SentRequest> {
        let mut requests = self.requests();
        while stream_index == 0 || stream_index <= requests.additional_streams_needed() {
            let Some((_, lease)) = requests.unsent.pop_first() else {
                requests.backlog_since = None;
                break;
            };
            let request = requests.by_lease.get(&lease).filter(|request| request.is_awaited());
            let Some(idle_timeout) = request.map(|request| request.idle_timeout) else {
                requests.by_lease.remove(&lease);
                continue;
            };
            let additional = requests.additional_streams_needed();
            if additional > 0 {
                requests.last_woken_stream = requests.last_woken_stream % additional + 1;
                self.ready[requests.last_woken_stream].notify_one();
            }
            return Some(SentRequest { lease, sent_at: Moment::now(), idle_timeout });
        }
        None
    }

    fn complete(&self, lease: i64, response: TimedResponse) {
        let request = self.requests().by_lease.remove(&lease);
        for waiter in request.into_iter().flat_map(|request| request.waiters) {
            // The send fails if the caller no longer waits.
            _ = waiter.send(response);
        }
    }

    /// Puts the unanswered requests of a stream back into the queue.
    fn requeue(&self, sent: impl IntoIterator<Item = SentRequest>) {
        let mut requests = self.requests();
        for SentRequest { lease, .. } in sent {
            if let Some(expires_at) =
                requests.by_lease.get(&lease).map(|request| request.expires_at)
            {
                requests.insert(expires_at, lease);
            }
        }
        self.ready[0].notify_one();
    }

    /// Fails all unsent requests. Dropping their senders notifies the callers.
    fn fail_unsent(&self) {
        let mut requests = self.requests();
        requests.backlog_since = None;
        for (_, lease) in std::mem::take(&mut requests.unsent) {
            requests.by_lease.remove(&lease);
        }
    }

    fn requests(&self) -> MutexGuard<'_, PendingRequests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that was sent and is unanswered.
#[derive(Debug, Clone, Copy)]
struct SentRequest {
    lease: i64,
    sent_at: Moment,
    idle_timeout: Duration,
}

/// The unanswered requests of one stream, in order. Dropping this value returns the requests to the
/// queue.
struct InFlight<'a> {
    queue: &'a RequestQueue,
    sent: VecDeque<SentRequest>,
}

impl InFlight<'_> {
    fn has_capacity(&self) -> bool {
        self.sent.len() < IN_FLIGHT_MAX
    }

    fn on_response(&mut self, response: LeaseKeepAliveResponse) {
        let Some(at) = self.sent.iter().position(|sent| sent.lease == response.id) else { return };
        if let Some(SentRequest { lease, sent_at, .. }) = self.sent.remove(at) {
            let term = response.header.unwrap_or_default().raft_term;
            self.queue.complete(lease, TimedResponse { sent_at, ttl: response.ttl, term });
        }
    }

    /// Returns how long the stream may receive nothing. Returns `None` if no response is due.
    fn idle_timeout(&self) -> Option<Duration> {
        self.sent.iter().map(|sent| sent.idle_timeout).min()
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.queue.requeue(self.sent.drain(..));
    }
}

/// Sends requests. Opens a new stream when the previous stream ends.
async fn run_streams(client: EtcdClient, queue: Arc<RequestQueue>, stream_index: usize) {
    let mut pause = PAUSE_MIN;
    loop {
        let Some(first_request) = queue.pop_next(stream_index) else {
            queue.ready[stream_index].notified().await;
            continue;
        };
        let mut in_flight = InFlight { queue: &queue, sent: VecDeque::from([first_request]) };
        match client.get_or_connect().await {
            Ok(connection) => {
                if serve_stream(&client, &connection, stream_index, &mut in_flight).await {
                    pause = PAUSE_MIN;
                } else {
                    // A member or a proxy may end each stream immediately. The pause limits the
                    // rate of new connections and logins.
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

/// Serves one stream until it ends. Returns true if the stream received a response, or if another
/// caller dropped the connection after the stream was opened.
async fn serve_stream(
    client: &EtcdClient,
    connection: &MemberConnection,
    stream_index: usize,
    in_flight: &mut InFlight<'_>,
) -> bool {
    let mut disconnects = client.disconnects();
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    let send = |sent: SentRequest| requests.send(LeaseKeepAliveRequest { id: sent.lease }).is_ok();
    // The first requests are sent before the stream opens. A member answers the opening of a stream
    // only with its first response.
    if !in_flight.sent.iter().all(|sent| send(*sent)) {
        return false;
    }
    let idle_timeout = in_flight.idle_timeout().unwrap_or_else(|| client.response_timeout());
    let opened = timeout(idle_timeout, client.open_stream(connection, KEEP_ALIVE, outgoing)).await;
    let Ok(Ok(responses)) = opened else {
        client.disconnect(connection.id, Reconnect::NextMember);
        return false;
    };
    let mut has_response = false;
    let mut responses: Streaming<LeaseKeepAliveResponse> = responses;
    connection.record_receive();
    let mut last_response_at = Instant::now();
    loop {
        while in_flight.has_capacity()
            && let Some(sent) = in_flight.queue.pop_next(stream_index)
        {
            if in_flight.sent.is_empty() {
                // The idle time-out starts with the first unanswered request.
                last_response_at = Instant::now();
            }
            in_flight.sent.push_back(sent);
            if !send(sent) {
                return has_response;
            }
        }
        let idle_timer = async {
            match in_flight.idle_timeout() {
                Some(idle_timeout) => sleep_until(last_response_at + idle_timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            response = responses.message() => {
                let Ok(Some(response)) = response else {
                    client.disconnect(connection.id, Reconnect::NextMember);
                    return has_response;
                };
                has_response = true;
                last_response_at = Instant::now();
                connection.record_receive();
                in_flight.on_response(response);
            }
            () = in_flight.queue.ready[stream_index].notified(), if in_flight.has_capacity() => {}
            disconnected = disconnects.wait_for(|&last| last >= connection.id) => {
                drop(disconnected);
                return true;
            }
            () = idle_timer => {
                // If the connection has received other data, only this stream hangs. The connection
                // is kept.
                if !in_flight
                    .idle_timeout()
                    .is_some_and(|idle_timeout| connection.has_received_within(idle_timeout))
                {
                    client.disconnect(connection.id, Reconnect::NextMember);
                }
                return has_response;
            }
        }
    }
}

/// The limits of the pause after a stream that received no response. The pause doubles after each
/// such stream.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The maximum number of streams. Only a follower needs more than one: a leader processes thousands
/// of requests per second on one.
const STREAMS_MAX: usize = 16;
/// How long the queue must stay non-empty before additional streams are used.
const BACKLOG_AGE_MIN: Duration = Duration::from_millis(200);
/// The maximum number of unanswered requests per stream.
const IN_FLIGHT_MAX: usize = 8;
