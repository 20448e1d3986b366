//! Connects to the members: selects a member, logs in, and replaces a connection that does not
//! answer. Retries a request only if the member reported that it did nothing.
//!
//! All requests share one connection to one member, which forwards requests to the leader. A caller
//! that finds the member silent drops the connection, and the next request uses the next member.

use std::error::Error as _;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use registry_core::{BackendError, BackendErrorKind};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::config::{EtcdConfig, Login};
use crate::error::{ALERT, Failure, judge, unreadable, untaken};
use crate::single::Single;
use crate::wire::{AuthenticateRequest, Call};

#[derive(Clone)]
pub(crate) struct Link(Arc<Inner>);

struct Inner {
    members: Vec<Endpoint>,
    login: Option<Login>,
    connect_timeout: Duration,
    patience: Duration,
    /// The member for the next connection.
    current: AtomicUsize,
    wire: Mutex<Option<Wire>>,
    /// Held while a caller connects, so that other callers wait for the same connection. Contains
    /// the last error.
    connecting: tokio::sync::Mutex<Option<BackendError>>,
    /// The number of failed attempts to connect.
    in_vain: AtomicU64,
    /// The number of the last connection or login that was dropped.
    left: watch::Sender<u64>,
    next_number: AtomicU64,
}

/// A connection to a member, with its login.
#[derive(Clone)]
pub(crate) struct Wire {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    pub(crate) number: u64,
    opened: Instant,
    /// When data last arrived, in milliseconds after `opened`.
    heard_ms: Arc<AtomicU64>,
}

/// The time limits of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A connection is dropped if nothing arrives over it for this long.
    pub(crate) silence: Duration,
    /// The request fails after this time.
    pub(crate) total: Duration,
}

impl Wire {
    /// Records that data has arrived.
    pub(crate) fn heard(&self) {
        let ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// Returns whether data has arrived in the last `span`.
    pub(crate) fn was_heard_within(&self, span: Duration) -> bool {
        self.last_heard().elapsed() < span
    }

    /// Returns when data last arrived.
    pub(crate) fn last_heard(&self) -> Instant {
        self.opened + Duration::from_millis(self.heard_ms.load(Ordering::Relaxed))
    }

    /// Waits for `answer`. Returns `None` if a limit is reached first.
    async fn answer<T>(&self, answer: impl Future<Output = T>, limits: Limits) -> Option<T> {
        let begun = Instant::now();
        let mut answer = pin!(answer);
        loop {
            let silent_since = self.last_heard().max(begun);
            let limit = (silent_since + limits.silence).min(begun + limits.total);
            if let Ok(answer) = timeout_at(limit, &mut answer).await {
                return Some(answer);
            }
            if limit == begun + limits.total || self.last_heard() <= silent_since {
                return None;
            }
        }
    }
}

impl Link {
    /// Creates a link to the members of `config`, without connecting.
    pub(crate) fn new(config: &EtcdConfig) -> Result<Self, BackendError> {
        let members = config.endpoints()?;
        // Clients start at different members to distribute their load.
        let current = start(members.len());
        Ok(Self(Arc::new(Inner {
            members,
            login: config.login.clone(),
            connect_timeout: config.connect_timeout,
            patience: config.response_timeout,
            current: current.into(),
            wire: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            in_vain: 0.into(),
            left: watch::Sender::default(),
            next_number: 1.into(),
        })))
    }

    /// Returns the default time limit of a request.
    pub(crate) fn patience(&self) -> Duration {
        self.0.patience
    }

    /// Returns the number of configured members.
    pub(crate) fn members(&self) -> usize {
        self.0.members.len()
    }

    /// Sends a request to the current member and waits for the response.
    pub(crate) async fn call<C: Call>(&self, request: C) -> Result<C::Answer, Failure> {
        self.call_within(request, self.0.patience).await
    }

