//! Redis and Valkey as a lock store.
//!
//! By default, an exclusive lock is a string key with an expiry. Its value holds the claim, the
//! fencing token, the time of acquisition and a readable label. A single script makes each change
//! of a lock on a server. The server executes the script atomically, so a failed acquisition leaves
//! no partial record. A published message wakes the waiters. This crate does not contain local
//! queues, renewal schedules, hand-over or loss detection. The engine in `registry-core` implements
//! them and drives a backend through `LockBackend`.
//!
//! The store is a single server, the master that sentinels report, a cluster, or a quorum of
//! independent masters; see [`RedisConfig`]. A [`Layout`] determines the keys and values of a lock:
//! this library's own format, the format of Spring Integration, or the format of Redisson. With the
//! layout of another library, programs that use that library contend for the same locks.
//!
//! # Examples
//! ```no_run
//! use std::sync::Arc;
//! use registry_redis::{RedisBackend, RedisConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = RedisConfig::from_url("redis://127.0.0.1:6379/0")?;
//! let backend = RedisBackend::open(config).await?;
//! let registry = registry_core::Registry::builder(Arc::new(backend)).build()?;
//! # use registry_core::LockRegistry;
//! let guard = registry.obtain("orders/42").lock().await?;
//! guard.unlock().await?;
//! # Ok(())
//! # }
//! ```

mod config;
mod backend;
mod quorum;
mod store;
mod names;
mod slot;
mod script;
mod multi_claim;
mod values;
mod waiting;
mod record;
mod connections;
mod listener;
mod invalidations;
mod fenced;
mod diagnose;
mod error;
#[cfg_attr(
    not(lock_registry_mutants),
    expect(
        dead_code,
        unreachable_pub,
        reason = "public only in the builds that prove the harness"
    )
)]
mod mutant;

pub use backend::RedisBackend;
pub use config::{Fsync, Layout, Publish, RedisConfig, STORE};
pub use fenced::{Fenced, FencedScript, FencedWrites, ScriptReply};
#[cfg(lock_registry_mutants)]
pub use mutant::{Mutant, switch_mutant};

// The README example must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
