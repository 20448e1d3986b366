//! ZooKeeper as a lock store.
//!
//! Each lock is a node, and each contender creates an ephemeral sequential child of it. The servers
//! number the children in order of arrival and delete them when their session ends. The child with
//! the lowest number holds the lock; each other child watches its predecessor. Processes therefore
//! acquire the lock in the order of these nodes, with one node at a time per process. A release
//! wakes exactly one waiter. Waiting, renewal and loss are handled by the engine in
//! `registry-core`, which drives a backend through `LockBackend`.
//!
//! All locks of a backend share one session, which is kept alive as a whole, so a held lock needs
//! no request of its own. Several thousand locks need further sessions, because the end of a
//! session must fit into one transaction. [`Layout`] and [`Naming`] set the path and the name of a
//! lock's nodes. Both have this library's own form and the form of Apache Curator (and so of Spring
//! Integration); [`Naming`] also has that of kazoo. Programs that use the same form share the
//! locks.
//!
//! The fencing token is the transaction that created the holder's node (`czxid`). Use [`Multi`] to
//! protect data in ZooKeeper itself: its writes succeed only if the lock's node still exists.
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
mod layout;
mod backend;
mod recipe;
mod queue_entry;
mod queue;
mod head_cache;
mod path;
mod node_data;
mod session;
mod connection;
mod session_validity;
mod inspect;
mod fence;
mod diagnose;
mod error;
mod mutex;

pub use backend::ZkBackend;
pub use config::{Acl, STORE, ZkConfig};
pub use fence::{FenceError, FencedMulti, Multi, Written};
pub use layout::{Layout, Naming};
pub use session::SessionsExhausted;

// The example of the README is compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