    /// Like [`call`](Self::call), but drops a connection over which nothing arrives for `silence`.
    pub(crate) async fn call_within<C: Call>(
        &self,
        request: C,
        silence: Duration,
    ) -> Result<C::Answer, Failure> {
        let limits = Limits { silence, total: self.0.patience };
        let mut has_new_login = false;
        loop {
            let wire = self.wire().await.map_err(Failure::Trouble)?;
            let failure = match wire.answer(unary(&wire, request.clone()), limits).await {
                Some(Ok(answer)) => {
                    wire.heard();
                    return Ok(answer);
                }
                Some(Err(status)) => judge(&status),
                None => Failure::Elsewhere(silent()),
            };
            match failure {
                Failure::Login if !has_new_login && self.0.login.is_some() => {
                    has_new_login = true;
                    self.leave(wire.number, false);
                }
                Failure::Elsewhere(error) => {
                    self.leave(wire.number, true);
                    return Err(Failure::Elsewhere(error));
                }
                failure => return Err(failure),
            }
        }
    }

    /// Sends a request to the given member over a new connection.
    pub(crate) async fn call_at<C: Call>(
        &self,
        member: usize,
        request: C,
    ) -> Result<C::Answer, BackendError> {
        let wire = self.open(member).await?;
        let answer = timeout(self.0.patience, unary(&wire, request)).await;
        answer.map_err(|_| silent())?.map_err(|status| judge(&status).into_error())
    }

    /// Opens a bidirectional stream. A member without a leader ends it.
    pub(crate) async fn stream<Q, A>(
        &self,
        wire: &Wire,
        path: &'static str,
        requests: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(wire.channel.clone());
        let opened = async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let mut request = Request::new(requests);
            request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
            log_in(&mut request, wire);
            let codec = ProstCodec::<Q, A>::default();
            grpc.streaming(request, PathAndQuery::from_static(path), codec).await
        };
        let mut departures = self.departures();
        tokio::select! {
            stream = timeout(self.0.patience, opened) => {
                Ok(stream.map_err(|_| Status::unavailable("silent"))??.into_inner())
            }
            // Another caller has found that the member does not answer.
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                Err(Status::unavailable("left"))
            }
        }
    }

    /// Returns the current connection or opens a new one. Tries the members in order, beginning
    /// with the current one.
    pub(crate) async fn wire(&self) -> Result<Wire, BackendError> {
        if let Some(wire) = &*self.present() {
            return Ok(wire.clone());
        }
        let in_vain = self.0.in_vain.load(Ordering::Acquire);
        let mut connecting = self.0.connecting.lock().await;
        if let Some(wire) = &*self.present() {
            return Ok(wire.clone());
        }
        // Another caller has tried all members meanwhile. If every queued caller tried them in
        // turn, the last one would wait for a multiple of the time limit.
        if let Some(error) = &*connecting
            && self.0.in_vain.load(Ordering::Acquire) != in_vain
        {
            return Err(error.clone());
        }
        let (mut failed, first) = (None, self.0.current.load(Ordering::Relaxed));
        for step in 0..self.members() {
            let member = (first + step) % self.members();
            match self.open(member).await {
                Ok(wire) => {
                    self.0.current.store(member, Ordering::Relaxed);
                    *self.present() = Some(wire.clone());
                    return Ok(wire);
                }
                Err(error) => {
                    // A permanent refusal is the same at every member, unless one is configured
                    // differently.
                    let is_over = error.kind() == BackendErrorKind::Denied;
                    failed = Some(error);
                    if is_over {
                        break;
                    }
                }
            }
        }
        let error = failed.unwrap_or_else(unreadable);
        *connecting = Some(error.clone());
        self.0.in_vain.fetch_add(1, Ordering::Release);
        Err(error)
    }

    /// Stops using the connection of this number. With `to_another`, the next connection goes to
    /// the next member.
    pub(crate) fn leave(&self, number: u64, to_another: bool) {
        let mut present = self.present();
        if present.as_ref().is_some_and(|wire| wire.number == number) {
            *present = None;
            if to_another {
                self.0.current.fetch_add(1, Ordering::Relaxed);
            }
            // Sent under the lock, so that the numbers only grow.
            self.0.left.send_replace(number);
        }
    }

    /// Returns a receiver of the number of the last dropped connection.
    pub(crate) fn departures(&self) -> watch::Receiver<u64> {
        self.0.left.subscribe()
    }

    /// Drops the connection. It closes once its last request has finished.
    pub(crate) fn close(&self) {
        let number = self.present().as_ref().map(|wire| wire.number);
        if let Some(number) = number {
            self.leave(number, false);
        }
    }

    async fn open(&self, member: usize) -> Result<Wire, BackendError> {
        let endpoint = &self.0.members[member % self.members()];
        let channel = timeout(self.0.connect_timeout, endpoint.connect()).await;
        let channel = channel
            .map_err(|_| {
                BackendError::transient("etcd: the member did not let us connect in time")
                    .as_refused()
            })?
            .map_err(|error| unconnected(&error))?;
        let number = self.0.next_number.fetch_add(1, Ordering::Relaxed);
        let (opened, heard_ms) = (Instant::now(), Arc::default());
        let mut wire = Wire { channel, token: None, number, opened, heard_ms };
        if let Some(Login { user, password }) = &self.0.login {
            let request = AuthenticateRequest { name: user.clone(), password: password.clone() };
            let answer = timeout(self.0.patience, unary(&wire, request)).await;
            wire.token = match answer.map_err(|_| silent().as_refused())? {
                Ok(answer) => {
                    let mut token: MetadataValue<Ascii> =
                        answer.token.parse().map_err(|_| unreadable())?;
                    token.set_sensitive(true);
                    Some(token)
                }
                // The cluster does not require a login.
                Err(status) if status.message().contains("authentication is not enabled") => None,
                Err(status) => return Err(judge(&status).into_error().as_refused()),
            };
        }
        Ok(wire)
    }

    fn present(&self) -> MutexGuard<'_, Option<Wire>> {
        self.0.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn unary<C: Call>(wire: &Wire, message: C) -> Result<C::Answer, Status> {
    let channel = Single(wire.channel.clone());
    let mut grpc = Grpc::new(channel).max_decoding_message_size(ANSWER_MAX);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut request = Request::new(message);
    log_in(&mut request, wire);
    let codec = ProstCodec::<C, C::Answer>::default();
    let answer = grpc.unary(request, PathAndQuery::from_static(C::PATH), codec).await?;
    Ok(answer.into_inner())
}

