//! A count of things alive, and a way to wait until there are none.
//!
//! Sequentially consistent: closing relies on "I count, then look at the flag" meeting "I set the flag, then look at the
//! count"; and so do those who leave and those who wait for them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::contained::shielded;

#[derive(Debug, Default)]
pub(crate) struct Gauge {
    alive: AtomicUsize,
    /// Somebody has begun to wait. Never unset: that happens when a registry is closed.
    watched: AtomicBool,
    none_left: Notify,
}

impl Gauge {
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
            // Listening starts before the look, or the last one to leave could slip through in between.
            none_left.as_mut().enable();
            if self.alive() == 0 {
                return;
            }
            shielded(none_left).await;
        }
    }
}
