//! What the locks in ZooKeeper are worth while servers stand still, crash and lose their majority, connections break and sessions end:
//! clients contend meanwhile, all that happens to them is recorded, and the checks of the testkit decide.
//!
//! No fault breaks a promise. Only where somebody ends a session from outside, or removes a node, others may have the lock before the
//! holder has heard of it; tokens grow and fenced writes are safe even then.
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
