//! Changes to lock nodes from outside: deleted parents, exhausted counters, deleted nodes.

use std::collections::HashSet;

use registry_core::{BackendErrorKind, LockError, LockRegistry as _, LostReason};
use registry_testkit::contest::LONG;
use registry_testkit::history::Window;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use crate::lab::{LONG_SESSION, SESSION, contest, end, operator, registry, secs};

const ROOT: &str = "/lock-registry";
/// Parent of the store's keys.
const BASE: &str = "/lock-registry/default";

/// Deletes empty parents all the time, as the servers do from time to time.
async fn reap(operator: Client) {
    loop {
        for key in operator.list_children(BASE).await.unwrap_or_default() {
            _ = operator.delete(&format!("{BASE}/{key}"), None).await;
        }
        _ = operator.delete(BASE, None).await;
        _ = operator.delete(ROOT, None).await;
    }
}

#[tokio::test]
async fn parents_that_vanish_at_any_moment_cost_nothing_and_tokens_grow_on() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let ours = registry(&server.url(), LONG_SESSION).await;
    let mut reaping = JoinSet::new();
    reaping.spawn(reap(operator.clone()));
    let contest = contest(&server.url(), LONG_SESSION).await;
    let mut last = None;
    let mut parents = HashSet::new();
    for _ in 0..300 {
        // Without other contenders, so that the parent is deleted after each release.
        let guard = within(LONG, ours.obtain("alone").lock()).await.unwrap();
        let parent = operator.check_stat(&format!("{BASE}/alone")).await.unwrap().unwrap();
        parents.insert(parent.czxid);
        assert!(guard.fencing_token() > last);
        last = guard.fencing_token();
        guard.unlock().await.unwrap();
    }
    contest.goes_on().await;
    reaping.shutdown().await;
    println!("{} parents", parents.len());
    assert!(parents.len() > 10, "they were hardly ever removed");
    let outcome = end(contest, &server.url()).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

/// The number in a node's name counts all children that its parent ever had, in 31 bits. Later
/// numbers are not ordered, and the servers assign one number to several nodes.
#[tokio::test]
async fn the_end_of_all_numbers_breaks_no_promise_and_keeps_the_order() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let keys: Vec<String> = (0..3).map(|key| format!("{BASE}/contested%2F{key}")).collect();
    for path in &keys {
        operator.mkdir(path, &persistent).await.unwrap();
    }
    server.kill();
    for path in &keys {
        server.set_children_ever(path, i32::MAX - 20).await.unwrap();
    }
    server.start_again().await.unwrap();
    let contest = contest(&server.url(), LONG_SESSION).await;
    for _ in 0..20 {
        contest.goes_on().await;
    }
    let names = crate::lab::operator(&server).await;
    let names = names.list_children(&keys[0]).await.unwrap();
    let outcome = end(contest, &server.url()).await;
    let grants = |key: &str| {
        let key = key.replace("%2F", "/");
        outcome.history.grants.iter().filter(|grant| key.ends_with(&*grant.key)).count()
    };
    println!("{names:?}; {:?}", keys.iter().map(|key| grants(key)).collect::<Vec<_>>());
    assert!(keys.iter().all(|key| grants(key) > 25), "the numbers have not ended");
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

/// An operator deletes the node. Another client may acquire the lock before its holder is notified,
/// which takes one message from the server.
#[tokio::test]
async fn a_node_that_somebody_deletes_is_a_lock_that_is_lost() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let contest = contest(&server.url(), LONG_SESSION).await;
    let mut windows = Vec::new();
    for round in 1..=2 {
        contest.goes_on().await;
        contest.steady().await;
        // Locks held this long have a watch on their node.
        tokio::time::sleep(secs(1)).await;
        let begin = contest.now();
        for key in 0..3 {
            let path = format!("{BASE}/steady%2F{key}");
            let mut all = operator.list_children(&path).await.unwrap();
            // Contenders that arrived after the holder sort after it.
            all.sort_by_key(|name| name[name.len() - 10..].to_owned());
            operator.delete(&format!("{path}/{}", all[0]), None).await.unwrap();
        }
        contest.loses_steadily(3 * round).await;
        windows.push(Window::new(begin, contest.now() + 1_000_000_000));
        let told = contest.losses();
        let told = told.iter().filter(|loss| loss.key.starts_with("steady") && loss.at > begin);
        let told: Vec<_> =
            told.map(|loss| std::time::Duration::from_nanos(loss.at - begin)).collect();
        println!("told after {told:?}");
        assert!(told.iter().all(|after| *after < LONG_SESSION / 4), "{told:?}");
    }
    contest.goes_on().await;
    let outcome = end(contest, &server.url()).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Gone), "{losses:?}");
    outcome.assert_flawless_but_between(&windows);
}

