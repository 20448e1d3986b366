//! Writes under a lost lock: the servers refuse them even if the holder has not detected the loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use registry_core::LockOptions;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::within;
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{Acl, FenceError, FencedMulti, Multi as _, ZkBackend};
use tokio::task::JoinSet;
use tokio::time::sleep;
use zookeeper_client::{Acls, Client, CreateMode};

use super::support::{
    LONG_SESSION, MINUTE_SESSION, SESSION, backend, config, operator, registry, registry_over,
};

const BALANCE: &str = "/balance";
/// The lock's node.
const LOCK: &str = "/lock-registry/default/account";
const WRITERS: usize = 4;
/// How many sessions of holders the test ends.
const ENDED_SESSIONS: usize = 25;

async fn create_balance(operator: &Client) {
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create(BALANCE, b"0", &persistent).await.unwrap();
}

async fn balance(client: &Client) -> u64 {
    let (data, _) = client.get_data(BALANCE).await.unwrap();
    String::from_utf8(data).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_late_write_of_a_former_holder_is_refused() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    create_balance(&operator).await;
    let first = backend(&server.url(), LONG_SESSION).await;
    let guard = registry_over(&first).obtain("account").lock().await.unwrap();
    guard.multi().unwrap().set(BALANCE, "1", None).commit().await.unwrap();
    // Prepared while the lock is held, sent after the loss.
    let late_write = guard.multi().unwrap().set(BALANCE, "wrong", None).create("/journal", "wrong");
    server.end_session(first.session_id().unwrap()).await.unwrap();
    let second = registry(&server.url(), LONG_SESSION).await;
    let next = within(LONG, second.obtain("account").lock()).await.unwrap();
    next.multi().unwrap().set(BALANCE, "2", None).commit().await.unwrap();
    let refused = late_write.commit().await.unwrap_err();
    println!("{refused:?}");
    assert_eq!(balance(&operator).await, 2);
    assert!(operator.check_stat("/journal").await.unwrap().is_none());
    // A write without the check succeeds.
    operator.set_data(BALANCE, b"3", None).await.unwrap();
    within(LONG, guard.lost()).await;
    assert!(matches!(guard.multi().err(), Some(FenceError::Lost { .. })));
    next.unlock().await.unwrap();
}

/// The network delays the multi after the guard has checked its lease. The session stays alive.
#[tokio::test]
async fn a_write_that_arrives_after_the_loss_is_refused() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    create_balance(&operator).await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let url = format!("zk://{}", proxy.addr());
    let first = config(&url, MINUTE_SESSION).with_request_timeout(LONG);
    let first = registry_over(&Arc::new(ZkBackend::open(first).await.unwrap()));
    let second = registry(&server.url(), LONG_SESSION).await;
    let guard = first.obtain("account").lock().await.unwrap();
    guard.multi().unwrap().set(BALANCE, "1", None).commit().await.unwrap();
    proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
    assert!(guard.is_held());
    let late_write = guard.multi().unwrap().set(BALANCE, "wrong", None).commit();
    let successor = async {
        for node in operator.list_children(LOCK).await.unwrap() {
            operator.delete(&format!("{LOCK}/{node}"), None).await.unwrap();
        }
        let next = second.obtain("account").lock().await.unwrap();
        next.multi().unwrap().set(BALANCE, "2", None).commit().await.unwrap();
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        next
    };
    let (refused, next) = tokio::join!(late_write, successor);
    assert!(matches!(refused, Err(FenceError::Lost { .. })), "{refused:?}");
    assert_eq!(balance(&operator).await, 2);
    next.unlock().await.unwrap();
}

