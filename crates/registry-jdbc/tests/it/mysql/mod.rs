//! The MariaDB and MySQL store on real servers. Needs MariaDB.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

#[path = "../servers/mod.rs"]
#[cfg_attr(
    feature = "postgres",
    expect(clippy::duplicate_mod, reason = "these tests run on both servers")
)]
mod servers;
mod server;
mod fence;
mod lock_in;
mod opening;
mod row;
mod rows;
mod session;
mod spring;
mod failures;

use std::time::Duration;

use registry_jdbc::{SpringTable, SqlMode};
use registry_testkit::mariadb::MariaDbOptions;
use servers::common;
use servers::conformance::run_conformance;

#[test]
fn a_server_passes_the_conformance_suite() {
    run_conformance(&MariaDbOptions::new(), &SqlMode::Lease, 422, 13);
}

/// One node of a cluster, which all clients use.
#[test]
fn a_node_of_a_galera_cluster_passes_the_conformance_suite() {
    run_conformance(&MariaDbOptions::new().galera_node(), &SqlMode::Lease, 422, 13);
}

#[test]
fn session_locks_pass_the_applicable_conformance_clauses() {
    run_conformance(&MariaDbOptions::new(), &SqlMode::Session, 246, 189);
}

#[test]
fn row_locks_pass_the_applicable_conformance_clauses() {
    run_conformance(&MariaDbOptions::new(), &SqlMode::Row, 277, 158);
}

/// On these servers, the release of a Spring lock sends no wake-up.
#[test]
fn a_table_of_spring_7_passes_the_conformance_suite_without_wake_ups() {
    run_conformance(&MariaDbOptions::new(), &SqlMode::Spring(SpringTable::v7()), 224, 211);
}

/// The clauses have leases shorter and longer than the time to live.
#[test]
fn a_table_of_spring_6_passes_the_conformance_suite_without_wake_ups() {
    run_conformance(
        &MariaDbOptions::new(),
        &SqlMode::Spring(SpringTable::v6(Duration::from_secs(10))),
        224,
        211,
    );
}
