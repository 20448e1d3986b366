//! Extends leases: queues `LeaseKeepAlive` requests and sends them over a few streams. Each stream
//! returns responses in order. This module does not depend on claims.
//!
//! A follower forwards each request to the leader before it reads the next request of the stream.
//! One stream therefore carries one request per round trip between the members. If the queue stays
//! long, additional streams also take requests from it. The request for the lease that expires
//! first is sent first. The extended lease is counted from the time at which the request is sent,
//! not from the time at which it is queued.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::poll_fn;
use registry_core::{BackendError, Moment};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::Streaming;

use crate::client::{EtcdClient, MemberConnection, Reconnect, RequestLimits};
use crate::lease::EtcdLease;
use crate::proto::{KEEP_ALIVE, LeaseKeepAliveRequest, LeaseKeepAliveResponse};

/// The queue of requests and the tasks that send the requests. Dropping this value ends the tasks.
pub(crate) struct KeepAlive {
    queue: Arc<RequestQueue>,
    /// The task that takes any request.
    first_stream: AbortHandle,
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
        let mut spawn = |stream_index| {
            streams.spawn(run_streams(client.clone(), Arc::clone(&queue), stream_index))
        };
        let first_stream = spawn(0);
        for stream_index in 1..STREAMS_MAX {
            spawn(stream_index);
        }
        Self { queue, first_stream, _streams: streams }
    }

    /// Extends `lease` to its full duration. The extension counts after a [response of a
    /// majority](EtcdLease::record_majority_response).
    ///
    /// If a stream receives nothing for `idle_timeout`, its task drops the stream and puts its
    /// requests back into the queue.
    pub(crate) async fn extend(
        &self,
        lease: &mut EtcdLease,
        limits: RequestLimits,
    ) -> Result<LeaseStatus, BackendError> {
        let receiver = self.queue.push(lease.id, lease.expires_at(), limits.idle_timeout);
        let response = timeout(limits.total, receiver).await;
        let Ok(Ok(response)) = response else {
            return Err(if self.first_stream.is_finished() {
                let message =
                    "etcd: the tokio runtime has shut down; open the registry in another runtime";
                BackendError::transient(message)
            } else {
                BackendError::transient(format!(
                    "etcd: no response to LeaseKeepAlive within {:?}; check the member's load and the network",
                    limits.total
                ))
            });
        };
        let response = response?;
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
    receiver: oneshot::Receiver<Result<TimedResponse, BackendError>>,
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
        let response = self.receiver.try_recv().ok()?.ok()?;
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
    /// The time since which the queue is not empty: set by the first insertion, and cleared when a
    /// stream finds no unsent request or the unsent requests fail.
    backlog_since: Option<Instant>,
    /// The index of the additional stream that was woken last.
    last_woken_stream: usize,
}

struct QueuedRequest {
    expires_at: Moment,
    idle_timeout: Duration,
    waiters: Vec<oneshot::Sender<Result<TimedResponse, BackendError>>>,
}

