//! Real etcd servers for tests, each on its own ports and in its own folder: single servers or a
//! cluster. Dropping the handle that started them kills them. They are independent of any etcd
//! server installed as a service.
//!
//! Nothing here uses the code under test: the testkit queries the servers with `etcdctl`.

// One server.
mod options;
mod server;
// Several servers.
mod cluster;

pub use cluster::EtcdCluster;
pub use options::{CTL_VARIABLE, Etcd, EtcdOptions, SERVER_VARIABLE};
pub use server::{EtcdMember, EtcdServer};
