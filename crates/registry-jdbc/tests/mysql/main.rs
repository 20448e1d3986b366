//! The MariaDB and MySQL store on real servers. Needs MariaDB.
#![cfg(all(feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

mod lab;
mod shared;

mod fence;
mod lock_in;
mod opening;
mod rows;
mod session;
mod trouble;

use shared::{Way, keeps_its_promises};

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises(Way::ByLease, 210, 11);
}

#[test]
fn locks_of_a_session_keep_the_promises_that_they_can() {
    keeps_its_promises(Way::BySession, 186, 35);
}
