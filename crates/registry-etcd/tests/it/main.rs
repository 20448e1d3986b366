//! etcd: the suite, fault workloads, peers and traffic, on real servers.

mod conformance;
mod connections;
mod faults;
mod many_waiters;
mod peers;
mod traffic;
mod upgraded_tokens;
mod values;
