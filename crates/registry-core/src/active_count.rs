//! An active count, and a wait until it is zero.
//!
//! All accesses are sequentially consistent. A caller increments the count and then reads the
//! closing flag; closing sets the flag and then reads the count. At least one of them must see the
//! other. The same applies to `leave` and `none_left`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::contained::shielded;

#[derive(Debug, Default)]
pub(crate) struct ActiveCount {
    alive: AtomicUsize,
    /// A task waits, or has waited. Never reset, because that happens only when a registry is
    /// closed or idle.
    watched: AtomicBool,
    none_left: Notify,
}

impl ActiveCount {
    pub(crate) fn enter(&self) {
        self.alive.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn leave(&self) {
        if self.alive.fetch_sub(1, Ordering::SeqCst) == 1 && self.watched.load(Ordering::SeqCst) {
            self.none_left.notify_waiters();
        }
    }

    pub(crate) fn alive(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }

    pub(crate) async fn none_left(&self) {
        self.watched.store(true, Ordering::SeqCst);
        loop {
            let none_left = self.none_left.notified();
            tokio::pin!(none_left);
            // Enabled before the check; the last `leave` in between would be missed otherwise.
            none_left.as_mut().enable();
            if self.alive() == 0 {
                return;
            }
            shielded(none_left).await;
        }
    }
}
