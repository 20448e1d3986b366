//! Lock nodes that servers and operators change: deleted parents, exhausted counters, deleted
//! nodes, nodes that only one member has, and nodes without read permission.

use std::collections::HashSet;

use registry_core::{BackendErrorKind, LockError, LostReason};
use registry_testkit::history::Window;
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use super::support::{LONG_SESSION, SESSION, finish, operator, registry, secs, start_workload};

const ROOT: &str = "/lock-registry";
/// Parent of the store's keys.
const BASE: &str = "/lock-registry/default";

/// Deletes empty parents continuously. ZooKeeper deletes empty container nodes in the same way, but
/// only periodically.
async fn delete_empty_parents(operator: Client) {
    loop {
        for key in operator.list_children(BASE).await.unwrap_or_default() {
            _ = operator.delete(&format!("{BASE}/{key}"), None).await;
        }
        _ = operator.delete(BASE, None).await;
        _ = operator.delete(ROOT, None).await;
    }
}

#[tokio::test]
async fn deleted_parents_are_created_again_and_tokens_still_grow() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let client = registry(&server.url(), LONG_SESSION).await;
    let mut deleting = JoinSet::new();
    deleting.spawn(delete_empty_parents(operator.clone()));
    let workload = start_workload(&server.url(), LONG_SESSION).await;
    let mut last = None;
    let mut parents = HashSet::new();
    for _ in 0..300 {
        // Without other contenders, so that the parent is empty after each release and can be
        // deleted.
        let guard = within(LONG, client.obtain("alone").lock()).await.unwrap();
        let parent = operator.check_stat(&format!("{BASE}/alone")).await.unwrap().unwrap();
        parents.insert(parent.czxid);
        assert!(Some(guard.fencing_token()) > last);
        last = Some(guard.fencing_token());
        guard.unlock().await.unwrap();
    }
    workload.wait_for_progress().await;
    deleting.shutdown().await;
    println!("{} parents", parents.len());
    assert!(parents.len() > 10, "parents were hardly ever deleted");
    finish(workload, &server.url()).await.assert_no_losses();
}

/// The number in the name of a sequential node is the count of all children that its parent ever
/// had, as a signed 32-bit number. After 2^31 - 1, the numbers are no longer ordered, and the
/// servers assign the same number to several nodes.
#[tokio::test]
async fn with_an_exhausted_sequence_counter_all_guarantees_hold_and_tokens_still_grow() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let key_paths: Vec<String> = (0..3).map(|key| format!("{BASE}/contested%2F{key}")).collect();
    for path in &key_paths {
        operator.mkdir(path, &persistent).await.unwrap();
    }
    server.kill();
    for path in &key_paths {
        server.set_child_counter(path, i32::MAX - 20).await.unwrap();
    }
    server.restart().await.unwrap();
    let workload = start_workload(&server.url(), LONG_SESSION).await;
    for _ in 0..20 {
        workload.wait_for_progress().await;
    }
    let new_operator = super::support::operator(&server).await;
    let names = new_operator.list_children(&key_paths[0]).await.unwrap();
    let outcome = finish(workload, &server.url()).await;
    let grants = |path: &String| {
        let path = path.replace("%2F", "/");
        outcome.history.grants.iter().filter(|grant| path.ends_with(&*grant.key)).count()
    };
    println!("{names:?}; {:?}", key_paths.iter().map(grants).collect::<Vec<_>>());
    assert!(
        key_paths.iter().all(|path| grants(path) > 25),
        "the sequence counter is not exhausted"
    );
    assert_eq!(outcome.long_held_losses(), []);
    outcome.assert_guarantees();
}

/// An operator deletes the node. A watch event, one message from the server, notifies the holder.
/// Until this event arrives, another client may already have acquired the lock.
#[tokio::test]
async fn a_deleted_node_is_a_lost_lock() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let workload = start_workload(&server.url(), LONG_SESSION).await;
    let mut windows = Vec::new();
    for round in 1..=2 {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        // After this time, each held lock has a watch on its node.
        tokio::time::sleep(secs(1)).await;
        let begin = workload.now();
        for key in 0..3 {
            let path = format!("{BASE}/steady%2F{key}");
            let mut all = operator.list_children(&path).await.unwrap();
            // Contenders that arrived after the holder sort after it.
            all.sort_by_key(|name| name[name.len() - 10..].to_owned());
            operator.delete(&format!("{path}/{}", all[0]), None).await.unwrap();
        }
        workload.wait_for_long_held_losses(3 * round).await;
        windows.push(Window::new(begin, workload.now() + 1_000_000_000));
        let losses = workload.losses();
        let long_held_losses =
            losses.iter().filter(|loss| loss.key.starts_with("steady") && loss.at > begin);
        let detected_after: Vec<_> =
            long_held_losses.map(|loss| std::time::Duration::from_nanos(loss.at - begin)).collect();
        println!("detected after {detected_after:?}");
        assert!(detected_after.iter().all(|after| *after < LONG_SESSION / 4), "{detected_after:?}");
    }
    workload.wait_for_progress().await;
    let outcome = finish(workload, &server.url()).await;
    let losses = outcome.long_held_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Gone), "{losses:?}");
    outcome.assert_guarantees_except_in(&windows);
}

