//! Redis: the suite, fault workloads and error texts, on real servers.

mod conformance;
mod failures;
mod faults;
mod fenced;
mod invalid_config;
