//! A server that refuses commands for a while. No holder loses its lock, and no free key is
//! reported as held.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, LockError, LockEvent, LockGuard, LostReason, Observer, Registry,
};
use registry_redis::{Layout, RedisBackend, RedisConfig};
use registry_testkit::redis::{RedisOptions, RedisServer, SentinelOptions, SentinelSetup};
use registry_testkit::{eventually, within};

use super::{LONG, secs};

const GUARDS: usize = 100;
/// Renewals start after a third of the lease. The rest is a reserve for a busy machine.
const LEASE: Duration = Duration::from_secs(9);

/// The observed renewals since the last [`Renewals::clear`].
#[derive(Debug, Default)]
struct Renewals(Mutex<RenewedKeys>);

#[derive(Debug, Default)]
struct RenewedKeys {
    failed: BTreeSet<String>,
    succeeded: BTreeSet<String>,
}

impl Observer for Renewals {
    fn on(&self, event: &LockEvent<'_>) {
        let mut seen = self.0.lock().unwrap();
        match event {
            LockEvent::RenewFailed { key, .. } => _ = seen.failed.insert((*key).to_owned()),
            LockEvent::Renewed { key, .. } => _ = seen.succeeded.insert((*key).to_owned()),
            _ => {}
        }
    }
}

impl Renewals {
    fn clear(&self) {
        *self.0.lock().unwrap() = RenewedKeys::default();
    }

    async fn wait_until_all_failed(&self) {
        eventually(LONG, async || self.0.lock().unwrap().failed.len() == GUARDS).await;
    }

    async fn wait_until_all_succeeded(&self) {
        eventually(LONG, async || self.0.lock().unwrap().succeeded.len() == GUARDS).await;
    }
}

async fn open(config: RedisConfig, lease: Duration) -> (Registry, Arc<Renewals>) {
    let renewals = Arc::new(Renewals::default());
    let backend = Arc::new(RedisBackend::open(config).await.unwrap());
    let builder = Registry::builder(backend).lease(lease);
    (builder.observer(Arc::clone(&renewals) as _).build().unwrap(), renewals)
}

async fn guards(registry: &Registry) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for n in 0..GUARDS {
        guards.push(registry.obtain(&format!("k{n}")).lock().await.unwrap());
    }
    guards
}

/// Asserts that no lock of any layout is lost between the commands `refuse` and `accept`. In this
/// time the server refuses renewals.
async fn assert_all_survive(server: &RedisServer, url: &str, refuse: &str, accept: &str) {
    let mut holders = Vec::new();
    for layout in [Layout::Native, Layout::Spring, Layout::Redisson] {
        let config = RedisConfig::from_url(url).unwrap().with_layout(layout);
        let (registry, renewals) = open(config.with_namespace(format!("{layout:?}")), LEASE).await;
        let guards = guards(&registry).await;
        holders.push((layout, registry, renewals, guards));
    }
    server.send_command(refuse).await.unwrap();
    for (layout, registry, renewals, _) in &holders {
        renewals.clear();
        renewals.wait_until_all_failed().await;
        let held = registry.obtain("k0").holders().await;
        assert!(
            matches!(held, Err(LockError::Backend { .. }))
                || held.as_ref().is_ok_and(|all| all.len() == 1),
            "{held:?}"
        );
        let free = registry.obtain("free").holders().await;
        assert!(
            matches!(free, Err(LockError::Backend { .. }))
                || free.as_ref().is_ok_and(Vec::is_empty),
            "{layout:?}: {free:?}"
        );
    }
    server.send_command(accept).await.unwrap();
    for (layout, _, renewals, guards) in holders {
        renewals.clear();
        renewals.wait_until_all_succeeded().await;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "{layout:?}, {refuse}");
    }
}

#[tokio::test]
async fn no_lock_is_lost_while_a_server_has_too_few_replicas() {
    let server = RedisServer::start(&[]).await.unwrap();
    let set = |number: u8| format!("CONFIG SET min-replicas-to-write {number}");
    assert_all_survive(&server, &server.url(), &set(1), &set(0)).await;
}

