//! Whole systems: real servers, several processes, and programs of other libraries that share locks
//! with this one. Needs the feature `server-tests`.

mod fairness;
mod many_callers;
mod modes;
mod peers;
mod rights;
mod secrets;
mod spring_tables;
mod undriven_runtime;
mod zookeeper_peers;
