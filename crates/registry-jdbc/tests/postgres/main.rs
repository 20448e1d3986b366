//! The PostgreSQL store on real servers. Needs PostgreSQL and PgBouncer.
#![cfg(all(feature = "postgres", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

mod fence;
mod lab;
mod listening;
mod lock_in;
mod opening;
mod row;
mod rows;
mod session;
mod shared;
mod spring;
mod trouble;

use std::time::Duration;

use registry_jdbc::SpringTable;
use shared::{Way, keeps_its_promises};

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises(Way::Directly, 221, 11);
}

#[test]
fn a_server_behind_pgbouncer_keeps_all_promises() {
    keeps_its_promises(Way::ThroughPgBouncer, 221, 11);
}

#[test]
fn locks_of_a_session_keep_the_promises_that_they_can() {
    keeps_its_promises(Way::BySession, 194, 38);
}

#[test]
fn locks_of_transactions_keep_the_promises_that_they_can() {
    keeps_its_promises(Way::ByRow, 218, 14);
}

#[test]
fn locks_of_transactions_behind_pgbouncer_keep_the_same_promises() {
    keeps_its_promises(Way::ByRowThroughPgBouncer, 218, 14);
}

#[test]
fn a_table_of_spring_7_keeps_all_promises() {
    keeps_its_promises(Way::AsSpring(SpringTable::v7()), 221, 11);
}

/// The clauses have leases shorter and longer than the time to live.
#[test]
fn a_table_of_spring_6_keeps_all_promises() {
    keeps_its_promises(Way::AsSpring(SpringTable::v6(Duration::from_secs(10))), 221, 11);
}
