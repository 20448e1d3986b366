//! Shared locks, upgrades and permits while connections break, sessions end, and other programs
//! change nodes.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use registry_core::{
    Attempt, BackendErrorKind, Claim, ClaimMode, FencingToken, Grant, Key, LockAdmin as _,
    LockBackend, LockError, LockGuard, LockOptions, LockRegistryExt as _, Queueing, Registry,
    Release,
};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{eventually, within};
use registry_zk::{FenceError, Layout, Multi as _, Naming, TooManyUnits, ZkBackend};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{interval, sleep};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use super::support::{
    LONG_SESSION, MINUTE_SESSION, backend, config, operator, registry, registry_over,
};

/// The lock's node.
const LOCK: &str = "/lock-registry/default/k";
const NO_NODES: [&str; 0] = [];
/// So long that no lease ends during a test.
const LEASE: Duration = LONG_SESSION.saturating_mul(3);

fn claim(mode: ClaimMode) -> Claim {
    Claim::new(Key::new("k").unwrap(), LEASE).with_mode(mode)
}

async fn grant(client: &ZkBackend, claim: &Claim) -> Grant {
    match client.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant,
        busy => panic!("{claim:?} is not granted: {busy:?}"),
    }
}

async fn assert_busy(client: &ZkBackend, claim: &Claim) {
    let attempt = client.try_acquire(claim).await.unwrap();
    assert!(matches!(attempt, Attempt::Busy(_)), "{claim:?}: {attempt:?}");
}

async fn nodes(operator: &Client) -> Vec<String> {
    operator.list_children(LOCK).await.unwrap_or_default()
}

/// Starts an upgrade that waits for a reader, and returns when new readers are blocked.
async fn start_upgrade(
    registry: &Registry,
    operator: &Client,
) -> JoinHandle<Result<LockGuard, LockError>> {
    let guard = registry.obtain("k").upgradable().await.unwrap();
    let upgrade = tokio::spawn(guard.upgrade());
    let has_request = async || nodes(operator).await.iter().any(|name| name.contains("-q-lock-"));
    eventually(LONG, has_request).await;
    upgrade
}

async fn wait_until_readers_enter(registry: &Registry) {
    let enters = async || registry.obtain("k").try_read().await.unwrap().is_some();
    eventually(LONG, enters).await;
}

/// The proxy cuts the replies to an upgrade and a downgrade after 0, 20, 40 and more bytes. The
/// repeated conversion detects what the servers did, and leaves no further node.
#[tokio::test]
async fn a_conversion_whose_reply_is_lost_is_one_conversion() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let client = backend(&format!("zk://{}", proxy.addr()), LONG_SESSION * 3).await;
    let other = backend(&server.url(), LONG_SESSION).await;
    let (mut errors, mut token) = (0, None);
    for reply_bytes in (0..700).step_by(20) {
        let held = claim(ClaimMode::Upgradable);
        let mut last = grant(&client, &held).await;
        let reader = claim(ClaimMode::Shared);
        grant(&other, &reader).await;
        assert_eq!(other.release(&reader).await.unwrap(), Release::Freed);
        for mode in [ClaimMode::Exclusive, ClaimMode::Shared] {
            let conversion = held.clone().converted_to(mode).restricted_to_grant(last.token);
            proxy.set_mode(ProxyMode::CutAfter { reply_bytes }).await.unwrap();
            let mut converted = within(LONG, client.try_acquire(&conversion)).await;
            errors += usize::from(converted.is_err());
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
            proxy.cut_all().await;
            while let Err(error) = converted {
                assert!(error.is_retryable(), "{error:?}");
                converted = within(LONG, client.try_acquire(&conversion)).await;
            }
            let Ok(Attempt::Granted(grant)) = converted else { panic!("{converted:?}") };
            assert_eq!(grant.token > last.token, mode == ClaimMode::Exclusive, "{grant:?}");
            last = grant;
            let nodes = nodes(&operator).await;
            assert_eq!(nodes.len(), 1, "after {reply_bytes} bytes: {nodes:?}");
            let holders = other.inspect(held.key()).await.unwrap();
            let [holder] = &holders[..] else { panic!("{holders:?}") };
            assert_eq!((holder.mode, holder.token), (mode, Some(last.token)));
        }
        assert!(token < Some(last.token));
        token = Some(last.token);
        let released = eventually(LONG, async || client.release(&held).await).await;
        assert_eq!(released, Release::Freed);
        assert_eq!(nodes(&operator).await, NO_NODES);
    }
    println!("{errors} errors");
    assert!(errors > 5, "only {errors} attempts failed");
}

