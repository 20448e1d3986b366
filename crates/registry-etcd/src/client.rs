//! Connects to the members: selects a member, logs in, and replaces a connection that receives no
//! responses. Retries a request only after an expired login, because the member then executed
//! nothing.
//!
//! All requests except those of `call_member` share one connection. Its member forwards them to the
//! leader. A caller that receives no response in time drops the connection. The next request uses
//! the next member.

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

use crate::config::{Credentials, EtcdConfig};
use crate::error::{CallError, TLS_ALERT, certificate_rejected, classify, protocol_error};
use crate::proto::{AuthenticateRequest, UnaryCall};
use crate::unary::UnaryChannel;

#[derive(Clone)]
pub(crate) struct EtcdClient(Arc<ClientState>);

struct ClientState {
    members: Vec<Endpoint>,
    credentials: Option<Credentials>,
    connect_timeout: Duration,
    response_timeout: Duration,
    /// The member for the next connection.
    next_member: AtomicUsize,
    connection: Mutex<Option<MemberConnection>>,
    /// The error of the last failed round. Locked while a caller connects, so that other callers
    /// wait for the same connection.
    last_connect_error: tokio::sync::Mutex<Option<BackendError>>,
    /// The number of failed rounds. In a failed round, a caller tried the members and opened no
    /// connection.
    failed_rounds: AtomicU64,
    /// The id of the last dropped connection. A connection is dropped after a fault, for a new
    /// login, or by [`EtcdClient::close`].
    last_disconnected: watch::Sender<u64>,
    next_connection_id: AtomicU64,
}

/// A connection to a member, with its login.
#[derive(Clone)]
pub(crate) struct MemberConnection {
    channel: Channel,
    /// `HOST:PORT` of the member, for messages.
    address: Arc<str>,
    auth_token: Option<MetadataValue<Ascii>>,
    pub(crate) id: u64,
    opened_at: Instant,
    /// The time at which data last arrived, in milliseconds after `opened_at`.
    last_received_ms: Arc<AtomicU64>,
}

/// The member for the connection that replaces a dropped one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reconnect {
    SameMember,
    NextMember,
}

/// The time limits of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLimits {
    /// A connection that receives nothing for this time is dropped.
    pub(crate) idle_timeout: Duration,
    /// The request fails after this time.
    pub(crate) total: Duration,
}

