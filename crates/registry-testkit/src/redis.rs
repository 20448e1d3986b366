//! Redis servers for tests: real ones, each on a port and in a folder of its own. Alone, under sentinels, as a cluster, or as
//! several that know nothing of each other. All of them end with the handle that started them.
//!
//! Nothing here speaks for the code under test: what the servers are asked, an operator would ask them.

// One server, and how it is asked.
mod connection;
mod options;
mod reply;
mod server;
// Several.
mod cluster;
mod quorum;
mod sentinel;

mod waiting;

pub use cluster::{Migration, RedisCluster};
pub use connection::RedisConnection;
pub use options::{SERVER_VARIABLE, ServerOptions};
pub use quorum::RedisQuorum;
pub use reply::Reply;
pub use sentinel::{SentinelOptions, SentinelSetup};
pub use server::RedisServer;