impl QueuedRequest {
    fn is_awaited(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.is_closed())
    }

    fn complete(self, response: &Result<TimedResponse, BackendError>) {
        for waiter in self.waiters {
            // The send fails if the caller no longer waits.
            _ = waiter.send(response.clone());
        }
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
    ) -> oneshot::Receiver<Result<TimedResponse, BackendError>> {
        let (waiter, receiver) = oneshot::channel();
        let mut requests = self.requests();
        match requests.by_lease.entry(lease) {
            Entry::Occupied(mut request) => {
                let request = request.get_mut();
                if idle_timeout < request.idle_timeout {
                    request.idle_timeout = idle_timeout;
                    // The request may have been sent. The task of its stream must then restart its
                    // timer.
                    self.ready.iter().for_each(Notify::notify_one);
                }
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
            if !requests.by_lease.get(&lease).is_some_and(QueuedRequest::is_awaited) {
                requests.by_lease.remove(&lease);
                continue;
            }
            let additional = requests.additional_streams_needed();
            if additional > 0 {
                requests.last_woken_stream = requests.last_woken_stream % additional + 1;
                self.ready[requests.last_woken_stream].notify_one();
            }
            return Some(SentRequest { lease, sent_at: Moment::now() });
        }
        None
    }

    fn complete(&self, lease: i64, response: TimedResponse) {
        let request = self.requests().by_lease.remove(&lease);
        if let Some(request) = request {
            request.complete(&Ok(response));
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

    /// Fails all unsent requests with `error`, because no member can be reached.
    fn fail_unsent(&self, error: BackendError) {
        let mut requests = self.requests();
        requests.backlog_since = None;
        let unsent = std::mem::take(&mut requests.unsent);
        let by_lease = &mut requests.by_lease;
        let failed: Vec<_> =
            unsent.iter().filter_map(|(_, lease)| by_lease.remove(lease)).collect();
        drop(requests);
        let response = Err(error);
        failed.into_iter().for_each(|request| request.complete(&response));
    }

    /// Returns the shortest idle time-out of these requests, or `None` if all are answered.
    fn idle_timeout(&self, sent: &VecDeque<SentRequest>) -> Option<Duration> {
        let requests = self.requests();
        let sent = sent.iter().filter_map(|sent| requests.by_lease.get(&sent.lease));
        sent.map(|request| request.idle_timeout).min()
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
        self.queue.idle_timeout(&self.sent)
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
            Err(error) => {
                drop(in_flight);
                queue.fail_unsent(error);
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
    // The first request is sent before the stream opens, because a member sends the response
    // headers of a stream only together with its first response.
    if !in_flight.sent.iter().all(|sent| send(*sent)) {
        return false;
    }
    let opened_at = Instant::now();
    let mut opening = pin!(client.open_stream(connection, KEEP_ALIVE, outgoing));
    let opened = loop {
        let idle_timeout = in_flight.idle_timeout().unwrap_or_else(|| client.response_timeout());
        tokio::select! {
            biased;
            opened = &mut opening => break opened.ok(),
            // The idle time-out may have become shorter.
            () = in_flight.queue.ready[stream_index].notified() => {}
            () = sleep_until(opened_at + idle_timeout) => break None,
        }
    };
    let Some(mut responses): Option<Streaming<LeaseKeepAliveResponse>> = opened else {
        client.disconnect(connection.id, Reconnect::NextMember);
        return false;
    };
    let mut has_response = false;
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
            () = in_flight.queue.ready[stream_index].notified() => {}
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
pub(crate) const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The maximum number of streams. Only a follower needs more than one: a leader processes thousands
/// of requests per second on one.
const STREAMS_MAX: usize = 16;
/// How long the queue must stay non-empty before additional streams are used.
const BACKLOG_AGE_MIN: Duration = Duration::from_millis(200);
/// The maximum number of unanswered requests per stream.
const IN_FLIGHT_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use registry_core::BackendErrorKind;

    use super::*;

    const LEASE: i64 = 7;

    #[test]
    fn a_shorter_idle_timeout_also_applies_to_a_sent_request() {
        let queue = RequestQueue::default();
        let _first = queue.push(LEASE, Moment::now(), Duration::from_secs(3));
        let in_flight = InFlight { queue: &queue, sent: queue.pop_next(0).into_iter().collect() };
        assert_eq!(in_flight.idle_timeout(), Some(Duration::from_secs(3)));
        let _joined = queue.push(LEASE, Moment::now(), Duration::from_secs(1));
        assert_eq!(in_flight.idle_timeout(), Some(Duration::from_secs(1)));
        let _joined = queue.push(LEASE, Moment::now(), Duration::from_secs(2));
        assert_eq!(in_flight.idle_timeout(), Some(Duration::from_secs(1)));
    }

    #[test]
    fn callers_receive_the_error_of_the_connection() {
        let queue = RequestQueue::default();
        let mut receivers = [1, 2].map(|lease| queue.push(lease, Moment::now(), Duration::ZERO));
        // A request that was sent over a broken connection returns to the queue.
        drop(InFlight { queue: &queue, sent: queue.pop_next(0).into_iter().collect() });
        queue.fail_unsent(BackendError::new(BackendErrorKind::Denied, "wrong password"));
        for receiver in &mut receivers {
            let error = receiver.try_recv().unwrap().unwrap_err();
            assert_eq!(
                (error.kind(), error.message()),
                (BackendErrorKind::Denied, "wrong password")
            );
        }
        assert_eq!(
            queue.idle_timeout(&VecDeque::from([SentRequest { lease: 1, sent_at: Moment::now() }])),
            None
        );
    }
}
