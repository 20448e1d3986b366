//! The promises of lock-registry as a test suite that any backend can run.
//!
//! A backend's author implements [`Harness`] and [`Store`] for the store and calls [`conformance!`] in a test file.
//! Each promise becomes a test of its own, named as a statement; what a store cannot do is skipped by name and counted,
//! so that no backend passes by running nothing.
//!
//! Three more tools are here because backends and applications want them too: [`FaultyBackend`] puts faults between an
//! engine and its store, [`mod@sweep`] drops a future at every poll, and [`distant`] opens a client in another process.

// What a backend's author writes …
mod harness;
// … and calls …
mod suite;
// … and what becomes of it.
mod need;
mod run;
// The promises.
pub mod clauses;
mod lab;
mod list;
// Tools.
pub mod distant;
mod faulty;
pub mod sweep;

pub use faulty::{Fault, Faults, FaultyBackend, Operation};
pub use harness::{Clock, Harness, RemoteHolder, RemoteLock, Store};
pub use lab::Lab;
pub use need::Need;
pub use run::{Clause, check, clauses as all_clauses, run};
