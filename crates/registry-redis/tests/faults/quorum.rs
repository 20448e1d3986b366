//! A quorum of five masters. Two failures have no visible effect. With three failures no lock is
//! granted and every caller receives an error.

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
    // The two live masters know the holders, and the three dead ones may be free. The claims are
    // sent without an engine, whose callers would queue in the process.
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
    // Earlier requests are answered by then.
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

/// One master refuses, two are silent and two report a holder: too few to report `Busy`.
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
    for _ in 0..3 {
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
    // Two clients, because three would often block each other while no master is spare.
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

/// Crashes a master and deletes its data.
async fn forget(quorum: &mut RedisQuorum, master: usize) {
    let server = &mut quorum.servers_mut()[master];
    server.kill();
    server.lose_data().unwrap();
    server.start_again().await.unwrap();
}

/// A sequence that certainly loses a lock: the standard counterexample to Redlock.
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
        // One master at a time.
        sleep(LEASE + secs(2)).await;
    }
    contest.goes_on().await;
    contest.end(&all(&quorum)).await.with_splits().assert_flawless();
}

/// The leases on one master end at once. That affects only locks that exist on no more than a
/// majority.
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

/// Three of five masters have one lock, and all have the other. A silent master decides about the
/// first lock.
#[tokio::test]
async fn a_hold_that_depends_on_a_silent_master_takes_no_other_hold_with_it() {
    let (mut quorum, config) = quorum().await;
    let lease = secs(4);
    let ours = registry(&config, lease).await;
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let patient = || LockOptions::new().wait(LONG);
    let weak = ours.obtain("weak").lock_with(patient()).await.unwrap().unwrap();
    for back in [3, 4] {
        quorum.servers_mut()[back].start_again().await.unwrap();
    }
    let holds = async |key: &str, server: &RedisServer| {
        server.ask(&format!("EXISTS lock-registry:{{{key}}}")).await.unwrap().contains(":1")
    };
    let strong = ours.obtain("strong").lock_with(patient()).await.unwrap().unwrap();
    eventually(LONG, async || {
        join_all(quorum.servers().iter().map(|server| holds("strong", server))).await == [true; 5]
    })
    .await;
    assert!(
        !holds("weak", &quorum.servers()[3]).await && !holds("weak", &quorum.servers()[4]).await
    );
    quorum.servers()[0].pause().unwrap();
    assert_eq!(within(LONG, weak.lost()).await, LostReason::Expired);
    sleep(lease).await;
    assert!(strong.is_held(), "four masters have renewed it");
    quorum.servers()[0].resume().unwrap();
    strong.unlock().await.unwrap();
}

/// With a restart guard, a master's process id is requested before the lock. The response may
/// arrive after the release.
#[tokio::test]
async fn a_lock_that_was_released_before_a_slow_master_was_asked_for_it_is_not_taken_there() {
    let (quorum, _) = quorum().await;
    let proxy = FaultProxy::start(quorum.servers()[0].addr()).unwrap();
    let others = quorum.servers()[1..].iter().map(RedisServer::addr);
    let addresses: Vec<String> =
        [proxy.addr()].into_iter().chain(others).map(|addr| addr.to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap().with_restart_guard(millis(100));
    let ours = registry(&config, LONG).await;
    let lock = async |key: &str| {
        let options = LockOptions::new().wait(LONG);
        ours.obtain(key).lock_with(options).await.unwrap().unwrap()
    };
    let is_there = async |name: &str| {
        quorum.servers()[0]
            .ask(&format!("EXISTS lock-registry:{name}"))
            .await
            .unwrap()
            .contains(":1")
    };
    // The restart guard is over on all masters by then.
    eventually(LONG, async || {
        let first = lock("first").await;
        let there = is_there("{first}").await;
        first.unlock().await.unwrap();
        there
    })
    .await;
    proxy.set_mode(Mode::Delay(millis(300))).await.unwrap();
    lock("released").await.unlock().await.unwrap();
    let next = lock("next").await;
    // This lock was requested from the slow master later.
    eventually(LONG, async || is_there("{next}").await).await;
    eventually(secs(20), async || !is_there("{released}").await).await;
    next.unlock().await.unwrap();
}

/// The fault of one master of five during a throughput measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    None,
    Dead,
    Stopped,
    Silent,
    /// Responses take a second.
    Distant,
}

/// The number of acquired locks and the duration of the slowest acquisition.
#[derive(Debug, Default, Clone, Copy)]
struct Count {
    grants: usize,
    longest: Duration,
}

/// Five masters, the first one behind a proxy, and four registries.
struct Counted {
    quorum: RedisQuorum,
    proxy: FaultProxy,
    registries: Vec<registry_core::Registry>,
}

impl Counted {
    async fn start() -> Self {
        let (quorum, _) = quorum().await;
        let proxy = FaultProxy::start(quorum.servers()[0].addr()).unwrap();
        let others = quorum.servers()[1..].iter().map(RedisServer::addr);
        let addresses: Vec<String> =
            [proxy.addr()].into_iter().chain(others).map(|addr| addr.to_string()).collect();
        let url = format!("redis+quorum://{}", addresses.join(","));
        let config = RedisConfig::from_url(&url).unwrap();
        let mut registries = Vec::new();
        for _ in 0..4 {
            registries.push(registry(&config, secs(10)).await);
        }
        Self { quorum, proxy, registries }
    }

