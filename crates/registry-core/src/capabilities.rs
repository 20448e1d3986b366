//! The functions and promises of a store, as data. Programs check them, `lockreg doctor` prints
//! them, and the conformance suite skips the tests of missing capabilities.

use std::fmt;
use std::time::Duration;

use crate::mode::ClaimMode;

/// Under which faults a store keeps its two promises: one holder per lock, and safe fenced writes.
///
/// The classes are ordered: `Durable` promises most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum GuaranteeClass {
    /// The store grants every claim and excludes no other client. Only the pass-through store has
    /// this class.
    None,
    /// There is one holder as long as no failover, data loss or jump of the store's clock happens.
    /// Fenced writes are safe as long as the tokens survive.
    BestEffort,
    /// There is one holder, and fenced writes are safe, as long as the store keeps its data and its
    /// wall clock does not jump.
    Volatile,
    /// Fenced writes are safe under every fault that the store's data survives. There is one holder
    /// as long as clocks run at about the same *rate*.
    Durable,
}

impl fmt::Display for GuaranteeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Volatile => "volatile",
            Self::Durable => "durable",
        })
    }
}

/// Which callers a lock of this store excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Reach {
    /// Tasks and threads of this process.
    Process,
    /// Processes of this host.
    Host,
    /// Processes on all hosts that reach the store.
    Network,
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "this process",
            Self::Host => "this host",
            Self::Network => "all hosts that reach the store",
        })
    }
}

/// The functions and promises of a store.
///
/// A backend builds this value with [`Capabilities::new`] and the `with_…` methods.
/// [`LockRegistry::capabilities`](crate::LockRegistry::capabilities) returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capabilities {
    /// The store's name, as in `memory`, `sqlite`, `redis`.
    pub store: &'static str,
    /// The guarantee class.
    pub class: GuaranteeClass,
    /// Which callers a lock excludes.
    pub reach: Reach,
    /// The [`FencingToken`](crate::FencingToken) of each grant is larger than those of all earlier
    /// grants of the key, by any client. If false, tokens of different processes are not
    /// comparable, so they do not protect a resource.
    pub fencing: bool,
    /// The store has a queue of claims, across processes. A registry queues one claim per key at a
    /// time. Its other callers wait locally, so processes take turns.
    pub fair: bool,
    /// Waiters of all processes queue in the store if they [request](crate::LockOptions::fair) it.
    pub fair_on_request: bool,
    /// The store wakes a waiter when the lock may be free. If false, waiters poll.
    pub wakes: bool,
    /// A holder is notified at once when another client removes the record of its lock. If false,
    /// it is notified at its next renewal.
    pub reports_invalidations: bool,
    /// The store grants [shared](ClaimMode::Shared) claims.
    pub shared: bool,
    /// The store grants [upgradable](ClaimMode::Upgradable) claims, and converts claims between
    /// exclusive, upgradable and shared.
    pub upgradable: bool,
    /// The store grants [permits](ClaimMode::Permits).
    pub permits: bool,
    /// The store keeps a [value block](crate::LockValue) for each key.
    pub values: bool,
    /// [`DistributedLock::waiters`](crate::DistributedLock::waiters) and
    /// [`Registry::list_waiters`](crate::Registry::list_waiters) work.
    pub waiters: bool,
    /// The poll interval of other programs that share these records, if they poll. If it is set,
    /// the engine delays its attempts for a contended lock longer. These programs can then find the
    /// lock free.
    pub peer_poll: Option<Duration>,
    /// The store keeps the holder's label with a grant, and returns it.
    pub labels: bool,
    /// [`DistributedLock::holders`](crate::DistributedLock::holders),
    /// [`Registry::list`](crate::Registry::list) and
    /// [`Registry::force_release`](crate::Registry::force_release) work.
    pub inspect: bool,
    /// The shortest lease that the store accepts.
    pub lease_min: Duration,
    /// The longest lease that the store accepts.
    pub lease_max: Duration,
    /// How the engine renews claims. The engine reads this policy again at each grant and before
    /// each round of renewals. All other values are read only when a registry is built.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub renewal: RenewalPolicy,
}

