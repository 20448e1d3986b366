//! The guarantees of locks in etcd while members stall, crash and are partitioned, operators end
//! leases, and connections break. Clients contend meanwhile, a recorder logs all their operations,
//! and the checkers of the testkit verify the history.
//!
//! Under these faults, two guards of one key are never valid at the same time. One exception is a
//! leader that is paused for about a lease or longer. Even then tokens grow and fenced writes are
//! safe.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

mod cluster;
mod follower;
mod one;
mod paused_holder;
mod tombstones;

mod workload;
mod child_process;
