//! The points at which the model checker `shuttle` may switch threads. A normal build uses std's
//! mutex and an empty function.
//!
//! With `--cfg shuttle`, the local locks run under shuttle. Shuttle switches threads only at its
//! own mutex. [`interleaving_point`] marks the other places where threads interact.
//!
//! No switch may occur during an access to the table of local locks, or while a std mutex is
//! locked. Shuttle does not control these locks. It could switch to a thread that then blocks on
//! such a lock forever.

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

    // Shuttle may switch at every atomic access. A yield would force a switch.
    AtomicBool::new(false).load(Ordering::SeqCst);
}
