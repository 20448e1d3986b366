//! One server that writes to disk before it answers. While it keeps its data and its clock, faults
//! cost only time.

use std::time::Duration;

use registry_core::{LockRegistry as _, LostReason};
use registry_redis::RedisConfig;
use registry_testkit::clock::ClockShim;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::redis::{RedisServer, ServerOptions};
use registry_testkit::within;
use tokio::time::{Instant, sleep};

use crate::contest::{Contest, Keys, LEASE, LONG, millis, registry, secs};
use crate::elsewhere;

async fn server() -> (RedisServer, RedisConfig) {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    (server, config)
}

#[tokio::test]
async fn a_server_that_stands_still_for_less_than_a_lease_ends_no_hold() {
    let (server, config) = server().await;
    // Long enough for a busy machine.
    let lease = secs(6);
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), lease).await;
    for _ in 0..2 {
        contest.goes_on().await;
        server.pause().unwrap();
        sleep(millis(1_500)).await;
        server.resume().unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&[&server]).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_server_that_stands_still_for_longer_than_a_lease_ends_holds_and_makes_no_second_holder()
{
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
    let outcome = contest.end(&[&server]).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Expired), "{losses:?}");
    outcome.assert_flawless();
}

#[tokio::test]
async fn crashes_of_a_server_that_keeps_its_data_break_no_promise() {
    let (mut server, config) = server().await;
    let contest = Contest::begin(&config).await;
    for down in [Duration::ZERO, LEASE / 2, LEASE * 3 / 2] {
        contest.goes_on().await;
        server.kill();
        sleep(down).await;
        server.start_again().await.unwrap();
    }
    contest.goes_on().await;
    contest.end(&[&server]).await.assert_flawless();
}

/// Locks whose records are lost are free. Two holders may therefore exist until the first one's
/// next renewal detects the loss.
#[tokio::test]
async fn a_restart_without_data_costs_exclusion_until_the_next_renewal_and_tokens_grow_on() {
    let (mut server, config) = server().await;
    let contest = Contest::begin(&config).await;
    let mut windows = Vec::new();
    for round in 1..=2 {
        contest.goes_on().await;
        contest.steady().await;
        let begin = contest.now();
        server.kill();
        server.lose_data().unwrap();
        server.start_again().await.unwrap();
        windows.push((begin, contest.after(LEASE)));
        contest.goes_on().await;
        contest.loses_steadily(3 * round).await;
        let losses = contest.losses();
        let told = losses.iter().filter(|loss| loss.at > begin && loss.key.starts_with("steady"));
        let told = told.map(|loss| Duration::from_nanos(loss.at - begin));
        println!("told after {:?}", told.collect::<Vec<_>>());
    }
    let outcome = contest.end(&[&server]).await;
    outcome.assert_flawless_but_between(&windows);
}

#[tokio::test]
async fn forgotten_scripts_and_cut_connections_end_no_hold() {
    let (server, config) = server().await;
    let lease = secs(6);
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), lease).await;
    for _ in 0..5 {
        for trouble in ["SCRIPT FLUSH", "CLIENT KILL TYPE normal", "CLIENT KILL TYPE pubsub"] {
            server.ask(trouble).await.unwrap();
            contest.goes_on().await;
        }
    }
    let outcome = contest.end(&[&server]).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_grant_whose_reply_was_lost_is_taken_up_or_given_back() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let behind = RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    // So long that only a release can free the key in time.
    let lease = secs(600);
    let theirs = registry(&config, lease).await;
    for round in 0..20 {
        let key = format!("reply/{round}");
        // A new registry each time. Responses to an older registry's releases would be cut off
        // instead.
        let ours = registry(&behind, lease).await;
        // From now on a connection exists on which the server has cached the script.
        ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let lock = ours.obtain(&key);
        let taking = tokio::spawn(async move { lock.lock().await });
        // The server has granted the lock, but the response was lost.
        let held = async || server.ask(&format!("EXISTS lock-registry:{{{key}}}")).await.unwrap();
        registry_testkit::eventually(LONG, async || held().await == ":1\r\n").await;
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
async fn a_release_whose_reply_was_lost_frees_the_key() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let behind = RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    let (ours, theirs) = (registry(&behind, secs(600)).await, registry(&config, secs(600)).await);
    // The server has cached the script from now on.
    ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    for round in 0..20 {
        let key = format!("reply/{round}");
        let guard = ours.obtain(&key).lock().await.unwrap();
        let token = guard.fencing_token();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let releasing = tokio::spawn(async move { guard.unlock().await });
        let next = within(LONG, theirs.obtain(&key).lock()).await.unwrap();
        assert!(next.fencing_token() > token);
        proxy.set_mode(Mode::Pass).await.unwrap();
        // The release finds the key free, or its outcome is unknown. It never reports a loss.
        let released = within(LONG, releasing).await.unwrap();
        println!("{released:?}");
        assert!(!matches!(released, Err(registry_core::LockError::Lost { .. })), "{released:?}");
        ours.idle().await;
        assert!(next.is_held());
        next.renew(secs(600)).await.unwrap();
        next.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn replies_that_are_lost_cut_or_late_break_no_promise() {
    let (server, config) = server().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let behind =
        |proxy: &FaultProxy| RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    let ways: Vec<_> = proxies.iter().map(behind).collect();
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
        contest.goes_on().await;
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    contest.goes_on().await;
    contest.end(&[&server]).await.assert_flawless();
}

/// All leases end at once on the server, but not on the clients. Holders detect the loss at their
/// next renewal.
#[tokio::test]
async fn a_server_clock_that_jumps_ahead_ends_leases_early_and_tokens_grow_on() {
    let clock = ClockShim::new().unwrap();
    let server = RedisServer::start_with(ServerOptions::new().clock(&clock)).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let contest = Contest::begin(&config).await;
    contest.goes_on().await;
    contest.steady().await;
    let begin = contest.now();
    clock.jump_wall(61).unwrap();
    let end = contest.after(LEASE);
    contest.loses_steadily(3).await;
    contest.goes_on().await;
    let outcome = contest.end(&[&server]).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

/// All leases last longer on the server, and no client relies on that. They are over once the clock
/// is corrected.
#[tokio::test]
async fn a_server_clock_that_was_wrong_for_a_while_costs_exclusion_until_the_next_renewal() {
    let clock = ClockShim::new().unwrap();
    let server = RedisServer::start_with(ServerOptions::new().clock(&clock)).await.unwrap();
    // The server sends this user no invalidations.
    server.ask("ACL SETUSER plain on >p ~* &* +@all -client|tracking").await.unwrap();
    let url = format!("redis://plain:p@{}", server.addr());
    let config = RedisConfig::from_url(&url).unwrap();
    let contest = Contest::begin(&config).await;
    contest.steady().await;
    clock.jump_wall(-61).unwrap();
    contest.goes_on().await;
    // Every holder renews during this time.
    sleep(LEASE * 3 / 2).await;
    contest.steady().await;
    assert_eq!(contest.losses().len(), 0);
    let begin = contest.now();
    clock.jump_wall(61).unwrap();
    let end = contest.after(LEASE);
    contest.loses_steadily(3).await;
    contest.goes_on().await;
    let outcome = contest.end(&[&server]).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

#[tokio::test]
async fn a_stopped_holder_is_replaced_and_knows_it() {
    let (server, _) = server().await;
    let (url, servers) = (server.url(), [&server]);
    let outcome = elsewhere::a_stopped_holder_is_replaced_and_knows_it(&url, &servers);
    outcome.await.assert_flawless();
}
