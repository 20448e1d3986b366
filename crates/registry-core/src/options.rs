//! The options of one acquisition, the defaults of a registry, and the limits of both.

use std::sync::Arc;
use std::time::Duration;

use crate::capabilities::Capabilities;
use crate::error::InvalidOption;
use crate::fairness::CONTENDED_SPAN;
use crate::lease::{LeaseTerms, covering};
use crate::owner::Owner;

/// The options of an acquisition. An option that is not set comes from the registry.
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
    pub(crate) auto_renew: Option<bool>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
    pub(crate) label: Option<Arc<str>>,
}

impl LockOptions {
    /// The maximum length of a label, in bytes.
    pub const LABEL_BYTES_MAX: usize = 1_024;

    /// Creates options that wait without a limit and take everything else from the registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum wait, which covers both the local queue and the store. A wait of more than
    /// 366 days, such as [`Duration::MAX`], has no limit.
    ///
    /// A wait of zero still sends one request to the store, unless another caller of this process
    /// holds the lock or is acquiring it.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sets the lease: how long the key stays locked if this process dies.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets whether the lease is renewed while the guard lives. Without renewal, the lock is lost
    /// when its lease ends (Redisson's `leaseTime`).
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.auto_renew = Some(auto_renew);
        self
    }

    /// Sets the maximum time for which the lock is held; then it is lost (ShedLock's
    /// `lockAtMostFor`). This limits the harm of a guard that is never dropped.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Sets the minimum time for which the key stays locked, even if the guard is released earlier
    /// (ShedLock's `lockAtLeastFor`).
    ///
    /// A release does not wait for this time: the key is freed in the background when it is over.
    /// The maximum is [`max_hold`](Self::max_hold), or without one the store's longest lease.
    ///
    /// For jobs that several processes start at about the same time: the second process finds the
    /// key locked even if the job is short.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = Some(min_hold);
        self
    }

    /// Acquires the lock for `owner`, for which it is re-entrant. Overrides [`Owner::scope`].
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.owner = Some(owner.clone());
        self
    }

    /// Sets the label that other clients see when they query the holder. At most
    /// [`LockOptions::LABEL_BYTES_MAX`] bytes; must contain no secret.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into().into());
        self
    }
}

impl LockOptions {
    /// Timers and clocks stay far from their limits up to this wait.
    const LIMITED_WAIT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

    /// Returns the wait, unless it has no limit.
    pub(crate) fn limited_wait(&self) -> Option<Duration> {
        self.wait.filter(|wait| *wait <= Self::LIMITED_WAIT_MAX)
    }

    /// Returns whether an option other than the wait and the owner is set.
    pub(crate) fn asks_for_terms(&self) -> bool {
        let Self { wait: _, lease, auto_renew, max_hold, min_hold, owner: _, label } = self;
        lease.is_some()
            || auto_renew.is_some()
            || max_hold.is_some()
            || min_hold.is_some()
            || label.is_some()
    }
}

/// The values that a registry uses for options that an acquisition does not set.
#[derive(Debug, Clone)]
pub(crate) struct Defaults {
    pub(crate) lease: Duration,
    pub(crate) auto_renew: bool,
    /// The poll interval of a waiter, with or without wake-ups.
    pub(crate) poll: Duration,
    pub(crate) handoffs: Handoffs,
    /// How long a store operation may take before its outcome counts as unknown.
    pub(crate) operation_timeout: Duration,
    pub(crate) label: Option<Arc<str>>,
    /// The store's address, for errors of calls without a response.
    pub(crate) address: Option<Arc<str>>,
}

impl Defaults {
    /// Long enough for a failover, short enough to wait for after a crash. Also the usual value of
    /// other libraries (Redisson, madelson).
    pub(crate) const LEASE: Duration = Duration::from_secs(30);
    pub(crate) const POLL: Duration = Duration::from_millis(250);
    pub(crate) const HANDOFFS: Handoffs = Handoffs { max: 64, slow_max: 32 };
    pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(3);
}

/// The maximum number of consecutive hand-overs of a claim between local callers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handoffs {
    pub(crate) max: u32,
    /// The maximum once the claim has been held for [`SHORT`](Self::SHORT). Time limits the wait of
    /// other processes, and the shorter the work, the larger the relative cost of a request to the
    /// store.
    slow_max: u32,
}

impl Handoffs {
    /// Exactly the configured number.
    pub(crate) fn exactly(times: u32) -> Self {
        Self { max: times, slow_max: times }
    }

    /// Returns whether another hand-over is allowed after `times` of them, `held_for` after the
    /// grant. `contended` means that other processes want the key.
    pub(crate) fn allow_another(self, times: u32, held_for: Duration, contended: bool) -> bool {
        let max = if held_for < Self::SHORT { self.max } else { self.slow_max };
        // Each hand-over uses a token, and a token stands for a microsecond of the store's clock.
        let in_time = times < Self::UNTIMED || u128::from(times) < held_for.as_micros();
        let span = if contended { CONTENDED_SPAN } else { Self::SPAN };
        times < max && held_for < span && in_time
    }

    /// The number of hand-overs that are not checked against the clock: a request to a store takes
    /// more microseconds than this.
    const UNTIMED: u32 = 64;

    /// So short that other processes do not wait longer than for a slow holder.
    const SHORT: Duration = Duration::from_millis(20);
    /// How long a claim may be handed over before other processes get a chance, whatever the count.
    const SPAN: Duration = Duration::from_secs(1);
}

/// The terms of a claim. A claim can be handed over only to a waiter with the same terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) lease: LeaseTerms,
    pub(crate) min_hold: Duration,
    pub(crate) label: Option<Arc<str>>,
}

impl Terms {
    /// Completes `options` with `defaults` and checks the result against the limits of the store.
    pub(crate) fn resolve(
        options: &LockOptions,
        defaults: &Defaults,
        store: &Capabilities,
    ) -> Result<Self, InvalidOption> {
        let mut length = options.lease.unwrap_or(defaults.lease);
        check_lease("lease", length, store)?;
        if let Some(max_hold) = options.max_hold {
            if max_hold < store.lease_min {
                return Err(InvalidOption::new(
                    "max_hold",
                    max_hold,
                    format!(
                        "is shorter than the shortest lease of this store, {:?}; use a longer one",
                        store.lease_min
                    ),
                ));
            }
            // Long enough to reach `max_hold` without a renewal, if the lease is not shorter.
            length = length.min(covering(max_hold)).min(store.lease_max);
        }
        let min_hold = options.min_hold.unwrap_or_default();
        if min_hold > options.max_hold.unwrap_or(store.lease_max) {
            return Err(InvalidOption::new(
                "min_hold",
                min_hold,
                match options.max_hold {
                    Some(max_hold) => {
                        format!("is longer than max_hold, {max_hold:?}; use a shorter one")
                    }
                    None => format!(
                        "is longer than the longest lease of this store, {:?}; use a shorter one",
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
                renews: options.auto_renew.unwrap_or(defaults.auto_renew),
                max_hold: options.max_hold,
                shortest: store.lease_min,
            },
            min_hold,
            label,
        })
    }
}

/// Checks a lease against the limits of the store.
pub(crate) fn check_lease(
    option: &'static str,
    lease: Duration,
    store: &Capabilities,
) -> Result<(), InvalidOption> {
    if lease < store.lease_min {
        return Err(InvalidOption::new(
            option,
            lease,
            format!(
                "is shorter than the shortest lease of this store, {:?}; use a longer one",
                store.lease_min
            ),
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
