//! Five masters that know nothing of each other. Two may fail without anybody noticing; three end all, and tell everybody.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendErrorKind, Claim, Key, LockBackend as _, LockError, LockOptions,
    LockRegistry as _, LostReason,
};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::clock::ClockShim;
use registry_testkit::history::{Recorder, host_clock};
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::redis::{RedisQuorum, RedisServer, ServerOptions};
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use crate::contest::{Contest, Keys, LEASE, LONG, Resource, millis, registry, secs};
use crate::elsewhere;

async fn quorum() -> (RedisQuorum, RedisConfig) {
    let quorum = RedisQuorum::start(5).await.unwrap();
    let config = RedisConfig::from_url(&quorum.url()).unwrap();
    (quorum, config)
}

fn all(quorum: &RedisQuorum) -> Vec<&RedisServer> {
    quorum.servers().iter().collect()
}

async fn begin(config: &RedisConfig, lease: Duration) -> Contest {
    Contest::begin_with(&vec![config.clone(); 3], config, Keys::default(), lease).await
}

#[tokio::test]
async fn one_dead_master_or_two_of_five_end_no_hold_and_hold_up_nobody() {
    let (mut quorum, config) = quorum().await;
    let contest = begin(&config, secs(6)).await;
    contest.goes_on().await;
    quorum.servers_mut()[1].kill();
    contest.goes_on().await;
    quorum.servers_mut()[4].kill();
    for _ in 0..3 {
        contest.goes_on().await;
    }
    for dead in [1, 4] {
        quorum.servers_mut()[dead].start_again().await.unwrap();
        contest.goes_on().await;
    }
    let outcome = contest.end(&all(&quorum)).await;
    assert_eq!(outcome.steady_losses(), []);
    assert_eq!(outcome.errors, [""; 0]);
    outcome.with_splits().assert_flawless();
}

#[tokio::test]
async fn without_a_majority_there_are_errors_and_no_holders_and_those_who_were_are_told() {
    let (mut quorum, config) = quorum().await;
    let others = [
        RedisBackend::open(config.clone()).await.unwrap(),
        RedisBackend::open(config.clone()).await.unwrap(),
    ];
    let contest = Contest::begin(&config).await;
    contest.goes_on().await;
    contest.steady().await;
    for dead in 0..3 {
        quorum.servers_mut()[dead].kill();
    }
    // Two still know who has it, three may be free; and those who contend find each other there. Asked without an engine in between, whose
    // callers would stand behind each other.
    for _ in 0..20 {
        for key in ["steady/0", "steady/1", "steady/2", "fresh"] {
            let claim = || Claim::new(Key::new(key).unwrap(), LEASE);
            let claims = [claim(), claim()];
            let asked = others.iter().zip(&claims).map(|(other, claim)| other.try_acquire(claim));
            for answer in join_all(asked).await {
                let error = answer.expect_err("an outage is no holder");
                assert_eq!(error.kind(), BackendErrorKind::Transient, "{error:?}");
            }
        }
    }
    let newcomer = within(LONG, RedisBackend::open(config.clone())).await;
    assert_eq!(newcomer.unwrap_err().kind(), BackendErrorKind::Transient);
    // What was asked before is answered by now.
    let begin = contest.after(LEASE);
    contest.loses_steadily(3).await;
    sleep(LEASE * 3 / 2).await;
    let end = contest.now();
    assert!(contest.errors() > 0);
    for dead in 0..3 {
        quorum.servers_mut()[dead].start_again().await.unwrap();
    }
    contest.goes_on().await;
    contest.goes_on().await;
    let outcome = contest.end(&all(&quorum)).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Expired), "{losses:?}");
    let during = |from: u64| begin < from && from < end;
    let mut granted = outcome.history.grants.iter().filter(|grant| during(grant.acquire.to));
    assert_eq!(granted.next(), None, "without a majority");
    outcome.with_splits().assert_flawless();
}

