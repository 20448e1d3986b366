//! The engine, observed from outside: cancellation, loss, close, hand-over, panics and store errors
//! over the in-process store and SQLite. Needs no server.

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
