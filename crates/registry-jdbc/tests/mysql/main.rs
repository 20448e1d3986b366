//! The MariaDB and MySQL store on real servers. Needs MariaDB.
#![cfg(all(feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

mod lab;
mod shared;

mod fence;
mod lock_in;
mod opening;
mod row;
mod rows;
mod session;
mod spring;
mod trouble;

use std::time::Duration;

use registry_jdbc::SpringTable;
use registry_testkit::mariadb::MariaDbOptions;
use shared::{Way, keeps_its_promises, keeps_its_promises_on};

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises(Way::ByLease, 221, 11);
}

/// One node of a cluster, which all clients use.
#[test]
fn a_node_of_a_galera_cluster_keeps_all_promises() {
    let options = MariaDbOptions::new().galera_node().args(&["--max-connections=1000"]);
    keeps_its_promises_on(&options, Way::ByLease, 221, 11);
}

#[test]
fn locks_of_a_session_keep_the_promises_that_they_can() {
    keeps_its_promises(Way::BySession, 194, 38);
}

#[test]
fn locks_of_transactions_keep_the_promises_that_they_can() {
    keeps_its_promises(Way::ByRow, 218, 14);
}

/// There releases are not published.
#[test]
fn a_table_of_spring_7_keeps_all_promises_but_those_of_wakes() {
    keeps_its_promises(Way::AsSpring(SpringTable::v7()), 216, 16);
}

/// The clauses have leases shorter and longer than the time to live.
#[test]
fn a_table_of_spring_6_keeps_all_promises_but_those_of_wakes() {
    keeps_its_promises(Way::AsSpring(SpringTable::v6(Duration::from_secs(10))), 216, 16);
}
