//! What a store promises, as data: callers can require it, `doctor` prints it, tests choose by it.

use std::fmt;
use std::time::Duration;

/// How far the promise of one holder reaches under faults.
///
/// The classes are ordered: `A` promises most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum GuaranteeClass {
    /// Locking does nothing: everybody is always granted. Only the pass-through store says so.
    None,
    /// One holder as long as no failover, data loss or jump of the store's clock happens; fenced writes are safe as
    /// long as the tokens survive.
    C,
    /// One holder, and fenced writes are safe, as long as the store's data and wall clock survive.
    B,
    /// Fenced writes are safe under every fault, and there is one holder as long as clock *rates* are sane.
    A,
}

impl fmt::Display for GuaranteeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::C => "C",
            Self::B => "B",
            Self::A => "A",
        })
    }
}

/// Whom a lock of this store excludes.
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

/// What a store can do and what it promises.
///
/// Made by a backend with [`Capabilities::new`] and the `with_…` methods; read by everybody.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capabilities {
    /// The store's name, as in `memory`, `sqlite`, `redis`.
    pub store: &'static str,
    /// How far the promise of one holder reaches under faults.
    pub class: GuaranteeClass,
    /// Whom a lock excludes.
    pub reach: Reach,
    /// Every grant carries a [`FencingToken`](crate::FencingToken) that only grows.
    pub fencing: bool,
    /// The store queues its claimants and grants in the order of arrival, across processes.
    pub fair: bool,
    /// The store tells a waiter when the lock may be free; without it waiters poll.
    pub wakes: bool,
    /// A holder hears at once when somebody else has removed the record of its lock; without it, at the next renewal.
    pub tells_losses: bool,
    /// Several holders at once, if all ask for it. No store offers it yet.
    pub shared: bool,
    /// A grant carries the holder's label, and it can be read back.
    pub labels: bool,
    /// `holder`, `list` and `break` work.
    pub inspect: bool,
    /// The shortest lease that the store takes.
    pub lease_min: Duration,
    /// The longest lease that the store takes.
    pub lease_max: Duration,
}

impl Capabilities {
    /// The shortest lease that any store takes.
    pub const LEASE_MIN: Duration = Duration::from_millis(100);
    /// The longest lease that any store takes.
    pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

    /// Describes a store that can do nothing beyond the required operations.
    #[must_use]
    pub const fn new(store: &'static str, class: GuaranteeClass, reach: Reach) -> Self {
        Self {
            store,
            class,
            reach,
            fencing: false,
            fair: false,
            wakes: false,
            tells_losses: false,
            shared: false,
            labels: false,
            inspect: false,
            lease_min: Self::LEASE_MIN,
            lease_max: Self::LEASE_MAX,
        }
    }

    /// Says that every grant carries a token that only grows.
    #[must_use]
    pub const fn with_fencing(mut self) -> Self {
        self.fencing = true;
        self
    }

    /// Says that the store grants in the order of arrival. The core then stops handing claims over locally.
    #[must_use]
    pub const fn with_fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// Says that [`LockBackend::wait`](crate::LockBackend::wait) answers when the lock may be free.
    #[must_use]
    pub const fn with_wakes(mut self) -> Self {
        self.wakes = true;
        self
    }

    /// Says that registries are told by [`LockBackend::tell_losses`](crate::LockBackend::tell_losses) when somebody else has
    /// removed a record.
    #[must_use]
    pub const fn with_tells_losses(mut self) -> Self {
        self.tells_losses = true;
        self
    }

    /// Says that labels are stored and read back.
    #[must_use]
    pub const fn with_labels(mut self) -> Self {
        self.labels = true;
        self
    }

    /// Says that `inspect`, `list` and `force_release` work.
    #[must_use]
    pub const fn with_inspect(mut self) -> Self {
        self.inspect = true;
        self
    }

    /// Narrows the leases that the store takes.
    #[must_use]
    pub const fn with_leases(mut self, min: Duration, max: Duration) -> Self {
        self.lease_min = min;
        self.lease_max = max;
        self
    }

    /// What can be relied on when a lock may come from either of two stores.
    #[must_use]
    pub fn meet(&self, other: &Self) -> Self {
        Self {
            store: if self.store == other.store { self.store } else { "several" },
            class: self.class.min(other.class),
            reach: self.reach.min(other.reach),
            fencing: self.fencing && other.fencing,
            fair: self.fair && other.fair,
            wakes: self.wakes && other.wakes,
            tells_losses: self.tells_losses && other.tells_losses,
            shared: self.shared && other.shared,
            labels: self.labels && other.labels,
            inspect: self.inspect && other.inspect,
            lease_min: self.lease_min.max(other.lease_min),
            lease_max: self.lease_max.min(other.lease_max),
        }
    }
}
