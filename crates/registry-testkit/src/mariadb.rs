//! Real MariaDB servers for tests, each on its own port and in its own folder. Dropping the handle
//! that started them kills them. They are independent of any MariaDB server installed as a service.
//!
//! Nothing here uses the code under test: the testkit queries the servers with the program
//! `mariadb`.

mod options;
mod server;

pub use options::{MariaDb, MariaDbOptions, SERVER_VARIABLE};
pub use server::MariaDbServer;
