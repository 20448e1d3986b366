//! The engine's clock: tokio's clock plus the time for which this host was suspended.
//!
//! On many systems, `Instant` does not advance while the machine is suspended. By that clock alone,
//! a resumed holder would still trust an expired lease. On Linux and Android, the suspended time is
//! the difference between the kernel's clocks `CLOCK_BOOTTIME` and `CLOCK_MONOTONIC`. On other
//! systems, the suspended time counts as zero. The engine's clock is the sum of tokio's clock and
//! this time, so in tests it follows tokio's paused time. This module reads no wall clock.

use std::future::poll_fn;
use std::mem;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

/// Waits for `span` on tokio's clock. Several runtimes may poll the future, one after the other.
/// For backends, in the futures that the engine polls.
///
/// The background releaser may complete a future that began in another runtime. A timer of tokio
/// panics after its runtime has shut down. The future therefore creates a new timer in each
/// runtime.
///
/// # Cancel safety
/// Dropping the future ends the wait.
///
/// # Panics
/// Panics if it is polled outside of a tokio runtime that has time enabled.
pub async fn sleep(span: Duration) {
    let mut timer = pin!(tokio::time::sleep(span));
    let mut runtime = Handle::current().id();
    poll_fn(|cx| {
        let current = Handle::current().id();
        if mem::replace(&mut runtime, current) != current {
            let deadline = timer.deadline();
            timer.set(tokio::time::sleep_until(deadline));
        }
        timer.as_mut().poll(cx)
    })
    .await;
}

/// A time on the engine's clock, in nanoseconds from an arbitrary origin of this process.
///
/// This clock follows tokio's clock, including paused time in tests. On Linux and Android, it also
/// counts the time for which the host is suspended. A backend uses a `Moment` as the time after
/// which it must not rely on an earlier response.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Moment(i64);

impl Moment {
    /// A time before all others.
    pub(crate) const PAST: Self = Self(i64::MIN);

    /// A time after all others.
    pub(crate) const FUTURE: Self = Self(i64::MAX);

    /// Returns the current time.
    #[must_use]
    pub fn now() -> Self {
        // `boot` must be read first; see `update_suspended_time`.
        let boot = boot_ns();
        let (tokio_ns, origin) = since_origin();
        Self(tokio_ns.saturating_add(update_suspended_time(boot, tokio_ns, origin)))
    }

    /// Returns the current time without a check for a new suspension. The result is too early by
    /// the time for which the host was suspended since the last call of [`now`](Self::now).
    pub(crate) fn now_coarse() -> Self {
        Self(since_origin().0.saturating_add(SUSPENDED.load(Ordering::Relaxed)))
    }

    /// Returns the current time. Checks for a new suspension only if `recent`, a result of
    /// [`now`](Self::now), is at least 1 ms ago.
    pub(crate) fn now_reusing_check_of(recent: Self) -> Self {
        let now = Self::now_coarse();
        if now.since(recent) < Duration::from_millis(1) { now } else { Self::now() }
    }

    /// Returns this time plus `span`. Saturates about 290 years after the clock's origin.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }

    /// Returns the time from `earlier` to `self`, or zero if `earlier` is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Returns the time as an integer, for an atomic.
    pub(crate) const fn to_bits(self) -> i64 {
        self.0
    }

    /// Converts the result of [`to_bits`](Self::to_bits) back to a time.
    pub(crate) const fn from_bits(bits: i64) -> Self {
        Self(bits)
    }

    /// Returns this time as an instant on tokio's clock. `now` is the current time.
    pub(crate) fn to_instant(self, now: Self) -> Instant {
        let instant = tokio::time::Instant::now().into_std();
        if self > now {
            instant.checked_add(self.since(now)).unwrap_or(instant)
        } else {
            instant.checked_sub(now.since(self)).unwrap_or(instant)
        }
    }
}

fn nanos(span: Duration) -> i64 {
    let secs = i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
    secs.saturating_mul(1_000_000_000).saturating_add(i64::from(span.subsec_nanos()))
}

/// The origin of all [`Moment`]s, on each clock.
struct ClockOrigin {
    /// On tokio's clock.
    instant: Instant,
    /// On the boot clock, which counts suspension.
    boot: i64,
    /// The time by which the boot clock was ahead of the monotonic clock.
    boot_minus_monotonic: i64,
}

