//! Faults of one member, of leases, of connections and of clients.

use registry_core::{LockError, LockOptions, LockRegistry as _, LostReason};
use registry_etcd::EtcdConfig;
use registry_testkit::etcd::{EtcdOptions, EtcdServer};
use registry_testkit::holder::Order;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::witness::Witness;
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use crate::contest::{Contest, Keys, LEASE, LONG, millis, registry, secs};
use crate::elsewhere;

pub(crate) async fn server() -> (EtcdServer, EtcdConfig) {
    let server = EtcdServer::start().await.unwrap();
    let config = of(server.addr());
    (server, config)
}

pub(crate) fn of(addr: std::net::SocketAddr) -> EtcdConfig {
    EtcdConfig::new([(addr.ip().to_string(), addr.port())])
}

#[tokio::test]
async fn a_member_that_stands_still_for_less_than_a_lease_ends_no_hold() {
    let (server, config) = server().await;
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), secs(9)).await;
    for _ in 0..2 {
        contest.goes_on().await;
        server.pause().unwrap();
        sleep(millis(1_500)).await;
        server.resume().unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&server).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_member_that_stands_still_for_longer_than_a_lease_makes_no_second_holder() {
    let (server, config) = server().await;
    let contest = Contest::begin(&config).await;
    for round in 1..=2 {
        contest.goes_on().await;
        contest.steady().await;
        server.pause().unwrap();
        contest.loses_steadily(3 * round).await;
        server.resume().unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&server).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Expired), "{losses:?}");
    outcome.assert_flawless();
}

#[tokio::test]
async fn crashes_of_the_member_break_no_promise() {
    let (mut server, config) = server().await;
    let contest = Contest::begin(&config).await;
    for down in [millis(0), LEASE / 2, LEASE * 3 / 2] {
        contest.goes_on().await;
        server.kill();
        sleep(down).await;
        server.start_again().await.unwrap();
    }
    contest.goes_on().await;
    contest.end(&server).await.assert_flawless();
}

/// Returns the lease of the first entry in the queue of `key`.
pub(crate) async fn lease_of(server: &EtcdServer, key: &str) -> Option<String> {
    let queue = format!("lock-registry/{key}/");
    let args = ["get", &queue, "--prefix", "--sort-by", "CREATE", "--limit", "1", "--keys-only"];
    let names = server.ctl(&args).await.unwrap();
    names.trim().rsplit_once('/').map(|(_, lease)| lease.to_owned())
}

#[tokio::test]
async fn a_lease_that_somebody_else_ends_is_told_to_its_holder_at_once() {
    let (server, config) = server().await;
    let contest = Contest::begin(&config).await;
    for round in 1..=10 {
        contest.goes_on().await;
        contest.steady().await;
        for number in 0..3 {
            let lease = lease_of(&server, &format!("steady%2F{number}")).await.unwrap();
            server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        }
        contest.loses_steadily(3 * round).await;
    }
    contest.goes_on().await;
    let outcome = contest.end(&server).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Gone), "{losses:?}");
    outcome.assert_flawless();
}

/// Returns all keys of locks: queue entries and tombstones.
pub(crate) async fn left(server: &EtcdServer) -> Vec<String> {
    let names = server.ctl(&["get", "lock-registry/", "--prefix", "--keys-only"]).await.unwrap();
    names.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The queue behind the holder is empty, so only its tombstone reveals that it may not know of its
/// loss.
#[tokio::test]
async fn who_comes_after_a_holder_that_did_not_let_go_comes_when_that_one_has_heard_of_it() {
    let (server, config) = server().await;
    let (ours, theirs) = (registry(&config, LEASE).await, registry(&config, LEASE).await);
    let (lock, next) = (ours.obtain("key"), theirs.obtain("key"));
    for round in 0..6 {
        let guard = lock.lock().await.unwrap();
        if round == 0 {
            // Longer than a tombstone's lease lasts without a keep-alive.
            sleep(LEASE * 5).await;
        }
        let stand = left(&server).await;
        assert_eq!(stand.len(), 2, "a place and its trace: {stand:?}");
        if round % 2 == 0 {
            let lease = lease_of(&server, "key").await.unwrap();
            server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        } else {
            server.ctl(&["del", "lock-registry/key/", "--prefix"]).await.unwrap();
        }
        let waits = round % 3 == 0;
        let taken = if waits { next.lock().await.map(Some) } else { next.try_lock().await };
        let taken = taken.unwrap().expect("nobody stands there");
        assert!(!guard.is_held(), "it has not heard of it");
        taken.unlock().await.unwrap();
        // The tombstone is erased, so the next claim need not wait.
        eventually(LONG, async || match left(&server).await {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        })
        .await;
        drop(guard);
    }
}

/// The store cannot know whether the holder was notified, so it waits.
#[tokio::test]
async fn who_comes_after_a_holder_that_does_not_say_that_it_heard_gives_it_time() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (ours, theirs) = (registry(&of(proxy.addr()), LEASE).await, registry(&config, LEASE).await);
    let guard = ours.obtain("key").lock().await.unwrap();
    proxy.set_mode(Mode::BlackHole).await.unwrap();
    let lease = lease_of(&server, "key").await.unwrap();
    server.ctl(&["lease", "revoke", &lease]).await.unwrap();
    let begun = Instant::now();
    let taken = theirs.obtain("key").try_lock().await.unwrap().expect("nobody stands there");
    assert!(begun.elapsed() >= millis(250), "too soon: after {:?}", begun.elapsed());
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Expired);
    taken.unlock().await.unwrap();
}