fn queued_claim(mode: ClaimMode) -> Claim {
    claim(mode).with_queueing(Queueing::Join)
}

/// Converts a held claim to another mode, and returns the grant.
async fn convert(client: &ZkBackend, held: &Claim, token: FencingToken, to: ClaimMode) -> Grant {
    grant(client, &held.clone().converted_to(to).restricted_to_grant(token)).await
}

/// Asserts that `claim` is granted with a token larger than `last`, that a repeated attempt returns
/// the same token, and that `other` sees this token. Returns the token.
async fn assert_later_token(
    client: &ZkBackend,
    other: &ZkBackend,
    claim: &Claim,
    last: FencingToken,
) -> FencingToken {
    let token = grant(client, claim).await.token;
    assert!(token > last, "{claim:?}: {token:?} after {last:?}");
    for _ in 0..2 {
        assert_eq!(grant(client, claim).await.token, token, "{claim:?}");
    }
    let holders = other.inspect(claim.key()).await.unwrap();
    assert!(holders.iter().any(|holder| holder.token == Some(token)), "{claim:?}: {holders:?}");
    token
}

/// A writer, readers, a second writer, permits and an upgradable claim wait while the holder is
/// downgraded and upgraded again. Of these claims, only the first writer directly follows the node
/// of the holder. All others can detect the upgrade only by the last write of the lock's node.
#[tokio::test]
async fn claims_that_waited_during_an_upgrade_have_larger_tokens_in_the_order_of_their_grants() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let (first, second) =
        (backend(&server.url(), LONG_SESSION).await, backend(&server.url(), LONG_SESSION).await);
    let held = claim(ClaimMode::Exclusive);
    let initial = grant(&first, &held).await.token;
    let [writer, reader, other_reader, next_writer, permits, upgradable] = [
        ClaimMode::Exclusive,
        ClaimMode::Shared,
        ClaimMode::Shared,
        ClaimMode::Exclusive,
        ClaimMode::Permits { take: 1, of: 2 },
        ClaimMode::Upgradable,
    ]
    .map(queued_claim);
    for claim in [&writer, &reader, &other_reader, &next_writer, &permits, &upgradable] {
        assert_busy(&second, claim).await;
    }
    let downgraded = convert(&first, &held, initial, ClaimMode::Upgradable).await.token;
    assert_eq!(downgraded, initial);
    let upgraded = convert(&first, &held, downgraded, ClaimMode::Exclusive).await.token;
    assert!(upgraded > initial);
    assert_eq!(first.release(&held).await.unwrap(), Release::Freed);

    let token = assert_later_token(&second, &first, &writer, upgraded).await;
    assert_eq!(second.release(&writer).await.unwrap(), Release::Freed);
    let reader_token = assert_later_token(&second, &first, &reader, token).await;
    let other_reader_token = assert_later_token(&second, &first, &other_reader, token).await;
    // The write of the other reader does not change the token of the first reader.
    assert_eq!(grant(&second, &reader).await.token, reader_token);
    for claim in [&reader, &other_reader] {
        assert_eq!(second.release(claim).await.unwrap(), Release::Freed);
    }
    let last = reader_token.max(other_reader_token);
    let token = assert_later_token(&second, &first, &next_writer, last).await;
    assert_eq!(second.release(&next_writer).await.unwrap(), Release::Freed);
    let token = assert_later_token(&second, &first, &permits, token).await;
    assert_eq!(second.release(&permits).await.unwrap(), Release::Freed);
    let token = assert_later_token(&second, &first, &upgradable, token).await;
    let token = {
        let upgraded = convert(&second, &upgradable, token, ClaimMode::Exclusive).await.token;
        assert!(upgraded > token);
        upgraded
    };
    // A claim that is created after all these writes does not write.
    let written = operator.check_stat(LOCK).await.unwrap().unwrap().version;
    let newest = queued_claim(ClaimMode::Exclusive);
    assert_busy(&first, &newest).await;
    assert_eq!(second.release(&upgradable).await.unwrap(), Release::Freed);
    assert_later_token(&first, &second, &newest, token).await;
    let stat = operator.check_stat(LOCK).await.unwrap().unwrap();
    assert_eq!(stat.version, written);
    assert_eq!(first.release(&newest).await.unwrap(), Release::Freed);
    assert_eq!(nodes(&operator).await, NO_NODES);
}

