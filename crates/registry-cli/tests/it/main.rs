//! Tests of the `lockreg` program, started as a process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

mod bad_input;
mod cron;
mod exclusion;
mod gate;
mod loss;
mod output;
#[cfg(feature = "redis")]
mod redis;
mod run;
mod secrets;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod sql;
mod terminal;
mod watchdog;
#[cfg(feature = "zk")]
mod zk;
