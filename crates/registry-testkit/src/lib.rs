//! Test support for lock-registry: servers, fault injection, helper processes, and recorded
//! histories with their checks. The library itself uses no store backend.
//!
//! The modules appear in the order of use in a fault test: ports, faults, processes, servers, lock
//! holders, recorded histories, checks.
//!
//! # Errors
//!
//! Unless a function says otherwise, it returns the error of the operating system, of a connection,
//! or of a server, with the server's output. A program that is not installed, a server or process
//! that is down, and a state that is not reached in time are errors as well.
//!
//! # Cancel safety
//!
//! Unless a function says otherwise, dropping its future kills the servers and processes that it
//! was starting for the first time, and ends every other wait. What was sent to a server or a
//! process before may still take effect, completely or in part.

#![expect(clippy::missing_errors_doc, reason = "stated once, above")]

// Faults.
pub mod ports;
pub mod proxy;
#[cfg(target_os = "linux")]
pub mod clock;
pub mod waiter_race;
// Other processes.
#[cfg(unix)]
pub mod process;

// Servers.
#[cfg(unix)]
mod managed_process;
#[cfg(unix)]
mod server_options;
#[cfg(unix)]
mod managed_server;
#[cfg(unix)]
mod server_user;
#[cfg(unix)]
pub mod tls;
#[cfg(unix)]
pub mod redis;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod run_command;
#[cfg(target_os = "linux")]
mod data_cache;
#[cfg(target_os = "linux")]
pub mod postgres;
#[cfg(target_os = "linux")]
pub mod pgbouncer;
#[cfg(target_os = "linux")]
pub mod mariadb;
#[cfg(target_os = "linux")]
pub mod zookeeper;
#[cfg(target_os = "linux")]
pub mod etcd;
#[cfg(target_os = "linux")]
pub mod prometheus;

#[cfg(unix)]
pub mod holder;
// Recorded histories.
pub mod history;
pub mod recording_client;
// Checks of a history.
pub mod check;
// All of the above in one test.
#[cfg(unix)]
pub mod workload;
// Seeds and replay of randomized tests.
pub mod seed;

mod eventually;
#[cfg(unix)]
mod retry;
mod error_text;

pub use error_text::{assert_acquire_error, error_text};
pub use eventually::{ConditionResult, TimeoutError, eventually, within};
#[cfg(unix)]
pub use managed_server::{ManagedServer, ServerDescription, ServerProgram};
#[cfg(unix)]
pub use server_options::ServerOptions;

// The examples of the README are compiled and run.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../README.md")]
struct Readme;
