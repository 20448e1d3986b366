//! Locks in a SQLite file. Needs no server.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

mod conformance;
mod conformance_processes;
mod fence;
mod opening;

mod store;