    /// Lets all registries acquire `keys` locks in turn for `window`.
    async fn take(&self, keys: usize, window: Duration) -> Count {
        let end = Instant::now() + window;
        let callers = self.registries.iter().enumerate().map(async |(nth, registry)| {
            let mut count = Count::default();
            while Instant::now() < end {
                let lock = registry.obtain(&format!("k{}", (nth + count.grants) % keys));
                let begun = Instant::now();
                if let Ok(Some(guard)) = lock.lock_with(LockOptions::new().wait(secs(5))).await {
                    count.grants += 1;
                    count.longest = count.longest.max(begun.elapsed());
                    guard.unlock().await.unwrap();
                }
            }
            count
        });
        join_all(callers).await.into_iter().fold(Count::default(), |sum, count| Count {
            grants: sum.grants + count.grants,
            longest: sum.longest.max(count.longest),
        })
    }

    /// Repeats this under each of the faults, in turns, so that a busy machine affects all of them
    /// equally.
    async fn compare<const N: usize>(&self, keys: usize, troubles: [Trouble; N]) -> [Count; N] {
        let mut counts = [Count::default(); N];
        for _ in 0..3 {
            for (trouble, sum) in troubles.into_iter().zip(&mut counts) {
                let mode = match trouble {
                    Trouble::None | Trouble::Stopped => Mode::Pass,
                    Trouble::Dead => Mode::Refuse,
                    Trouble::Silent => Mode::BlackHole,
                    Trouble::Distant => Mode::Delay(secs(1)),
                };
                self.proxy.set_mode(mode).await.unwrap();
                match trouble {
                    Trouble::Dead => self.proxy.cut_all().await,
                    Trouble::Stopped => self.quorum.servers()[0].pause().unwrap(),
                    _ => {}
                }
                // The first acquisitions detect the fault.
                self.take(keys, millis(500)).await;
                let count = self.take(keys, secs(2)).await;
                sum.grants += count.grants;
                sum.longest = sum.longest.max(count.longest);
                self.quorum.servers()[0].resume().unwrap();
                self.proxy.set_mode(Mode::Pass).await.unwrap();
                self.take(keys, millis(500)).await;
            }
        }
        counts
    }
}

/// Only half is asserted, because a busy machine does not affect both measurements equally.
#[tokio::test]
async fn a_silent_or_distant_master_of_five_costs_little_more_than_a_dead_one() {
    use Trouble::{Dead, Distant, Silent, Stopped};
    let counted = Counted::start().await;
    let counts = counted.compare(2, [Dead, Silent, Stopped, Distant]).await;
    println!("dead, silent, stopped, distant: {counts:?}");
    let [dead, others @ ..] = counts;
    assert!(others.iter().all(|count| count.grants * 2 > dead.grants), "{counts:?}");
}

#[tokio::test]
#[ignore = "a measurement: cargo test -p registry-redis --test faults -- --ignored --nocapture quorum::"]
async fn how_many_locks_are_taken_while_one_master_of_five_is_in_trouble() {
    use Trouble::{Dead, Distant, None, Stopped};
    let counted = Counted::start().await;
    for keys in [1, 2, 4, 1_000] {
        let [none, dead, stopped, distant] =
            counted.compare(keys, [None, Dead, Stopped, Distant]).await;
        println!(
            "{keys} keys: none {none:?}, dead {dead:?}, stopped {stopped:?}, distant {distant:?}"
        );
    }
}

/// A server's uptime jumps with its wall clock.
#[tokio::test]
async fn a_clock_that_jumps_ahead_ends_no_restart_guard() {
    let clock = ClockShim::new().unwrap();
    let options = ServerOptions::new().clock(&clock);
    let quorum = RedisQuorum::start_with(3, &options).await.unwrap();
    let config = RedisConfig::from_url(&quorum.url()).unwrap().with_restart_guard(secs(3_600));
    let backend = RedisBackend::open(config).await.unwrap();
    let attempt = async || {
        let claim = Claim::new(Key::new("k").unwrap(), LEASE);
        backend.try_acquire(&claim).await
    };
    assert!(attempt().await.unwrap_err().to_string().contains("restart_guard"));
    clock.jump_wall(2 * 3_600).unwrap();
    // Servers read their clock about ten times per second.
    for _ in 0..5 {
        assert!(attempt().await.unwrap_err().to_string().contains("restart_guard"));
        sleep(millis(200)).await;
    }
}

/// Otherwise each new process would wait for the restart guard, however long the servers have been
/// running.
#[tokio::test]
async fn one_client_waits_for_the_restart_guard_and_vouches_for_those_that_come_later() {
    let (mut quorum, config) = quorum().await;
    let config = config.with_restart_guard(secs(2));
    let attempt = async |backend: &RedisBackend| {
        let claim = Claim::new(Key::new("k").unwrap(), LEASE);
        let answer = backend.try_acquire(&claim).await;
        let _ = backend.release(&claim).await;
        matches!(answer, Ok(Attempt::Granted(_)))
    };
    let begun = Instant::now();
    let first = RedisBackend::open(config.clone()).await.unwrap();
    eventually(LONG, async || attempt(&first).await).await;
    assert!(begun.elapsed() >= secs(2));
    // All masters, because the fifth may answer later than the majority.
    eventually(LONG, async || {
        let keys = quorum.servers().iter().map(|server| server.ask("EXISTS lock-registry:{}:age"));
        join_all(keys).await.into_iter().all(|exists| exists.unwrap().contains(":1"))
    })
    .await;
    let later = RedisBackend::open(config.clone()).await.unwrap();
    assert!(attempt(&later).await, "the servers are known to run for long enough");
    // Restarted with their data, which includes the stored ages of the old processes.
    for server in quorum.servers_mut() {
        server.start_again().await.unwrap();
    }
    let newest = RedisBackend::open(config).await.unwrap();
    assert!(!attempt(&newest).await, "the servers have just been started");
}
