//! One call to the store that is carried through even if its caller goes away.
//!
//! The caller polls the call in place, so the normal path costs no task and no channel. If the caller is dropped in between,
//! the janitor polls it to its end.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::janitor::Janitor;

pub(crate) type CallFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(crate) struct Call<T: Send + 'static> {
    future: Option<CallFuture<T>>,
    janitor: Janitor,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(janitor: &Janitor, future: CallFuture<T>) -> Self {
        Self { future: Some(future), janitor: janitor.clone() }
    }

    /// A call whose answer is already there, not looked at yet.
    pub(crate) fn answered(janitor: &Janitor, answer: T) -> Self {
        Self::new(janitor, Box::pin(std::future::ready(answer)))
    }

    /// Takes the call back in mid-flight; `None` when it has been answered.
    pub(crate) fn take(&mut self) -> Option<CallFuture<T>> {
        self.future.take()
    }

    /// Waits for the answer for at most `limit`. The call itself goes on either way.
    pub(crate) async fn answer_within(&mut self, limit: Duration) -> Option<T> {
        // Stores that answer at once need no timer, and setting one up costs as much as they do.
        if let Poll::Ready(answer) = poll_fn(|cx| Poll::Ready(Pin::new(&mut *self).poll(cx))).await
        {
            return Some(answer);
        }
        tokio::time::timeout(limit, self).await.ok()
    }
}

impl<T: Send + 'static> Future for Call<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(future) = self.future.as_mut() else {
            // Answered already. Pending is what a fused future says.
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
            self.janitor.hand_over(Box::pin(async move {
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