/// The process continues with other locks, so nothing is cleaned up by its end.
#[tokio::test]
async fn a_loss_leaves_nothing_behind() {
    let (server, config) = server().await;
    let ours = registry(&config, LEASE).await;
    let other = ours.obtain("other").lock().await.unwrap();
    for round in 0..4 {
        let guard = ours.obtain("key").lock().await.unwrap();
        server.ctl(&["del", "lock-registry/key/", "--prefix"]).await.unwrap();
        within(LONG, guard.lost()).await;
        if round % 2 == 0 {
            guard.unlock().await.unwrap_err();
        } else {
            drop(guard);
        }
        eventually(LONG, async || match left(&server).await {
            left if left.len() == 2 => Ok(()),
            left => Err(format!("{left:?}")),
        })
        .await;
    }
    other.unlock().await.unwrap();
}

#[tokio::test]
async fn compaction_makes_nobody_miss_anything() {
    let (server, config) = server().await;
    let contest = Contest::begin(&config).await;
    for _ in 0..10 {
        contest.goes_on().await;
        let status = server.ctl(&["get", "x", "-w", "json"]).await.unwrap();
        let revision = status.split(r#""revision":"#).nth(1).unwrap();
        let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
        server.ctl(&["compaction", &revision]).await.unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&server).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn replies_that_are_lost_cut_or_late_break_no_promise() {
    let (server, config) = server().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let ways: Vec<_> = proxies.iter().map(|proxy| of(proxy.addr())).collect();
    let contest = Contest::begin_with(&ways, &config, Keys::default(), LEASE).await;
    let faults = [
        Mode::ResetAfterRequest,
        Mode::CutAfter { reply_bytes: 40 },
        Mode::DropReplies,
        Mode::HoldReplies,
        Mode::BlackHole,
        Mode::HalfClose,
        Mode::Refuse,
        Mode::Delay(millis(100)),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let proxy = &proxies[number % proxies.len()];
        contest.goes_on().await;
        proxy.set_mode(fault).await.unwrap();
        if fault == Mode::Refuse {
            proxy.cut_all().await;
        }
        // The other clients continue meanwhile.
        sleep(LEASE / 2).await;
        contest.goes_on().await;
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    contest.goes_on().await;
    contest.end(&server).await.assert_flawless();
}

#[tokio::test]
async fn a_grant_whose_reply_was_lost_is_taken_up_or_given_back() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // So long that only a release can free the key in time.
    let lease = secs(600);
    let theirs = registry(&config, lease).await;
    for round in 0..10 {
        let key = format!("reply-{round}");
        let ours = registry(&of(proxy.addr()), lease).await;
        // From now on a connection and a lease exist.
        ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(Mode::DropReplies).await.unwrap();
        let lock = ours.obtain(&key);
        let taking = tokio::spawn(async move { lock.lock().await });
        // The member has granted the lock, but the response was lost.
        let granted = async || match lease_of(&server, &key).await {
            Some(_) => Ok(()),
            None => Err("nobody stands there".to_owned()),
        };
        eventually(LONG, granted).await;
        if round % 2 == 0 {
            proxy.set_mode(Mode::Pass).await.unwrap();
            let guard = within(LONG, taking).await.unwrap().unwrap();
            guard.unlock().await.unwrap();
        } else {
            taking.abort();
            proxy.set_mode(Mode::Pass).await.unwrap();
        }
        let begun = Instant::now();
        let next = within(LONG, theirs.obtain(&key).lock()).await.unwrap();
        println!("free after {:?}", begun.elapsed());
        next.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_login_that_grows_old_is_renewed() {
    let options = EtcdOptions::new().login("worker", "opensesame").args(&["--auth-token-ttl", "2"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let config = of(server.addr()).with_login("worker", "opensesame");
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), secs(9)).await;
    for _ in 0..3 {
        sleep(secs(3)).await;
        contest.goes_on().await;
    }
    let outcome = contest.end(&server).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

/// The login expires during an idle time, then a caller waits for a lock.
#[tokio::test]
async fn a_waiter_whose_login_grew_old_is_woken_all_the_same() {
    let options = EtcdOptions::new().login("worker", "opensesame").args(&["--auth-token-ttl", "2"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let config = of(server.addr()).with_login("worker", "opensesame");
    let (ours, theirs) = (registry(&config, secs(60)).await, registry(&config, secs(60)).await);
    let guard = theirs.obtain("key").lock().await.unwrap();
    sleep(secs(4)).await;
    let lock = ours.obtain("key");
    let waiting = tokio::spawn(async move { lock.lock().await });
    sleep(secs(4)).await;
    guard.unlock().await.unwrap();
    within(LONG, waiting).await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn a_stopped_holder_is_replaced_and_knows_it() {
    let (server, config) = server().await;
    let url = format!("etcd://{}", server.addr());
    let ways = vec![config.clone(); 3];
    // Longer leases, so that a busy machine ends no hold of the clients that are not suspended.
    let contest = Contest::begin_with(&ways, &config, Keys::default(), LEASE * 3).await;
    let ours = registry(&config, LEASE).await;
    let witness = Witness::new(contest.recorder(), 7_000);
    let mut theirs = elsewhere::client(&url).await;
    for _ in 0..2 {
        let held = theirs.lock("paused", LONG).await.unwrap();
        theirs.process().pause().await.unwrap();
        let lock = ours.obtain("paused");
        let next = witness.lock_with(&lock, LockOptions::new().wait(LONG)).await.unwrap().unwrap();
        assert!(next.fencing_token() > held.token);
        assert!(contest.write_as(7_000, "paused", next.fencing_token().unwrap()));
        theirs.process().resume().unwrap();
        assert_eq!(theirs.lost("paused", LONG).await.unwrap(), "expired");
        assert!(!contest.write_as(7_001, "paused", held.token.unwrap()), "somebody newer wrote");
        assert!(theirs.unlock("paused", LONG).await.is_err(), "it was lost");
        assert!(next.is_held(), "the successor is left alone");
        next.unlock().await.unwrap();
    }
    let events = theirs.events();
    theirs.quit(LONG).await.unwrap();
    drop((witness, ours));
    let outcome = contest.end_with(&server, events).await;
    assert_eq!(outcome.steady_losses(), [], "nobody else was stopped");
    outcome.assert_flawless();
}

/// The gap in etcdctl's recipe: a waiter that was suspended beyond its lease must not hold a lock
/// that was granted to another client meanwhile.
#[tokio::test]
async fn a_waiter_that_was_stopped_beyond_its_lease_does_not_hold_the_lock_when_it_goes_on() {
    let (server, config) = server().await;
    let url = format!("etcd://{}", server.addr());
    let (first, third) = (registry(&config, secs(60)).await, registry(&config, secs(60)).await);
    let mut waiter = elsewhere::client(&url).await;
    for _ in 0..2 {
        let guard = first.obtain("key").lock().await.unwrap();
        assert!(waiter.try_lock("key", LONG).await.unwrap().is_none());
        // The client joins the queue and is then suspended until its entry has expired.
        let queued = async || match places(&server, "key").await {
            2 => Ok(()),
            other => Err(format!("{other} stand there")),
        };
        let stopped = async || match places(&server, "key").await {
            1 => Ok(()),
            other => Err(format!("{other} stand there")),
        };
        waiter.order(&Order::lock("key")).unwrap();
        eventually(LONG, queued).await;
        waiter.process().pause().await.unwrap();
        eventually(LONG, stopped).await;
        guard.unlock().await.unwrap();
        let next = third.obtain("key").lock().await.unwrap();
        waiter.process().resume().unwrap();
        // The client has a new entry behind the third one.
        eventually(LONG, queued).await;
        assert!(next.is_held());
        next.unlock().await.unwrap();
        waiter.held("key", LONG).await.unwrap();
        waiter.unlock("key", LONG).await.unwrap();
    }
    waiter.quit(LONG).await.unwrap();
}

async fn places(server: &EtcdServer, key: &str) -> usize {
    let queue = format!("lock-registry/{key}/");
    let names = server.ctl(&["get", &queue, "--prefix", "--keys-only"]).await.unwrap();
    names.lines().filter(|line| !line.is_empty()).count()
}

/// A request that exceeds the members' space must not return `Busy`.
#[tokio::test]
async fn a_member_without_space_is_trouble_and_nothing_is_granted() {
    let options = EtcdOptions::new().args(&["--quota-backend-bytes", "200000"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let registry = registry(&of(server.addr()), LEASE).await;
    let large = "x".repeat(100_000);
    for number in 0..100 {
        if server.ctl(&["put", &format!("large/{number}"), &large]).await.is_err() {
            break;
        }
    }
    let error = registry.obtain("key").try_lock().await.unwrap_err();
    assert!(matches!(error, LockError::Backend { .. }) && error.is_retryable(), "{error:?}");
    let found = registry.diagnose().await.unwrap();
    assert!(found.iter().any(|finding| finding.message.contains("NOSPACE")), "{found:?}");
}
