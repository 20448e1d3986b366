//! The promises, one function each, named as statements. A function that returns has found its promise kept; one that
//! panics has found it broken and says where.
//!
//! A clause either talks to the [`LockBackend`](registry_core::LockBackend) itself, which shows what the store promises
//! to the engine, or goes through [`Registry`](registry_core::Registry), which shows what users are promised over that
//! store. Two clients of one store stand for two processes.
//!
//! Backends run all of them with [`conformance!`](crate::conformance).
//!
//! # Cancel safety
//! Clauses are run to their end. One that is dropped leaves its locks to the store's leases.
#![expect(
    clippy::missing_panics_doc,
    reason = "a panic is how a clause says that its promise is broken"
)]

// The contract with the engine.
pub mod spi;
// One holder, told apart from those before it.
pub mod exclusion;
pub mod fencing;
// Its time.
pub mod expiry;
pub mod release;
pub mod renewal;
// Those who want the same.
pub mod waiting;
// What locks are called, and who tells of them.
pub mod inspect;
pub mod keys;
// What users can ask for.
pub mod options;
pub mod reentry;
// What users must know.
pub mod loss;
// What goes on inside a process.
pub mod handoff;
// Every end.
pub mod close;
pub mod drop_and_cancel;
