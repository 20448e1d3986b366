//! etcd as a lock store, version 3.4 and later.
//!
//! A lock is a queue of keys under its name. Each key is attached to its own lease, and the key
//! that was created first holds the lock. This is the recipe of `etcdctl lock` and of Go's
//! `concurrency.Mutex`. With [`Layout::Etcdctl`], programs that use this recipe contend for the
//! same locks. This store closes two gaps of the recipe. First, a grant requires a response that
//! shows the creation revision of the claim's key. This is the response to the transaction that
//! creates the key, or to a later read. Second, a release deletes the key only if it has this
//! revision.
//!
//! The crate contains its own client with the few messages that locks need. A build therefore
//! requires no protobuf compiler. The engine in `registry-core` implements waiting, the schedule of
//! renewals, and loss detection. It calls this backend through `LockBackend`.
//!
//! # Examples
//! ```no_run
//! use std::sync::Arc;
//! use registry_etcd::{EtcdBackend, EtcdConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = EtcdConfig::from_url("etcd://127.0.0.1:2379")?;
//! let backend = EtcdBackend::open(config).await?;
//! let registry = registry_core::Registry::builder(Arc::new(backend)).build()?;
//! # use registry_core::LockRegistry;
//! let guard = registry.obtain("orders/42").lock().await?;
//! guard.unlock().await?;
//! # Ok(())
//! # }
//! ```

mod config;
mod backend;
mod queue;
mod modes;
mod renew;
mod unary;
mod claims;
mod names;
mod record;
mod txn;
mod values;
mod lease;
mod pool;
mod tombstones;
mod keep_alive;
mod watcher;
mod client;
mod proto;
mod fenced;
mod diagnose;
mod error;

pub use backend::EtcdBackend;
pub use config::{EtcdConfig, Layout, STORE};
pub use fenced::{Committed, Fence, FenceError, FencedTxn};

// The README example must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
