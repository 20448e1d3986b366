//! A pool of two connections with many waiting callers. Leases of the same registry are still
//! renewed.

use std::time::Duration;

use registry_core::{Key, Registry};
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::server::{
    LockMode, OpenOptions, RESPONSE_TIMEOUT, ServerKind, TEST_TIMEOUT, backend_with,
    backend_with_long_timeouts, registry,
};

/// Long enough that renewals are in time on a loaded machine.
const LEASE: Duration = Duration::from_secs(6);

const CONNECTIONS: u32 = 2;
const WAITERS: usize = 50;

async fn renewals_continue_while_many_callers_wait_for_two_connections(kind: ServerKind) {
    let server = kind.start().await;
    let watcher = backend_with_long_timeouts(&server.url(), LockMode::Lease).await;
    let second_registry = registry(&server.url(), Duration::from_secs(600)).await;
    let options = OpenOptions { connections: CONNECTIONS, ..OpenOptions::default() };
    let first_registry = Registry::builder(backend_with(&server.url(), options).await).lease(LEASE);
    let first_registry = first_registry.timeout(RESPONSE_TIMEOUT).build().unwrap();

    let mut renewed_guards = Vec::new();
    for number in 0..5 {
        renewed_guards.push(first_registry.obtain(&format!("mine/{number}")).lock().await.unwrap());
    }
    let (mut guards, mut waiting) = (Vec::new(), JoinSet::new());
    for number in 0..WAITERS {
        let key = format!("theirs/{number}");
        guards.push(second_registry.obtain(&key).lock().await.unwrap());
        let lock = first_registry.obtain(&key);
        waiting.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    // For one and a half leases, waits for a renewal of one lock after the other.
    let until = Instant::now() + LEASE * 3 / 2;
    for guard in renewed_guards.iter().cycle() {
        let key = Key::new(guard.key()).unwrap();
        let lease_end = async || {
            let holder = watcher.admin().unwrap().inspect(&key).await.unwrap().remove(0);
            Instant::now() + holder.lease_left.unwrap()
        };
        let before = lease_end().await;
        eventually(TEST_TIMEOUT, async || lease_end().await > before + LEASE / 4).await;
        assert!(guard.is_held());
        if Instant::now() > until {
            break;
        }
    }
    // Waiters use no connection. Each backend has its pool, and one connection each for renewals,
    // releases and wake-ups. The pools of the other two backends have eight connections.
    let connections = server.connections().await;
    let connections_max = usize::try_from(CONNECTIONS).unwrap() + 3 + 2 * (8 + 3);
    assert!(connections <= connections_max, "{connections}");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    within(TEST_TIMEOUT, waiting.join_all()).await;
    for guard in renewed_guards {
        guard.unlock().await.unwrap();
    }
}

on_both_servers! {
    renewals_continue_while_many_callers_wait_for_two_connections,
}
