//! Many waiters for one lock, each a separate client.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::within;

async fn registry(server: &EtcdServer) -> Registry {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    let backend = EtcdBackend::open(config).await.unwrap();
    Registry::builder(Arc::new(backend)).build().unwrap()
}

/// If waiters read the whole queue at each poll, they would overload the member.
#[tokio::test(flavor = "multi_thread")]
async fn many_waiters_for_one_lock_are_all_granted() {
    let server = EtcdServer::start().await.unwrap();
    let first = registry(&server).await;
    let guard = first.obtain("key").lock().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..WAITERS {
        let registry = registry(&server).await;
        waiting.push(tokio::spawn(async move {
            let guard = registry.obtain("key").lock().await.unwrap();
            let token = guard.fencing_token();
            guard.unlock().await.unwrap();
            // Keeps the client open until all waiters were granted the lock.
            (token, registry)
        }));
    }
    guard.unlock().await.unwrap();
    let (mut tokens, mut registries) = (BTreeSet::new(), Vec::new());
    let all = async {
        for waiter in waiting {
            let (token, registry) = waiter.await.unwrap();
            tokens.insert(token);
            registries.push(registry);
        }
    };
    within(LONG, all).await;
    assert_eq!(tokens.len(), WAITERS, "each grant has its own token");
}

const WAITERS: usize = 300;
/// Three times as long as the test takes on a busy machine.
const LONG: Duration = Duration::from_secs(90);
