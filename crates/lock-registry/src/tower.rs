//! A tower layer that runs each request under the lock of its key. Feature `tower`.
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

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use registry_core::{LockError, LockOptions, LockRegistry};
use tower_layer::Layer;
use tower_service::Service;

/// A layer that runs each request under a lock, whose key is computed from the request.
///
/// Requests with the same key run one after the other, across all processes that use the same
/// store. By default, a request does not wait: if its lock is held, the request fails with
/// [`LockServiceError::Busy`]. [`LockLayer::wait`] sets the time for which a request waits.
///
/// The lock protects the inner service's future until the future returns its response. It does not
/// protect a body that is streamed afterwards. If the lock is lost before the response, the inner
/// future is dropped and the request fails with [`LockServiceError::Lock`].
///
/// The futures of the created services must be polled inside a tokio runtime that has time enabled.
/// Otherwise, these futures panic before the inner service's future is polled.
#[derive(Clone)]
pub struct LockLayer<KeyFn> {
    registry: Arc<dyn LockRegistry>,
    key_of: KeyFn,
    options: LockOptions,
}

impl<KeyFn> LockLayer<KeyFn> {
    /// Returns a layer that acquires the lock of `key_of(&request)` in `registry`.
    pub fn new(registry: Arc<dyn LockRegistry>, key_of: KeyFn) -> Self {
        Self { registry, key_of, options: LockOptions::new().wait(Duration::ZERO) }
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

impl<KeyFn> fmt::Debug for LockLayer<KeyFn> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("registry", &self.registry)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<S, KeyFn: Clone> Layer<S> for LockLayer<KeyFn> {
    type Service = LockService<S, KeyFn>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService { inner, layer: self.clone() }
    }
}

/// The service that [`LockLayer`] creates around an inner service.
#[derive(Clone)]
pub struct LockService<S, KeyFn> {
    inner: S,
    layer: LockLayer<KeyFn>,
}

impl<S: fmt::Debug, KeyFn> fmt::Debug for LockService<S, KeyFn> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, KeyFn, R> Service<R> for LockService<S, KeyFn>
where
    S: Service<R> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send,
    S::Error: Send,
    R: Send + 'static,
    KeyFn: Fn(&R) -> String,
{
    type Response = S::Response;
    type Error = LockServiceError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(LockServiceError::Inner)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let lock = self.layer.registry.obtain(&(self.layer.key_of)(&request));
        let options = self.layer.options.clone();
        // The instance that is ready handles this request. The clone has its own readiness.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let guard = match lock.lock_with(options).await {
                Err(LockError::WaitElapsed { key, .. }) => {
                    return Err(LockServiceError::Busy { key });
                }
                acquired => acquired?,
            };
            let response = guard.protect(inner.call(request)).await?;
            // The request completed under the lock, so its response is valid even if the release
            // fails. The engine emits an event for a failed release and retries it in the
            // background. The claim ends with its lease at the latest.
            let _ = guard.unlock().await;
            response.map_err(LockServiceError::Inner)
        })
    }
}

/// The error of a request under a lock.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockServiceError<E> {
    /// Another client or request held the lock until the end of the wait. The request was not
    /// started.
    #[non_exhaustive]
    Busy {
        /// The key.
        key: String,
    },
    /// The lock could not be acquired, and the request was not started. For [`LockError::Lost`],
    /// the lock was lost, and the request was dropped.
    Lock(LockError),
    /// The inner service failed.
    Inner(E),
}

impl<E> From<LockError> for LockServiceError<E> {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl<E> fmt::Display for LockServiceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { key } => write!(f, "lock {key:?} is held by another client"),
            Self::Lock(_) => f.write_str("the request's lock could not be acquired or was lost"),
            Self::Inner(_) => f.write_str("the service failed"),
        }
    }
}

impl<E: StdError + 'static> StdError for LockServiceError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Busy { .. } => None,
            Self::Lock(error) => Some(error),
            Self::Inner(error) => Some(error),
        }
    }
}
