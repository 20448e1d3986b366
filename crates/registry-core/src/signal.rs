//! Something that happens once, and those who wait for it.
//!
//! Sequentially consistent, for the same reason as a [gauge](crate::gauge).

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use crate::contained::shielded;

#[derive(Debug, Default)]
pub(crate) struct Signal {
    given: AtomicBool,
    told: Notify,
}

impl Signal {
    /// True for whoever does it first.
    pub(crate) fn give(&self) -> bool {
        let first = !self.given.swap(true, Ordering::SeqCst);
        if first {
            self.told.notify_waiters();
        }
        first
    }

    pub(crate) fn is_given(&self) -> bool {
        self.given.load(Ordering::SeqCst)
    }

    /// Returns when it is given.
    pub(crate) async fn given(&self) {
        let told = self.told.notified();
        tokio::pin!(told);
        // Listening starts before the look, or the signal could slip through in between.
        told.as_mut().enable();
        if !self.is_given() {
            shielded(told).await;
        }
    }
}
