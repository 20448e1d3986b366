//! The tower layer for HTTP with axum, over the in-process store: the status of requests without a
//! lock, and the token of requests with one.
#![cfg(feature = "http")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::convert::Infallible;
use std::future::poll_fn;
use std::num::ParseIntError;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{Router, post};
use axum::{Extension, body};
use http::StatusCode;
use http::header::RETRY_AFTER;
use lock_registry::backend::MemoryBackend;
use lock_registry::tower::{ErrorResponse, LockLayer, LockServiceError, StatusResponse};
use lock_registry::{FencingToken, LockError, LockOptions, Registry};
use registry_conformance::{Faults, FaultyBackend};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tower_service::Service;

/// The signals between a test and the handler [`respond_with_token`].
struct Handler {
    started: Notify,
    resume: Semaphore,
}

impl Handler {
    fn new() -> Arc<Self> {
        Arc::new(Self { started: Notify::new(), resume: Semaphore::new(0) })
    }
}

/// Responds with the token of the lock, after the test has resumed the request.
async fn respond_with_token(
    State(handler): State<Arc<Handler>>,
    Path(_): Path<String>,
    token: Option<Extension<FencingToken>>,
) -> String {
    handler.started.notify_one();
    handler.resume.acquire().await.unwrap().forget();
    token.map_or_else(|| "no lock".to_owned(), |Extension(token)| token.to_string())
}

/// Returns the key of `/orders/NUMBER`. Other paths need no lock.
fn key_of(request: &Request) -> Result<Option<String>, ParseIntError> {
    match request.uri().path().strip_prefix("/orders/") {
        None => Ok(None),
        Some(order) => order.parse::<u64>().map(|order| Some(format!("orders/{order}"))),
    }
}

type KeyOf = fn(&Request) -> Result<Option<String>, ParseIntError>;

fn layer(registry: &Registry) -> LockLayer<KeyOf> {
    LockLayer::new(Arc::new(registry.clone()), key_of as KeyOf)
}

/// Returns the router without its layer.
fn routes(handler: &Arc<Handler>) -> Router {
    Router::new()
        .route("/orders/{order}", post(respond_with_token))
        .route("/{page}", post(respond_with_token))
        .with_state(Arc::clone(handler))
}

fn app() -> (Registry, Arc<Handler>, Router) {
    let (registry, handler) = (Registry::in_memory().unwrap(), Handler::new());
    let router = routes(&handler).layer(layer(&registry).http());
    (registry, handler, router)
}

async fn send(router: &Router, path: &str) -> Response {
    let mut router = router.clone();
    let request = Request::post(path).body(Body::empty()).unwrap();
    poll_fn(|cx| Service::<Request>::poll_ready(&mut router, cx)).await.unwrap();
    router.call(request).await.unwrap()
}

/// Sends a request in a task, and waits until the handler runs.
async fn start(handler: &Handler, router: &Router, path: &'static str) -> JoinHandle<Response> {
    let router = router.clone();
    let sent = tokio::spawn(async move { send(&router, path).await });
    handler.started.notified().await;
    sent
}

