//! ZooKeeper: the suite, fault workloads and traffic, on real servers.

mod conformance;
mod faults;
mod queue_traffic;
