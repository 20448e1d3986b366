//! Redis and Valkey as a lock store.
//!
//! A lock is a string key with an expiry: the claim that holds it, its fencing token, since when, and a label for people. Every
//! operation is one script, so the server decides and no half-done acquisition is left to clean up. Waiters are woken by a
//! message. Waiting, renewal, hand-over and loss are not decided here: the engine in `registry-core` drives a backend through
//! `LockBackend`.
//!
//! So far there is one topology: a single server, or whatever answers like one.
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
mod names;
mod script;
mod record;
mod link;
mod ears;
mod diagnose;
mod error;

pub use backend::RedisBackend;
pub use config::RedisConfig;
