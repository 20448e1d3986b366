//! Real ZooKeeper servers for tests, each on its own ports and in its own folder: single servers or
//! an ensemble. Dropping the handle that started them kills them. They are independent of any
//! ZooKeeper server installed as a service.
//!
//! Nothing here uses the code under test: the testkit queries the servers with four-letter words.

// One server, and queries to it.
mod options;
mod server;
mod session;
// Several servers.
mod ensemble;

pub use ensemble::ZooKeeperEnsemble;
pub use options::{CLASSES_VARIABLE, JAVA_VARIABLE, ZooKeeper, ZooKeeperOptions};
pub use server::ZooKeeperServer;
pub use session::ClientStats;