/// A claim takes a later token, and the proxy cuts the replies after 0, 20, 40 and more bytes. The
/// claim is granted with the token that the store has recorded.
#[tokio::test]
async fn a_claim_whose_token_write_has_no_reply_is_granted_with_the_recorded_token() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let client = backend(&format!("zk://{}", proxy.addr()), LONG_SESSION * 3).await;
    let other = backend(&server.url(), LONG_SESSION).await;
    let mut errors = 0;
    for (round, reply_bytes) in (0..700).step_by(20).enumerate() {
        let held = claim(ClaimMode::Upgradable);
        let token = grant(&other, &held).await.token;
        let mode = if round % 2 == 0 { ClaimMode::Exclusive } else { ClaimMode::Upgradable };
        let waiter = queued_claim(mode);
        assert_busy(&client, &waiter).await;
        let upgraded = convert(&other, &held, token, ClaimMode::Exclusive).await.token;
        assert_eq!(other.release(&held).await.unwrap(), Release::Freed);
        proxy.set_mode(ProxyMode::CutAfter { reply_bytes }).await.unwrap();
        let mut attempt = within(LONG, client.try_acquire(&waiter)).await;
        errors += usize::from(attempt.is_err());
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        proxy.cut_all().await;
        while let Err(error) = attempt {
            assert!(error.is_retryable(), "{error:?}");
            attempt = within(LONG, client.try_acquire(&waiter)).await;
        }
        let Ok(Attempt::Granted(granted)) = attempt else { panic!("{attempt:?}") };
        assert!(granted.token > upgraded, "{granted:?} after {upgraded:?}");
        let holders = other.inspect(waiter.key()).await.unwrap();
        let [holder] = &holders[..] else { panic!("{holders:?}") };
        assert_eq!((holder.mode, holder.token), (mode, Some(granted.token)));
        let again = eventually(LONG, async || client.try_acquire(&waiter).await).await;
        let Attempt::Granted(again) = again else { panic!("{again:?}") };
        assert_eq!(again.token, granted.token);
        let released = eventually(LONG, async || client.release(&waiter).await).await;
        assert_eq!(released, Release::Freed);
    }
    println!("{errors} errors");
    assert!(errors > 5, "only {errors} attempts failed");
}

async fn set_rights(operator: &Client, rights: Permission) {
    let acls = [Acl::new(rights, AuthId::anyone())];
    operator.set_acl(LOCK, &acls, None).await.unwrap();
}

/// An upgrade, and a claim that waits during the upgrade, write to the lock's node. Without the
/// right to write, both return an error, and no claim is granted with a token that is too small.
#[tokio::test]
async fn tokens_after_an_upgrade_need_the_right_to_write_the_nodes_of_locks() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let (first, second) =
        (backend(&server.url(), LONG_SESSION).await, backend(&server.url(), LONG_SESSION).await);
    let read_only = Permission::READ | Permission::CREATE | Permission::DELETE | Permission::ADMIN;
    let held = claim(ClaimMode::Upgradable);
    let token = grant(&first, &held).await.token;
    let writer = queued_claim(ClaimMode::Exclusive);
    assert_busy(&second, &writer).await;
    let upgrade = held.clone().converted_to(ClaimMode::Exclusive).restricted_to_grant(token);
    set_rights(&operator, read_only).await;
    let error = first.try_acquire(&upgrade).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{error:?}");
    set_rights(&operator, Permission::ALL).await;
    let upgraded = grant(&first, &upgrade).await.token;
    set_rights(&operator, read_only).await;
    assert_eq!(first.release(&held).await.unwrap(), Release::Freed);
    let error = second.try_acquire(&writer).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{error:?}");
    // A claim that is created after the upgrade needs no write. It is busy because of the waiting
    // writer.
    assert_busy(&first, &claim(ClaimMode::Exclusive)).await;
    set_rights(&operator, Permission::ALL).await;
    assert_later_token(&second, &first, &writer, upgraded).await;
    assert_eq!(second.release(&writer).await.unwrap(), Release::Freed);
    set_rights(&operator, read_only).await;
    let writer = claim(ClaimMode::Exclusive);
    grant(&first, &writer).await;
    assert_eq!(first.release(&writer).await.unwrap(), Release::Freed);
}

