//! The requests that `lockreg serve` answers.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::header::{self, HeaderName};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::stream;
use lock_registry::observe::MetricsObserver;
use lock_registry::{Key, LockError};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::history::ObservedHold;
use super::metrics;
use super::monitor::Monitor;
use crate::exit::error_chain;
use crate::inspect::ShowView;
use crate::output::{HolderView, Output, WaiterView, printable};

/// The state that all request handlers share.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) monitor: Monitor,
    /// Derives the label `name` of metrics from a key.
    pub(crate) names: MetricsObserver,
    /// The token that a client must send to release a lock. `None`: this server releases no locks.
    pub(crate) break_token: Option<BreakToken>,
    /// The names that the header `Host` may contain, in addition to IP addresses and `localhost`.
    /// `None`: the header is not checked.
    pub(crate) allowed_hosts: Option<Vec<String>>,
    /// `/healthz` fails if the last snapshot is older, or if the last attempt failed.
    pub(crate) age_limit: Duration,
    pub(crate) output: Output,
}

/// The SHA-256 hash of the token. The duration of a comparison of hashes reveals nothing about the
/// token.
#[derive(Debug)]
pub(crate) struct BreakToken([u8; 32]);

impl BreakToken {
    pub(crate) fn new(token: &str) -> Self {
        Self(Sha256::digest(token).into())
    }

    fn is_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = given.and_then(|value| value.split_once(' '));
        token.is_some_and(|(scheme, token)| {
            let hash: [u8; 32] = Sha256::digest(token.trim()).into();
            scheme.eq_ignore_ascii_case("bearer") && hash == self.0
        })
    }
}

const PAGE_TEMPLATE: &str = include_str!("page.html");
const PAGE_STYLE: &str = include_str!("page.css");
const PAGE_SCRIPT: &str = include_str!("page.js");

/// The maximum number of open event streams. It is less than the maximum number of connections, so
/// that other requests are still answered.
const EVENT_STREAMS_MAX: usize = 400;

pub(crate) fn router(server: Arc<Server>) -> Router {
    let store = server.monitor.registry().capabilities().store;
    let page = page(store, server.break_token.is_some());
    let policy = HeaderValue::try_from(page.policy).expect("the policy is ASCII text");
    let body = Bytes::from(page.html);
    Router::new()
        .route(
            "/",
            get(
                move || async move { ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], body) },
            ),
        )
        .route("/events", get(events))
        .route("/api/locks", get(locks).delete(break_lock_in_query))
        .route("/api/locks/{*key}", get(lock_in_path).delete(break_lock_in_path))
        .route("/api/waits", get(waits))
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(health))
        .fallback(async || {
            Failure::new(StatusCode::NOT_FOUND, "this server has no such path; the page is at /")
        })
        .layer(from_fn_with_state((Arc::clone(&server), policy), apply_security_policy))
        .with_state(server)
}

struct Page {
    html: String,
    policy: String,
}

/// Inserts the style and the script into the page. The policy names their hashes, so a browser runs
/// no other script, whatever text the page shows.
fn page(store: &str, may_break: bool) -> Page {
    let hash = |text: &str| BASE64.encode(Sha256::digest(text));
    let html = PAGE_TEMPLATE
        .replace("{{style}}", PAGE_STYLE)
        .replace("{{script}}", PAGE_SCRIPT)
        .replace("{{store}}", store)
        .replace("{{may-break}}", if may_break { "yes" } else { "no" });
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(PAGE_STYLE),
        hash(PAGE_SCRIPT),
    );
    Page { html, policy }
}

