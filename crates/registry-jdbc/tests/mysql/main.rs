//! The MariaDB and MySQL store on real servers. Needs MariaDB.
#![cfg(all(feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

mod lab;
mod shared;

mod fence;
mod opening;
mod rows;
mod trouble;

use shared::keeps_its_promises;

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises(210, 11);
}
