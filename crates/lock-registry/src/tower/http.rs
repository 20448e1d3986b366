//! The layer for HTTP: if the lock of a request cannot be acquired, or is lost, the request gets a
//! response instead of an error.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderValue, Request, Response, StatusCode};
use registry_core::{ClaimMode, LockError};
use tower_layer::Layer;
use tower_service::Service;

use super::{LockKey, LockLayer, LockService, LockServiceError, RequestMode, run};

impl<KeyFn, M> LockLayer<KeyFn, M> {
    /// Returns this layer for HTTP. If the lock of a request cannot be acquired, or is lost, the
    /// request gets a response instead of an error. By default, it is that of [`StatusResponse`].
    /// Feature `http`.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    ///
    /// use axum::extract::{Path, Request};
    /// use axum::routing::{Router, post};
    /// use axum::Extension;
    /// use lock_registry::FencingToken;
    /// use lock_registry::tower::LockLayer;
    ///
    /// async fn ship(Path(order): Path<u64>, Extension(token): Extension<FencingToken>) -> String {
    ///     format!("order {order} is shipped under token {token}")
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Arc::new(lock_registry::connect("memory:").await?);
    /// // While a request runs, another request for the same order gets status 423. The number is
    /// // parsed, because `/orders/42/ship` and `/orders/042/ship` name the same order.
    /// let key_of = |request: &Request| {
    ///     let path = request.uri().path().strip_prefix("/orders/").unwrap_or_default();
    ///     let order = path.strip_suffix("/ship").unwrap_or_default();
    ///     order.parse::<u64>().map(|order| format!("orders/{order}"))
    /// };
    /// let one_at_a_time = LockLayer::new(registry, key_of);
    /// let app: Router = Router::new()
    ///     .route("/orders/{order}/ship", post(ship))
    ///     .layer(one_at_a_time.http());
    /// # Ok(()) }
    /// ```
    pub fn http(self) -> HttpLockLayer<KeyFn, M> {
        HttpLockLayer { layer: self, respond: StatusResponse::new() }
    }
}

/// A [`LockLayer`] for HTTP requests, created by [`LockLayer::http`]. Feature `http`.
///
/// A request that runs under a lock has the lock's [`FencingToken`](crate::FencingToken) as an
/// extension. If several layers lock a request, the extension is that of the innermost one.
///
/// The created services have the error type of the inner service, so frameworks such as axum accept
/// them. If the client disconnects and the server drops the request, its lock is released.
#[derive(Clone)]
pub struct HttpLockLayer<KeyFn, M = ClaimMode, F = StatusResponse> {
    layer: LockLayer<KeyFn, M>,
    respond: F,
}

impl<KeyFn, M, F> HttpLockLayer<KeyFn, M, F> {
    /// Sets the response if the lock of a request cannot be acquired or is lost: a
    /// [`StatusResponse`], or a function from [`LockServiceError`] to a response.
    ///
    /// # Examples
    /// ```
    /// # use std::convert::Infallible;
    /// # use std::sync::Arc;
    /// # use std::time::Duration;
    /// use lock_registry::tower::{ErrorResponse, LockLayer, LockServiceError, StatusResponse};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let registry = Arc::new(lock_registry::connect("memory:").await?);
    /// # let key_of = |request: &http::Request<String>| request.uri().path().to_owned();
    /// let later = StatusResponse::new().retry_after(Duration::from_secs(5));
    /// let layer = LockLayer::new(registry, key_of).http().respond(
    ///     move |error: LockServiceError<Infallible>| -> http::Response<String> {
    ///         let text = error.to_string();
    ///         later.response(error).map(|_: String| text)
    ///     },
    /// );
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn respond<G>(self, respond: G) -> HttpLockLayer<KeyFn, M, G> {
        HttpLockLayer { layer: self.layer, respond }
    }
}

impl<KeyFn, M, F> fmt::Debug for HttpLockLayer<KeyFn, M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpLockLayer").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<S, KeyFn: Clone, M: Clone, F: Clone> Layer<S> for HttpLockLayer<KeyFn, M, F> {
    type Service = HttpLockService<S, KeyFn, M, F>;

    fn layer(&self, inner: S) -> Self::Service {
        HttpLockService { service: self.layer.layer(inner), respond: self.respond.clone() }
    }
}

