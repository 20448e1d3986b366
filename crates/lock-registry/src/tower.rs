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

/// Runs each request under the lock whose key is made from the request.
///
/// Requests of one key run one after the other, in this process and in all others that use the same store. A request waits as
/// long as [`LockLayer::wait`] allows, by default not at all; then it fails with [`LockServiceError::Busy`].
///
/// The lock covers the inner service's future until it has given its response. A body that is streamed after that is not
/// covered. If the lock is lost in the meantime, the inner future is dropped and the request fails with
/// [`LockServiceError::Lock`].
///
/// The futures of its services must be polled inside a tokio runtime that has time enabled: outside of one they panic before
/// the inner service's future is polled.
#[derive(Clone)]
pub struct LockLayer<K> {
    registry: Arc<dyn LockRegistry>,
    key: K,
    options: LockOptions,
}

impl<K> LockLayer<K> {
    /// A layer that takes the lock of `key(&request)` in `registry`.
    pub fn new(registry: Arc<dyn LockRegistry>, key: K) -> Self {
        Self { registry, key, options: LockOptions::new().wait(Duration::ZERO) }
    }

    /// Lets a request wait this long for its lock.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options = self.options.wait(wait);
        self
    }

    /// Sets all options of the lock. Without [`LockOptions::wait`] a request waits for ever.
    #[must_use]
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self
    }
}

impl<K> fmt::Debug for LockLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("registry", &self.registry)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<S, K: Clone> Layer<S> for LockLayer<K> {
    type Service = LockService<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService { inner, layer: self.clone() }
    }
}

/// The service that [`LockLayer`] makes of another one.
#[derive(Clone)]
pub struct LockService<S, K> {
    inner: S,
    layer: LockLayer<K>,
}

impl<S: fmt::Debug, K> fmt::Debug for LockService<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

impl<S, K, R> Service<R> for LockService<S, K>
where
    S: Service<R> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send,
    S::Error: Send,
    R: Send + 'static,
    K: Fn(&R) -> String,
{
    type Response = S::Response;
    type Error = LockServiceError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(LockServiceError::Inner)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let lock = self.layer.registry.obtain(&(self.layer.key)(&request));
        let options = self.layer.options.clone();
        // The instance that is ready goes with the request; the clone that stays must become ready by itself.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            let Some(guard) = lock.lock_with(options).await? else {
                return Err(LockServiceError::Busy { key: lock.key().to_owned() });
            };
            let response = guard.protect(inner.call(request)).await?;
            // The work is done and was covered to its end, so its result stands. A release that fails is told to the
            // registry's observers, and repeated in the background if that can help; the lease ends in any case.
            let _ = guard.unlock().await;
            response.map_err(LockServiceError::Inner)
        })
    }
}

/// Why a request under a lock failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockServiceError<E> {
    /// Others held the lock until the wait was over. The request was not started.
    #[non_exhaustive]
    Busy {
        /// The key.
        key: String,
    },
    /// The lock could not be taken, and the request was not started; or it was lost ([`LockError::Lost`]), and the request
    /// was stopped in the middle.
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
            Self::Busy { key } => write!(f, "lock {key:?} is held by others"),
            Self::Lock(_) => f.write_str("the lock of the request failed"),
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
