//! The engine of lock-registry: one trait in front, any store behind.
//!
//! Users of locks name the crate `lock-registry`, which re-exports what is here. Authors of stores implement
//! [`LockBackend`] and get waiting, renewal, loss notification, re-entrancy, hand-over and clean-up from the engine.
//!
//! A registry lives in the tokio runtime that it is built in. The futures of registries, locks and guards must be polled inside a
//! runtime that has time enabled, this one or another: outside of one they panic where they would have to wait. Guards may be
//! dropped anywhere.
//!
//! The modules are listed in the order in which one acquisition runs through them.

// What users see.
mod registry;
mod ext;
mod fairness;
mod routing;
mod lock;
mod options;
// One acquisition.
mod acquire;
mod slot;
mod local_turn;
mod claim;
mod call;
mod backend;
mod hints;
mod siblings;
mod held;
mod lease;
mod hold;
mod guard;
mod release;
// What works behind it.
mod keeper;
mod janitor;
mod watch;
mod engine;
mod event;
mod gauge;
mod signal;
mod clock;
mod contained;
mod interleave;
// Values.
mod key;
mod owner;
mod fencing;
mod capabilities;
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
// Stores.
mod memory;
mod pass_through;
// Around it.
#[cfg(feature = "blocking")]
pub mod blocking;
pub mod observe;

pub use backend::{
    Attempt, Busy, Claim, ClaimId, ClaimMode, Finding, Grant, Holder, LockBackend, Release,
    Renewal, Severity,
};
pub use capabilities::{Capabilities, GuaranteeClass, Reach};
pub use clock::Moment;
pub use error::{
    BackendError, BackendErrorKind, ConfigError, InvalidOption, LockError, LostReason,
};
pub use event::{LockEvent, Observer};
pub use ext::{Executed, LockRegistryExt};
pub use fencing::FencingToken;
pub use guard::LockGuard;
pub use hints::LossHints;
pub use key::{InvalidKey, Key};
pub use lock::DistributedLock;
pub use memory::MemoryBackend;
#[cfg(lock_registry_mutants)]
pub use mutant::{Mutant, switch_mutant};
pub use options::LockOptions;
pub use owner::Owner;
pub use pass_through::PassThroughBackend;
pub use registry::{CloseReport, LockRegistry, Registry, RegistryBuilder};
pub use routing::RoutingRegistry;
