//! One call to the store that completes even if its caller is dropped.
//!
//! The caller polls the call directly, so the normal case needs no task and no channel. If the
//! caller is dropped before the response, the background releaser completes the call.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::background::{BackgroundReleaser, Job};
use crate::clock::sleep;
use crate::watch::{Parked, Suspended, Suspension};

pub(crate) type CallFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Polls a call once, without a suspension. Returns the call if it is not ready.
pub(crate) async fn first_poll<T>(mut call: CallFuture<T>) -> Result<T, CallFuture<T>> {
    match poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
        Poll::Ready(answer) => Ok(answer),
        Poll::Pending => Err(call),
    }
}

/// Waits for `future` for at most `limit`.
///
/// A future that is ready at its first poll needs no timer, which can cost as much as a request to
/// a fast store. The future is polled once per wake-up, because a second poll costs as much again.
pub(crate) async fn within<F: Future + Unpin>(limit: Duration, mut future: F) -> Option<F::Output> {
    if let Poll::Ready(answer) = poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await {
        return Some(answer);
    }
    let mut end = pin!(sleep(limit));
    // This task has just polled the future.
    let mut polled = true;
    poll_fn(|cx| {
        if !mem::take(&mut polled)
            && let Poll::Ready(answer) = Pin::new(&mut future).poll(cx)
        {
            return Poll::Ready(Some(answer));
        }
        end.as_mut().poll(cx).map(|()| None)
    })
    .await
}

pub(crate) struct Call<T: Send + 'static> {
    future: Option<CallFuture<T>>,
    /// The call was polled just before, so the next poll is skipped.
    polled: bool,
    /// The call releases a claim.
    releases_claim: bool,
    background: BackgroundReleaser,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        Self {
            future: Some(future),
            polled: false,
            releases_claim: false,
            background: background.clone(),
        }
    }

    /// Creates a call that was not ready at its [first poll](first_poll). Its next poll must be
    /// within the same poll of the same task.
    pub(crate) fn polled(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        let mut call = Self::new(background, future);
        call.polled = true;
        call
    }

    /// Creates a call that releases a claim.
    pub(crate) fn releasing_claim(background: &BackgroundReleaser, future: CallFuture<T>) -> Self {
        let mut call = Self::new(background, future);
        call.releases_claim = true;
        call
    }

    /// Creates a call whose response is known but not handled yet.
    pub(crate) fn answered(background: &BackgroundReleaser, answer: T) -> Self {
        Self::new(background, Box::pin(std::future::ready(answer)))
    }

    /// Takes the future of a call in flight. Returns `None` if the call is complete.
    pub(crate) fn take(&mut self) -> Option<CallFuture<T>> {
        self.future.take()
    }

    /// Waits for the response for at most `limit`. The call continues in any case. For callers that
    /// are polled until they are ready.
    pub(crate) async fn answer_within(&mut self, limit: Duration) -> Option<T> {
        within(limit, self).await
    }

    /// Waits for the response for at most `limit`. The call continues in any case, even if the
    /// caller is not polled any more. After `patience` without a poll, the background releaser
    /// completes the call.
    pub(crate) async fn answer_to_caller_within(
        self,
        limit: Duration,
        patience: Duration,
    ) -> Option<T> {
        let background = self.background.clone();
        let mut suspension = Suspension::new(background.watch(), patience.min(limit));
        let answer = pin!(suspension.run(self, |call, cx| Pin::new(call).poll(cx)));
        within(limit, answer).await.map(|answer| match answer {
            Ok((_, answer)) | Err(answer) => answer,
        })
    }

    fn go_on(mut self, then: impl FnOnce(T) + Send + 'static) {
        if let Some(future) = self.future.take() {
            self.leave(Box::pin(async move { then(future.await) }));
        }
    }

    fn leave(&self, job: Job) {
        if self.releases_claim {
            self.background.submit_release(job);
        } else {
            self.background.finish(job);
        }
    }
}

impl<T: Send + 'static> Parked for Call<T> {
    type Replacement = T;

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        let cell = Arc::clone(cell);
        self.go_on(move |answer| cell.leave(answer));
    }
}

impl<T: Send + 'static> Future for Call<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        if mem::take(&mut self.polled) {
            return Poll::Pending;
        }
        let Some(future) = self.future.as_mut() else {
            // Already complete; returns `Pending` as a fused future may.
            return Poll::Pending;
        };
        let answer = std::task::ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(answer)
    }
}

impl<T: Send + 'static> Drop for Call<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.leave(Box::pin(async move {
                let _ = future.await;
            }));
        }
    }
}

impl<T: Send + 'static> std::fmt::Debug for Call<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("answered", &self.future.is_none()).finish_non_exhaustive()
    }
}
