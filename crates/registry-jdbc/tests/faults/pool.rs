//! Few connections and many callers.

use std::time::Duration;

use registry_core::{Key, LockRegistry, Registry};
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::contest::LEASE;
use crate::server::{ANSWER_LIMIT, Kind, LONG, Opening, backend, backend_with, registry};

const CONNECTIONS: u32 = 2;
const WAITERS: usize = 50;

async fn renewals_go_on_while_many_wait_for_two_connections(kind: Kind) {
    let server = kind.start().await;
    let watcher = backend(&server.url()).await;
    let theirs = registry(&server.url(), Duration::from_secs(600)).await;
    let opening = Opening { connections: CONNECTIONS, ..Opening::default() };
    let ours = Registry::builder(backend_with(&server.url(), opening).await).lease(LEASE);
    let ours = ours.timeout(ANSWER_LIMIT).build().unwrap();

    let mut mine = Vec::new();
    for number in 0..5 {
        mine.push(ours.obtain(&format!("mine/{number}")).lock().await.unwrap());
    }
    let (mut guards, mut waiting) = (Vec::new(), JoinSet::new());
    for number in 0..WAITERS {
        let key = format!("theirs/{number}");
        guards.push(theirs.obtain(&key).lock().await.unwrap());
        let lock = ours.obtain(&key);
        waiting.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    // Every lock stays held for several leases.
    let until = Instant::now() + LEASE * 3;
    for guard in mine.iter().cycle() {
        let key = Key::new(guard.key()).unwrap();
        let end = async || {
            let holder = watcher.inspect(&key).await.unwrap().unwrap();
            Instant::now() + holder.lease_left.unwrap()
        };
        let before = end().await;
        eventually(LONG, async || end().await > before + LEASE / 4).await;
        assert!(guard.is_held());
        if Instant::now() > until {
            break;
        }
    }
    // Waiters use no connection. These are the pool, one each for renewals, releases and listening,
    // and the connections of the other two stores.
    let connections = server.connections().await;
    let connections_max = usize::try_from(CONNECTIONS).unwrap() + 3 + 2 * (8 + 3);
    assert!(connections <= connections_max, "{connections}");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    within(LONG, waiting.join_all()).await;
    for guard in mine {
        guard.unlock().await.unwrap();
    }
}

on_both_servers! {
    renewals_go_on_while_many_wait_for_two_connections,
}
