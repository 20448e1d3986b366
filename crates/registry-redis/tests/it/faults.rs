//! The guarantees of locks in Redis while servers stall, crash, lose data and fail over, and while
//! their clocks jump. Clients contend meanwhile, a recorder logs all their operations, and the
//! checkers of the testkit verify the history.
//!
//! A single server that keeps its data keeps all guarantees. Where a fault may break exclusion, the
//! test states the time window. Tokens grow and fenced writes are safe in any case.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]
#![expect(clippy::print_stdout, reason = "measurements are printed with --nocapture")]

mod standalone;
mod sentinel;
mod cluster;
mod quorum;
mod invalidations;
mod error_texts;
mod loss_rates;
mod paused_holder;

mod workload;
mod remote_client;
