//! Fault tests of the ZooKeeper store: servers stall, crash and lose their majority, connections
//! break and sessions end. Clients contend meanwhile, their events are recorded, and the testkit
//! checks the history.
//!
//! No fault breaks a guarantee. One exception: if an operator ends a session or deletes a node,
//! another client may acquire the lock before the holder is notified. Even then tokens grow and
//! fenced writes are safe.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]
#![expect(clippy::print_stdout, reason = "the measured values are shown with --nocapture")]

mod ensemble;
mod leaders;
mod sessions;
mod network;
mod watch_budget;
mod session_size;
mod reconnect;
mod nodes;
mod fenced_writes;
mod paused_holder;
mod modes;

mod other_process;
mod support;