/// How the engine renews the claims of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RenewalPolicy {
    /// The maximum number of claims in one call of
    /// [`LockBackend::renew`](crate::LockBackend::renew), at least one. The default is 100.
    ///
    /// A larger number means fewer but longer calls, and a longer call delays other requests to the
    /// store. A call with free space also renews claims that are due soon.
    pub batch_max: usize,
    /// Renewing one claim of a shard costs as much as renewing all of them. The default is false.
    ///
    /// If true, a renewal also renews other claims of the shard, as far as
    /// [`batch_max`](Self::batch_max) permits. It does not renew claims whose last renewal is less
    /// than a twelfth of their lease ago.
    pub renews_whole_shard: bool,
    /// The time from a grant to the first verification of its claim, if the claim is still held. A
    /// verification is an early renewal. The default, `None`, adds no verification to the renewals.
    ///
    /// Set it for a store that [reports](crate::LockBackend::subscribe) only changes to records
    /// that this client has read. This option is for stores in which a renewal counts as such a
    /// read and an acquisition does not. Because of the delay, a lock that is held only briefly
    /// causes no extra request.
    pub verify_after: Option<Duration>,
}

impl RenewalPolicy {
    /// Returns the policy of a store that renews up to 100 claims in one call, each at its own
    /// time.
    #[must_use]
    pub const fn new() -> Self {
        Self { batch_max: 100, renews_whole_shard: false, verify_after: None }
    }

    /// Sets [`batch_max`](Self::batch_max). Zero counts as one.
    #[must_use]
    pub const fn with_batch_max(mut self, claims: usize) -> Self {
        self.batch_max = if claims == 0 { 1 } else { claims };
        self
    }

    /// Sets [`renews_whole_shard`](Self::renews_whole_shard): all claims of a shard are renewed
    /// together.
    #[must_use]
    pub const fn with_whole_shard(mut self) -> Self {
        self.renews_whole_shard = true;
        self
    }

    /// Sets [`verify_after`](Self::verify_after): a claim is verified this long after its grant.
    #[must_use]
    pub const fn with_verify_after(mut self, after: Duration) -> Self {
        self.verify_after = Some(after);
        self
    }

    fn intersection(self, other: Self) -> Self {
        Self {
            batch_max: self.batch_max.min(other.batch_max),
            renews_whole_shard: self.renews_whole_shard && other.renews_whole_shard,
            verify_after: self.verify_after.max(other.verify_after),
        }
    }
}

impl Default for RenewalPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Capabilities {
    /// The shortest lease that any store accepts.
    pub const LEASE_MIN: Duration = Duration::from_millis(100);
    /// The longest lease that any store accepts.
    pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

    /// Returns the capabilities of a store that has only the required operations.
    #[must_use]
    pub const fn new(store: &'static str, class: GuaranteeClass, reach: Reach) -> Self {
        Self {
            store,
            class,
            reach,
            fencing: false,
            fair: false,
            fair_on_request: false,
            wakes: false,
            reports_invalidations: false,
            shared: false,
            upgradable: false,
            permits: false,
            values: false,
            waiters: false,
            peer_poll: None,
            labels: false,
            inspect: false,
            lease_min: Self::LEASE_MIN,
            lease_max: Self::LEASE_MAX,
            renewal: RenewalPolicy::new(),
        }
    }

    /// Sets [`fencing`](Self::fencing): the tokens of a key grow across all clients.
    #[must_use]
    pub const fn with_fencing(mut self) -> Self {
        self.fencing = true;
        self
    }

    /// Sets [`fair`](Self::fair): the store has a queue of claims. The engine then does not hand
    /// claims over locally.
    #[must_use]
    pub const fn with_fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// Sets [`fair_on_request`](Self::fair_on_request): a waiting claim can keep a place in a queue
    /// in the store.
    #[must_use]
    pub const fn with_fair_on_request(mut self) -> Self {
        self.fair_on_request = true;
        self
    }

    /// Sets [`wakes`](Self::wakes): [`LockBackend::wait`](crate::LockBackend::wait) returns when
    /// the lock may be free.
    #[must_use]
    pub const fn with_wakes(mut self) -> Self {
        self.wakes = true;
        self
    }