/// Without a release, the node would block all other claims until the client removes it as
/// abandoned.
#[tokio::test]
async fn a_busy_claim_whose_node_cannot_be_deleted_reports_that_it_must_be_released() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let client = backend(&server.url(), LONG_SESSION).await;
    let other = backend(&server.url(), LONG_SESSION).await;
    let held = claim(ClaimMode::Exclusive);
    grant(&other, &held).await;
    set_rights(&operator, Permission::READ | Permission::CREATE | Permission::ADMIN).await;
    let busy = claim(ClaimMode::Exclusive);
    let error = client.try_acquire(&busy).await.unwrap_err();
    assert!(error.kind() == BackendErrorKind::Denied && !error.refused(), "{error:?}");
    assert_eq!(nodes(&operator).await.len(), 2);
    set_rights(&operator, Permission::ALL).await;
    client.release(&busy).await.unwrap();
    assert_eq!(other.release(&held).await.unwrap(), Release::Freed);
    assert_eq!(nodes(&operator).await, NO_NODES);
}

/// One transaction takes all units of a claim of Curator's semaphore. The proxy cuts the replies
/// after 0, 30, 60 and more bytes.
#[tokio::test]
async fn units_whose_reply_is_lost_are_taken_once() {
    const LEASES: &str = "/SpringIntegration-LockRegistry/k/leases";
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let semaphore = |url: &str| {
        let config = config(url, LONG_SESSION * 3).with_layout(Layout::Curator);
        ZkBackend::open(config.with_naming(Naming::CuratorSemaphore))
    };
    let client = semaphore(&format!("zk://{}", proxy.addr())).await.unwrap();
    let other = semaphore(&server.url()).await.unwrap();
    let mode = ClaimMode::Permits { take: 3, of: 5 };
    let (mut errors, mut token) = (0, None);
    for reply_bytes in (0..900).step_by(30) {
        let permits = claim(mode).with_queueing(Queueing::Join);
        proxy.set_mode(ProxyMode::CutAfter { reply_bytes }).await.unwrap();
        let mut attempt = within(LONG, client.try_acquire(&permits)).await;
        errors += usize::from(attempt.is_err());
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        proxy.cut_all().await;
        while let Err(error) = attempt {
            assert!(error.is_retryable(), "{error:?}");
            attempt = within(LONG, client.try_acquire(&permits)).await;
        }
        let Ok(Attempt::Granted(granted)) = attempt else { panic!("{attempt:?}") };
        assert!(token < Some(granted.token), "{granted:?} after {token:?}");
        token = Some(granted.token);
        let units = async || operator.list_children(LEASES).await.unwrap_or_default().len();
        assert_eq!(units().await, 3, "after {reply_bytes} bytes");
        assert_busy(&other, &claim(mode)).await;
        let holders = other.inspect(permits.key()).await.unwrap();
        let [holder] = &holders[..] else { panic!("{holders:?}") };
        assert_eq!((holder.mode, holder.token), (mode, token));
        let released = eventually(LONG, async || client.release(&permits).await).await;
        assert_eq!(released, Release::Freed);
        assert_eq!(units().await, 0);
    }
    println!("{errors} errors");
    assert!(errors > 5, "only {errors} attempts failed");
}

