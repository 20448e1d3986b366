//! Real Redis servers for tests, each on its own port and in its own folder: single servers,
//! sentinel setups, clusters and independent servers. Dropping the handle that started them kills
//! them.
//!
//! Nothing here uses the code under test: the testkit sends commands over its own connections.

// One server, and its connections.
mod connection;
mod options;
mod reply;
mod server;
// Several servers.
mod cluster;
mod quorum;
mod sentinel;

pub use cluster::{Migration, RedisCluster};
pub use connection::RedisConnection;
pub use options::{Redis, RedisOptions, SERVER_VARIABLE};
pub use quorum::RedisQuorum;
pub use reply::RedisReply;
pub use sentinel::{SentinelOptions, SentinelSetup};
pub use server::RedisServer;
