//! The way to the members: which one is asked, the login, and what happens when it does not answer. Repeats nothing, unless the member
//! said that it did nothing.
//!
//! All go through one connection to one member, which passes on what is for the leader. Whoever finds that it does not answer leaves it, and
//! the next request goes to the next member.

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
    /// Which member is asked next.
    current: AtomicUsize,
    wire: Mutex<Option<Wire>>,
    /// Held while somebody connects, so that others wait for that instead of connecting too. Has why that failed the last time.
    connecting: tokio::sync::Mutex<Option<BackendError>>,
    /// How many have tried to connect in vain.
    in_vain: AtomicU64,
    /// The number of the last connection or login that was left.
    left: watch::Sender<u64>,
    next_number: AtomicU64,
}

/// A connection to a member, with a login.
#[derive(Clone)]
pub(crate) struct Wire {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    pub(crate) number: u64,
    opened: Instant,
    /// When something arrived last, in milliseconds after it was opened.
    heard_ms: Arc<AtomicU64>,
}

/// How long an answer is waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A connection over which nothing at all arrives for this long is given up.
    pub(crate) silence: Duration,
    /// The time until the request fails.
    pub(crate) total: Duration,
}

impl Wire {
    /// Notes that something has arrived.
    pub(crate) fn heard(&self) {
        let ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// Whether something has arrived in the last `span`.
    pub(crate) fn was_heard_within(&self, span: Duration) -> bool {
        self.last_heard().elapsed() < span
    }

    /// When something arrived last.
    pub(crate) fn last_heard(&self) -> Instant {
        self.opened + Duration::from_millis(self.heard_ms.load(Ordering::Relaxed))
    }

    /// Waits for `answer`. `None` when a limit is over before it comes.
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
    /// A way to the members of `config`, which are not asked yet.
    pub(crate) fn new(config: &EtcdConfig) -> Result<Self, BackendError> {
        let members = config.endpoints()?;
        // Not all clients begin with the same member.
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

    /// How long an answer is waited for.
    pub(crate) fn patience(&self) -> Duration {
        self.0.patience
    }

    /// How many members there are.
    pub(crate) fn members(&self) -> usize {
        self.0.members.len()
    }

    /// Asks a member and waits for the answer.
    pub(crate) async fn call<C: Call>(&self, request: C) -> Result<C::Answer, Failure> {
        self.call_within(request, self.0.patience).await
    }

    /// As [`call`](Self::call); a connection over which nothing arrives for `silence` is given up.
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

    /// As [`call`](Self::call), of one member.
    pub(crate) async fn call_at<C: Call>(
        &self,
        member: usize,
        request: C,
    ) -> Result<C::Answer, BackendError> {
        let wire = self.open(member).await?;
        let answer = timeout(self.0.patience, unary(&wire, request)).await;
        answer.map_err(|_| silent())?.map_err(|status| judge(&status).into_error())
    }

    /// Opens a stream of requests, and of answers. A member that has no leader ends it.
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
            // Others have found that it does not answer.
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                Err(Status::unavailable("left"))
            }
        }
    }

    /// The present connection, or a new one: to the present member, or to the first after it that takes it.
    pub(crate) async fn wire(&self) -> Result<Wire, BackendError> {
        if let Some(wire) = &*self.present() {
            return Ok(wire.clone());
        }
        let in_vain = self.0.in_vain.load(Ordering::Acquire);
        let mut connecting = self.0.connecting.lock().await;
        if let Some(wire) = &*self.present() {
            return Ok(wire.clone());
        }
        // Somebody has tried all members meanwhile. If each one did, one after the other, the last would wait for a multiple of the time.
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
                    // What does not pass is the same everywhere, but for a member that is set up differently.
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

    /// Has no more requests go through the connection of this number. With `to_another`, the next member gets them.
    pub(crate) fn leave(&self, number: u64, to_another: bool) {
        let mut present = self.present();
        if present.as_ref().is_some_and(|wire| wire.number == number) {
            *present = None;
            if to_another {
                self.0.current.fetch_add(1, Ordering::Relaxed);
            }
            // Still under the lock: the numbers that are told only grow.
            self.0.left.send_replace(number);
        }
    }

    /// Tells when a connection was left.
    pub(crate) fn departures(&self) -> watch::Receiver<u64> {
        self.0.left.subscribe()
    }

    /// Closes the connection as soon as nobody uses it any more.
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
                // Who logs in where nobody has to is let in.
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

/// Why there is no connection. Nothing was sent.
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

/// Some number below `members`.
fn start(members: usize) -> usize {
    use std::hash::{BuildHasher as _, RandomState};

    let random = RandomState::new().hash_one(());
    usize::try_from(random % u64::try_from(members.max(1)).unwrap_or(1)).unwrap_or(0)
}

/// The longest answer, in bytes: as much as etcd's own client takes.
const ANSWER_MAX: usize = i32::MAX as usize;

// By hand: it holds a login.
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
