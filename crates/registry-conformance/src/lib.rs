//! The promises of lock-registry as a test suite that any backend can run.
//!
//! To test a backend, implement [`Harness`] and [`Store`] for it and call [`conformance!`] in a
//! test file. Each promise is one clause, and each clause becomes a test whose name states the
//! promise. A clause that needs a feature that the store lacks becomes an ignored test. The number
//! of ignored tests is asserted, so that no backend passes by running nothing. For servers that
//! take seconds to start, call [`assert_conformance_on_shared_servers`] instead. One test then runs
//! the clauses on one set of servers. Only clauses that restart or wipe a server start their own.
//!
//! Backends and applications can also use three tools on their own. [`FaultyBackend`] injects
//! faults between an engine and its store, [`mod@sweep`] drops a future at every poll, and
//! [`remote`] opens a client in another process.

// Implemented by the author of a backend.
mod harness;
// Called by the author of a backend.
mod suite;
mod shared;
// Runs the clauses.
mod need;
mod run;
// The clauses.
pub mod clauses;
mod context;
mod list;
// Tools.
pub mod remote;
mod faulty;
pub mod sweep;

pub use context::TestContext;
pub use faulty::{Fault, Faults, FaultyBackend, Operation};
pub use harness::{Clock, Harness, RemoteHolder, RemoteLock, Store};
pub use need::Need;
pub use run::{Clause, check, clauses as all_clauses, run};
pub use shared::{SharedServers, assert_conformance_on_shared_servers};
