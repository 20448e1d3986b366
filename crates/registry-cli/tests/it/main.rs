//! Tests of the `lockreg` program, started as a process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

mod bad_input;
mod cron;
mod elect;
mod exclusion;
mod gate;
mod loss;
mod once;
mod output;
#[cfg(all(feature = "redis", feature = "server-tests"))]
mod redis;
mod run;
mod runbook;
mod secrets;
mod serve;
#[cfg(all(any(feature = "mysql", feature = "postgres"), feature = "server-tests"))]
mod sql;
mod terminal;
mod top;
mod watchdog;
#[cfg(all(feature = "zk", feature = "server-tests"))]
mod zk;
