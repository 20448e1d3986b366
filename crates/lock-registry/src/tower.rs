//! A tower layer that runs each request under the lock of its key. Feature `tower`.
//!
//! [`LockLayer`] works with every type of request. If the lock of a request cannot be acquired, the
//! request fails with an error. With the feature `http`, `LockLayer::http` returns a layer that
//! responds with a status instead.
//!
//! ```
//! # use std::convert::Infallible;
//! # use std::sync::Arc;
//! # use std::time::Duration;
//! use lock_registry::tower::LockLayer;
//! use tower_layer::Layer;
//! use tower_service::Service;
//! # #[derive(Clone)]
//! # struct Pay;
//! # struct Payment { order: u64 }
//! # impl Service<Payment> for Pay {
//! #     type Response = u64;
//! #     type Error = Infallible;
//! #     type Future = std::future::Ready<Result<u64, Infallible>>;
//! #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
//! #         std::task::Poll::Ready(Ok(()))
//! #     }
//! #     fn call(&mut self, payment: Payment) -> Self::Future { std::future::ready(Ok(payment.order)) }
//! # }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let registry = Arc::new(lock_registry::connect("memory:").await?);
//! let one_at_a_time =
//!     LockLayer::new(registry, |payment: &Payment| format!("orders/{}", payment.order)).wait(Duration::from_secs(2));
//! let mut service = one_at_a_time.layer(Pay);
//! std::future::poll_fn(|cx| service.poll_ready(cx)).await?;
//! assert_eq!(service.call(Payment { order: 42 }).await?, 42);
//! # Ok(()) }
//! ```

#[cfg(feature = "http")]
mod http;

use std::borrow::Cow;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use registry_core::{
    ClaimMode, DistributedLock, FencingToken, LockError, LockOptions, LockRegistry,
};
use tower_layer::Layer;
use tower_service::Service;

#[cfg(feature = "http")]
pub use http::{ErrorResponse, HttpLockLayer, HttpLockService, StatusResponse};

/// A layer that runs each request under a lock, whose key is computed from the request.
///
/// Requests with the same key run one after the other, across all processes that use the same
/// store. With [`LockLayer::mode`], readers, or a limited number of requests, run concurrently. A
/// request without a key runs without a lock; see [`LockKey`].
///
/// By default, a request does not wait: if its lock is held, the request fails with
/// [`LockServiceError::Busy`]. [`LockLayer::wait`] sets the time for which a request waits.
///
/// The lock protects the inner service's future until the future returns its response. It does not
/// protect a body that is streamed afterwards. If the lock is lost before the response, the inner
/// future is dropped and the request fails with [`LockServiceError::Lock`].
///
/// The futures of the created services must be polled inside a tokio runtime that has time enabled.
/// Outside such a runtime, the future of a request with a key panics when it has to wait.
#[derive(Clone)]
pub struct LockLayer<KeyFn, M = ClaimMode> {
    registry: Arc<dyn LockRegistry>,
    key_of: KeyFn,
    mode: M,
    options: LockOptions,
}

impl<KeyFn> LockLayer<KeyFn> {
    /// Returns a layer that acquires the exclusive lock of `key_of(&request)` in `registry`. The
    /// function `key_of` returns a [`LockKey`].
    pub fn new(registry: Arc<dyn LockRegistry>, key_of: KeyFn) -> Self {
        let options = LockOptions::new().wait(Duration::ZERO);
        Self { registry, key_of, mode: ClaimMode::Exclusive, options }
    }
}

