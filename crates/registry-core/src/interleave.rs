//! The points at which the model checker may switch threads. In a normal build, std's mutex and an
//! empty function.
//!
//! Built with `--cfg shuttle`, the local half of a lock runs under shuttle, which can switch only
//! at its own mutex. [`interleaving_point`] marks the other places where threads interact. No point
//! may be inside an access to the table of local locks or under a std mutex. The checker does not
//! see those, so the next thread to request one would hang.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};

/// Another thread may run here.
#[cfg(not(shuttle))]
pub(crate) const fn interleaving_point() {}

/// Another thread may run here.
#[cfg(shuttle)]
pub(crate) fn interleaving_point() {
    use shuttle::sync::atomic::{AtomicBool, Ordering};

    // Every atomic access is a switching point. Unlike a yield, it does not demand another thread.
    AtomicBool::new(false).load(Ordering::SeqCst);
}