impl MemberConnection {
    /// Records that data has arrived.
    pub(crate) fn record_receive(&self) {
        let ms = u64::try_from(self.opened_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_received_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// Returns whether data has arrived in the last `span`.
    pub(crate) fn has_received_within(&self, span: Duration) -> bool {
        self.last_received().elapsed() < span
    }

    /// Returns when data last arrived.
    pub(crate) fn last_received(&self) -> Instant {
        self.opened_at + Duration::from_millis(self.last_received_ms.load(Ordering::Relaxed))
    }

    /// Waits for `response`. If no response arrives in time, returns the exceeded limit as the
    /// error.
    async fn await_response<T>(
        &self,
        response: impl Future<Output = T>,
        limits: RequestLimits,
    ) -> Result<T, Duration> {
        let started = Instant::now();
        let mut response = pin!(response);
        loop {
            let silent_since = self.last_received().max(started);
            let deadline = (silent_since + limits.idle_timeout).min(started + limits.total);
            if let Ok(response) = timeout_at(deadline, &mut response).await {
                return Ok(response);
            }
            if deadline == started + limits.total {
                return Err(limits.total);
            }
            if self.last_received() <= silent_since {
                return Err(limits.idle_timeout);
            }
        }
    }
}

impl EtcdClient {
    /// Creates a client of the members of `config`, without connecting.
    pub(crate) fn new(config: &EtcdConfig) -> Result<Self, BackendError> {
        let members = config.endpoints()?;
        // Clients start at different members to distribute their load.
        let next_member = random_member(members.len());
        Ok(Self(Arc::new(ClientState {
            members,
            credentials: config.credentials.clone(),
            connect_timeout: config.connect_timeout,
            response_timeout: config.response_timeout,
            next_member: next_member.into(),
            connection: Mutex::default(),
            last_connect_error: tokio::sync::Mutex::default(),
            failed_rounds: 0.into(),
            last_disconnected: watch::Sender::default(),
            next_connection_id: 1.into(),
        })))
    }

    /// Returns the default time limit of a request.
    pub(crate) fn response_timeout(&self) -> Duration {
        self.0.response_timeout
    }

    /// Returns `HOST:PORT,HOST:PORT` of the configured members.
    pub(crate) fn addresses(&self) -> String {
        self.0.members.iter().map(address).collect::<Vec<_>>().join(",")
    }

    /// Returns the number of configured members.
    pub(crate) fn member_count(&self) -> usize {
        self.0.members.len()
    }

    /// Sends a request to the current member and waits for the response.
    pub(crate) async fn call<C: UnaryCall>(&self, request: C) -> Result<C::Response, CallError> {
        self.call_within(request, self.0.response_timeout).await
    }

    /// Like [`call`](Self::call), but the request also fails, and the connection is dropped, if the
    /// connection receives nothing for `idle_timeout`.
    pub(crate) async fn call_within<C: UnaryCall>(
        &self,
        request: C,
        idle_timeout: Duration,
    ) -> Result<C::Response, CallError> {
        let limits = RequestLimits { idle_timeout, total: self.0.response_timeout };
        let mut has_new_login = false;
        loop {
            let connection = self.get_or_connect().await.map_err(CallError::Other)?;
            let failure = match connection
                .await_response(unary(&connection, request.clone()), limits)
                .await
            {
                Ok(Ok(response)) => {
                    connection.record_receive();
                    return Ok(response);
                }
                Ok(Err(status)) => classify(&status),
                Err(limit) => CallError::MemberFailed(response_timed_out(limit)),
            };
            match failure.with_address(&connection.address) {
                CallError::Unauthenticated if !has_new_login && self.0.credentials.is_some() => {
                    has_new_login = true;
                    self.disconnect(connection.id, Reconnect::SameMember);
                }
                CallError::MemberFailed(error) => {
                    self.disconnect(connection.id, Reconnect::NextMember);
                    return Err(CallError::MemberFailed(error));
                }
                failure => return Err(failure),
            }
        }
    }

    /// Sends a request to the given member over a new connection.
    pub(crate) async fn call_member<C: UnaryCall>(
        &self,
        member: usize,
        request: C,
    ) -> Result<C::Response, BackendError> {
        let connection = self.connect(member).await?;
        let limit = self.0.response_timeout;
        let response = match timeout(limit, unary(&connection, request)).await {
            Ok(response) => response.map_err(|status| classify(&status).into_error()),
            Err(_) => Err(response_timed_out(limit)),
        };
        response.map_err(|error| error.with_address(connection.address))
    }

    /// Opens a bidirectional stream. A member ends the stream if it has no leader.
    pub(crate) async fn open_stream<Req, Resp>(
        &self,
        connection: &MemberConnection,
        path: &'static str,
        requests: impl Stream<Item = Req> + Send + 'static,
    ) -> Result<Streaming<Resp>, Status>
    where
        Req: prost::Message + 'static,
        Resp: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(connection.channel.clone());
        let opened = async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let mut request = Request::new(requests);
            request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
            add_auth_token(&mut request, connection);
            let codec = ProstCodec::<Req, Resp>::default();
            grpc.streaming(request, PathAndQuery::from_static(path), codec).await
        };
        let mut disconnects = self.disconnects();
        tokio::select! {
            stream = timeout(self.0.response_timeout, opened) => {
                Ok(stream.map_err(|_| Status::unavailable("no response in time"))??.into_inner())
            }
            // Another caller has dropped this connection.
            disconnected = disconnects.wait_for(|&last| last >= connection.id) => {
                drop(disconnected);
                Err(Status::unavailable("connection dropped"))
            }
        }
    }