async fn text(response: Response) -> String {
    let bytes = body::to_bytes(response.into_body(), 1_024).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn assert_refused(response: &Response, status: StatusCode, retry_after: Option<&str>) {
    let header = response.headers().get(RETRY_AFTER).map(|header| header.to_str().unwrap());
    assert_eq!((response.status(), header), (status, retry_after));
}

#[tokio::test]
async fn a_request_for_a_held_lock_is_refused_with_423_until_it_is_free() {
    let (registry, handler, router) = app();
    let first = start(&handler, &router, "/orders/1").await;
    assert_refused(&send(&router, "/orders/1").await, StatusCode::LOCKED, Some("1"));
    let other = start(&handler, &router, "/orders/2").await;
    handler.resume.add_permits(2);
    assert_eq!(first.await.unwrap().status(), StatusCode::OK);
    assert_eq!(other.await.unwrap().status(), StatusCode::OK);
    registry.idle().await;
    handler.resume.add_permits(1);
    assert_eq!(send(&router, "/orders/1").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_waits_for_its_lock_if_the_layer_says_so() {
    let (registry, handler) = (Registry::in_memory().unwrap(), Handler::new());
    let router = routes(&handler).layer(layer(&registry).wait(Duration::from_secs(60)).http());
    let first = start(&handler, &router, "/orders/1").await;
    let second = tokio::spawn(async move { send(&router, "/orders/1").await });
    handler.resume.add_permits(2);
    assert_eq!(first.await.unwrap().status(), StatusCode::OK);
    assert_eq!(second.await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_handler_sees_the_token_of_its_lock() {
    let (registry, handler, router) = app();
    handler.resume.add_permits(2);
    let before = registry.obtain("orders/1").lock().await.unwrap();
    let (low, _) = (before.fencing_token(), before.unlock().await.unwrap());
    let token: u64 = text(send(&router, "/orders/1").await).await.parse().unwrap();
    let after = registry.obtain("orders/1").lock().await.unwrap();
    let high = after.fencing_token();
    assert!(low.get() < token && token < high.get(), "{low} {token} {high}");
}

#[tokio::test]
async fn a_request_without_a_key_runs_without_a_lock() {
    let (registry, handler, router) = app();
    let first = start(&handler, &router, "/status").await;
    let second = start(&handler, &router, "/status").await;
    // A closed registry grants no locks.
    _ = registry.close(Duration::ZERO).await;
    handler.resume.add_permits(2);
    for response in [first.await.unwrap(), second.await.unwrap()] {
        assert_eq!(text(response).await, "no lock");
    }
}

#[tokio::test]
async fn a_request_without_a_valid_key_is_refused_before_the_handler() {
    // If a request reached the handler, the handler would wait forever.
    let (registry, handler, router) = app();
    assert_refused(&send(&router, "/orders/first").await, StatusCode::BAD_REQUEST, None);
    let empty = LockLayer::new(Arc::new(registry), |_: &Request| "").http();
    let router = routes(&handler).layer(empty);
    assert_refused(&send(&router, "/status").await, StatusCode::BAD_REQUEST, None);
}

#[tokio::test]
async fn a_failed_store_or_a_closed_registry_is_503() {
    let store = Arc::new(MemoryBackend::new());
    let faulty = Arc::new(FaultyBackend::new(store, Faults::outage()));
    let registry = Registry::builder(Arc::<FaultyBackend>::clone(&faulty)).build().unwrap();
    let handler = Handler::new();
    let router = routes(&handler).layer(layer(&registry).http());
    let response = send(&router, "/orders/1").await;
    assert_refused(&response, StatusCode::SERVICE_UNAVAILABLE, Some("1"));

    faulty.clear_faults();
    handler.resume.add_permits(1);
    assert_eq!(send(&router, "/orders/2").await.status(), StatusCode::OK);

    _ = registry.close(Duration::ZERO).await;
    let response = send(&router, "/orders/3").await;
    assert_refused(&response, StatusCode::SERVICE_UNAVAILABLE, Some("1"));
}

#[tokio::test]
async fn a_lost_lock_is_500_because_the_request_may_have_had_effects() {
    let (registry, handler, router) = app();
    let running = start(&handler, &router, "/orders/1").await;
    _ = registry.close(Duration::ZERO).await;
    assert_refused(&running.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR, None);
}

#[tokio::test]
async fn an_invalid_option_of_the_layer_is_500() {
    let (registry, handler) = (Registry::in_memory().unwrap(), Handler::new());
    let options = LockOptions::new().lease(Duration::ZERO);
    let router = routes(&handler).layer(layer(&registry).options(options).http());
    let response = send(&router, "/orders/1").await;
    assert_refused(&response, StatusCode::INTERNAL_SERVER_ERROR, None);
}

#[tokio::test]
async fn a_request_that_the_server_drops_releases_its_lock() {
    let (registry, handler, router) = app();
    tokio::select! {
        biased;
        _ = send(&router, "/orders/1") => unreachable!("the handler never ends"),
        () = handler.started.notified() => {}
    }
    registry.idle().await;
    assert!(registry.obtain("orders/1").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn the_response_can_be_chosen() {
    let (registry, handler) = (Registry::in_memory().unwrap(), Handler::new());
    let _guard = registry.obtain("orders/1").lock().await.unwrap();

    let later = StatusResponse::new().retry_after(Duration::from_millis(2_500));
    let router = routes(&handler).layer(layer(&registry).http().respond(later));
    assert_refused(&send(&router, "/orders/1").await, StatusCode::LOCKED, Some("3"));

    let respond = move |error: LockServiceError<Infallible, ParseIntError>| match error {
        LockServiceError::Key(error) => (StatusCode::NOT_FOUND, error.to_string()).into_response(),
        other => later.response(other),
    };
    let router = routes(&handler).layer(layer(&registry).http().respond(respond));
    assert_refused(&send(&router, "/orders/1").await, StatusCode::LOCKED, Some("3"));
    let response = send(&router, "/orders/first").await;
    assert_refused(&response, StatusCode::NOT_FOUND, None);
    assert_eq!(text(response).await, "invalid digit found in string");
}

#[tokio::test]
async fn a_layer_without_http_fails_requests_with_a_typed_error() {
    let (registry, handler) = (Registry::in_memory().unwrap(), Handler::new());
    let mut service = tower_layer::Layer::layer(&layer(&registry), routes(&handler));
    let request = |path| Request::post(path).body(Body::empty()).unwrap();
    poll_fn(|cx| Service::<Request>::poll_ready(&mut service, cx)).await.unwrap();
    let error = service.call(request("/orders/first")).await.unwrap_err();
    assert!(matches!(error, LockServiceError::Key(_)), "{error:?}");
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert_eq!(source.as_deref(), Some("invalid digit found in string"));

    _ = registry.close(Duration::ZERO).await;
    poll_fn(|cx| Service::<Request>::poll_ready(&mut service, cx)).await.unwrap();
    let error = service.call(request("/orders/1")).await.unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::Closed)), "{error:?}");
    handler.resume.add_permits(1);
    poll_fn(|cx| Service::<Request>::poll_ready(&mut service, cx)).await.unwrap();
    let response = service.call(request("/status")).await.unwrap();
    assert_eq!(text(response).await, "no lock");
}
