//! The PostgreSQL store on real servers. Needs PostgreSQL and PgBouncer.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

#[path = "../servers/mod.rs"]
mod servers;
mod server;
mod fence;
mod listening;
mod lock_in;
mod opening;
mod row;
mod rows;
mod session;
mod spring;
mod failures;

use std::time::Duration;

use registry_jdbc::{SpringTable, SqlMode};
use server::ServerKind;
use servers::common;
use servers::conformance::run_conformance;

#[test]
fn a_server_passes_the_conformance_suite() {
    run_conformance(&ServerKind::Direct, &SqlMode::Lease, 422, 13);
}

#[test]
fn a_server_behind_pgbouncer_passes_the_conformance_suite() {
    run_conformance(&ServerKind::PgBouncer, &SqlMode::Lease, 422, 13);
}

#[test]
fn session_locks_pass_the_applicable_conformance_clauses() {
    run_conformance(&ServerKind::Direct, &SqlMode::Session, 246, 189);
}

#[test]
fn row_locks_pass_the_applicable_conformance_clauses() {
    run_conformance(&ServerKind::Direct, &SqlMode::Row, 277, 158);
}

#[test]
fn row_locks_behind_pgbouncer_pass_the_applicable_conformance_clauses() {
    run_conformance(&ServerKind::LargePgBouncer, &SqlMode::Row, 277, 158);
}

#[test]
fn a_table_of_spring_7_passes_the_conformance_suite() {
    run_conformance(&ServerKind::Direct, &SqlMode::Spring(SpringTable::v7()), 229, 206);
}

/// The clauses have leases shorter and longer than the time to live.
#[test]
fn a_table_of_spring_6_passes_the_conformance_suite() {
    run_conformance(
        &ServerKind::Direct,
        &SqlMode::Spring(SpringTable::v6(Duration::from_secs(10))),
        229,
        206,
    );
}