/// Ensembles have been in this state after a kill: one member showed a holder whose node the other
/// members had deleted.
#[tokio::test]
async fn a_waiter_ignores_a_holder_that_only_its_own_server_has() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let leader = ensemble.leader().await.unwrap();
    let (other, outdated) = ((leader + 1) % 3, (leader + 2) % 3);
    let operator = operator(&ensemble.members()[other]).await;
    let open = Acls::anyone_all();
    let lock_path = format!("{BASE}/k");
    operator.mkdir(&lock_path, &CreateMode::Persistent.with_acls(open)).await.unwrap();
    // The servers assigned this number, so no other node gets it.
    let node = CreateMode::EphemeralSequential.with_acls(open);
    let (_, number) =
        operator.create(&format!("{lock_path}/_c_0-lock-"), b"", &node).await.unwrap();
    let deleted_node = format!("_c_0-lock-{number}");
    operator.delete(&format!("{lock_path}/{deleted_node}"), None).await.unwrap();
    let member = &mut ensemble.members_mut()[outdated];
    // Waits until this member has applied the deletion.
    let outdated_operator = super::support::operator(member).await;
    outdated_operator.sync("/").await.unwrap();
    drop(outdated_operator);
    member.kill();
    member.add_ephemeral_node(&format!("{lock_path}/{deleted_node}"), 4711).await.unwrap();
    member.restart().await.unwrap();

    let other_client = registry(&ensemble.members()[other].url(), LONG_SESSION).await;
    let client = registry(&ensemble.members()[outdated].url(), SESSION).await;
    // The other members show the lock as free. A client of the outdated member must still wait for
    // the actual holder.
    let first = other_client.obtain("k").lock().await.unwrap();
    let lock = client.obtain("k");
    assert!(lock.try_lock().await.unwrap().is_none());
    let waiter_task = tokio::spawn(async move { lock.lock().await });
    eventually(LONG, async || operator.list_children(&lock_path).await.unwrap().len() == 2).await;
    tokio::time::sleep(SESSION * 2).await;
    assert!(first.is_held() && !waiter_task.is_finished());
    first.unlock().await.unwrap();
    let next = within(LONG, waiter_task).await.unwrap().unwrap();
    // The outdated member still shows the deleted node.
    let outdated_operator = super::support::operator(&ensemble.members()[outdated]).await;
    assert!(outdated_operator.list_children(&lock_path).await.unwrap().contains(&deleted_node));
    next.unlock().await.unwrap();
    // `try_lock` also ignores the deleted node.
    let free = client.obtain("k").try_lock().await.unwrap().expect("the lock is free");
    assert!(other_client.obtain("k").try_lock().await.unwrap().is_none());
    free.unlock().await.unwrap();
    for registry in [&client, &other_client] {
        assert!(registry.obtain("k").try_lock().await.unwrap().is_some());
        registry.idle().await;
    }
}

/// A key that this login may not read hides no other key.
#[tokio::test]
async fn a_list_omits_only_the_keys_that_the_login_may_not_read() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let client = registry(&server.url(), LONG_SESSION).await;
    let guard = client.obtain("open").lock().await.unwrap();
    let closed = [Acl::new(Permission::ALL, AuthId::new("digest", "operator:aGFzaA="))];
    let (open, closed) = (Acls::anyone_all(), Acls::new(&closed));
    operator
        .create(&format!("{BASE}/closed"), b"", &CreateMode::Persistent.with_acls(closed))
        .await
        .unwrap();
    operator
        .create(&format!("{BASE}/half"), b"", &CreateMode::Persistent.with_acls(open))
        .await
        .unwrap();
    let path = format!("{BASE}/half/_c_0-lock-");
    let node = CreateMode::EphemeralSequential.with_acls(closed);
    let (node, _) = operator.create(&path, b"secret", &node).await.unwrap();

    let mut all = client.list().await.unwrap();
    all.sort_by(|one, other| one.key.as_str().cmp(other.key.as_str()));
    let keys: Vec<_> = all.iter().map(|holder| holder.key.as_str()).collect();
    assert_eq!(keys, ["half", "open"]);
    assert_eq!(all[0].label, None);
    assert_eq!(all[0].token.map(i64::from), Some(node.czxid));
    assert_eq!(all[1].token, Some(guard.fencing_token()));
    // A direct request for that key returns the actual error.
    let Err(LockError::Backend { source, .. }) = client.obtain("closed").holders().await else {
        panic!("the key is readable")
    };
    assert_eq!(source.kind(), BackendErrorKind::Denied);
    guard.unlock().await.unwrap();
}