/// The parent of the nodes of Curator's semaphore `k`.
const SEMAPHORE: &str = "/SpringIntegration-LockRegistry/k";

async fn semaphore(server: &ZooKeeperServer) -> ZkBackend {
    let config = config(&server.url(), LONG_SESSION * 3).with_layout(Layout::Curator);
    let config = config.with_naming(Naming::CuratorSemaphore);
    // A request with a thousand units takes long on a loaded machine.
    let config = config.with_request_timeout(Duration::from_secs(10));
    eventually(LONG, async || ZkBackend::open(config.clone()).await).await
}

/// With a label in each unit's node, the request would exceed `jute.maxbuffer`. The paths of all
/// units exceed what a session can watch.
#[tokio::test]
async fn a_semaphore_grants_a_thousand_units_with_a_long_label_in_one_session() {
    let server = ZooKeeperServer::start().await.unwrap();
    let client = semaphore(&server).await;
    let label = "x".repeat(LockOptions::LABEL_BYTES_MAX);
    let mode = ClaimMode::Permits { take: 1_000, of: 1_000 };
    let permits = claim(mode).with_label(Some((&*label).into()));
    grant(&client, &permits).await;
    assert_eq!(client.session_ids().len(), 1);
    assert_busy(&client, &claim(ClaimMode::Permits { take: 1, of: 1_000 })).await;
    let holders = client.inspect(permits.key()).await.unwrap();
    let [holder] = &holders[..] else { panic!("{holders:?}") };
    assert_eq!((holder.mode, holder.label.as_deref()), (mode, Some(&*label)));
    assert_eq!(client.release(&permits).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn a_semaphore_refuses_too_many_units_before_it_creates_a_node() {
    let server = ZooKeeperServer::start().await.unwrap();
    let (client, operator) = (semaphore(&server).await, operator(&server).await);
    let long_key = "k".repeat(2_000);
    for (key, take, units_max) in [("k", 1_001, 1_000..1_001), (&*long_key, 300, 200..300)] {
        let mode = ClaimMode::Permits { take, of: 2_000 };
        let permits = Claim::new(Key::new(key).unwrap(), LEASE).with_mode(mode);
        let error = client.try_acquire(&permits).await.unwrap_err();
        assert!(error.refused() && !error.is_retryable(), "{error:?}");
        let source = error.source().unwrap().downcast_ref::<TooManyUnits>().unwrap();
        assert!(source.units == take && units_max.contains(&source.units_max), "{source:?}");
        let (parent, _) = SEMAPHORE.rsplit_once('/').unwrap();
        assert_eq!(operator.list_children(parent).await.unwrap_or_default(), NO_NODES);
        // The number that the error names is granted.
        let mode = ClaimMode::Permits { take: source.units_max, of: 2_000 };
        let permits = permits.with_mode(mode);
        grant(&client, &permits).await;
        assert_eq!(client.release(&permits).await.unwrap(), Release::Freed);
        let _ = operator.delete(&format!("{parent}/{key}/locks"), None).await;
        let _ = operator.delete(&format!("{parent}/{key}/leases"), None).await;
        let _ = operator.delete(&format!("{parent}/{key}"), None).await;
    }
}

/// Without a release, the node would remain the first of the queue.
#[tokio::test]
async fn a_semaphore_whose_units_are_denied_reports_that_the_claim_must_be_released() {
    let server = ZooKeeperServer::start().await.unwrap();
    let (client, operator) = (semaphore(&server).await, operator(&server).await);
    let leases = format!("{SEMAPHORE}/leases");
    operator.mkdir(SEMAPHORE, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.unwrap();
    let read_only = CreateMode::Persistent.with_acls(Acls::anyone_read());
    operator.create(&leases, b"", &read_only).await.unwrap();
    let permits = claim(ClaimMode::Permits { take: 2, of: 5 });
    let error = client.try_acquire(&permits).await.unwrap_err();
    assert!(error.kind() == BackendErrorKind::Denied && !error.refused(), "{error:?}");
    client.release(&permits).await.unwrap();
    let queue = format!("{SEMAPHORE}/locks");
    assert_eq!(operator.list_children(&queue).await.unwrap_or_default(), NO_NODES);
}

/// A dead process blocks the readers of other processes no longer than its session lasts.
#[tokio::test]
async fn the_end_of_a_session_ends_its_waiting_upgrade() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let dying = backend(&server.url(), LONG_SESSION).await;
    let (upgrading, reading) = (registry_over(&dying), registry(&server.url(), LONG_SESSION).await);
    let reader = reading.obtain("k").read().await.unwrap();
    let upgrade = start_upgrade(&upgrading, &operator).await;
    server.end_session(dying.session_ids()[0]).await.unwrap();
    let lost = within(LONG, upgrade).await.unwrap().unwrap_err();
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    let other = registry(&server.url(), LONG_SESSION).await;
    wait_until_readers_enter(&other).await;
    reader.unlock().await.unwrap();
    within(LONG, other.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

/// Otherwise the upgrade request would block all claims behind it, although its claim is deleted.
#[tokio::test]
async fn a_deleted_claim_takes_its_waiting_upgrade_with_it() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let upgrading = registry(&server.url(), MINUTE_SESSION).await;
    let reading = registry(&server.url(), MINUTE_SESSION).await;
    let reader = reading.obtain("k").read().await.unwrap();
    let upgrade = start_upgrade(&upgrading, &operator).await;
    let node = nodes(&operator).await.into_iter().find(|name| name.contains("-u-lock-"));
    operator.delete(&format!("{LOCK}/{}", node.unwrap()), None).await.unwrap();
    let lost = within(LONG, upgrade).await.unwrap().unwrap_err();
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    let other = registry(&server.url(), MINUTE_SESSION).await;
    within(LONG, wait_until_readers_enter(&other)).await;
    reader.unlock().await.unwrap();
    within(LONG, other.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

/// A claim whose data another program has replaced is exclusive for all others, and is not
/// converted.
#[tokio::test]
async fn a_claim_with_replaced_data_excludes_readers_and_is_not_converted() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let (holding, other) =
        (backend(&server.url(), LONG_SESSION).await, backend(&server.url(), LONG_SESSION).await);
    for (mode, to) in [
        (ClaimMode::Upgradable, ClaimMode::Exclusive),
        (ClaimMode::Upgradable, ClaimMode::Shared),
        (ClaimMode::Exclusive, ClaimMode::Shared),
    ] {
        let held = claim(mode);
        let granted = grant(&holding, &held).await;
        let name = nodes(&operator).await.remove(0);
        operator.set_data(&format!("{LOCK}/{name}"), b"__REVOKE__", None).await.unwrap();
        assert_busy(&other, &claim(ClaimMode::Shared)).await;
        let conversion = held.clone().converted_to(to).restricted_to_grant(granted.token);
        let error = holding.try_acquire(&conversion).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Protocol, "{error:?}");
        assert_busy(&other, &claim(ClaimMode::Shared)).await;
        // The release does not depend on the data.
        assert_eq!(holding.release(&held).await.unwrap(), Release::Freed);
        assert_eq!(nodes(&operator).await, NO_NODES);
    }
}

/// Once the counter of the sequence numbers has reached 2^31 - 1, the servers assign the same
/// number to several nodes. The transactions that created these nodes determine their order.
#[tokio::test]
async fn modes_exclude_each_other_when_the_sequence_numbers_are_exhausted() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator(&server).await.mkdir(LOCK, &persistent).await.unwrap();
    server.kill();
    server.set_child_counter(LOCK, i32::MAX).await.unwrap();
    server.restart().await.unwrap();
    let (first, second) =
        (backend(&server.url(), LONG_SESSION).await, backend(&server.url(), LONG_SESSION).await);
    let reader = claim(ClaimMode::Shared);
    grant(&second, &reader).await;
    let upgradable = claim(ClaimMode::Upgradable);
    let granted = grant(&first, &upgradable).await;
    let upgrade =
        upgradable.clone().converted_to(ClaimMode::Exclusive).restricted_to_grant(granted.token);
    assert_busy(&first, &upgrade).await;
    assert_busy(&second, &claim(ClaimMode::Shared)).await;
    assert_eq!(second.release(&reader).await.unwrap(), Release::Freed);
    let upgraded = grant(&first, &upgrade).await;
    assert_busy(&second, &claim(ClaimMode::Shared)).await;
    let downgrade =
        upgradable.clone().converted_to(ClaimMode::Upgradable).restricted_to_grant(upgraded.token);
    grant(&first, &downgrade).await;
    grant(&second, &reader).await;
    assert_eq!(second.release(&reader).await.unwrap(), Release::Freed);
    // Another node could get the same name as the waiting writer's node, and the transaction of an
    // upgrade would not detect that. The upgrade is therefore refused.
    let writer = claim(ClaimMode::Exclusive).with_queueing(Queueing::Join);
    assert_busy(&second, &writer).await;
    let upgrade = upgrade.restricted_to_grant(upgraded.token);
    let error = first.try_acquire(&upgrade).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
    assert_eq!(first.release(&upgradable).await.unwrap(), Release::Freed);
    grant(&second, &writer).await;
    assert_eq!(second.release(&writer).await.unwrap(), Release::Freed);
    let permits = [1, 2].map(|take| claim(ClaimMode::Permits { take, of: 3 }));
    for permit in &permits {
        grant(&first, permit).await;
    }
    assert_busy(&second, &claim(permits[0].mode())).await;
    for permit in &permits {
        assert_eq!(first.release(permit).await.unwrap(), Release::Freed);
    }
    assert_eq!(nodes(&operator(&server).await).await, NO_NODES);
}

/// After an upgrade and after a downgrade, the guard's fenced write succeeds. After the node of the
/// claim is deleted, it returns `FenceError::Lost`.
#[tokio::test]
async fn a_converted_guard_writes_fenced_until_it_is_lost() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create("/balance", b"0", &persistent).await.unwrap();
    let client = registry(&server.url(), LONG_SESSION).await;
    let mut guard = client.obtain("k").upgradable().await.unwrap();
    let write = async |guard: &LockGuard, value: &str| {
        guard.multi().unwrap().set("/balance", value, None).commit().await.unwrap();
    };
    write(&guard, "1").await;
    for _ in 0..2 {
        guard = guard.upgrade().await.unwrap();
        write(&guard, "2").await;
        guard = guard.downgrade_to_upgradable().await.unwrap();
        write(&guard, "3").await;
    }
    let late = guard.multi().unwrap().set("/balance", "wrong", None);
    let name = nodes(&operator).await.remove(0);
    operator.delete(&format!("{LOCK}/{name}"), None).await.unwrap();
    let refused = late.commit().await.unwrap_err();
    assert!(matches!(refused, FenceError::Lost { .. }), "{refused:?}");
    assert_eq!(operator.get_data("/balance").await.unwrap().0, b"3");
}

#[tokio::test]
async fn a_guard_that_waited_during_an_upgrade_writes_fenced() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create("/balance", b"0", &persistent).await.unwrap();
    let first = registry(&server.url(), LONG_SESSION).await;
    let second = registry(&server.url(), LONG_SESSION).await;
    let guard = first.obtain("k").upgradable().await.unwrap();
    let lock = second.obtain("k");
    let waiter = tokio::spawn(async move { lock.lock().await });
    eventually(LONG, async || nodes(&operator).await.len() == 2).await;
    let guard = guard.upgrade().await.unwrap();
    let upgraded = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = within(LONG, waiter).await.unwrap().unwrap();
    assert!(next.fencing_token() > upgraded);
    next.multi().unwrap().set("/balance", "1", None).commit().await.unwrap();
    assert_eq!(operator.get_data("/balance").await.unwrap().0, b"1");
    next.unlock().await.unwrap();
}

