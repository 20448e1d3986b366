//! The MariaDB and MySQL store on real servers. Needs MariaDB.
#![cfg(all(feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

mod lab;
mod shared;

mod faults;
mod fence;
mod opening;
mod rows;
mod spring;
mod trouble;

use std::time::Duration;

use registry_jdbc::SpringTable;
use shared::keeps_its_promises;

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises(None, 210, 11);
}

/// Nobody is told of releases there.
#[test]
fn a_table_of_spring_7_keeps_all_promises_but_those_of_wakes() {
    keeps_its_promises(Some(SpringTable::v7()), 205, 16);
}

/// Its clauses have leases shorter and longer than the time to live.
#[test]
fn a_table_of_spring_6_keeps_all_promises_but_those_of_wakes() {
    keeps_its_promises(Some(SpringTable::v6(Duration::from_secs(10))), 205, 16);
}
