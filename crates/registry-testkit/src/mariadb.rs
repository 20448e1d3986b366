//! MariaDB servers for tests: real ones, each on a port and in a folder of its own. They end with the handle that started them, and have
//! nothing to do with a server that the machine may run.
//!
//! Nothing here speaks for the code under test: what the servers are asked, the program `mariadb` asks.

mod options;
mod server;

pub use options::{MariaDbOptions, SERVER_VARIABLE};
pub use server::MariaDbServer;
