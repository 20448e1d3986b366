//! The lock engine: one lock API over any store that implements [`LockBackend`].
//!
//! Applications use the crate `lock-registry`, which re-exports the public types that they need.
//! Backend authors implement [`LockBackend`]; the engine adds waiting, renewal, loss notification,
//! re-entry, hand-over and clean-up.
//!
//! A registry runs its background tasks in the tokio runtime in which it is built. The futures of
//! registries, locks and guards must be polled inside this or another tokio runtime with time
//! enabled. Outside such a runtime, they panic when they have to wait. A guard may be dropped
//! anywhere.
//!
//! Within a group, the modules are listed roughly in the order in which an acquisition uses them.

// Public API.
mod registry;
mod ext;
mod routing;
mod lock;
mod options;
// One acquisition.
mod acquire;
mod local_lock;
mod fairness;
mod permit_for_backend;
mod pending_claim;
mod registration;
mod call;
mod backend;
mod invalidation;
mod shared_backend;
mod grant;
mod lease;
mod guard;
mod conversion;
mod semaphore;
mod multi;
mod value;
mod waiting_list;
mod value_access;
pub mod once;
pub mod election;
mod min_hold;
mod release;
// Background tasks and shared infrastructure.
mod renewer;
mod schedule;
mod background;
mod stall_detector;
mod engine;
mod event;
mod observed;
mod active_count;
mod one_shot;
mod clock;
mod panic_safe;
mod interleave;
// Values.
mod key;
mod mode;
mod owner;
mod fencing;
mod capabilities;
mod error;
#[cfg_attr(
    not(lock_registry_mutants),
    expect(
        dead_code,
        unreachable_pub,
        reason = "used only in builds with `--cfg lock_registry_mutants`"
    )
)]
mod mutant;
// Stores.
mod memory;
mod pass_through;
mod queue_modes;
mod record;
mod waiters;
// Configuration of backends.
pub mod config;
// Adapters.
#[cfg(feature = "blocking")]
pub mod blocking;
pub mod observe;

pub use backend::{
    Attempt, BatchAttempt, Busy, Claim, ClaimId, Finding, Grant, Holder, InvalidClaimId, LockAdmin,
    LockBackend, LockBatch, Queueing, Release, Renewal, Severity, WakeCheck,
};
pub use capabilities::{Capabilities, GuaranteeClass, Reach, RenewalPolicy};
pub use clock::{Moment, sleep};
pub use error::{
    BackendError, BackendErrorKind, ConfigError, InvalidOption, LockError, LostReason,
};
pub use event::{LockEvent, Observer};
pub use ext::{Executed, LockRegistryExt};
pub use fencing::{FencingToken, InvalidToken};
pub use guard::LockGuard;
pub use invalidation::{InvalidationSet, Invalidations};
pub use key::{InvalidKey, Key};
pub use lock::DistributedLock;
pub use memory::MemoryBackend;
pub use mode::{ClaimMode, InvalidClaimMode};
pub use multi::{MultiGuard, MultiLock};
#[cfg(lock_registry_mutants)]
pub use mutant::{Mutant, switch_mutant};
pub use options::LockOptions;
pub use owner::Owner;
pub use pass_through::PassThroughBackend;
pub use queue_modes::{
    QueuePosition, QueuedEntry, UpgradePosition, granted_entries, queue_position, upgrade_position,
};
pub use record::{InvalidRecord, LockRecord, NewGrant, RecordChange, RecordEntry};
pub use registry::{CloseReport, LockRegistry, Registry, RegistryBuilder};
pub use routing::RoutingRegistry;
pub use semaphore::Semaphore;
pub use value::{LockValue, ValueRead, ValueStore, ValueWrite};
pub use waiters::{Waiter, Waiters};
pub use waiting_list::{WaiterStore, WaitingClaim};
