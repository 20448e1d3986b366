// The README's examples need the default feature `config`.
#![cfg_attr(feature = "config", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "config"),
    doc = "Locks that exclude tasks, processes and hosts, behind one trait.\n\nFutures of registries, locks and guards must be \
           polled inside a tokio runtime that has time enabled: outside of one they panic where they would have to wait."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Options and their sources.
mod config;
#[cfg(feature = "config")]
mod environment;
#[cfg(feature = "config")]
mod file;
mod options;
mod layout;
mod value;
mod suggestion;
// Store URLs.
mod scheme;
mod store_url;
// From a configuration to a registry.
mod connect;
mod memory;
// Integrations.
#[cfg(feature = "tower")]
pub mod tower;

pub use config::{RegistryConfig, Setting};
pub use connect::connect;
pub use layout::Layout;
pub use options::Origin;
pub use store_url::redact_url;
pub use value::parse_duration;

/// Blocking facade for threads without async. Feature `blocking`.
#[cfg(feature = "blocking")]
pub use registry_core::blocking;
pub use registry_core::observe;
pub use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Capabilities, Claim, ClaimId, ClaimMode,
    CloseReport, ConfigError, DistributedLock, Executed, FencingToken, Finding, Grant,
    GuaranteeClass, Holder, InvalidKey, InvalidOption, Invalidations, Key, LockAdmin, LockBackend,
    LockError, LockEvent, LockGuard, LockOptions, LockRegistry, LockRegistryExt, LostReason,
    MemoryBackend, Observer, Owner, PassThroughBackend, Queueing, Reach, Registry, RegistryBuilder,
    Release, Renewal, RenewalPolicy, RoutingRegistry, Severity, WakeCheck,
};
#[cfg(feature = "etcd")]
pub use registry_etcd::{
    Committed as EtcdCommitted, EtcdBackend, EtcdConfig, Fence as EtcdFence,
    FenceError as EtcdFenceError, FencedTxn as EtcdFencedTxn, Layout as EtcdLayout,
};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use registry_jdbc::{
    Encryption as DatabaseEncryption, RowLocksExhausted, SpringTable, SqlMode,
};
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use registry_jdbc::{Fence, FenceError, sqlx};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use registry_jdbc::{LockIn, LockInError, TransactionLock};
#[cfg(feature = "mysql")]
pub use registry_jdbc::{MySqlBackend, MySqlConfig};
#[cfg(feature = "postgres")]
pub use registry_jdbc::{PostgresBackend, PostgresConfig};
#[cfg(feature = "sqlite")]
pub use registry_jdbc::{SqliteBackend, SqliteConfig};
#[cfg(feature = "redis")]
pub use registry_redis::{
    Fenced, FencedScript, FencedWrites, Layout as RedisLayout, Publish as RedisPublish,
    RedisBackend, RedisConfig, ScriptReply,
};
#[cfg(feature = "zk")]
pub use registry_zk::{
    Acl as ZkAcl, FenceError as ZkFenceError, FencedMulti, Layout as ZkLayout, Multi,
    Naming as ZkNaming, SessionsExhausted as ZkSessionsExhausted, Written, ZkBackend, ZkConfig,
};