impl ClockOrigin {
    #[expect(clippy::disallowed_methods, reason = "tokio's clock may stand still")]
    fn new(instant: Instant) -> Self {
        let mut shortest = Duration::MAX;
        let mut boot_at_origin = 0;
        let mut boot_minus_monotonic = i64::MIN;
        // The clocks should be read at the same time, but the thread may be interrupted between two
        // reads. The fastest of 16 rounds therefore counts.
        for _ in 0..16 {
            let before = Instant::now();
            let boot = boot_ns();
            let elapsed = before.elapsed();
            if elapsed < shortest {
                shortest = elapsed;
                boot_at_origin = boot.saturating_sub(nanos_between(instant, before));
            }
            boot_minus_monotonic = boot_minus_monotonic.max(boot_minus_monotonic_ns());
        }
        Self { instant, boot: boot_at_origin, boot_minus_monotonic }
    }
}

fn origin(now: Instant) -> &'static ClockOrigin {
    static ORIGIN: OnceLock<ClockOrigin> = OnceLock::new();

    ORIGIN.get_or_init(|| ClockOrigin::new(now))
}

/// Returns the time since the origin on tokio's clock, and the origin.
fn since_origin() -> (i64, &'static ClockOrigin) {
    let now = tokio::time::Instant::now().into_std();
    let origin = origin(now);
    (nanos_between(origin.instant, now), origin)
}

/// Returns the time from `earlier` to `later`. Negative if the clock of a paused runtime is behind
/// the origin.
fn nanos_between(earlier: Instant, later: Instant) -> i64 {
    match later.checked_duration_since(earlier) {
        Some(after) => nanos(after),
        None => -nanos(earlier.saturating_duration_since(later)),
    }
}

/// Updates and returns the time for which this host was suspended since the origin. The value only
/// grows.
///
/// `boot` must be read before `tokio_ns`. An interruption of this thread between these reads can
/// then hide a suspension, but cannot look like a suspension.
fn update_suspended_time(boot: i64, tokio_ns: i64, origin: &ClockOrigin) -> i64 {
    let known = SUSPENDED.load(Ordering::Relaxed);
    let difference = boot.saturating_sub(origin.boot).saturating_sub(tokio_ns);
    if difference.saturating_sub(known) <= READ_JITTER {
        return known;
    }
    // A test may pause tokio's clock, so the difference alone proves no suspension. The clocks of
    // the system must confirm it.
    let total = boot_minus_monotonic_ns().saturating_sub(origin.boot_minus_monotonic);
    if total - known <= READ_JITTER {
        return known;
    }
    SUSPENDED.fetch_max(total, Ordering::Relaxed).max(total)
}

/// Returns the time by which the boot clock is ahead of the monotonic clock. The result may be
/// slightly too low, because this function reads the boot clock first.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_minus_monotonic_ns() -> i64 {
    let boot = boot_ns();
    boot.saturating_sub(clock_ns(nix::time::ClockId::CLOCK_MONOTONIC))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_ns() -> i64 {
    clock_ns(nix::time::ClockId::CLOCK_BOOTTIME)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn clock_ns(clock: nix::time::ClockId) -> i64 {
    nix::time::clock_gettime(clock)
        .map_or(0, |at| at.tv_sec().saturating_mul(1_000_000_000).saturating_add(at.tv_nsec()))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_minus_monotonic_ns() -> i64 {
    0
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_ns() -> i64 {
    0
}

/// The maximum difference between two clocks that are read one after the other, in nanoseconds. A
/// larger difference means a suspension.
const READ_JITTER: i64 = 1_000_000;

/// The total time of the suspensions that this process has detected, in nanoseconds.
static SUSPENDED: AtomicI64 = AtomicI64::new(0);

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn a_sleep_continues_after_the_shutdown_of_its_first_runtime() {
        let mut sleeping = Box::pin(sleep(Duration::from_millis(20)));
        let first = runtime();
        first.block_on(async { assert!(poll!(&mut sleeping).is_pending()) });
        drop(first);
        runtime().block_on(sleeping);
    }

    #[tokio::test(start_paused = true)]
    async fn moments_follow_paused_time() {
        let start = Moment::now();
        tokio::time::advance(Duration::from_secs(3_600)).await;
        let passed = Moment::now().since(start);
        assert!(passed >= Duration::from_secs(3_600) && passed < Duration::from_secs(3_601));
    }

    #[test]
    fn arithmetic_saturates_instead_of_wrapping() {
        let now = Moment::now();
        assert!(now.after(Duration::MAX) > now);
        assert_eq!(now.since(now.after(Duration::from_secs(1))), Duration::ZERO);
        assert!(Moment::PAST.after(Duration::from_secs(1)) < now);
        assert!(now.since(Moment::PAST) > Duration::from_secs(1));
    }
}