    /// Sets [`reports_invalidations`](Self::reports_invalidations): when another client has removed
    /// a record, the backend notifies each registry that has
    /// [subscribed](crate::LockBackend::subscribe).
    #[must_use]
    pub const fn with_invalidations(mut self) -> Self {
        self.reports_invalidations = true;
        self
    }

    /// Sets [`shared`](Self::shared): readers hold a key together.
    #[must_use]
    pub const fn with_shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Sets [`upgradable`](Self::upgradable): a grant can change its mode.
    #[must_use]
    pub const fn with_upgradable(mut self) -> Self {
        self.upgradable = true;
        self
    }

    /// Sets [`permits`](Self::permits): claims take units of a key.
    #[must_use]
    pub const fn with_permits(mut self) -> Self {
        self.permits = true;
        self
    }

    /// Sets [`values`](Self::values): [`LockBackend::values`](crate::LockBackend::values) returns
    /// a [`ValueStore`](crate::ValueStore).
    #[must_use]
    pub const fn with_values(mut self) -> Self {
        self.values = true;
        self
    }

    /// Sets [`waiters`](Self::waiters): [`LockBackend::waiters`](crate::LockBackend::waiters)
    /// returns a [`WaiterStore`](crate::WaiterStore).
    #[must_use]
    pub const fn with_waiters(mut self) -> Self {
        self.waiters = true;
        self
    }

    /// Sets [`peer_poll`](Self::peer_poll): programs other than this library share these records
    /// and poll at this interval.
    #[must_use]
    pub const fn with_peer_poll(mut self, interval: Duration) -> Self {
        self.peer_poll = Some(interval);
        self
    }

    /// Sets [`labels`](Self::labels): labels are stored and returned.
    #[must_use]
    pub const fn with_labels(mut self) -> Self {
        self.labels = true;
        self
    }

    /// Sets [`inspect`](Self::inspect): [`LockBackend::admin`](crate::LockBackend::admin) returns a
    /// [`LockAdmin`](crate::LockAdmin) with `inspect`, `list` and `force_release`.
    #[must_use]
    pub const fn with_inspect(mut self) -> Self {
        self.inspect = true;
        self
    }

    /// Sets the shortest and the longest lease that the store accepts.
    #[must_use]
    pub const fn with_leases(mut self, min: Duration, max: Duration) -> Self {
        self.lease_min = min;
        self.lease_max = max;
        self
    }

    /// Sets how the engine renews claims.
    #[must_use]
    pub const fn with_renewal(mut self, renewal: RenewalPolicy) -> Self {
        self.renewal = renewal;
        self
    }

    /// Returns whether the store grants claims of this mode.
    #[must_use]
    pub const fn supports(&self, mode: ClaimMode) -> bool {
        match mode {
            ClaimMode::Exclusive => true,
            ClaimMode::Shared => self.shared,
            ClaimMode::Upgradable => self.upgradable,
            ClaimMode::Permits { .. } => self.permits,
        }
    }

    /// Returns the capabilities that both stores have.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self {
            store: if self.store == other.store { self.store } else { "several" },
            class: self.class.min(other.class),
            reach: self.reach.min(other.reach),
            fencing: self.fencing && other.fencing,
            fair: self.fair && other.fair,
            fair_on_request: self.fair_on_request && other.fair_on_request,
            wakes: self.wakes && other.wakes,
            reports_invalidations: self.reports_invalidations && other.reports_invalidations,
            shared: self.shared && other.shared,
            upgradable: self.upgradable && other.upgradable,
            permits: self.permits && other.permits,
            values: self.values && other.values,
            waiters: self.waiters && other.waiters,
            peer_poll: self.peer_poll.max(other.peer_poll),
            labels: self.labels && other.labels,
            inspect: self.inspect && other.inspect,
            lease_min: self.lease_min.max(other.lease_min),
            lease_max: self.lease_max.min(other.lease_max),
            renewal: self.renewal.intersection(other.renewal),
        }
    }
}
