//! The facade: configuration of each store by URL, environment, file and code, and the tower layer.

mod config;
mod tower;
mod tower_http;

#[cfg(feature = "server-tests")]
mod etcd;
#[cfg(feature = "server-tests")]
mod modes;
#[cfg(feature = "server-tests")]
mod mysql;
#[cfg(feature = "server-tests")]
mod postgres;
#[cfg(feature = "server-tests")]
mod redis;
#[cfg(feature = "server-tests")]
mod zk;