/// Refuses requests whose header `Host` is not a name of this server, and adds the headers that
/// restrict browsers.
///
/// An attacker can make the name of a site resolve to a loopback address (DNS rebinding). Without
/// the refusal, a page of that site could read all locks.
async fn apply_security_policy(
    State((server, policy)): State<(Arc<Server>, HeaderValue)>,
    request: Request,
    next: Next,
) -> Response {
    let host = host_of(&request);
    let mut response = if server.accepts_host(host.as_deref()) {
        next.run(request).await
    } else {
        let error = format!(
            "this server does not answer requests for the host {}; allow this name with --allow-host",
            printable(&host.unwrap_or_default())
        );
        Failure::new(StatusCode::MISDIRECTED_REQUEST, error).into_response()
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn host_of(request: &Request) -> Option<String> {
    let given = request.headers().get(header::HOST)?.to_str().ok()?;
    let authority: Authority = given.parse().ok()?;
    Some(authority.host().trim_matches(['[', ']']).to_ascii_lowercase())
}

impl Server {
    fn accepts_host(&self, host: Option<&str>) -> bool {
        let Some(allowed) = &self.allowed_hosts else { return true };
        // DNS rebinding needs a name. If the header contains an IP address, the same-origin policy
        // of the browser keeps pages of other sites from reading the answer.
        host.is_some_and(|host| {
            host.parse::<IpAddr>().is_ok()
                || host == "localhost"
                || allowed.iter().any(|name| name.eq_ignore_ascii_case(host))
        })
    }
}

fn json(body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}

fn json_of(value: &impl Serialize) -> Response {
    json(serde_json::to_vec(value).unwrap_or_default())
}

/// An error response: its status, and the text of its JSON field `error`.
struct Failure(StatusCode, String);

impl Failure {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self(status, error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = json_of(&json!({ "error": self.1 }));
        *response.status_mut() = self.0;
        if self.0 == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// The answer of `/api/locks`.
#[derive(Serialize)]
struct Listing<'a> {
    store: &'static str,
    taken_at_ms: u64,
    /// The error of the last attempt to take a snapshot, if it failed.
    error: Option<&'a str>,
    /// Whether this store lists waiters.
    lists_waiters: bool,
    holders: Vec<HolderView<'a>>,
    waiters: Vec<WaiterView<'a>>,
}

async fn locks(
    State(server): State<Arc<Server>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    if let Some(key) = key_in(query.as_deref())? {
        return Ok(lock_response(&server, &key));
    }
    let published = server.monitor.published();
    let capabilities = server.monitor.registry().capabilities();
    let listing = published.listing.get_or_init(|| {
        let listing = Listing {
            store: capabilities.store,
            taken_at_ms: published.taken_at_ms,
            error: published.error.as_deref(),
            lists_waiters: capabilities.waiters,
            holders: published.snapshot.holders.iter().map(HolderView::from).collect(),
            waiters: published.snapshot.waiters.iter().map(WaiterView::from).collect(),
        };
        serde_json::to_vec(&listing).unwrap_or_default().into()
    });
    Ok(json(listing.clone()))
}

/// The answer of `/api/locks/KEY`: the lock as `lockreg --json show KEY` prints it, and the history
/// of its holds.
#[derive(Serialize)]
struct LockDetails<'a> {
    taken_at_ms: u64,
    error: Option<&'a str>,
    #[serde(flatten)]
    lock: ShowView<'a>,
    history: Vec<ObservedHold>,
}

async fn lock_in_path(
    State(server): State<Arc<Server>>,
    Path(key): Path<String>,
) -> Result<Response, Failure> {
    Ok(lock_response(&server, &parse_key(&key)?))
}

fn lock_response(server: &Server, key: &Key) -> Response {
    let published = server.monitor.published();
    let holders: Vec<_> =
        published.snapshot.holders.iter().filter(|holder| holder.key == *key).collect();
    let waiters: Vec<_> =
        published.snapshot.waiters.iter().filter(|waiter| waiter.key == *key).collect();
    json_of(&LockDetails {
        taken_at_ms: published.taken_at_ms,
        error: published.error.as_deref(),
        lock: ShowView::new(key, holders, waiters),
        history: server.monitor.history(key),
    })
}

fn parse_key(text: &str) -> Result<Key, Failure> {
    Key::new(text)
        .map_err(|error| Failure::new(StatusCode::BAD_REQUEST, LockError::from(error).to_string()))
}

/// Returns the parameter `key` of a query, if the query has one.
///
/// axum's `Query` would replace bytes that are not UTF-8, and so return another key.
fn key_in(query: Option<&str>) -> Result<Option<Key>, Failure> {
    let mut pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let Some((_, given)) = pairs.find(|(name, _)| *name == "key") else { return Ok(None) };
    let text = given.replace('+', " ");
    let text = percent_decode_str(&text).decode_utf8().map_err(|_| {
        Failure::new(
            StatusCode::BAD_REQUEST,
            "the key is not UTF-8; percent-encode the UTF-8 bytes of the key",
        )
    })?;
    parse_key(&text).map(Some)
}

async fn break_lock_in_query(
    State(server): State<Arc<Server>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    match key_in(query.as_deref())? {
        Some(key) => break_lock(server, key, &headers).await,
        None => Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "the parameter `key` is missing; add `?key=KEY` to the path",
        )),
    }
}