impl<KeyFn, M> LockLayer<KeyFn, M> {
    /// Sets the mode of the lock: a [`ClaimMode`] for all requests, or a function that chooses the
    /// mode of each request.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// use lock_registry::modes::ClaimMode;
    /// use lock_registry::tower::LockLayer;
    /// # enum Request { Show(u64), Change(u64) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let registry = Arc::new(lock_registry::connect("memory:").await?);
    /// # let key = |request: &Request| match request {
    /// #     Request::Show(order) | Request::Change(order) => format!("orders/{order}"),
    /// # };
    /// let mode_of = |request: &Request| match request {
    ///     Request::Show(_) => ClaimMode::Shared,
    ///     Request::Change(_) => ClaimMode::Exclusive,
    /// };
    /// let readers_at_once = LockLayer::new(registry.clone(), key).mode(mode_of);
    /// let permits = ClaimMode::Permits { take: 1, of: 3 };
    /// let three_at_once = LockLayer::new(registry, key).mode(permits);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn mode<N>(self, mode: N) -> LockLayer<KeyFn, N> {
        let Self { registry, key_of, options, .. } = self;
        LockLayer { registry, key_of, mode, options }
    }

    /// Sets how long a request waits for its lock.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options = self.options.wait(wait);
        self
    }

    /// Replaces all options of the lock, including the default of not waiting. Without
    /// [`LockOptions::wait`], a request waits without a time limit.
    #[must_use]
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }
}

/// The key of a request, as the function in [`LockLayer::new`] returns it.
///
/// - `String`, `&str` and `Cow<str>` are keys.
/// - An `Option` of a key: a request with `None` runs without a lock.
/// - A `Result` of a key or of an `Option`: a request with an error does not run, and fails with
///   [`LockServiceError::Key`].
///
/// # Examples
/// ```
/// # use std::num::ParseIntError;
/// # use std::sync::Arc;
/// use lock_registry::tower::LockLayer;
/// # enum Request { Show, Change(String) }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let registry = Arc::new(lock_registry::connect("memory:").await?);
/// let key_of = |request: &Request| match request {
///     Request::Show => Ok(None),
///     // A malformed number is an error of the request: `LockServiceError::Key`.
///     Request::Change(order) => order.parse::<u64>().map(|id| Some(format!("orders/{id}"))),
/// };
/// let changes_one_at_a_time = LockLayer::new(registry, key_of);
/// # Ok(()) }
/// ```
pub trait LockKey {
    /// The error of a request without a valid key. `Infallible` if the function cannot fail.
    type Error;

    /// Returns the key, or `None` for a request that runs without a lock.
    ///
    /// # Errors
    /// If the request has no valid key and must not run.
    fn into_key(self) -> Result<Option<String>, Self::Error>;
}

impl LockKey for String {
    type Error = Infallible;

    fn into_key(self) -> Result<Option<String>, Infallible> {
        Ok(Some(self))
    }
}

impl LockKey for &str {
    type Error = Infallible;

    fn into_key(self) -> Result<Option<String>, Infallible> {
        Ok(Some(self.to_owned()))
    }
}

impl LockKey for Cow<'_, str> {
    type Error = Infallible;

    fn into_key(self) -> Result<Option<String>, Infallible> {
        Ok(Some(self.into_owned()))
    }
}

impl<K: LockKey> LockKey for Option<K> {
    type Error = K::Error;

    fn into_key(self) -> Result<Option<String>, K::Error> {
        self.map_or(Ok(None), K::into_key)
    }
}

impl<K: LockKey<Error = Infallible>, E> LockKey for Result<K, E> {
    type Error = E;

    fn into_key(self) -> Result<Option<String>, E> {
        let Ok(key) = self?.into_key();
        Ok(key)
    }
}

/// Chooses the mode in which a request holds its lock. Implemented for functions, and for a
/// [`ClaimMode`] that is the same for all requests.
pub trait RequestMode<R> {
    /// Returns the mode of the lock of `request`.
    fn mode_of(&self, request: &R) -> ClaimMode;
}

impl<R> RequestMode<R> for ClaimMode {
    fn mode_of(&self, _: &R) -> ClaimMode {
        *self
    }
}

impl<R, F: Fn(&R) -> ClaimMode> RequestMode<R> for F {
    fn mode_of(&self, request: &R) -> ClaimMode {
        self(request)
    }
}

impl<KeyFn, M> fmt::Debug for LockLayer<KeyFn, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("registry", &self.registry)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<S, KeyFn: Clone, M: Clone> Layer<S> for LockLayer<KeyFn, M> {
    type Service = LockService<S, KeyFn, M>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService { inner, layer: self.clone() }
    }
}

/// The service that [`LockLayer`] creates around an inner service.
#[derive(Clone)]
pub struct LockService<S, KeyFn, M = ClaimMode> {
    inner: S,
    layer: LockLayer<KeyFn, M>,
}

