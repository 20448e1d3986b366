//! A one-shot event.
//!
//! Sequentially consistent, for the same reason as [`ActiveCount`](crate::active_count).

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use crate::contained::with_panic_safe_waker;

#[derive(Debug, Default)]
pub(crate) struct OneShotEvent {
    is_set: AtomicBool,
    was_set: Notify,
}

impl OneShotEvent {
    /// Sets the event. Returns whether it was not set before.
    pub(crate) fn set(&self) -> bool {
        let is_first = !self.is_set.swap(true, Ordering::SeqCst);
        if is_first {
            self.was_set.notify_waiters();
        }
        is_first
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Waits until the event is set.
    pub(crate) async fn wait(&self) {
        let was_set = self.was_set.notified();
        tokio::pin!(was_set);
        // Enabled before the check; a `set` in between would be missed otherwise.
        was_set.as_mut().enable();
        if !self.is_set() {
            with_panic_safe_waker(was_set).await;
        }
    }
}
