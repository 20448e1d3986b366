//! A count of active objects, and a wait until it is zero.
//!
//! All accesses are sequentially consistent. An acquisition increments the count and then reads the
//! closing flag. `close` sets the flag and then reads the count. At least one of these reads must
//! see the other side's write. The same applies to `leave` and `wait_until_zero`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::panic_safe::with_panic_safe_waker;

#[derive(Debug, Default)]
pub(crate) struct ActiveCount {
    count: AtomicUsize,
    /// A task waits or has waited. This flag is never reset, because tasks wait only in `close` and
    /// `idle` of a registry.
    has_waiter: AtomicBool,
    is_zero: Notify,
}

impl ActiveCount {
    pub(crate) fn enter(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn leave(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 && self.has_waiter.load(Ordering::SeqCst)
        {
            self.is_zero.notify_waiters();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    pub(crate) async fn wait_until_zero(&self) {
        self.has_waiter.store(true, Ordering::SeqCst);
        loop {
            let is_zero = self.is_zero.notified();
            tokio::pin!(is_zero);
            // The notification is enabled before the check. Otherwise, a `leave` between the two
            // would be missed.
            is_zero.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            with_panic_safe_waker(is_zero).await;
        }
    }
}
