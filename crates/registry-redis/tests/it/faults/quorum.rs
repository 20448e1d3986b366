//! A quorum of five masters. Two failures have no visible effect. With three failures no lock is
//! granted and every caller receives an error.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendErrorKind, Claim, Key, LockBackend as _, LockError, LockOptions, LostReason,
};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::clock::ClockShim;
use registry_testkit::history::{Recorder, host_clock};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::redis::{RedisOptions, RedisQuorum, RedisServer};
use registry_testkit::workload::{FencedResource, WorkloadOptions};
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use super::remote_client;
use super::workload::{LEASE, LONG, LONG_LEASE, Workload, backend, millis, registry, secs};

async fn quorum() -> (RedisQuorum, RedisConfig) {
    let quorum = RedisQuorum::start(5).await.unwrap();
    let config = RedisConfig::from_url(&quorum.url()).unwrap();
    (quorum, config)
}

fn all(quorum: &RedisQuorum) -> Vec<&RedisServer> {
    quorum.servers().iter().collect()
}

#[tokio::test]
async fn two_dead_masters_of_five_lose_no_lock_and_stop_no_client() {
    let (mut quorum, config) = quorum().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    workload.wait_for_progress().await;
    quorum.servers_mut()[1].kill();
    workload.wait_for_progress().await;
    quorum.servers_mut()[4].kill();
    for _ in 0..3 {
        workload.wait_for_progress().await;
    }
    for dead in [1, 4] {
        quorum.servers_mut()[dead].restart().await.unwrap();
        workload.wait_for_progress().await;
    }
    let outcome = workload.end(&all(&quorum)).await;
    assert_eq!(outcome.long_held_losses(), []);
    // While two masters are down, every other master must respond in time. On a loaded machine, a
    // master may respond too late, and the call returns an error.
    let (errors, grants) = (&outcome.errors, outcome.history.grants.len());
    assert!(errors.len() * 10 < grants, "{grants} grants and {errors:#?}");
    outcome.without_split_votes().assert_guarantees();
}

#[tokio::test]
async fn without_a_majority_callers_receive_errors_and_holders_are_notified() {
    let (mut quorum, config) = quorum().await;
    let others = [backend(&config).await, backend(&config).await];
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    workload.wait_until_long_held().await;
    for dead in 0..3 {
        quorum.servers_mut()[dead].kill();
    }
    // The two live masters report a holder, but the lock may be free on the three dead ones. The
    // claims are sent without an engine, because callers of an engine would queue locally.
    for _ in 0..20 {
        for key in ["steady/0", "steady/1", "steady/2", "fresh"] {
            let claim = || Claim::new(Key::new(key).unwrap(), LEASE);
            let claims = [claim(), claim()];
            let attempts =
                others.iter().zip(&claims).map(|(other, claim)| other.try_acquire(claim));
            for result in join_all(attempts).await {
                let error = result.expect_err("an outage must not be reported as a holder");
                assert_eq!(error.kind(), BackendErrorKind::Transient, "{error:?}");
            }
        }
    }
    let new_client = within(LONG, RedisBackend::open(config.clone())).await;
    assert_eq!(new_client.unwrap_err().kind(), BackendErrorKind::Transient);
    // The responses to earlier requests have arrived by then.
    let begin = workload.window(0, LEASE).to;
    workload.wait_for_long_held_losses(3).await;
    sleep(LEASE * 3 / 2).await;
    let end = workload.now();
    assert!(workload.errors() > 0);
    for dead in 0..3 {
        quorum.servers_mut()[dead].restart().await.unwrap();
    }
    workload.wait_for_progress().await;
    workload.wait_for_progress().await;
    let outcome = workload.end(&all(&quorum)).await;
    let losses = outcome.long_held_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Expired), "{losses:?}");
    let during = |from: u64| begin < from && from < end;
    let mut granted = outcome.history.grants.iter().filter(|grant| during(grant.acquire.to));
    assert_eq!(granted.next(), None, "without a majority");
    outcome.without_split_votes().assert_guarantees();
}