/// The holders of one key. An exclusive holder counts as 1,000, a permit or a reader as one.
#[derive(Debug, Default)]
struct Holders {
    readers: AtomicI32,
    permits: AtomicI32,
    /// The largest token of all holders.
    last_token: AtomicU64,
    /// The largest token of all exclusive holders.
    last_exclusive_token: AtomicU64,
}

const EXCLUSIVE: i32 = 1_000;

impl Holders {
    async fn hold(&self, guard: &LockGuard) {
        let (mode, token) = (guard.mode(), guard.fencing_token().get());
        // A downgrade keeps the token.
        let may_be_downgraded = mode == ClaimMode::Shared;
        let last = match mode {
            ClaimMode::Exclusive => &self.last_token,
            _ => &self.last_exclusive_token,
        };
        let last = last.load(Ordering::SeqCst);
        assert!(token > last || may_be_downgraded && token == last, "{mode}: {token} after {last}");
        self.last_token.fetch_max(token, Ordering::SeqCst);
        if mode == ClaimMode::Exclusive {
            self.last_exclusive_token.fetch_max(token, Ordering::SeqCst);
        }
        let counter = match mode {
            ClaimMode::Permits { .. } => &self.permits,
            _ => &self.readers,
        };
        let count = match mode {
            ClaimMode::Exclusive => EXCLUSIVE,
            ClaimMode::Permits { take, .. } => i32::try_from(take).unwrap(),
            _ => 1,
        };
        counter.fetch_add(count, Ordering::SeqCst);
        sleep(Duration::from_millis(2)).await;
        let (readers, permits) =
            (self.readers.load(Ordering::SeqCst), self.permits.load(Ordering::SeqCst));
        let is_valid = match mode {
            ClaimMode::Exclusive => readers == EXCLUSIVE && permits == 0,
            ClaimMode::Permits { of, .. } => readers == 0 && permits <= i32::try_from(of).unwrap(),
            _ => readers < EXCLUSIVE && permits == 0,
        };
        assert!(is_valid, "{mode}: {readers} and {permits}");
        counter.fetch_sub(count, Ordering::SeqCst);
    }
}

