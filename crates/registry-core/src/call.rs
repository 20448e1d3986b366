//! One call to the store that is carried through even if its caller goes away.
//!
//! The caller polls the call in place, so the normal path costs no task and no channel. If the caller is dropped in between,
//! the janitor polls it to its end.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::clock::sleep;
use crate::janitor::{Janitor, Job};
use crate::watch::{Parked, Suspended, Suspension};

pub(crate) type CallFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Polls a call once, without a suspension, and gives it back if it has no answer yet.
pub(crate) async fn first_poll<T>(mut call: CallFuture<T>) -> Result<T, CallFuture<T>> {
    match poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
        Poll::Ready(answer) => Ok(answer),
        Poll::Pending => Err(call),
    }
}

/// Waits for `future` for at most `limit`. A future that answers at its first poll needs no timer, and setting one up costs as much as
/// many a store; and polling twice for one wake-up costs as much again.
pub(crate) async fn within<F: Future + Unpin>(limit: Duration, mut future: F) -> Option<F::Output> {
    if let Poll::Ready(answer) = poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await {
        return Some(answer);
    }
    let mut end = pin!(sleep(limit));
    // Just now, by this very task.
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
    /// The next poll has nothing to find out.
    polled: bool,
    /// It gives a claim back.
    gives_back: bool,
    janitor: Janitor,
}

impl<T: Send + 'static> Call<T> {
    pub(crate) fn new(janitor: &Janitor, future: CallFuture<T>) -> Self {
        Self { future: Some(future), polled: false, gives_back: false, janitor: janitor.clone() }
    }

    /// A call that had no answer at its [first poll](first_poll), to be polled next within the same poll of the same task.
    pub(crate) fn polled(janitor: &Janitor, future: CallFuture<T>) -> Self {
        let mut call = Self::new(janitor, future);
        call.polled = true;
        call
    }

    /// A call that gives a claim back.
    pub(crate) fn giving_back(janitor: &Janitor, future: CallFuture<T>) -> Self {
        let mut call = Self::new(janitor, future);
        call.gives_back = true;
        call
    }

    /// A call whose answer is already there, not looked at yet.
    pub(crate) fn answered(janitor: &Janitor, answer: T) -> Self {
        Self::new(janitor, Box::pin(std::future::ready(answer)))
    }

    /// Takes the call back in mid-flight; `None` when it has been answered.
    pub(crate) fn take(&mut self) -> Option<CallFuture<T>> {
        self.future.take()
    }

    /// Waits for the answer for at most `limit`. The call itself goes on either way. For callers that are polled until they are done.
    pub(crate) async fn answer_within(&mut self, limit: Duration) -> Option<T> {
        within(limit, self).await
    }

    /// Waits for the answer for at most `limit`. The call itself goes on either way, and also if the caller stops polling: a
    /// call that is not polled for its `patience` is finished in the background.
    pub(crate) async fn answer_to_caller_within(
        self,
        limit: Duration,
        patience: Duration,
    ) -> Option<T> {
        let janitor = self.janitor.clone();
        let mut suspension = Suspension::new(janitor.watch(), patience.min(limit));
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
        if self.gives_back {
            self.janitor.hand_over(job);
        } else {
            self.janitor.finish(job);
        }
    }
}

impl<T: Send + 'static> Parked for Call<T> {
    type Left = T;

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
