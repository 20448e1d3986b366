//! A clock that counts the time for which this host is suspended, where the system has one. An age that leaves it out would make a lease
//! look young.

use std::time::Duration;

/// A moment on that clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        Self(running())
    }

    /// The time since this moment.
    pub(crate) fn age(self) -> Duration {
        running().saturating_sub(self.0)
    }
}

#[cfg(target_os = "linux")]
fn running() -> Duration {
    // It is there in every Linux that this can run on; without it all leases would look over, which is safe.
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)
        .map_or(Duration::MAX, Duration::from)
}

#[cfg(not(target_os = "linux"))]
fn running() -> Duration {
    use std::sync::OnceLock;
    use std::time::Instant;

    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed()
}