/// Servers close the connection on a request that is too large. All locks of a session share the
/// connection.
#[tokio::test]
async fn a_multi_above_the_size_limit_is_refused_before_it_is_sent() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    create_balance(&operator).await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let acl = Acl::parse("world:anyone:cdrwa,digest:operator:aGFzaGFzaGFzaA=:cdrwa").unwrap();
    let config = config(&format!("zk://{}", proxy.addr()), MINUTE_SESSION).with_acl(acl);
    // A write of this size takes long on a loaded machine.
    let config = config.with_request_timeout(LONG);
    let client = registry_over(&Arc::new(ZkBackend::open(config).await.unwrap()));
    let guard = client.obtain("account").lock().await.unwrap();
    let write = async |bytes: usize, nodes: usize| {
        let mut multi = guard.multi().unwrap().set(BALANCE, vec![b'0'; bytes], None);
        for node in 0..nodes {
            multi = multi.create(format!("/new-{node}"), "");
            multi = multi.delete(format!("/new-{node}"), None);
        }
        multi.commit().await
    };
    for nodes in [0, 1_000] {
        let bytes = FencedMulti::BYTES_MAX;
        let Err(FenceError::TooLarge { bytes: size, .. }) = write(bytes, nodes).await else {
            panic!("the multi is not refused")
        };
        let max = bytes - (size - bytes);
        assert!(matches!(write(max + 1, nodes).await, Err(FenceError::TooLarge { .. })));
        write(max, nodes).await.unwrap();
        assert_eq!(operator.get_data(BALANCE).await.unwrap().0.len(), max);
    }
    assert_eq!(proxy.counts().accepted, 1, "the connection is the first one");
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
}

/// Writers read the balance, wait and write the incremented balance, while holders of the lock lose
/// their sessions.
#[tokio::test]
async fn no_update_is_lost_while_sessions_end() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    create_balance(&operator).await;
    let is_finished = Arc::new(AtomicBool::new(false));
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let client = registry(&server.url(), SESSION).await;
        let (reader, is_finished) = (operator.clone(), Arc::clone(&is_finished));
        writers.spawn(async move {
            let lock = client.obtain("account");
            let (mut committed, mut unknown, mut refused) = (0, 0, 0);
            while !is_finished.load(Ordering::Relaxed) {
                let options = LockOptions::new().wait(SESSION);
                let Ok(Some(guard)) = lock.try_lock_with(options).await else { continue };
                let read = balance(&reader).await;
                sleep(Duration::from_millis(fastrand::u64(1..20))).await;
                let written = match guard.multi() {
                    Ok(multi) => multi.set(BALANCE, (read + 1).to_string(), None).commit().await,
                    Err(error) => Err(error),
                };
                match written {
                    Ok(_) => committed += 1,
                    Err(FenceError::Lost { .. }) => refused += 1,
                    Err(FenceError::Store { source, .. }) if source.refused() => refused += 1,
                    Err(FenceError::Store { .. }) => unknown += 1,
                    Err(error) => panic!("{error:?}"),
                }
                drop(guard.unlock().await);
            }
            (committed, unknown, refused)
        });
    }
    let mut lost = 0;
    while lost < ENDED_SESSIONS {
        sleep(Duration::from_millis(fastrand::u64(1..150))).await;
        let mut contenders = operator.list_children(LOCK).await.unwrap_or_default();
        contenders.sort_by_key(|name| name[name.len() - 10..].to_owned());
        let Some(head) = contenders.first() else { continue };
        // The node may be deleted by now.
        let Ok(Some(node)) = operator.check_stat(&format!("{LOCK}/{head}")).await else { continue };
        lost += usize::from(server.end_session(node.ephemeral_owner).await.is_ok());
    }
    is_finished.store(true, Ordering::Relaxed);
    let (mut committed, mut unknown, mut refused) = (0, 0, 0);
    for writer in within(LONG, writers.join_all()).await {
        committed += writer.0;
        unknown += writer.1;
        refused += writer.2;
    }
    let balance = balance(&operator).await;
    println!(
        "{committed} committed, {refused} refused, {unknown} unknown, {lost} sessions lost: {balance}"
    );
    assert!(committed > 20, "{committed}");
    assert!(
        (committed..=committed + unknown).contains(&balance),
        "{committed} of {balance}, {unknown} unknown"
    );
}
