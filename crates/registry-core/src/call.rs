//! One call to the store that completes even if its caller is dropped.
//!
//! The caller polls the call directly, so a call usually needs no task and no channel. If the
//! caller is dropped before the response, the background releaser completes the call.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::FutureExt as _;

use crate::background::{BackgroundJob, BackgroundReleaser};
use crate::clock::sleep;
use crate::stall_detector::{MonitoredCell, MonitoredState, MonitoredWait};

pub(crate) type CallFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Polls a call once, without a [`MonitoredWait`]. Returns the call if it is not ready.
pub(crate) async fn first_poll<T>(mut call: CallFuture<T>) -> Result<T, CallFuture<T>> {
    match poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
        Poll::Ready(response) => Ok(response),
        Poll::Pending => Err(call),
    }
}

/// Splits a call for several claims into one call for each claim. `parts` is the number of claims.
/// Each part polls the whole call, so one part completes even if the others are dropped.
///
/// `missing` returns the response for a claim that has none in the backend's result.
pub(crate) fn split_by_claim<T>(
    call: impl Future<Output = Vec<T>> + Send + 'static,
    parts: usize,
    missing: fn() -> T,
) -> Vec<CallFuture<T>>
where
    T: Clone + Send + Sync + 'static,
{
    let shared = call.map(Arc::<[T]>::from).boxed().shared();
    let part = |index: usize| -> CallFuture<T> {
        let shared = shared.clone();
        Box::pin(async move { shared.await.get(index).cloned().unwrap_or_else(missing) })
    };
    (0..parts).map(part).collect()
}

/// Waits for `future` for at most `limit`.
///
/// A future that is ready at its first poll needs no timer. A timer can cost as much as a request
/// to a fast store. The future is polled only once per wake-up, because each poll has a cost.
pub(crate) async fn within<F: Future + Unpin>(limit: Duration, mut future: F) -> Option<F::Output> {
    if let Poll::Ready(response) = poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await {
        return Some(response);
    }
    let mut timer = pin!(sleep(limit));
    // The first poll above belongs to the current wake-up.
    let mut is_polled = true;
    poll_fn(|cx| {
        if !mem::take(&mut is_polled)
            && let Poll::Ready(response) = Pin::new(&mut future).poll(cx)
        {
            return Poll::Ready(Some(response));
        }
        timer.as_mut().poll(cx).map(|()| None)
    })
    .await
}

pub(crate) struct Call<T: Send + 'static> {
    future: Option<CallFuture<T>>,
    /// The caller has just polled the call, so the next poll is skipped.
    skips_next_poll: bool,
    /// The call releases a claim.
    releases_claim: bool,
    background: BackgroundReleaser,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        Self {
            future: Some(future),
            skips_next_poll: false,
            releases_claim: false,
            background: background.clone(),
        }
    }

    /// Creates a call from a future that has just returned `Pending` to [`first_poll`]. The next
    /// poll of the call skips the future. The caller must poll the call before its task yields, or
    /// a wake-up is lost.
    pub(crate) fn after_first_poll(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        let mut call = Self::new(background, future);
        call.skips_next_poll = true;
        call
    }

    /// Creates a call that releases a claim.
    pub(crate) fn releasing_claim(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        let mut call = Self::new(background, future);
        call.releases_claim = true;
        call
    }

    /// Creates a call whose response has arrived but is not handled yet.
    pub(crate) fn completed(background: &BackgroundReleaser, response: T) -> Self {
        Self::new(background, Box::pin(std::future::ready(response)))
    }

    /// Takes the future of a call in flight. Returns `None` if the call is complete.
    pub(crate) fn take_future(&mut self) -> Option<CallFuture<T>> {
        self.future.take()
    }

    /// Waits for the response for at most `limit`. After `limit`, the caller still has the call,
    /// and can poll it again. If the caller drops the call, the background releaser completes it.
    ///
    /// Only for callers that are certainly polled until they are ready.
    pub(crate) async fn response_within(&mut self, limit: Duration) -> Option<T> {
        within(limit, self).await
    }

    /// Waits for the response for at most `limit`. The call continues after `limit`.
    ///
    /// If the caller is not polled for `unpolled_max`, or for `limit` if that is shorter, the
    /// background releaser completes the call.
    pub(crate) async fn monitored_response_within(
        self,
        limit: Duration,
        unpolled_max: Duration,
    ) -> Option<T> {
        let background = self.background.clone();
        let mut monitored_wait =
            MonitoredWait::new(background.stall_detector(), unpolled_max.min(limit));
        let response = pin!(monitored_wait.run(self, |call, cx| Pin::new(call).poll(cx)));
        within(limit, response).await.map(|response| match response {
            Ok((_, response)) | Err(response) => response,
        })
    }

    fn complete_in_background(mut self, then: impl FnOnce(T) + Send + 'static) {
        if let Some(future) = self.future.take() {
            self.submit(Box::pin(async move { then(future.await) }));
        }
    }

    fn submit(&self, job: BackgroundJob) {
        if self.releases_claim {
            self.background.submit_release(job);
        } else {
            self.background.submit_call(job);
        }
    }
}

impl<T: Send + 'static> MonitoredState for Call<T> {
    type Replacement = T;

    fn take_over(self, cell: &Arc<MonitoredCell<Self>>) {
        let cell = Arc::clone(cell);
        self.complete_in_background(move |response| cell.resolve(response));
    }
}

impl<T: Send + 'static> Future for Call<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        if mem::take(&mut self.skips_next_poll) {
            return Poll::Pending;
        }
        let Some(future) = self.future.as_mut() else {
            // The call is complete. Like a fused future, it stays pending.
            return Poll::Pending;
        };
        let response = std::task::ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(response)
    }
}

impl<T: Send + 'static> Drop for Call<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.submit(Box::pin(async move {
                let _ = future.await;
            }));
        }
    }
}

impl<T: Send + 'static> std::fmt::Debug for Call<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("completed", &self.future.is_none()).finish_non_exhaustive()
    }
}
