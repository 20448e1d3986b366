//! Tests of the testkit.

mod check;
mod check_modes;
mod clock;
mod holder;
mod independent_checks;
mod process;
mod proxy;
mod recording_client;
mod redis;
mod seeds;
mod sql_servers;
mod zookeeper;
