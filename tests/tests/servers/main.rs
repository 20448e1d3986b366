//! Whole systems: real servers, several processes, and programs of other libraries that share locks
//! with this one. Needs the feature `server-tests`.

mod elections;
mod fairness;
mod jobs;
mod many_callers;
mod modes;
mod peers;
mod resource;
mod rights;
mod secrets;
mod spring_tables;
mod stores;
mod undriven_runtime;
mod zookeeper_peers;
