//! Traits that a backend's author implements: how to open a store under test, and what the suite
//! can do to that store. Contains no clause; see `clauses`. Called by `run` and `context`.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{Claim, FencingToken, LockBackend};

/// Creates the stores that the suite runs against. Usually a unit struct.
#[async_trait]
pub trait Harness: Debug + Send + Sync {
    /// Returns how time passes in the store. The default is [`Clock::Real`].
    fn clock(&self) -> Clock {
        Clock::Real
    }

    /// Creates an empty store that shares nothing with any other store: its own file, namespace or
    /// server.
    ///
    /// Called once per clause, inside the runtime of that clause, and once per
    /// [`Need`](crate::Need) by the test that checks `without`. The implementation must panic if it
    /// cannot create the store: an unavailable store fails the clause and never skips it.
    async fn store(&self) -> Box<dyn Store>;
}

/// How time passes in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a store either follows tokio's clock or it has its own"
)]
pub enum Clock {
    /// Tokio's clock, which the suite pauses, so that leases of minutes take almost no time. For
    /// stores inside this process.
    Paused,
    /// A clock of its own. The suite waits for that clock and never asserts a tight time limit.
    Real,
}

/// One isolated store under test.
///
/// Only [`client`](Self::client) is required. Some defaults declare that a feature is missing. You
/// then list that feature in `without` of [`conformance!`](crate::conformance).
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// Opens a further client of this store with connections of its own, as another process would.
    async fn client(&self) -> Arc<dyn LockBackend>;

    /// Returns a short lease for this store, by default 500 ms. Many clauses wait until such a
    /// lease expires, so a short one makes the suite faster.
    fn lease(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Returns a lease that renewals keep alive even on a slow and loaded machine, by default 4 s.
    fn renewable_lease(&self) -> Duration {
        Duration::from_secs(4)
    }

    /// Returns whether the clients return the store's responses unchanged. The default is true.
    /// Return false if the clients inject faults. Clauses that need [`Need::FaultFree`] are then
    /// skipped.
    ///
    /// [`Need::FaultFree`]: crate::Need::FaultFree
    fn fault_free(&self) -> bool {
        true
    }

    /// Returns whether a claim may be requested and renewed through a client other than the one
    /// that it was granted to. The default is true. Return false if a grant ends with its client.
    fn grants_outlive_client(&self) -> bool {
        true
    }

    /// Returns whether concurrent attempts may block each other, so that the store grants none of
    /// them. The default is false. Return true for a quorum.
    fn may_split_votes(&self) -> bool {
        false
    }

    /// Opens a client of the same store in another namespace. The default returns `None`.
    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        None
    }

    /// Stops the store and starts it again with its data. Returns false, the default, if the
    /// harness cannot do this. The suite closes all earlier clients before the call.
    async fn restart(&self) -> bool {
        false
    }

    /// Ends the grant of `claim` without informing its holder, in a store where no other client can
    /// release the claim. Returns false, the default, if another client can release it.
    async fn break_claim(&self, _claim: &Claim) -> bool {
        false
    }

    /// Deletes all data, as a restart without persistence does. Returns false, the default, if the
    /// harness cannot do this. The suite closes all earlier clients before the call.
    async fn wipe(&self) -> bool {
        false
    }

    /// Starts another process whose registries lock through this store with this `lease`. The
    /// default returns `None`.
    async fn remote(&self, _lease: Duration) -> Option<Box<dyn RemoteHolder>> {
        None
    }

    /// Cleans up at the end of a clause that passed. The default does nothing.
    async fn close(&self) {}
}

/// Another process that locks on request. Dropping it ends the process.
#[async_trait]
pub trait RemoteHolder: Debug + Send {
    /// Locks `key`, waiting at most `wait`.
    async fn lock(&mut self, key: &str, wait: Duration) -> RemoteLock;

    /// Unlocks `key`. Returns true if the process held the lock until then.
    async fn unlock(&mut self, key: &str) -> bool;

    /// Returns whether the process believes that it holds `key`, without a request to the store.
    async fn is_held(&mut self, key: &str) -> bool;

    /// Kills the process without any clean-up.
    async fn kill(&mut self);

    /// Pauses the process, as `SIGSTOP` does.
    async fn pause(&mut self);

    /// Resumes a paused process.
    async fn resume(&mut self);
}

/// The result of [`RemoteHolder::lock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a lock is held or busy; the harness panics on a store error"
)]
pub enum RemoteLock {
    /// The process holds the lock.
    Held {
        /// The fencing token, if the store has fencing.
        token: Option<FencingToken>,
    },
    /// Another client held the lock until the deadline.
    Busy,
}
