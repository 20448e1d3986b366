//! How one lock is taken, and the limits of what can be asked for.

use std::sync::Arc;
use std::time::Duration;

use crate::capabilities::Capabilities;
use crate::error::InvalidOption;
use crate::fairness::CONTENDED_SPAN;
use crate::lease::{LeaseTerms, covering};
use crate::owner::Owner;

/// How to take a lock. Whatever is not set comes from the registry.
///
/// # Examples
/// ```
/// # use std::time::Duration;
/// # use registry_core::LockOptions;
/// let nightly = LockOptions::new()
///     .wait(Duration::from_secs(2))
///     .max_hold(Duration::from_secs(3_600))
///     .label("nightly report");
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "options do nothing until a lock is taken with them"]
pub struct LockOptions {
    pub(crate) wait: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) renew: Option<bool>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
    pub(crate) label: Option<Arc<str>>,
}

impl LockOptions {
    /// The longest wait that can be asked for: 366 days. To wait for ever, ask for no wait at all.
    pub const WAIT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);
    /// The longest label, in bytes.
    pub const LABEL_BYTES_MAX: usize = 1_024;

    /// Options that wait for ever and take everything else from the registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives up after this time, which covers waiting in this process and in the store. The store is asked even with a wait of
    /// zero, unless another caller of this process has the lock or is after it. At most [`LockOptions::WAIT_MAX`].
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Asks for leases of this length: how long the key stays taken if this process dies.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Whether the lease is renewed while the guard lives. Without renewal the lock is lost when its lease ends
    /// (Redisson's `leaseTime`).
    pub fn renew(mut self, renew: bool) -> Self {
        self.renew = Some(renew);
        self
    }

    /// Holds the lock for at most this long; then it is lost (ShedLock's `lockAtMostFor`). Bounds the harm of a guard that is never dropped.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Keeps the key taken for at least this long, even if the guard is let go earlier (ShedLock's `lockAtLeastFor`).
    /// Releasing does not wait for it; the key is freed in the background when the time is over. At most [`max_hold`](Self::max_hold),
    /// or without one the store's longest lease.
    ///
    /// For jobs that several processes start at about the same time: the second one finds the key taken even if the job is short.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = Some(min_hold);
        self
    }

    /// Takes the lock for `owner`, who may enter it again. Wins over [`Owner::scope`].
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.owner = Some(owner.clone());
        self
    }

    /// What others see when they ask who holds the lock. At most [`LockOptions::LABEL_BYTES_MAX`] bytes; must hold no secret.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into().into());
        self
    }
}

impl LockOptions {
    /// Whether anything but the wait and the owner differs from the registry's defaults.
    pub(crate) fn asks_for_terms(&self) -> bool {
        let Self { wait: _, lease, renew, max_hold, min_hold, owner: _, label } = self;
        lease.is_some()
            || renew.is_some()
            || max_hold.is_some()
            || min_hold.is_some()
            || label.is_some()
    }

    pub(crate) fn check_wait(&self) -> Result<(), InvalidOption> {
        match self.wait {
            Some(wait) if wait > Self::WAIT_MAX => Err(InvalidOption::new(
                "wait",
                wait,
                format!("is longer than {:?}; leave it out to wait for ever", Self::WAIT_MAX),
            )),
            _ => Ok(()),
        }
    }
}

/// What a registry uses where a lock says nothing.
#[derive(Debug, Clone)]
pub(crate) struct Defaults {
    pub(crate) lease: Duration,
    pub(crate) renew: bool,
    /// How often a waiter looks by itself, wake-ups or not.
    pub(crate) poll: Duration,
    pub(crate) handoffs: Handoffs,
    /// How long a store operation may stay unanswered before its outcome counts as unknown.
    pub(crate) answer_limit: Duration,
    pub(crate) label: Option<Arc<str>>,
}

impl Defaults {
    /// Long enough to ride out a failover, short enough to wait for after a crash; the field's usual value (Redisson, madelson).
    pub(crate) const LEASE: Duration = Duration::from_secs(30);
    pub(crate) const POLL: Duration = Duration::from_millis(250);
    pub(crate) const HANDOFFS: Handoffs = Handoffs { max: 64, slow_max: 32 };
    pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(3);
}

