//! Tests of the engine through its public API.

mod engine;
mod invalidations;
mod local_permit;
mod modes;
mod observing;
mod once_and_election;
mod renewals;
mod user_code;
mod waiting;
