//! Where the model checker may let another thread come in between. In a normal build: std's mutex, and nothing.
//!
//! Built with `--cfg shuttle`, the local half of a lock runs under shuttle, which knows its own mutex only. [`point`] marks
//! the other places where threads meet. No point may lie inside an access to the slot table or under a mutex of std's:
//! the checker does not see those, and the next thread to want them would hang.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};

/// Another thread may run here.
#[cfg(not(shuttle))]
pub(crate) const fn point() {}

/// Another thread may run here.
#[cfg(shuttle)]
pub(crate) fn point() {
    use shuttle::sync::atomic::{AtomicBool, Ordering};

    // Every access to an atomic is one; unlike a yield it does not ask for another thread.
    AtomicBool::new(false).load(Ordering::SeqCst);
}
