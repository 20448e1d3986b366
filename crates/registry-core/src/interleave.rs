//! The points at which the model checker may switch threads. In a normal build, std's mutex and an
//! empty function.
//!
//! Built with `--cfg shuttle`, the local half of a lock runs under shuttle, which can switch only
//! at its own mutex. [`interleaving_point`] marks the other places where threads interact.
//!
//! No such point may be inside an access to the table of local locks or under a std mutex. Shuttle
//! does not know those locks: it would switch to a thread that then blocks on one of them forever.

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

    // Shuttle may switch at every atomic access. Unlike a yield, this does not force a switch.
    AtomicBool::new(false).load(Ordering::SeqCst);
}
