//! Findings about any database server, for `lockreg doctor`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use registry_core::Finding;

/// `doctor` reports a difference between the clocks of server and host above this limit.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(1);

/// Returns this host's time in microseconds. Only for the comparison with the server's clock.
pub(crate) fn host_micros() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

/// Returns a finding if the clocks of server and host differ by more than [`CLOCK_DIFFERENCE_MAX`].
/// The server's clock was read between the host times `before` and `after`.
pub(crate) fn check_clock(before: i64, server_time: i64, after: i64) -> Option<Finding> {
    let difference = (server_time - (before + (after - before) / 2)).unsigned_abs();
    (Duration::from_micros(difference) > CLOCK_DIFFERENCE_MAX).then(|| {
        Finding::note(format!(
            "the server's clock and this host's differ by {:?}: locks use only the server's clock, but one of the two is wrong",
            Duration::from_millis(difference / 1000)
        ))
    })
}

/// Returns a finding if `row_locks` is more than half of the server's connection limit.
pub(crate) fn check_row_locks(row_locks: u32, connections_max: i64) -> Option<Finding> {
    (i64::from(row_locks) > connections_max / 2).then(|| {
        Finding::warning(format!(
            "row_locks is {row_locks}, and the server accepts {connections_max} connections from all programs together; raise max_connections, \
             or lower row_locks"
        ))
    })
}