/// Readers, writers, upgrades and permits of several clients exclude each other as their modes
/// require, while their connections break. An exclusive token is larger than all earlier tokens,
/// and every other token is larger than the last exclusive token.
#[tokio::test]
async fn modes_exclude_each_other_while_connections_break() {
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 30;
    let server = ZooKeeperServer::start().await.unwrap();
    let holders = Arc::new(Holders::default());
    let (mut proxies, mut clients) = (Vec::new(), JoinSet::new());
    for client in 0..CLIENTS {
        let proxy = FaultProxy::start(server.addr()).unwrap();
        let registry = registry(&format!("zk://{}", proxy.addr()), MINUTE_SESSION).await;
        proxies.push(proxy);
        let holders = Arc::clone(&holders);
        clients.spawn(async move {
            let lock = registry.obtain("k");
            let options = || LockOptions::new().wait(LONG);
            for round in 0..ROUNDS {
                let guard = match (client + round) % 5 {
                    0 => lock.lock_with(options()).await.unwrap(),
                    1 | 2 => lock.read_with(options()).await.unwrap(),
                    3 => {
                        let take = u32::try_from(round % 3).unwrap() + 1;
                        let semaphore = registry.semaphore("k", 4);
                        semaphore.acquire_with(take, options()).await.unwrap()
                    }
                    _ => {
                        let guard = lock.upgradable_with(options()).await.unwrap();
                        holders.hold(&guard).await;
                        let guard = guard.upgrade().await.unwrap();
                        holders.hold(&guard).await;
                        guard.downgrade().await.unwrap()
                    }
                };
                holders.hold(&guard).await;
                // On a loaded machine, the connection may be down for longer than the request
                // timeout. The release then continues in the background.
                if let Err(error) = guard.unlock().await {
                    assert!(error.is_retryable(), "{error:?}");
                }
            }
            registry.idle().await;
            registry
        });
    }
    let breaking = async {
        let mut pause = interval(Duration::from_millis(130));
        for proxy in proxies.iter().cycle() {
            pause.tick().await;
            proxy.cut_all().await;
        }
    };
    // Nodes that are left behind exist as long as their sessions.
    let _registries = tokio::select! {
        () = breaking => unreachable!("it does not end"),
        registries = within(LONG, clients.join_all()) => registries,
    };
    assert_eq!(nodes(&operator(&server).await).await, NO_NODES);
}
