//! The clauses of the suite: one function per promise, named after it. The function returns if the
//! promise holds, and panics at the failed check otherwise.
//!
//! A clause that calls the [`LockBackend`](registry_core::LockBackend) checks what the store
//! promises to the engine. A clause that uses a [`Registry`](registry_core::Registry) checks what
//! users are promised over that store. Two clients of one store stand for two processes.
//!
//! Backends run the clauses with [`conformance!`](crate::conformance) or with
//! [`assert_conformance_on_shared_servers`](crate::assert_conformance_on_shared_servers).
//!
//! # Cancel safety
//! Clauses run to completion. If the future of a clause is dropped, its locks end with their leases
//! at the latest.
#![expect(clippy::missing_panics_doc, reason = "a clause panics if its promise is broken")]

// The contract with the engine.
pub mod spi;
// Mutual exclusion and fencing.
pub mod exclusion;
pub mod fencing;
// Leases.
pub mod expiry;
pub mod release;
pub mod renewal;
// Waiting.
pub mod waiters;
pub mod waiting;
// Keys and holders.
pub mod inspect;
pub mod keys;
// Options and re-entry.
pub mod options;
pub mod reentry;
// Modes and the queue on request.
pub mod fair_queue;
pub mod permits;
pub mod shared;
pub mod upgradable;
// Several keys.
pub mod several_keys;
// Value blocks, and what is built on them.
pub mod election;
pub mod once;
pub mod values;
// Notification of losses.
pub mod loss;
// Hand-over inside a process.
pub mod handoff;
// Closing, dropping and cancelling.
pub mod close;
pub mod drop_and_cancel;