    /// Returns the current connection or opens a new one. Tries the members in order, beginning
    /// with `next_member`.
    pub(crate) async fn get_or_connect(&self) -> Result<MemberConnection, BackendError> {
        if let Some(connection) = &*self.current_connection() {
            return Ok(connection.clone());
        }
        let failed_rounds = self.0.failed_rounds.load(Ordering::Acquire);
        let mut last_connect_error = self.0.last_connect_error.lock().await;
        if let Some(connection) = &*self.current_connection() {
            return Ok(connection.clone());
        }
        // Another caller's round has failed while this caller waited. This caller returns the same
        // error. If each queued caller made its own round, the last one would wait for a multiple
        // of the time limit.
        if let Some(error) = &*last_connect_error
            && self.0.failed_rounds.load(Ordering::Acquire) != failed_rounds
        {
            return Err(error.clone());
        }
        let mut round_error: Option<BackendError> = None;
        let first_member = self.0.next_member.load(Ordering::Relaxed);
        for offset in 0..self.member_count() {
            let member = (first_member + offset) % self.member_count();
            match self.connect(member).await {
                Ok(connection) => {
                    self.0.next_member.store(member, Ordering::Relaxed);
                    *self.current_connection() = Some(connection.clone());
                    return Ok(connection);
                }
                Err(error) => {
                    // Every member of a cluster rejects the same login or client certificate, so
                    // further members are not tried.
                    let is_denied = error.kind() == BackendErrorKind::Denied;
                    // If a member is only unreachable for now, callers must repeat their requests,
                    // whatever the error of another member.
                    if round_error.as_ref().is_none_or(|earlier| !earlier.is_retryable()) {
                        round_error = Some(error);
                    }
                    if is_denied {
                        break;
                    }
                }
            }
        }
        let error = round_error.unwrap_or_else(protocol_error);
        *last_connect_error = Some(error.clone());
        self.0.failed_rounds.fetch_add(1, Ordering::Release);
        Err(error)
    }

    /// Drops the current connection if it has this id.
    pub(crate) fn disconnect(&self, id: u64, reconnect: Reconnect) {
        let mut current_connection = self.current_connection();
        if current_connection.as_ref().is_some_and(|connection| connection.id == id) {
            *current_connection = None;
            if reconnect == Reconnect::NextMember {
                self.0.next_member.fetch_add(1, Ordering::Relaxed);
            }
            // The mutex is still locked, so the ids are sent in ascending order.
            self.0.last_disconnected.send_replace(id);
        }
    }

    /// Returns a receiver of the id of the last dropped connection.
    pub(crate) fn disconnects(&self) -> watch::Receiver<u64> {
        self.0.last_disconnected.subscribe()
    }

    /// Drops the connection. It closes once its last request has finished.
    pub(crate) fn close(&self) {
        let id = self.current_connection().as_ref().map(|connection| connection.id);
        if let Some(id) = id {
            self.disconnect(id, Reconnect::SameMember);
        }
    }

    async fn connect(&self, member: usize) -> Result<MemberConnection, BackendError> {
        let endpoint = &self.0.members[member % self.member_count()];
        let connected = self.connect_to(endpoint).await;
        connected.map_err(|error| error.with_address(address(endpoint)))
    }

