//! The options of one acquisition, the defaults of a registry, and the limits of both.

use std::sync::Arc;
use std::time::Duration;

use crate::capabilities::Capabilities;
use crate::error::InvalidOption;
use crate::fairness::CONTENDED_HAND_OVER_MAX;
use crate::lease::{LeaseOptions, lease_covering};
use crate::mode::ClaimMode;
use crate::owner::Owner;

/// The options of an acquisition. If the lease, automatic renewal, the label or fairness is not
/// set, the registry's default applies.
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
#[must_use = "options do nothing until a lock is acquired with them"]
pub struct LockOptions {
    pub(crate) wait: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) auto_renew: Option<bool>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) fair: Option<bool>,
}

impl LockOptions {
    /// The maximum length of a label, in bytes.
    pub const LABEL_BYTES_MAX: usize = 1_024;

    /// Creates options that are all unset.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum wait, for the local queue and the store together. A wait of more than 366
    /// days, such as [`Duration::MAX`], has no limit.
    ///
    /// A wait of zero still allows one request to the store. An exclusive acquisition sends none if
    /// a caller of this process holds the lock exclusively, or is acquiring or releasing it.
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

    /// Sets the maximum time for which the lock is held. After that, it is lost (ShedLock's
    /// `lockAtMostFor`). This limits the harm of a guard that is never dropped. The minimum is the
    /// store's shortest lease.
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
    /// Use this option for jobs that several processes start at about the same time. Even if the
    /// job is short, the second process then finds the key locked.
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

    /// Sets whether waiting registries acquire the lock in the order in which their claims arrived
    /// in the store. A registry has one waiting claim per key, and its other callers wait locally.
    ///
    /// Each waiting claim has a place in the store. The place expires if the claim does not repeat
    /// its attempt within its lease. A store with a [queue of its own](crate::Capabilities::fair)
    /// is fair without this option. A store that is fair neither by itself nor [on
    /// request](crate::Capabilities::fair_on_request) rejects the value `true` with
    /// [`LockError::InvalidOption`](crate::LockError::InvalidOption).
    pub fn fair(mut self, fair: bool) -> Self {
        self.fair = Some(fair);
        self
    }
}

impl LockOptions {
    /// Longer waits have no limit, so that no timer or clock overflows.
    const LIMITED_WAIT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

    /// Returns the wait, unless it has no limit.
    pub(crate) fn limited_wait(&self) -> Option<Duration> {
        self.wait.filter(|wait| *wait <= Self::LIMITED_WAIT_MAX)
    }

    /// Returns whether an option of a claim is set: any option except the wait and the owner.
    pub(crate) fn overrides_defaults(&self) -> bool {
        let Self { wait: _, lease, auto_renew, max_hold, min_hold, owner: _, label, fair } = self;
        lease.is_some()
            || fair.is_some()
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
    /// The poll interval of a waiter.
    pub(crate) poll: Duration,
    pub(crate) hand_over_limits: HandOverLimits,
    /// How long a store operation may take before its outcome counts as unknown.
    pub(crate) operation_timeout: Duration,
    pub(crate) label: Option<Arc<str>>,
    /// Whether waiters queue in the store, see [`LockOptions::fair`].
    pub(crate) fair: bool,
    /// Whether waiters are registered in stores without a queue.
    pub(crate) register_waiters: bool,
    /// The store's address, for errors of calls without a response.
    pub(crate) address: Option<Arc<str>>,
}

impl Defaults {
    /// Longer than a failover usually takes, and an acceptable wait after a crash. Redisson and
    /// madelson/DistributedLock have the same default.
    pub(crate) const LEASE: Duration = Duration::from_secs(30);
    pub(crate) const POLL: Duration = Duration::from_millis(250);
    pub(crate) const HAND_OVER_LIMITS: HandOverLimits =
        HandOverLimits { max: 64, max_after_long_hold: 32 };
    pub(crate) const OPERATION_TIMEOUT: Duration = Duration::from_secs(3);
}

/// The maximum number of consecutive hand-overs of a claim between local callers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandOverLimits {
    /// The maximum for a claim that has been held for less than
    /// [`SHORT_HOLD`](Self::SHORT_HOLD).
    pub(crate) max: u32,
    /// The maximum for a claim that has been held for longer. By default smaller than `max`: other
    /// processes have waited longer, and a request to the store costs less in relation to the work.
    max_after_long_hold: u32,
}

impl HandOverLimits {
    /// Returns limits with the same number before and after [`SHORT_HOLD`](Self::SHORT_HOLD).
    pub(crate) fn uniform(max: u32) -> Self {
        Self { max, max_after_long_hold: max }
    }

    /// Returns whether another hand-over is allowed, after `hand_overs` hand-overs and `held_for`
    /// after the grant. `contended` means that other processes compete for the key.
    pub(crate) fn allow_another(
        self,
        hand_overs: u32,
        held_for: Duration,
        contended: bool,
    ) -> bool {
        let max = if held_for < Self::SHORT_HOLD { self.max } else { self.max_after_long_hold };
        // Each hand-over uses a token. Some stores take tokens from their clock, one per
        // microsecond. The tokens must not get ahead of this clock.
        let is_behind_clock =
            hand_overs < Self::UNTIMED_MAX || u128::from(hand_overs) < held_for.as_micros();
        let span_max = if contended { CONTENDED_HAND_OVER_MAX } else { Self::SPAN_MAX };
        hand_overs < max && held_for < span_max && is_behind_clock
    }

    /// Fewer hand-overs are not compared with the clock, because a request to a store takes more
    /// than this number of microseconds.
    const UNTIMED_MAX: u32 = 64;

    /// The time since the grant in which `max` applies. Such a wait is negligible for other
    /// processes.
    const SHORT_HOLD: Duration = Duration::from_millis(20);
    /// The time since the grant after which an uncontended claim is not handed over any more, so
    /// that other processes can acquire the key.
    const SPAN_MAX: Duration = Duration::from_secs(1);
}

/// The options of one claim, all of them set and checked. A claim can be handed over only to a
/// waiter with equal options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimOptions {
    pub(crate) mode: ClaimMode,
    pub(crate) fair: bool,
    pub(crate) lease: LeaseOptions,
    pub(crate) min_hold: Duration,
    pub(crate) label: Option<Arc<str>>,
}

impl ClaimOptions {
    /// Completes `options` with `defaults` and checks the result against the limits of the store.
    pub(crate) fn resolve(
        options: &LockOptions,
        mode: ClaimMode,
        defaults: &Defaults,
        store: &Capabilities,
    ) -> Result<Self, InvalidOption> {
        validate_units(mode)?;
        let fair = options.fair.unwrap_or(defaults.fair);
        if fair && !store.fair && !store.fair_on_request {
            return Err(InvalidOption::fair_unsupported(store.store));
        }
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
            // A longer lease would outlast `max_hold`.
            length = length.min(lease_covering(max_hold)).min(store.lease_max);
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
            mode,
            fair,
            lease: LeaseOptions {
                length,
                renews: options.auto_renew.unwrap_or(defaults.auto_renew),
                max_hold: options.max_hold,
                lease_min: store.lease_min,
            },
            min_hold,
            label,
        })
    }
}

/// Checks the units of a semaphore.
pub(crate) fn validate_units(mode: ClaimMode) -> Result<(), InvalidOption> {
    match mode {
        ClaimMode::Permits { take, of } if take == 0 || take > of => {
            Err(InvalidOption::units(take, of))
        }
        _ => Ok(()),
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
