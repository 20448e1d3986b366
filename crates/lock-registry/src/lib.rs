// The README's examples need the default feature `config`.
#![cfg_attr(feature = "config", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "config"),
    doc = "Locks for mutual exclusion between tasks, processes and hosts, behind one trait.\n\nFutures of registries, locks and guards must be \
           polled inside a tokio runtime that has time enabled. Outside such a runtime, they panic when they have to wait."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Options and their sources.
pub mod config;
#[cfg(feature = "config")]
mod environment;
#[cfg(feature = "config")]
mod file;
mod layout;
mod options;
mod suggestion;
// Store URLs.
mod scheme;
mod store_url;
mod redact;
// From a configuration to a registry.
mod connect;
mod memory;
// Integrations.
#[cfg(feature = "tower")]
pub mod tower;

pub use config::RegistryConfig;
pub use connect::connect;
#[cfg(feature = "macros")]
#[doc = include_str!("locked.md")]
pub use lock_registry_macros::locked;
/// Blocking API for threads that do not run async code. Feature `blocking`.
#[cfg(feature = "blocking")]
pub use registry_core::blocking;
pub use registry_core::observe;
pub use registry_core::{
    Capabilities, CloseReport, ConfigError, DistributedLock, FencingToken, GuaranteeClass, Holder,
    Key, LockError, LockGuard, LockOptions, LockRegistry, LockRegistryExt, LostReason, Owner,
    Reach, Registry, RoutingRegistry,
};

/// Further types that methods of registries, locks and guards accept or return:
///
/// - locks with several holders or keys (`read`, `semaphore`, `obtain_all`);
/// - the result of `execute_locked`;
/// - value blocks;
/// - lists of waiters.
pub mod modes {
    pub use registry_core::{
        ClaimMode, Executed, InvalidClaimMode, LockValue, MultiGuard, MultiLock, Semaphore,
        WaitingClaim,
    };
}

/// Jobs that run once per tick of a schedule, over all processes.
pub use registry_core::once;

/// Leader election.
pub use registry_core::election;

/// For authors of stores: the traits of a backend, their types, and the two backends without
/// storage, in-process and pass-through.
pub mod backend {
    pub use registry_core::{
        Attempt, BackendError, BackendErrorKind, BatchAttempt, Busy, Capabilities, Claim, ClaimId,
        ClaimMode, Finding, Grant, InvalidClaimId, InvalidKey, InvalidRecord, InvalidToken,
        InvalidationSet, Invalidations, LockAdmin, LockBackend, LockBatch, LockRecord,
        MemoryBackend, NewGrant, PassThroughBackend, Queueing, RecordChange, RecordEntry,
        RegistryBuilder, Release, Renewal, RenewalPolicy, Severity, ValueRead, ValueStore,
        ValueWrite, Waiter, WaiterStore, Waiters, WakeCheck,
    };
}

/// The store in etcd. Feature `etcd`.
#[cfg(feature = "etcd")]
pub mod etcd {
    pub use registry_etcd::{
        Committed, EtcdBackend, EtcdConfig, Fence, FenceError, FencedTxn, Layout,
    };
}

/// The store in MariaDB and MySQL. Feature `mysql`.
#[cfg(feature = "mysql")]
pub mod mysql {
    pub use registry_jdbc::{
        CreateSchema, Encryption, Fence, FenceError, LockIn, LockInError, MySqlBackend,
        MySqlConfig, RowLocksExhausted, RunIn, RunInError, SpringTable, SqlMode, TransactionLock,
        TransactionRun, sqlx,
    };
}

/// The store in PostgreSQL. Feature `postgres`.
#[cfg(feature = "postgres")]
pub mod postgres {
    pub use registry_jdbc::{
        CreateSchema, Encryption, Fence, FenceError, LockIn, LockInError, PostgresBackend,
        PostgresConfig, RowLocksExhausted, RunIn, RunInError, SpringTable, SqlMode, StatementMode,
        TransactionLock, TransactionRun, sqlx,
    };
}

/// The store in Redis or Valkey. Feature `redis`.
#[cfg(feature = "redis")]
pub mod redis {
    pub use registry_redis::{
        Fenced, FencedScript, FencedWrites, Fsync, Layout, Publish, RedisBackend, RedisConfig,
        ScriptReply,
    };
}

/// The store in an SQLite file. Feature `sqlite`.
#[cfg(feature = "sqlite")]
pub mod sqlite {
    pub use registry_jdbc::{
        Fence, FenceError, RunIn, RunInError, SqliteBackend, SqliteConfig, TransactionRun, sqlx,
    };
}

/// The store in ZooKeeper. Feature `zk`.
#[cfg(feature = "zk")]
pub mod zk {
    pub use registry_zk::{
        Acl, FenceError, FencedMulti, Layout, Multi, Naming, SessionsExhausted, TooManyUnits,
        Written, ZkBackend, ZkConfig,
    };
}