async fn break_lock_in_path(
    State(server): State<Arc<Server>>,
    Path(key): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    break_lock(server, parse_key(&key)?, &headers).await
}

async fn break_lock(
    server: Arc<Server>,
    key: Key,
    headers: &HeaderMap,
) -> Result<Response, Failure> {
    let Some(token) = &server.break_token else {
        return Err(Failure::new(
            StatusCode::FORBIDDEN,
            "this server releases no locks; start it with --allow-break, or use `lockreg break`",
        ));
    };
    if !token.is_in(headers) {
        return Err(Failure::new(
            StatusCode::UNAUTHORIZED,
            "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`",
        ));
    }
    // The release runs in its own task, because a closed connection must not cancel it.
    let release = tokio::spawn({
        let server = Arc::clone(&server);
        async move {
            let released = server.monitor.registry().force_release(key.as_str()).await;
            server.monitor.refresh();
            if released.as_ref().is_ok_and(|released| *released) {
                server.output.alert(
                    "broken",
                    &format!("{} was released by force over HTTP", printable(key.as_str())),
                    json!({ "key": key.as_str() }),
                );
            }
            (key, released)
        }
    });
    let (key, released) = release
        .await
        .map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    let broken = released
        .map_err(|error| Failure::new(StatusCode::BAD_GATEWAY, error_chain(&error).join(": ")))?;
    Ok(json_of(&json!({ "key": key.as_str(), "broken": broken })))
}

async fn waits(State(server): State<Arc<Server>>) -> Response {
    json_of(&*server.monitor.published().graph)
}

async fn metrics_text(State(server): State<Arc<Server>>) -> Response {
    let published = server.monitor.published();
    let text = published.metrics.get_or_init(|| metrics::format(&published, &server.names)).clone();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn health(State(server): State<Arc<Server>>) -> Response {
    let published = server.monitor.published();
    let text = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    match &published.error {
        Some(error) => {
            (StatusCode::SERVICE_UNAVAILABLE, text, format!("{error}\n")).into_response()
        }
        None if published.snapshot.age() > server.age_limit => (
            StatusCode::SERVICE_UNAVAILABLE,
            text,
            "the last snapshot is too old, because the store does not answer\n",
        )
            .into_response(),
        None => (text, "ok\n").into_response(),
    }
}

/// Sends an event with all rows of the page's table, and then an event after each attempt to take a
/// snapshot.
async fn events(State(server): State<Arc<Server>>) -> Result<Response, Failure> {
    if server.monitor.event_stream_count() >= EVENT_STREAMS_MAX {
        return Err(Failure::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("the limit of {EVENT_STREAMS_MAX} open pages is reached; close some of them"),
        ));
    }
    let stream = stream::unfold(None, move |changes| {
        let server = Arc::clone(&server);
        async move {
            let (event, changes) = match changes {
                None => server.monitor.subscribe(),
                Some(changes) => next_event(&server.monitor, changes).await?,
            };
            Some((Ok::<_, Infallible>(event), Some(changes)))
        }
    });
    let body = Body::from_stream(stream);
    Ok(([(header::CONTENT_TYPE, "text/event-stream")], body).into_response())
}

async fn next_event(
    monitor: &Monitor,
    mut changes: Receiver<Bytes>,
) -> Option<(Bytes, Receiver<Bytes>)> {
    match changes.recv().await {
        Ok(event) => Some((event, changes)),
        // This connection has missed events, so it starts again with all rows.
        Err(RecvError::Lagged(_)) => Some(monitor.subscribe()),
        Err(RecvError::Closed) => None,
    }
}
