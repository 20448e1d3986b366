//! Fault tests of the ZooKeeper store: servers stall, crash and lose their majority, connections
//! break and sessions end. Clients contend meanwhile, their events are recorded, and the testkit
//! checks the history.
//!
//! No fault breaks a promise. One exception: if an operator ends a session or deletes a node,
//! another client may acquire the lock before the holder is notified. Even then tokens grow and
//! fenced writes are safe.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]
#![expect(clippy::print_stdout, reason = "figures are printed for those who ask for them")]

mod ensemble;
mod leaders;
mod sessions;
mod network;
mod crowds;
mod sizes;
mod reconnect;
mod nodes;
mod writes;

mod elsewhere;
mod lab;
