//! Faults that the tests of several stores cause, during a workload or during one call.

use std::time::Duration;

use registry_core::{LockError, LockGuard, LostReason, Registry};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::{LONG, Workload, WorkloadOutcome};
use crate::eventually::within;
use crate::proxy::{FaultProxy, ProxyMode};

/// The length of each pause in [`Workload::pause_briefly`]. It is shorter than the leases of the
/// workloads that call it.
const BRIEF_PAUSE: Duration = Duration::from_millis(1_500);

/// The length of a lease extension that all stores accept.
const EXTENSION: Duration = Duration::from_secs(5);

impl Workload {
    /// Pauses and resumes a server twice, each time for less than a lease.
    ///
    /// # Panics
    /// Panics if the clients make no progress, or with an error of `pause` or `resume`.
    #[cfg(unix)]
    pub async fn pause_briefly(
        &self,
        server: &crate::ManagedServer<impl crate::ServerDescription>,
    ) {
        for _ in 0..2 {
            self.wait_for_progress().await;
            server.pause().expect("the server runs");
            sleep(BRIEF_PAUSE).await;
            server.resume().expect("the server is paused");
        }
        self.wait_for_progress().await;
    }

    /// Pauses and resumes a server twice, each time until all permanent holders have lost their
    /// locks.
    ///
    /// # Panics
    /// Panics if the clients make no progress, if a permanent holder does not lose its lock in
    /// time, or with an error of `pause` or `resume`.
    #[cfg(unix)]
    pub async fn pause_until_losses(
        &self,
        server: &crate::ManagedServer<impl crate::ServerDescription>,
    ) {
        for round in 1..=2 {
            self.wait_for_progress().await;
            self.wait_until_long_held().await;
            server.pause().expect("the server runs");
            self.wait_for_long_held_losses(self.state.options.long_held.len() * round).await;
            server.resume().expect("the server is paused");
        }
        self.wait_for_progress().await;
    }

    /// Causes eight faults one after the other. Each affects the connections of the next proxy, and
    /// lasts for at least `span`. The clients must make progress during each fault, and after it.
    ///
    /// # Panics
    /// Panics if the clients make no progress, or with an error of the proxy.
    pub async fn disturb_connections(&self, proxies: &[FaultProxy], span: Duration) {
        let faults = [
            ProxyMode::ResetAfterRequest,
            ProxyMode::CutAfter { reply_bytes: 40 },
            ProxyMode::DropReplies,
            ProxyMode::HoldReplies,
            ProxyMode::BlackHole,
            ProxyMode::HalfClose,
            ProxyMode::Refuse,
            ProxyMode::Delay(Duration::from_millis(100)),
        ];
        for (fault, proxy) in faults.into_iter().zip(proxies.iter().cycle()) {
            self.wait_for_progress().await;
            set_mode(proxy, fault).await;
            if fault == ProxyMode::Refuse {
                proxy.cut_all().await;
            }
            sleep(span).await;
            self.wait_for_progress().await;
            set_mode(proxy, ProxyMode::Pass).await;
        }
        self.wait_for_progress().await;
    }
}

impl WorkloadOutcome {
    /// Asserts that all promises were kept, and that no permanent holder lost its lock.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub fn assert_no_losses(&self) {
        assert_eq!(self.long_held_losses(), []);
        self.assert_guarantees();
    }

    /// Asserts that all promises were kept, and that permanent holders lost their locks only for
    /// this reason.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub fn assert_losses_are(&self, expected: LostReason) {
        let losses = self.long_held_losses();
        assert!(losses.iter().all(|reason| *reason == expected), "{losses:?}");
        self.assert_guarantees();
    }
}

/// Ends an acquisition of `key` whose reply `proxy` has lost, and repairs the proxy. In even
/// rounds, the caller waits for the guard and unlocks it. In odd rounds, the caller drops its
/// future. In both cases, `other_client` must acquire the lock.
///
/// # Panics
/// Panics if a call fails or takes too long.
pub async fn end_acquisition_without_reply(
    round: u32,
    proxy: &FaultProxy,
    acquiring: JoinHandle<Result<LockGuard, LockError>>,
    other_client: &Registry,
    key: &str,
) {
    if round.is_multiple_of(2) {
        set_mode(proxy, ProxyMode::Pass).await;
        let guard = within(LONG, acquiring).await.expect("the caller does not panic");
        unlock(guard.expect("the grant is adopted")).await;
    } else {
        acquiring.abort();
        set_mode(proxy, ProxyMode::Pass).await;
    }
    let next = within(LONG, other_client.obtain(key).lock()).await;
    unlock(next.expect("the key becomes free")).await;
}

/// Loses the replies to releases of `client`, which is behind `proxy`. `other_client` must acquire
/// each lock, with a larger token, and keep it. No release may return [`LockError::Lost`]: the lock
/// was held until the first request.
///
/// # Panics
/// Panics if one of these promises is broken, or if a call takes too long.
pub async fn assert_releases_without_reply_free_their_keys(
    rounds: u32,
    proxy: &FaultProxy,
    client: &Registry,
    other_client: &Registry,
) {
    // From now on, a connection exists on which the server has prepared its statements or scripts.
    unlock(client.obtain("before").lock().await.expect("the store answers")).await;
    for round in 0..rounds {
        let key = format!("reply/{round}");
        let guard = client.obtain(&key).lock().await.expect("the store answers");
        let token = guard.fencing_token();
        set_mode(proxy, ProxyMode::ResetAfterRequest).await;
        let releasing = tokio::spawn(guard.unlock());
        let next = within(LONG, other_client.obtain(&key).lock()).await;
        let next = next.expect("the key becomes free");
        assert!(next.fencing_token() > token);
        set_mode(proxy, ProxyMode::Pass).await;
        let released = within(LONG, releasing).await.expect("the caller does not panic");
        assert!(!matches!(released, Err(LockError::Lost { .. })), "{released:?}");
        client.idle().await;
        assert!(next.is_held());
        next.extend(EXTENSION).await.expect("the release has not freed the next grant");
        unlock(next).await;
    }
}

async fn set_mode(proxy: &FaultProxy, mode: ProxyMode) {
    proxy.set_mode(mode).await.expect("the proxy runs");
}

async fn unlock(guard: LockGuard) {
    guard.unlock().await.expect("a held lock is unlocked");
}