    async fn connect_to(&self, endpoint: &Endpoint) -> Result<MemberConnection, BackendError> {
        let channel = timeout(self.0.connect_timeout, endpoint.connect()).await;
        let channel = channel
            .map_err(|_| {
                BackendError::transient(format!(
                    "etcd: no connection within {:?}; check that the member runs at this address",
                    self.0.connect_timeout
                ))
                .as_refused()
            })?
            .map_err(|error| connect_error(&error))?;
        let id = self.0.next_connection_id.fetch_add(1, Ordering::Relaxed);
        let (opened_at, last_received_ms) = (Instant::now(), Arc::default());
        let address = address(endpoint).into();
        let mut connection = MemberConnection {
            channel,
            address,
            auth_token: None,
            id,
            opened_at,
            last_received_ms,
        };
        if let Some(Credentials { user, password }) = &self.0.credentials {
            let request = AuthenticateRequest { name: user.clone(), password: password.clone() };
            let limit = self.0.response_timeout;
            let response = timeout(limit, unary(&connection, request)).await;
            connection.auth_token = match response
                .map_err(|_| response_timed_out(limit).as_refused())?
            {
                Ok(response) => {
                    let mut token: MetadataValue<Ascii> =
                        response.token.parse().map_err(|_| protocol_error().as_refused())?;
                    token.set_sensitive(true);
                    Some(token)
                }
                // The cluster does not require a login.
                Err(status) if status.message().contains("authentication is not enabled") => None,
                Err(status) => return Err(classify(&status).into_error().as_refused()),
            };
        }
        Ok(connection)
    }

    fn current_connection(&self) -> MutexGuard<'_, Option<MemberConnection>> {
        self.0.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn unary<C: UnaryCall>(
    connection: &MemberConnection,
    message: C,
) -> Result<C::Response, Status> {
    let channel = UnaryChannel(connection.channel.clone());
    let mut grpc = Grpc::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut request = Request::new(message);
    add_auth_token(&mut request, connection);
    let codec = ProstCodec::<C, C::Response>::default();
    let response = grpc.unary(request, PathAndQuery::from_static(C::PATH), codec).await?;
    Ok(response.into_inner())
}

fn add_auth_token<T>(request: &mut Request<T>, connection: &MemberConnection) {
    if let Some(token) = &connection.auth_token {
        request.metadata_mut().insert("token", token.clone());
    }
}

fn response_timed_out(limit: Duration) -> BackendError {
    BackendError::transient(format!(
        "etcd: no response from the member within {limit:?}; check its load and the network"
    ))
}

/// Returns `HOST:PORT` of a member.
fn address(endpoint: &Endpoint) -> &str {
    endpoint.uri().authority().map_or("", |authority| authority.as_str())
}

/// Classifies a failure to connect. No request was sent.
fn connect_error(error: &tonic::transport::Error) -> BackendError {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let mut causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.dedup();
    let message = causes.join(": ");
    let (kind, text) = if message.contains("invalid peer certificate") {
        (
            BackendErrorKind::Misconfigured,
            "the member's certificate is not trusted; configure the certificate authority that signed it",
        )
    } else if message.contains(TLS_ALERT) {
        return certificate_rejected(message);
    } else if message.contains("corrupt message") {
        (BackendErrorKind::Misconfigured, "the member does not use TLS; use etcd:// or enable TLS")
    } else {
        (BackendErrorKind::Transient, "no connection; check that the member runs at this address")
    };
    BackendError::new(kind, format!("etcd: {text}"))
        .with_source(ConnectErrorText(message))
        .as_refused()
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ConnectErrorText(String);

/// Returns the index of a random member.
fn random_member(member_count: usize) -> usize {
    use std::hash::{BuildHasher as _, RandomState};

    let random = RandomState::new().hash_one(());
    usize::try_from(random % u64::try_from(member_count.max(1)).unwrap_or(1)).unwrap_or(0)
}

/// The maximum size of a response in bytes, the same as in etcd's own client.
const RESPONSE_BYTES_MAX: usize = i32::MAX as usize;

// Written manually, because the fields include a login.
impl fmt::Debug for EtcdClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdClient").field("members", &self.member_count()).finish_non_exhaustive()
    }
}

impl fmt::Debug for MemberConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberConnection").field("id", &self.id).finish_non_exhaustive()
    }
}
