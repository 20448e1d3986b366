//! What a backend's author writes: how to open a store under test, and what that store can be put through.
//! Holds no promise; see `clauses`. Called by `run` and `lab`.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{Claim, FencingToken, LockBackend};

/// Makes the stores that the suite runs against. Usually a unit struct.
#[async_trait]
pub trait Harness: Debug + Send + Sync {
    /// How time passes in the store.
    fn clock(&self) -> Clock {
        Clock::Real
    }

    /// Makes a fresh, empty store that shares nothing with any other: its own file, namespace or server.
    ///
    /// Called once per clause, inside that clause's own runtime. Panics when the store cannot be made: a store
    /// that is not there is a failure, never a skip.
    async fn store(&self) -> Box<dyn Store>;
}

/// How time passes in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a store either follows tokio's clock or it has its own"
)]
pub enum Clock {
    /// With tokio's clock, which the suite pauses: leases of minutes pass in no time. For stores inside this process.
    Paused,
    /// With a clock of its own. The suite waits for that clock and never asserts a tight time.
    Real,
}

/// One isolated store under test.
///
/// Only [`client`](Self::client) is required. Each other method that is left out makes the clauses that need it
/// impossible; the caller of [`conformance!`](crate::conformance) then has to say so in `without`.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// Opens a further client of this store, as another process would: with connections of its own.
    async fn client(&self) -> Arc<dyn LockBackend>;

    /// A short lease that suits the store. Clauses let it run out, so every millisecond is paid many times.
    fn lease(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// A lease that renewals keep alive even on a slow and loaded machine.
    fn renewed_lease(&self) -> Duration {
        Duration::from_secs(4)
    }

    /// Whether the clients answer as the store does. False when faults are put in on purpose: then only the
    /// clauses that run through the engine make sense.
    fn faithful(&self) -> bool {
        true
    }

    /// Whether a claim may be asked for and renewed through another client than the one that it was granted to. False where a grant lives and
    /// dies with its client.
    fn roams(&self) -> bool {
        true
    }

    /// Opens a client of the same store in another namespace.
    async fn stranger(&self) -> Option<Arc<dyn LockBackend>> {
        None
    }

    /// Stops the store and starts it again with its data. Clients opened before are closed and never used again.
    async fn restart(&self) -> bool {
        false
    }

    /// Ends the grant of `claim` behind its holder's back, in a store where another client cannot do that by a release. False if it can.
    async fn break_claim(&self, _claim: &Claim) -> bool {
        false
    }

    /// Loses all data, as a restart without persistence does. Clients opened before are closed and never used again.
    async fn wipe(&self) -> bool {
        false
    }

    /// Starts another process that locks through this store with registries of this `lease`.
    async fn remote(&self, _lease: Duration) -> Option<Box<dyn RemoteHolder>> {
        None
    }

    /// Called at the end of a clause that kept its promise.
    async fn close(&self) {}
}

/// Another process that locks when told to. Dropping it ends the process.
#[async_trait]
pub trait RemoteHolder: Debug + Send {
    /// Locks `key`, waiting at most `wait`.
    async fn lock(&mut self, key: &str, wait: Duration) -> RemoteLock;

    /// Unlocks `key`. True when the process was told that it had held the lock until then.
    async fn unlock(&mut self, key: &str) -> bool;

    /// Whether the process says that it holds `key`, without asking the store.
    async fn is_held(&mut self, key: &str) -> bool;

    /// Kills the process: no clean-up is run.
    async fn kill(&mut self);

    /// Stops the process in its tracks.
    async fn stop(&mut self);

    /// Lets a stopped process go on.
    async fn cont(&mut self);
}

/// What another process got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a lock is held or it is busy; trouble is a panic of the harness"
)]
pub enum RemoteLock {
    /// It holds the lock.
    Held {
        /// The token, from a store that fences.
        token: Option<FencingToken>,
    },
    /// Somebody else held it all the time.
    Busy,
}
