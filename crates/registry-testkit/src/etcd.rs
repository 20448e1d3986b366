//! etcd servers for tests: real ones, each on ports and in a folder of its own, alone or as a cluster. They end with the handle that
//! started them, and have nothing to do with a server that the machine may run.
//!
//! Nothing here speaks for the code under test: the servers are asked by `etcdctl`.

// One server, and how it is asked.
mod options;
mod server;
// Several.
mod cluster;

pub use cluster::EtcdCluster;
pub use options::{CTL_VARIABLE, EtcdOptions, SERVER_VARIABLE};
pub use server::EtcdServer;
