//! PostgreSQL servers for tests: real ones, each on a port and in a folder of its own, alone or with a standby. They end with the handle
//! that started them, and have nothing to do with a server that the machine may run.
//!
//! Nothing here speaks for the code under test: what the servers are asked, `psql` asks.

mod options;
mod server;

pub use options::{PostgresOptions, SERVER_VARIABLE};
pub use server::PostgresServer;

pub(crate) use server::url;