#[tokio::test]
async fn no_lock_is_lost_while_a_server_cannot_save_its_data() {
    let server = RedisServer::start(&[]).await.unwrap();
    // A snapshot cannot replace a directory of the same name.
    std::fs::create_dir(server.folder().join("dump.rdb")).unwrap();
    server.send_command("CONFIG SET save \"3600 1\"").await.unwrap();
    server.send_command("BGSAVE").await.unwrap();
    eventually(LONG, async || {
        server
            .send_command("INFO persistence")
            .await
            .unwrap()
            .contains("rdb_last_bgsave_status:err")
    })
    .await;
    let set = |value: &str| format!("CONFIG SET stop-writes-on-bgsave-error {value}");
    server.send_command(&set("no")).await.unwrap();
    assert_all_survive(&server, &server.url(), &set("yes"), &set("no")).await;
}

#[tokio::test]
async fn no_lock_is_lost_while_the_rights_of_its_user_are_changed() {
    let server = RedisServer::start(&[]).await.unwrap();
    server.send_command("ACL SETUSER worker on >p ~* &* +@all").await.unwrap();
    let url = format!("redis://worker:p@{}", server.addr());
    let set = |sign: char| format!("ACL SETUSER worker {sign}getex {sign}hrandfield {sign}pexpire");
    assert_all_survive(&server, &url, &set('-'), &set('+')).await;
}

/// The new master refuses writes until it has a replica.
#[tokio::test]
async fn no_lock_is_lost_by_a_failover_to_a_master_without_replicas() {
    let servers = RedisOptions::new().args(&["--min-replicas-to-write", "1"]);
    let mut setup =
        SentinelSetup::start_with(&SentinelOptions::new().servers(servers)).await.unwrap();
    let config = RedisConfig::from_url(&setup.url()).unwrap();
    // The failover takes several seconds of the lease.
    let (registry, renewals) = open(config, secs(45)).await;
    let replicas = setup.replicas().await.unwrap();
    for replica in &replicas[1..] {
        setup.server_mut(*replica).kill();
    }
    let guards = guards(&registry).await;
    let master = setup.server(setup.master().await.unwrap());
    eventually(LONG, async || master.send_command("WAIT 1 100").await.unwrap() == ":1\r\n").await;
    let old = setup.kill_master().await.unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    renewals.clear();
    renewals.wait_until_all_failed().await;
    setup.server(new).send_command("CONFIG SET min-replicas-to-write 0").await.unwrap();
    renewals.clear();
    renewals.wait_until_all_succeeded().await;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    assert_eq!(lost, 0);
}

/// Of all errors of a read, only `WRONGTYPE` proves that the record is gone.
#[tokio::test]
async fn a_lock_whose_key_has_another_type_is_lost() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry, _) = open(RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    let (replaced, intact) =
        (registry.obtain("replaced").lock().await.unwrap(), registry.obtain("intact").lock().await);
    let intact = intact.unwrap();
    server.send_command("DEL lock-registry:{replaced}").await.unwrap();
    server.send_command("RPUSH lock-registry:{replaced} foreign").await.unwrap();
    assert_eq!(within(LONG, replaced.lost()).await, LostReason::Gone);
    intact.extend(secs(9)).await.unwrap();
    assert!(intact.is_held());
}

/// Redis refuses a script for lack of memory only before its first write. The native and Spring
/// layouts read with `GETEX` first, which counts as a write and needs no memory.
#[tokio::test]
async fn a_server_with_full_memory_grants_only_in_the_documented_layouts() {
    let server = RedisServer::start(&[]).await.unwrap();
    server.send_command("CONFIG SET maxmemory 100kb").await.unwrap();
    assert!(server.send_command("SET a b").await.unwrap().starts_with("-OOM"));
    for layout in [Layout::Native, Layout::Spring, Layout::Redisson] {
        let config = RedisConfig::from_url(&server.url()).unwrap().with_layout(layout);
        let (registry, _) = open(config, LEASE).await;
        let result = registry.obtain("k").try_lock().await;
        match (layout, result) {
            (Layout::Redisson, Err(LockError::Backend { source, .. })) => {
                assert_eq!(source.kind(), BackendErrorKind::Transient, "{source:?}");
            }
            (Layout::Native | Layout::Spring, Ok(Some(guard))) => {
                guard.extend(LEASE).await.unwrap();
                guard.unlock().await.unwrap();
            }
            (_, result) => panic!("{layout:?}: {result:?}"),
        }
    }
}