/// Responds to a request whose lock cannot be acquired, or is lost before the response of the inner
/// service. Implemented for functions, and for [`StatusResponse`].
///
/// `KeyError` is [`LockKey::Error`], the error of the function that returns the key. `B` is the
/// body of the response.
pub trait ErrorResponse<KeyError, B> {
    /// Returns the response. The error is never [`LockServiceError::Inner`].
    fn response(&self, error: LockServiceError<Infallible, KeyError>) -> Response<B>;
}

impl<KeyError, B, F: Fn(LockServiceError<Infallible, KeyError>) -> Response<B>>
    ErrorResponse<KeyError, B> for F
{
    fn response(&self, error: LockServiceError<Infallible, KeyError>) -> Response<B> {
        self(error)
    }
}

/// The default response to a request whose lock cannot be acquired or is lost: a status, with
/// `B::default()` as body.
///
/// | reason | status | header `Retry-After` |
/// |---|---|---|
/// | the lock was held until the end of the wait | 423 Locked | yes |
/// | the request has no valid key | 400 Bad Request | |
/// | the store failed, or the registry is closed | 503 Service Unavailable | yes |
/// | the lock was lost, so the request was dropped and may have had effects | 500 Internal Server Error | |
/// | any other error, such as an invalid or unsupported option | 500 Internal Server Error | |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusResponse {
    retry_after: Duration,
}

impl StatusResponse {
    /// Returns the default: the statuses 423 and 503 have the header `Retry-After: 1`.
    #[must_use]
    pub const fn new() -> Self {
        Self { retry_after: Duration::from_secs(1) }
    }

    /// Sets the time of the header `Retry-After`, which is rounded up to seconds.
    #[must_use]
    pub const fn retry_after(mut self, time: Duration) -> Self {
        self.retry_after = time;
        self
    }
}

impl Default for StatusResponse {
    fn default() -> Self {
        Self::new()
    }
}

impl<KeyError, B: Default> ErrorResponse<KeyError, B> for StatusResponse {
    fn response(&self, error: LockServiceError<Infallible, KeyError>) -> Response<B> {
        let (status, retry) = match error {
            LockServiceError::Busy { .. } => (StatusCode::LOCKED, true),
            LockServiceError::Key(_) | LockServiceError::Lock(LockError::InvalidKey(_)) => {
                (StatusCode::BAD_REQUEST, false)
            }
            LockServiceError::Lock(LockError::Backend { .. } | LockError::Closed) => {
                (StatusCode::SERVICE_UNAVAILABLE, true)
            }
            LockServiceError::Lock(_) => (StatusCode::INTERNAL_SERVER_ERROR, false),
        };
        let mut response = Response::new(B::default());
        *response.status_mut() = status;
        if retry {
            let round_up = u64::from(self.retry_after.subsec_nanos() > 0);
            let seconds = self.retry_after.as_secs().saturating_add(round_up);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// The service that [`HttpLockLayer`] creates around an inner service. Feature `http`.
#[derive(Clone)]
pub struct HttpLockService<S, KeyFn, M = ClaimMode, F = StatusResponse> {
    service: LockService<S, KeyFn, M>,
    respond: F,
}

impl<S: fmt::Debug, KeyFn, M, F> fmt::Debug for HttpLockService<S, KeyFn, M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpLockService").field("service", &self.service).finish_non_exhaustive()
    }
}

impl<S, KeyFn, M, F, In, Out, K> Service<Request<In>> for HttpLockService<S, KeyFn, M, F>
where
    S: Service<Request<In>, Response = Response<Out>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    In: Send + 'static,
    Out: Send,
    KeyFn: Fn(&Request<In>) -> K,
    K: LockKey,
    K::Error: Send + 'static,
    M: RequestMode<Request<In>>,
    F: ErrorResponse<K::Error, Out> + Clone + Send + 'static,
{
    type Response = Response<Out>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Out>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let request_lock = self.service.layer.request_lock(&request);
        let attach = |request: &mut Request<In>, token| _ = request.extensions_mut().insert(token);
        let response = run(self.service.take_ready(), request, request_lock, attach);
        let respond = self.respond.clone();
        Box::pin(async move {
            let error = match response.await {
                Ok(response) => return Ok(response),
                Err(LockServiceError::Inner(error)) => return Err(error),
                Err(LockServiceError::Busy { key }) => LockServiceError::Busy { key },
                Err(LockServiceError::Key(error)) => LockServiceError::Key(error),
                Err(LockServiceError::Lock(error)) => LockServiceError::Lock(error),
            };
            Ok(respond.response(error))
        })
    }
}