/// How many times in a row a claim may pass to the next local caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handoffs {
    pub(crate) max: u32,
    /// Once they have taken longer than [`SHORT`](Self::SHORT). What bounds the wait of other processes is the time; and the shorter the
    /// work is, the more of it a request to the store costs.
    slow_max: u32,
}

impl Handoffs {
    /// As often as somebody has asked for.
    pub(crate) fn exactly(times: u32) -> Self {
        Self { max: times, slow_max: times }
    }

    /// Whether there may be another one after `times` of them, `held_for` after the grant. `contended`: other processes want the key.
    pub(crate) fn allow_another(self, times: u32, held_for: Duration, contended: bool) -> bool {
        let max = if held_for < Self::SHORT { self.max } else { self.slow_max };
        // Each hand-over uses a token, and a token counts a microsecond of the store's clock.
        let in_time = times < Self::UNTIMED || u128::from(times) < held_for.as_micros();
        let span = if contended { CONTENDED_SPAN } else { Self::SPAN };
        times < max && held_for < span && in_time
    }

    /// Hand-overs that need not be checked against the clock: a request to a store takes longer than as many microseconds.
    const UNTIMED: u32 = 64;

    /// So short that other processes do not wait for longer than they would for a slow holder.
    const SHORT: Duration = Duration::from_millis(20);
    /// How long a claim may be passed around before other processes get their turn, however often.
    const SPAN: Duration = Duration::from_secs(1);
}

/// What a waiter must agree on with the holder before a claim can pass between them as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) lease: LeaseTerms,
    pub(crate) min_hold: Duration,
    pub(crate) label: Option<Arc<str>>,
}

impl Terms {
    /// Completes `options` with `defaults` and checks the result against what the store takes.
    pub(crate) fn resolve(
        options: &LockOptions,
        defaults: &Defaults,
        store: &Capabilities,
    ) -> Result<Self, InvalidOption> {
        options.check_wait()?;
        let mut length = options.lease.unwrap_or(defaults.lease);
        check_lease("lease", length, store)?;
        if let Some(max_hold) = options.max_hold {
            if max_hold < store.lease_min {
                return Err(InvalidOption::new(
                    "max_hold",
                    max_hold,
                    format!(
                        "is shorter than the shortest lease of this store, {:?}",
                        store.lease_min
                    ),
                ));
            }
            // Enough to reach max_hold without a renewal, where the lease is long enough for that.
            length = length.min(covering(max_hold)).min(store.lease_max);
        }
        let min_hold = options.min_hold.unwrap_or_default();
        if min_hold > options.max_hold.unwrap_or(store.lease_max) {
            return Err(InvalidOption::new(
                "min_hold",
                min_hold,
                match options.max_hold {
                    Some(max_hold) => format!("is longer than max_hold, {max_hold:?}"),
                    None => format!(
                        "is longer than the longest lease of this store, {:?}",
                        store.lease_max
                    ),
                },
            ));
        }
        let label = options.label.clone().or_else(|| defaults.label.clone());
        if let Some(label) = &label
            && label.len() > LockOptions::LABEL_BYTES_MAX
        {
            return Err(InvalidOption::label_too_long(label.len()));
        }
        Ok(Self {
            lease: LeaseTerms {
                length,
                renews: options.renew.unwrap_or(defaults.renew),
                max_hold: options.max_hold,
                shortest: store.lease_min,
            },
            min_hold,
            label,
        })
    }
}

/// Checks a lease against what the store takes.
pub(crate) fn check_lease(
    option: &'static str,
    lease: Duration,
    store: &Capabilities,
) -> Result<(), InvalidOption> {
    if lease < store.lease_min {
        return Err(InvalidOption::new(
            option,
            lease,
            format!("is shorter than the shortest lease of this store, {:?}", store.lease_min),
        ));
    }
    if lease > store.lease_max {
        return Err(InvalidOption::new(
            option,
            lease,
            format!(
                "is longer than the longest lease of this store, {:?}; leases are renewed while the lock is held, \
                 so a short one does not limit the work",
                store.lease_max
            ),
        ));
    }
    Ok(())
}
