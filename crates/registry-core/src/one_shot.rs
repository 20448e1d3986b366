//! A one-shot event.
//!
//! All accesses are sequentially consistent, for the same reason as in
//! [`active_count`](crate::active_count).

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use crate::panic_safe::with_panic_safe_waker;

#[derive(Debug, Default)]
pub(crate) struct OneShotEvent {
    is_set: AtomicBool,
    was_set: Notify,
}

impl OneShotEvent {
    /// Sets the event. Returns true for the first call.
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
        // The notification is enabled before the check. Otherwise, a `set` between the two would be
        // missed.
        was_set.as_mut().enable();
        if !self.is_set() {
            with_panic_safe_waker(was_set).await;
        }
    }
}
