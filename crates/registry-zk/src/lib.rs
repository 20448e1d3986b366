//! ZooKeeper as a lock store.
//!
//! Each lock is a node, and each contender creates an ephemeral sequential child of this node. The
//! servers number the children in order of arrival and delete a child when its session ends. The
//! child with the lowest number holds the lock. Each other contender watches the child before its
//! own child. Processes therefore acquire the lock in the order of their children. The callers of
//! one process wait in a local queue, and usually one of them has a child. If all claims are
//! exclusive, a release wakes exactly one waiter. Shared claims, upgradable claims and permits have
//! children in the same queue. A claim is granted if its mode is compatible with those of all
//! children before its own. The engine in `registry-core` implements local queues, the schedule of
//! renewals, and loss detection. It calls this backend through `LockBackend`.
//!
//! Up to about 1,000 locks of a backend share one session. One request renews the session with all
//! its locks. Beyond that number, the backend opens further sessions, because a session can watch a
//! limited number of nodes. [`Layout`] and [`Naming`] set the path and the name of a lock's nodes.
//! [`Layout`] contains this library's own form and the form of Apache Curator, which Spring
//! Integration uses. [`Naming`] contains the forms of Apache Curator and kazoo. Programs that use
//! the same root, namespace, layout and naming share the locks.
//!
//! The fencing token is the id of the transaction that created the holder's node (`czxid`). After
//! an upgrade and in Curator's semaphore, it is the id of a later transaction. Use [`Multi`] to
//! protect data in ZooKeeper. The writes of a multi request succeed only if the holder's node still
//! exists.
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
mod blockers;
mod conversion;
mod later_token;
mod semaphore;
mod units;
mod nodes;
mod queue_entry;
mod queue;
mod head_cache;
mod path;
mod node_data;
mod session;
mod connection;
mod session_validity;
mod timer;
mod inspect;
mod fence;
mod values;
mod diagnose;
mod error;
mod mutex;

pub use backend::ZkBackend;
pub use config::{Acl, STORE, ZkConfig};
pub use fence::{FenceError, FencedMulti, Multi, Written};
pub use layout::{Layout, Naming};
pub use session::SessionsExhausted;
pub use units::TooManyUnits;

// The README example must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