impl<S: fmt::Debug, KeyFn, M> fmt::Debug for LockService<S, KeyFn, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, KeyFn, M, R, K> Service<R> for LockService<S, KeyFn, M>
where
    S: Service<R> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send,
    S::Error: Send,
    R: Send + 'static,
    KeyFn: Fn(&R) -> K,
    K: LockKey,
    K::Error: Send + 'static,
    M: RequestMode<R>,
{
    type Response = S::Response;
    type Error = LockServiceError<S::Error, K::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(LockServiceError::Inner)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let request_lock = self.layer.request_lock(&request);
        Box::pin(run(self.take_ready(), request, request_lock, |_, _| {}))
    }
}

/// The lock of one request and how to acquire it. `None` for a request without a lock.
type RequestLock = Option<(DistributedLock, ClaimMode, LockOptions)>;

impl<KeyFn, M> LockLayer<KeyFn, M> {
    fn request_lock<R, K>(&self, request: &R) -> Result<RequestLock, K::Error>
    where
        KeyFn: Fn(&R) -> K,
        K: LockKey,
        M: RequestMode<R>,
    {
        let Some(key) = (self.key_of)(request).into_key()? else {
            return Ok(None);
        };
        let lock = self.registry.obtain(&key);
        Ok(Some((lock, self.mode.mode_of(request), self.options.clone())))
    }
}

impl<S: Clone, KeyFn, M> LockService<S, KeyFn, M> {
    /// Returns the inner service, which is ready, and leaves a clone of it, which may not be ready.
    fn take_ready(&mut self) -> S {
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }
}

/// Runs `request` under its lock, with the token of the lock attached by `attach`.
async fn run<S: Service<R>, R, E>(
    mut inner: S,
    mut request: R,
    request_lock: Result<RequestLock, E>,
    attach: impl FnOnce(&mut R, FencingToken),
) -> Result<S::Response, LockServiceError<S::Error, E>> {
    let Some((lock, mode, options)) = request_lock.map_err(LockServiceError::Key)? else {
        return inner.call(request).await.map_err(LockServiceError::Inner);
    };
    let guard = match lock.acquire(mode, options).await {
        Err(LockError::WaitElapsed { key, .. }) => return Err(LockServiceError::Busy { key }),
        acquired => acquired?,
    };
    attach(&mut request, guard.fencing_token());
    let response = guard.protect(inner.call(request)).await?;
    // The request completed under the lock, so its response is valid even if the release fails. The
    // engine emits an event for a failed release and retries it in the background. The claim ends
    // with its lease at the latest.
    let _ = guard.unlock().await;
    response.map_err(LockServiceError::Inner)
}

/// The error of a request under a lock. `E` is the error of the inner service, `KeyError` that of
/// the function that returns the key.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockServiceError<E, KeyError = Infallible> {
    /// Other clients or requests held the lock, or too many of its permits, until the end of the
    /// wait. The request was not started.
    #[non_exhaustive]
    Busy {
        /// The key.
        key: String,
    },
    /// The function that returns the key failed, and the request was not started.
    Key(KeyError),
    /// The lock could not be acquired, and the request was not started. For [`LockError::Lost`],
    /// the lock was lost, and the request was dropped.
    Lock(LockError),
    /// The inner service failed.
    Inner(E),
}

impl<E, KeyError> From<LockError> for LockServiceError<E, KeyError> {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl<E, KeyError> fmt::Display for LockServiceError<E, KeyError> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { key } => write!(f, "lock {key:?} was held until the end of the wait"),
            Self::Key(_) => f.write_str("the request has no valid lock key"),
            Self::Lock(_) => f.write_str("the request's lock could not be acquired or was lost"),
            Self::Inner(_) => f.write_str("the service failed"),
        }
    }
}

impl<E, KeyError> StdError for LockServiceError<E, KeyError>
where
    E: StdError + 'static,
    KeyError: StdError + 'static,
{
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Busy { .. } => None,
            Self::Key(error) => Some(error),
            Self::Lock(error) => Some(error),
            Self::Inner(error) => Some(error),
        }
    }
}
