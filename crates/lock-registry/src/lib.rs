#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

// In the order in which one call of `connect` runs through them.
mod config;
mod connect;
#[cfg(feature = "config")]
mod environment;
#[cfg(feature = "config")]
mod file;
mod layer;
mod memory;
mod nearest;
mod scheme;
mod store_url;
#[cfg(feature = "tower")]
pub mod tower;

pub use config::{RegistryConfig, Setting};
pub use connect::connect;
pub use layer::{Layout, Origin, parse_duration};
pub use store_url::redact_url;

/// The facade for threads that are not async. Feature `blocking`.
#[cfg(feature = "blocking")]
pub use registry_core::blocking;
pub use registry_core::observe;
pub use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Capabilities, Claim, ClaimId, ClaimMode,
    CloseReport, ConfigError, DistributedLock, Executed, FencingToken, Finding, Grant,
    GuaranteeClass, Holder, InvalidKey, InvalidOption, Key, LockBackend, LockError, LockEvent,
    LockGuard, LockOptions, LockRegistry, LockRegistryExt, LostReason, MemoryBackend, Observer,
    Owner, PassThroughBackend, Reach, Registry, RegistryBuilder, Release, Renewal, RoutingRegistry,
    Severity,
};
#[cfg(feature = "sqlite")]
pub use registry_jdbc::{Fence, FenceError, SqliteBackend, SqliteConfig, sqlx};