/// Some members behaved like this after a kill: one member showed a holder that the others had
/// deleted.
#[tokio::test]
async fn a_holder_that_only_our_own_server_has_is_passed_over() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let leader = ensemble.leader().await.unwrap();
    let (other, odd) = ((leader + 1) % 3, (leader + 2) % 3);
    let operator = operator(&ensemble.members()[other]).await;
    let open = Acls::anyone_all();
    let line = format!("{BASE}/k");
    operator.mkdir(&line, &CreateMode::Persistent.with_acls(open)).await.unwrap();
    // The servers assigned this number, so no other node gets it.
    let node = CreateMode::EphemeralSequential.with_acls(open);
    let (_, number) = operator.create(&format!("{line}/_c_0-lock-"), b"", &node).await.unwrap();
    let ghost = format!("_c_0-lock-{number}");
    operator.delete(&format!("{line}/{ghost}"), None).await.unwrap();
    let member = &mut ensemble.members_mut()[odd];
    // This member has applied the deletion.
    let here = crate::lab::operator(member).await;
    here.sync("/").await.unwrap();
    drop(here);
    member.kill();
    member.keep_node(&format!("{line}/{ghost}"), 4711).await.unwrap();
    member.start_again().await.unwrap();

    let there = registry(&ensemble.members()[other].url(), SESSION).await;
    let ours = registry(&ensemble.members()[odd].url(), SESSION).await;
    // The other members show the lock as free. A client of the odd member must still wait for the
    // actual holder.
    let first = there.obtain("k").lock().await.unwrap();
    let lock = ours.obtain("k");
    assert!(lock.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn(async move { lock.lock().await });
    eventually(LONG, async || operator.list_children(&line).await.unwrap().len() == 2).await;
    tokio::time::sleep(SESSION * 2).await;
    assert!(first.is_held() && !waiting.is_finished());
    first.unlock().await.unwrap();
    let next = within(LONG, waiting).await.unwrap().unwrap();
    // The odd member still shows the deleted node.
    let here = crate::lab::operator(&ensemble.members()[odd]).await;
    assert!(here.list_children(&line).await.unwrap().contains(&ghost));
    next.unlock().await.unwrap();
    // `try_lock` also ignores the deleted node.
    let free = ours.obtain("k").try_lock().await.unwrap().expect("nobody has it");
    assert!(there.obtain("k").try_lock().await.unwrap().is_none());
    free.unlock().await.unwrap();
    for registry in [&ours, &there] {
        assert!(registry.obtain("k").try_lock().await.unwrap().is_some());
        registry.idle().await;
    }
}

/// A key that this login may not read hides no other key.
#[tokio::test]
async fn keys_that_may_not_be_read_do_not_keep_the_others_from_being_listed() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let ours = registry(&server.url(), LONG_SESSION).await;
    let guard = ours.obtain("open").lock().await.unwrap();
    let closed = [Acl::new(Permission::ALL, AuthId::new("digest", "somebody:aGFzaA="))];
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

    let mut all = ours.list().await.unwrap();
    all.sort_by(|one, other| one.key.as_str().cmp(other.key.as_str()));
    let keys: Vec<_> = all.iter().map(|holder| holder.key.as_str()).collect();
    assert_eq!(keys, ["half", "open"]);
    assert_eq!(all[0].label, None);
    assert_eq!(all[0].token.map(i64::from), Some(node.czxid));
    assert_eq!(all[1].token, guard.fencing_token());
    // A direct request for that key returns the actual error.
    let Err(LockError::Backend { source, .. }) = ours.obtain("closed").holder().await else {
        panic!("it may not be read")
    };
    assert_eq!(source.kind(), BackendErrorKind::Denied);
    guard.unlock().await.unwrap();
}
