//! ZooKeeper as a lock store.
//!
//! A lock is a node, and those who contend for it are its children: ephemeral ones, which the servers number in the order of their arrival and remove with
//! the session that made them. The child with the smallest number holds the lock; each other one watches the one directly before. So
//! processes take turns in the order of these nodes, one caller of each at a time, and a release wakes exactly one. Waiting, renewal
//! and loss are not decided here: the engine in `registry-core` drives a backend through `LockBackend`.
//!
//! The locks of a backend share a session, which is kept alive as a whole: a held lock costs nothing more. Several thousand locks take further
//! sessions, because the end of a session must fit into one transaction. What a lock's node is called, and
//! where it is, is a [`Layout`] and a [`Naming`]: this library's own, or that of Apache Curator (and so of Spring Integration) or of kazoo, whose programs
//! then take turns with ours.
//!
//! The fencing token is the transaction in which the holder's node was made (`czxid`). What is kept in ZooKeeper itself is protected best by
//! [`Multi`]: writes that are made only if the lock's node is still there.
//!
//! # Examples
//! ```no_run
//! use std::sync::Arc;
//! use registry_zk::{ZkBackend, ZkConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = ZkConfig::new("zk1:2181,zk2:2181,zk3:2181")?;
//! let backend = ZkBackend::open(config).await?;
//! let registry = registry_core::Registry::builder(Arc::new(backend)).build()?;
//! # use registry_core::LockRegistry;
//! let guard = registry.obtain("orders/42").lock().await?;
//! guard.unlock().await?;
//! # Ok(())
//! # }
//! ```

mod config;
mod backend;
mod recipe;
mod place;
mod queue;
mod heads;
mod path;
mod node;
mod session;
mod connection;
mod proof;
mod inspect;
mod fence;
mod diagnose;
mod error;

pub use backend::ZkBackend;
pub use config::{Acl, Layout, Naming, ZkConfig};
pub use fence::{FenceError, FencedMulti, Multi, Written};
pub use session::SessionsExhausted;

// The example of the README is compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