fn log_in<T>(request: &mut Request<T>, wire: &Wire) {
    if let Some(token) = &wire.token {
        request.metadata_mut().insert("token", token.clone());
    }
}

fn silent() -> BackendError {
    BackendError::transient("etcd: the member did not answer in time")
}

/// Classifies a failure to connect. No request was sent.
fn unconnected(error: &tonic::transport::Error) -> BackendError {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let mut causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.dedup();
    let said = causes.join(": ");
    let (kind, says) = if said.contains("invalid peer certificate") {
        (
            BackendErrorKind::Misconfigured,
            "the member's certificate is not trusted; the authority that signed it can be given",
        )
    } else if said.contains(ALERT) {
        return untaken(said);
    } else if said.contains("corrupt message") {
        (BackendErrorKind::Misconfigured, "the member does not encrypt its connections")
    } else {
        (BackendErrorKind::Transient, "no member can be reached")
    };
    BackendError::new(kind, format!("etcd: {says}")).with_source(Unconnected(said)).as_refused()
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unconnected(String);

/// Returns a random number below `members`.
fn start(members: usize) -> usize {
    use std::hash::{BuildHasher as _, RandomState};

    let random = RandomState::new().hash_one(());
    usize::try_from(random % u64::try_from(members.max(1)).unwrap_or(1)).unwrap_or(0)
}

/// The maximum size of a response in bytes, the same as in etcd's own client.
const ANSWER_MAX: usize = i32::MAX as usize;

// Written manually, because the fields include a login.
impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("members", &self.members()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("number", &self.number).finish_non_exhaustive()
    }
}
