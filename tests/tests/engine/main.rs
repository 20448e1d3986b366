//! The engine, observed from outside, over the in-process store and SQLite: the promises to its
//! callers, cancellation, loss, close, hand-over, panics, store errors and observers. Needs no
//! server.

mod promises;
mod modes;
mod waiting;
mod renewals;
mod invalidations;
mod local_permit;
mod once_and_election;
mod observing;
mod user_code;
mod blocking;
mod bounds;
mod close;
mod close_under_load;
mod elections;
mod hand_over;
mod late_acquires;
mod loss;
mod owner_queue;
mod panicking;
mod panicking_backend;
mod renewal_failures;
mod runtime_gone;
mod store_errors;
mod sweep;
mod locked;
