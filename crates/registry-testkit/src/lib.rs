//! What the tests of lock-registry need beside the code under test. It judges locks; it knows no store.
//!
//! The modules stand in the order in which a test of faults uses them: somewhere to listen, something that breaks
//! the network, somebody else who holds the lock, a record of what happened, a verdict on the record.

// Faults.
pub mod ports;
pub mod proxy;
#[cfg(target_os = "linux")]
pub mod clock;
// Somebody else.
#[cfg(unix)]
pub mod process;

// Servers.
#[cfg(unix)]
mod kept;
#[cfg(unix)]
pub mod tls;
#[cfg(unix)]
pub mod redis;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod account;
#[cfg(target_os = "linux")]
mod asked;
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

#[cfg(unix)]
pub mod holder;
// What happened.
pub mod history;
pub mod witness;
// Whether it may.
pub mod check;
// All of it at once.
#[cfg(unix)]
pub mod contest;
// Around every test.
pub mod seed;

mod eventually;
mod shown;

pub use eventually::{NotInTime, Settled, eventually, within};
pub use shown::error_text;

// The examples of the README are compiled and run.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../README.md")]
struct Readme;
