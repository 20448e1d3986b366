//! ZooKeeper servers for tests: real ones, each on ports and in a folder of its own, alone or as an ensemble. They end with the handle
//! that started them, and have nothing to do with a server that the machine may run.
//!
//! Nothing here speaks for the code under test: what the servers are asked are the four-letter words of operators.

// One server, and how it is asked.
mod options;
mod server;
mod session;
// Several.
mod ensemble;

pub use ensemble::ZooKeeperEnsemble;
pub use options::{CLASSES_VARIABLE, JAVA_VARIABLE, ZooKeeperOptions};
pub use server::ZooKeeperServer;
pub use session::ClientOfServer;