/// One master refuses, two are unresponsive and two report a holder: too few to report `Busy`.
#[tokio::test]
async fn the_responses_of_two_of_five_masters_do_not_decide() {
    let (mut quorum, config) = quorum().await;
    let registry_a = registry(&config, LEASE).await;
    let other = backend(&config).await;
    let claim = || Claim::new(Key::new("k").unwrap(), LEASE);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    assert!(matches!(other.try_acquire(&claim()).await, Ok(Attempt::Busy(_))));
    quorum.servers_mut()[0].kill();
    for server in &quorum.servers()[1..3] {
        server.pause().unwrap();
    }
    for _ in 0..3 {
        let error = other
            .try_acquire(&claim())
            .await
            .expect_err("an outage must not be reported as a holder");
        assert_eq!(error.kind(), BackendErrorKind::Transient, "{error:?}");
    }
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Expired);
    for server in &quorum.servers()[1..3] {
        server.resume().unwrap();
    }
    within(LONG, registry_a.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn two_slow_masters_of_five_lose_no_lock_and_delay_no_client() {
    let (quorum, _) = quorum().await;
    let proxies: Vec<FaultProxy> = quorum.servers()[..2]
        .iter()
        .map(|server| FaultProxy::start(server.addr()).unwrap())
        .collect();
    let proxied = proxies.iter().map(FaultProxy::addr);
    let addresses = proxied.chain(quorum.servers()[2..].iter().map(|server| server.addr()));
    let addresses: Vec<String> = addresses.map(|addr| addr.to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap();
    // Two clients, because three would often split the votes when all live masters must agree.
    let client_configs = vec![config.clone(); 2];
    let workload =
        Workload::start_with(&client_configs, &config, WorkloadOptions::new(), LONG_LEASE).await;
    workload.wait_for_progress().await;
    for proxy in &proxies {
        proxy.set_mode(ProxyMode::Delay(millis(300))).await.unwrap();
    }
    workload.wait_for_progress().await;
    for proxy in &proxies {
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
    }
    for server in &quorum.servers()[..2] {
        server.pause().unwrap();
    }
    workload.wait_for_progress().await;
    for server in &quorum.servers()[..2] {
        server.resume().unwrap();
    }
    workload.wait_for_progress().await;
    let outcome = workload.end(&all(&quorum)).await;
    assert_eq!(outcome.long_held_losses(), []);
    outcome.without_split_votes().assert_guarantees();
}

#[tokio::test]
async fn a_lock_on_five_masters_survives_the_data_loss_of_one() {
    let (mut quorum, config) = quorum().await;
    let (registry_a, registry_b) =
        (registry(&config, secs(30)).await, registry(&config, secs(30)).await);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    restart_without_data(&mut quorum, 2).await;
    eventually(LONG, async || guard.extend(secs(30)).await.is_ok()).await;
    assert!(registry_b.obtain("k").try_lock().await.unwrap().is_none());
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = within(LONG, registry_b.obtain("k").lock()).await.unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().await.unwrap();
}

/// Crashes a master and deletes its data.
async fn restart_without_data(quorum: &mut RedisQuorum, master: usize) {
    let server = &mut quorum.servers_mut()[master];
    server.kill();
    server.delete_data().unwrap();
    server.restart().await.unwrap();
}

/// A sequence that certainly loses a lock: the standard counterexample to Redlock.
#[tokio::test]
async fn a_lock_on_three_of_five_masters_is_lost_with_the_data_of_one_and_the_holder_is_notified() {
    let (mut quorum, config) = quorum().await;
    let (registry_a, registry_b) =
        (registry(&config, secs(30)).await, registry(&config, secs(30)).await);
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let guard = registry_a.obtain("k").lock().await.unwrap();
    for dead in [3, 4] {
        quorum.servers_mut()[dead].restart().await.unwrap();
    }
    assert!(matches!(registry_b.obtain("k").try_lock().await, Ok(None)), "three have it");
    restart_without_data(&mut quorum, 0).await;
    let next = within(LONG, registry_b.obtain("k").lock()).await.unwrap();
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    let (recorder, resource) = (Recorder::new(host_clock()), FencedResource::default());
    let (token, newer) = (guard.fencing_token(), next.fencing_token());
    assert!(newer > token, "tokens grow although one was lost");
    assert!(resource.write(&recorder, 2, "k", newer));
    assert!(!resource.write(&recorder, 1, "k", token));
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert!(next.is_held(), "the next holder keeps its lock");
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_restart_guard_excludes_masters_that_have_just_been_started() {
    let (mut quorum, config) = quorum().await;
    let lease = secs(4);
    let guarded = config.clone().with_restart_guard(lease);
    let registry_a = registry(&guarded, lease).await;
    let registry_b = registry(&guarded, lease).await;
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let with_wait = || LockOptions::new().wait(LONG);
    let guard = registry_a.obtain("k").lock_with(with_wait()).await.unwrap();
    for dead in [3, 4] {
        quorum.servers_mut()[dead].restart().await.unwrap();
    }
    let restarted_at = Instant::now();
    restart_without_data(&mut quorum, 0).await;
    let error = registry_b.obtain("k").try_lock().await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), BackendErrorKind::Transient, "{error:?}");
    println!("{source}");
    let next = registry_b.obtain("k").lock_with(with_wait()).await.unwrap();
    assert!(restarted_at.elapsed() >= lease, "the lost leases have ended");
    assert!(!guard.is_held() && next.fencing_token() > guard.fencing_token());
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_restart_guard_prevents_violations_while_masters_lose_data_in_turn() {
    let (mut quorum, config) = quorum().await;
    let guarded = config.clone().with_restart_guard(LEASE);
    let workload = Workload::start(&guarded, LEASE).await;
    for master in [0, 3] {
        workload.wait_for_progress().await;
        restart_without_data(&mut quorum, master).await;
        workload.wait_for_progress().await;
        // The restart guard of this master ends before the next master restarts.
        sleep(LEASE + secs(2)).await;
    }
    workload.wait_for_progress().await;
    workload.end(&all(&quorum)).await.without_split_votes().assert_guarantees();
}

/// All leases on one master end at once. Only locks that exist on a bare majority are affected.
#[tokio::test]
async fn a_clock_jump_of_one_master_ends_no_lock_on_five_masters() {
    let clock = ClockShim::new().unwrap();
    let mut servers = Vec::new();
    for number in 0..5 {
        let options = RedisOptions::new();
        let options = if number == 1 { options.clock(&clock) } else { options };
        servers.push(RedisServer::start_with(options).await.unwrap());
    }
    let addresses: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap();
    // The lock is renewed every five seconds.
    let other_registry = registry(&config, secs(15)).await;
    let guard = other_registry.obtain("mine").lock().await.unwrap();
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    let begin = workload.now();
    clock.jump_wall(61).unwrap();
    let window = workload.window(begin, LEASE);
    for _ in 0..4 {
        workload.wait_for_progress().await;
    }
    sleep(secs(6)).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    clock.jump_wall(-61).unwrap();
    workload.wait_for_progress().await;
    let outcome = workload.end(&servers.iter().collect::<Vec<_>>()).await;
    outcome.without_split_votes().assert_guarantees_except_in(&[window]);
}

#[tokio::test]
async fn a_suspended_holder_is_replaced_and_notified() {
    let (quorum, _) = quorum().await;
    let (url, servers) = (quorum.url(), all(&quorum));
    let outcome = remote_client::a_suspended_holder_is_replaced_and_notified(&url, &servers);
    outcome.await.without_split_votes().assert_guarantees();
}

/// Three of five masters have one lock, and all have the other. The first lock has no majority
/// without the master that becomes unresponsive.
#[tokio::test]
async fn a_lock_that_depends_on_an_unresponsive_master_affects_no_other_lock() {
    let (mut quorum, config) = quorum().await;
    let lease = secs(12);
    let registry_a = registry(&config, lease).await;
    for dead in [3, 4] {
        quorum.servers_mut()[dead].kill();
    }
    let with_wait = || LockOptions::new().wait(LONG);
    let weak = registry_a.obtain("weak").lock_with(with_wait()).await.unwrap();
    for back in [3, 4] {
        quorum.servers_mut()[back].restart().await.unwrap();
    }
    let holds = async |key: &str, server: &RedisServer| {
        server
            .send_command(&format!("EXISTS lock-registry:{{{key}}}"))
            .await
            .unwrap()
            .contains(":1")
    };
    let strong = registry_a.obtain("strong").lock_with(with_wait()).await.unwrap();
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

/// With a restart guard, the client requests a master's `run_id` before the lock. The response may
/// arrive after the release.
#[tokio::test]
async fn a_slow_master_does_not_grant_a_lock_that_was_already_released() {
    let (quorum, _) = quorum().await;
    let proxy = FaultProxy::start(quorum.servers()[0].addr()).unwrap();
    let others = quorum.servers()[1..].iter().map(|server| server.addr());
    let addresses: Vec<String> =
        [proxy.addr()].into_iter().chain(others).map(|addr| addr.to_string()).collect();
    let url = format!("redis+quorum://{}", addresses.join(","));
    let config = RedisConfig::from_url(&url).unwrap().with_restart_guard(millis(100));
    let registry_a = registry(&config, LONG).await;
    let lock = async |key: &str| {
        let options = LockOptions::new().wait(LONG);
        registry_a.obtain(key).lock_with(options).await.unwrap()
    };
    let exists_on_slow_master = async |name: &str| {
        quorum.servers()[0]
            .send_command(&format!("EXISTS lock-registry:{name}"))
            .await
            .unwrap()
            .contains(":1")
    };
    // The restart guard is over on all masters by then.
    eventually(LONG, async || {
        let first = lock("first").await;
        let exists = exists_on_slow_master("{first}").await;
        first.unlock().await.unwrap();
        exists
    })
    .await;
    proxy.set_mode(ProxyMode::Delay(millis(300))).await.unwrap();
    lock("released").await.unlock().await.unwrap();
    let next = lock("next").await;
    // The client requested this lock from the slow master after `released`.
    eventually(LONG, async || exists_on_slow_master("{next}").await).await;
    eventually(secs(20), async || !exists_on_slow_master("{released}").await).await;
    next.unlock().await.unwrap();
}

/// The fault of one master of five during a throughput measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MasterFault {
    None,
    Dead,
    Suspended,
    Unresponsive,
    /// Requests and responses each take a second.
    Slow,
}

/// The number of acquired locks and the duration of the slowest acquisition.
#[derive(Debug, Default, Clone, Copy)]
struct Throughput {
    grants: usize,
    longest: Duration,
}

/// Five masters, the first one behind a proxy, and four registries.
struct ThroughputTest {
    quorum: RedisQuorum,
    proxy: FaultProxy,
    registries: Vec<registry_core::Registry>,
}

impl ThroughputTest {
    async fn start() -> Self {
        let (quorum, _) = quorum().await;
        let proxy = FaultProxy::start(quorum.servers()[0].addr()).unwrap();
        let others = quorum.servers()[1..].iter().map(|server| server.addr());
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

    /// All registries acquire `keys` locks in turn for the time `window`.
    async fn measure(&self, keys: usize, window: Duration) -> Throughput {
        let end = Instant::now() + window;
        let callers = self.registries.iter().enumerate().map(async |(index, registry)| {
            let mut throughput = Throughput::default();
            while Instant::now() < end {
                let lock = registry.obtain(&format!("k{}", (index + throughput.grants) % keys));
                let started_at = Instant::now();
                if let Ok(Some(guard)) = lock.try_lock_with(LockOptions::new().wait(secs(5))).await
                {
                    throughput.grants += 1;
                    throughput.longest = throughput.longest.max(started_at.elapsed());
                    guard.unlock().await.unwrap();
                }
            }
            throughput
        });
        join_all(callers).await.into_iter().fold(Throughput::default(), |sum, throughput| {
            Throughput {
                grants: sum.grants + throughput.grants,
                longest: sum.longest.max(throughput.longest),
            }
        })
    }

    /// Measures under each of the faults in turn, three times, so that a busy machine affects all
    /// faults equally. Returns the sums.
    async fn compare<const N: usize>(
        &self,
        keys: usize,
        faults: [MasterFault; N],
    ) -> [Throughput; N] {
        let mut throughputs = [Throughput::default(); N];
        for _ in 0..3 {
            for (fault, sum) in faults.into_iter().zip(&mut throughputs) {
                let mode = match fault {
                    MasterFault::None | MasterFault::Suspended => ProxyMode::Pass,
                    MasterFault::Dead => ProxyMode::Refuse,
                    MasterFault::Unresponsive => ProxyMode::BlackHole,
                    MasterFault::Slow => ProxyMode::Delay(secs(1)),
                };
                self.proxy.set_mode(mode).await.unwrap();
                match fault {
                    MasterFault::Dead => self.proxy.cut_all().await,
                    MasterFault::Suspended => self.quorum.servers()[0].pause().unwrap(),
                    _ => {}
                }
                // The first acquisitions detect the fault.
                self.measure(keys, millis(500)).await;
                let throughput = self.measure(keys, secs(2)).await;
                sum.grants += throughput.grants;
                sum.longest = sum.longest.max(throughput.longest);
                self.quorum.servers()[0].resume().unwrap();
                self.proxy.set_mode(ProxyMode::Pass).await.unwrap();
                self.measure(keys, millis(500)).await;
            }
        }
        throughputs
    }
}

/// Asserts only half of the throughput, in one of three comparisons, because a busy machine does
/// not affect all measurements equally.
#[tokio::test]
async fn an_unresponsive_or_slow_master_costs_little_more_than_a_dead_one() {
    use MasterFault::{Dead, Slow, Suspended, Unresponsive};
    let test = ThroughputTest::start().await;
    for _ in 0..3 {
        let throughputs = test.compare(2, [Dead, Unresponsive, Suspended, Slow]).await;
        println!("dead, unresponsive, suspended, slow: {throughputs:?}");
        let [dead, others @ ..] = throughputs;
        if others.iter().all(|throughput| throughput.grants * 2 > dead.grants) {
            return;
        }
    }
    panic!("in each comparison, a fault costs more than half of the throughput");
}

#[tokio::test]
#[ignore = "a measurement: cargo test -p registry-redis --all-features --test it -- --ignored --nocapture quorum::"]
async fn throughput_with_one_faulty_master_of_five() {
    use MasterFault::{Dead, None, Slow, Suspended};
    let test = ThroughputTest::start().await;
    for keys in [1, 2, 4, 1_000] {
        let [healthy, dead, suspended, slow] =
            test.compare(keys, [None, Dead, Suspended, Slow]).await;
        println!(
            "{keys} keys: healthy {healthy:?}, dead {dead:?}, suspended {suspended:?}, slow {slow:?}"
        );
    }
}

/// A server's uptime jumps with its wall clock.
#[tokio::test]
async fn a_clock_jump_ends_no_restart_guard() {
    let clock = ClockShim::new().unwrap();
    let options = RedisOptions::new().clock(&clock);
    let quorum = RedisQuorum::start_with(3, &options).await.unwrap();
    let config = RedisConfig::from_url(&quorum.url()).unwrap().with_restart_guard(secs(3_600));
    let backend = backend(&config).await;
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

/// Without the stored age, each new process would wait for the restart guard, however long the
/// servers have been running.
#[tokio::test]
async fn the_age_of_a_master_is_stored_for_later_clients() {
    let (mut quorum, config) = quorum().await;
    let config = config.with_restart_guard(secs(2));
    let attempt = async |backend: &RedisBackend| {
        let claim = Claim::new(Key::new("k").unwrap(), LEASE);
        let result = backend.try_acquire(&claim).await;
        let _ = backend.release(&claim).await;
        matches!(result, Ok(Attempt::Granted(_)))
    };
    let started_at = Instant::now();
    let first = backend(&config).await;
    eventually(LONG, async || attempt(&first).await).await;
    assert!(started_at.elapsed() >= secs(2));
    // All masters. The fifth may respond later than the majority, and then needs another attempt.
    eventually(LONG, async || {
        attempt(&first).await;
        let keys = quorum
            .servers()
            .iter()
            .map(|server| server.send_command("EXISTS lock-registry:{}:age"));
        join_all(keys).await.into_iter().all(|exists| exists.unwrap().contains(":1"))
    })
    .await;
    let later = backend(&config).await;
    assert!(attempt(&later).await, "the servers are known to run for long enough");
    // The servers restart with their data, which includes the stored ages of the old processes.
    for server in quorum.servers_mut() {
        server.restart().await.unwrap();
    }
    let newest = backend(&config).await;
    assert!(!attempt(&newest).await, "the servers have just been started");
}