/// One refuses, two are silent, two say that it is taken: that is too few to say so.
#[tokio::test]
async fn what_two_of_five_say_is_no_answer() {
    let (mut quorum, config) = quorum().await;
    let ours = registry(&config, LEASE).await;
    let other = RedisBackend::open(config).await.unwrap();
    let claim = || Claim::new(Key::new("k").unwrap(), LEASE);
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(matches!(other.try_acquire(&claim()).await, Ok(Attempt::Busy(_))));
    quorum.servers_mut()[0].kill();
    for server in &quorum.servers()[1..3] {
        server.pause().unwrap();
    }
    for _ in 0..5 {
        let error = other.try_acquire(&claim()).await.expect_err("an outage is no holder");
        assert_eq!(error.kind(), BackendErrorKind::Transient, "{error:?}");
    }
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Expired);
    for server in &quorum.servers()[1..3] {
        server.resume().unwrap();
    }
    within(LONG, ours.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn two_slow_masters_of_five_end_no_hold_and_hold_up_nobody() {
    let (quorum, _) = quorum().await;
    let proxies: Vec<FaultProxy> = quorum.servers()[..2]
        .iter()
        .map(|server| FaultProxy::start(server.addr()).unwrap())
        .collect();
    let near = proxies.iter().map(FaultProxy::addr);
    let addresses = near.chain(quorum.servers()[2..].iter().map(RedisServer::addr));
    let addresses: Vec<String> = addresses.map(|addr| addr.to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap();
    // Of three, two would often stand in each other's way, without a master to spare.
    let ways = vec![config.clone(); 2];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), secs(6)).await;
    contest.goes_on().await;
    for proxy in &proxies {
        proxy.set_mode(Mode::Delay(millis(300))).await.unwrap();
    }
    contest.goes_on().await;
    for proxy in &proxies {
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    for server in &quorum.servers()[..2] {
        server.pause().unwrap();
    }
    contest.goes_on().await;
    for server in &quorum.servers()[..2] {
        server.resume().unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&all(&quorum)).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.with_splits().assert_flawless();
}

#[tokio::test]
async fn a_lock_that_all_five_have_survives_that_one_forgets_it() {
    let (mut quorum, config) = quorum().await;
    let (ours, theirs) = (registry(&config, secs(30)).await, registry(&config, secs(30)).await);
    let guard = ours.obtain("k").lock().await.unwrap();
    forget(&mut quorum, 2).await;
    eventually(LONG, async || guard.renew(secs(30)).await.is_ok()).await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = within(LONG, theirs.obtain("k").lock()).await.unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().await.unwrap();
}

/// A crash after which the master knows nothing.
async fn forget(quorum: &mut RedisQuorum, master: usize) {
    let server = &mut quorum.servers_mut()[master];
    server.kill();
    server.lose_data().unwrap();
    server.start_again().await.unwrap();
}

/// A recipe that loses a lock for certain: the classic one against this algorithm.
#[tokio::test]
async fn a_lock_that_three_of_five_have_is_lost_if_one_forgets_it_and_its_holder_is_told() {
    let (mut quorum, config) = quorum().await;
    let (ours, theirs) = (registry(&config, secs(30)).await, registry(&config, secs(30)).await);
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let guard = ours.obtain("k").lock().await.unwrap();
    for dead in [3, 4] {
        quorum.servers_mut()[dead].start_again().await.unwrap();
    }
    assert!(matches!(theirs.obtain("k").try_lock().await, Ok(None)), "three have it");
    forget(&mut quorum, 0).await;
    let next = within(LONG, theirs.obtain("k").lock()).await.unwrap();
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    let (recorder, resource) = (Recorder::new(host_clock()), Resource::default());
    let (token, newer) = (guard.fencing_token().unwrap(), next.fencing_token().unwrap());
    assert!(newer > token, "tokens grow though one was forgotten");
    assert!(resource.write(&recorder, 2, "k", newer));
    assert!(!resource.write(&recorder, 1, "k", token));
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert!(next.is_held(), "the successor is left alone");
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn masters_that_have_just_been_started_count_for_nothing_where_that_is_asked_for() {
    let (mut quorum, config) = quorum().await;
    let lease = secs(4);
    let guarded = config.clone().with_restart_guard(lease);
    let ours = registry(&guarded, lease).await;
    let theirs = registry(&guarded, lease).await;
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let patient = || LockOptions::new().wait(LONG);
    let guard = ours.obtain("k").lock_with(patient()).await.unwrap().unwrap();
    for dead in [3, 4] {
        quorum.servers_mut()[dead].start_again().await.unwrap();
    }
    let forgotten = Instant::now();
    forget(&mut quorum, 0).await;
    let error = theirs.obtain("k").try_lock().await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), BackendErrorKind::Transient, "{error:?}");
    println!("{source}");
    let next = theirs.obtain("k").lock_with(patient()).await.unwrap().unwrap();
    assert!(forgotten.elapsed() >= lease, "whatever it has forgotten is over");
    assert!(!guard.is_held() && next.fencing_token() > guard.fencing_token());
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_contest_goes_on_flawlessly_while_masters_forget_one_after_the_other() {
    let (mut quorum, config) = quorum().await;
    let guarded = config.clone().with_restart_guard(LEASE);
    let contest = begin(&guarded, LEASE).await;
    for forgetful in [0, 3] {
        contest.goes_on().await;
        forget(&mut quorum, forgetful).await;
        contest.goes_on().await;
        // One at a time.
        sleep(LEASE + secs(2)).await;
    }
    contest.goes_on().await;
    contest.end(&all(&quorum)).await.with_splits().assert_flawless();
}

/// The leases on one master are over at once. That matters where a lock has no master to spare.
#[tokio::test]
async fn the_clock_of_one_master_that_jumps_ahead_ends_no_hold_that_all_five_have() {
    let clock = ClockShim::new().unwrap();
    let mut servers = Vec::new();
    for number in 0..5 {
        let options = ServerOptions::new();
        let options = if number == 1 { options.clock(&clock) } else { options };
        servers.push(RedisServer::start_with(options).await.unwrap());
    }
    let addresses: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap();
    let alone = registry(&config, LEASE).await;
    let mine = alone.obtain("mine").lock().await.unwrap();
    let contest = begin(&config, LEASE).await;
    contest.goes_on().await;
    let begin = contest.now();
    clock.jump_wall(61).unwrap();
    let end = contest.after(LEASE);
    for _ in 0..4 {
        contest.goes_on().await;
    }
    sleep(LEASE).await;
    assert!(mine.is_held());
    mine.unlock().await.unwrap();
    clock.jump_wall(-61).unwrap();
    contest.goes_on().await;
    let outcome = contest.end(&servers.iter().collect::<Vec<_>>()).await;
    outcome.with_splits().assert_flawless_but_between(&[(begin, end)]);
}

#[tokio::test]
async fn a_stopped_holder_is_replaced_and_knows_it() {
    let (quorum, _) = quorum().await;
    let (url, servers) = (quorum.url(), all(&quorum));
    let outcome = elsewhere::a_stopped_holder_is_replaced_and_knows_it(&url, &servers);
    outcome.await.with_splits().assert_flawless();
}
