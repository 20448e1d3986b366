//! Real PostgreSQL servers for tests, each on its own port and in its own folder, with or without a
//! standby. Dropping the handle that started them kills them. They are independent of any
//! PostgreSQL server installed as a service.
//!
//! Nothing here uses the code under test: the testkit queries the servers with `psql`.

mod options;
mod server;

pub use options::{Postgres, PostgresOptions, SERVER_VARIABLE};
pub use server::PostgresServer;

pub(crate) use server::{psql, url};
