//! Locks in Redis that are shared with Spring Integration and Redisson. `peers/peer.py` acts as
//! either of them, with their original scripts. Both sides exclude each other, receive each other's
//! release messages, and continue after each other's crash.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use lock_registry_tests::sections::{CONNECT_TIMEOUT, PeerLayout, Section, SectionTask, TIMEOUT};
use registry_core::{LockOptions, Registry};
use registry_redis::{Layout, RedisBackend, RedisConfig};
use registry_testkit::check::check;
use registry_testkit::history::History;
use registry_testkit::process::HelperProcess;
use registry_testkit::redis::{RedisCluster, RedisConnection, RedisOptions, RedisServer};
use registry_testkit::{eventually, within};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(300);

/// The limit of the median time from a release to the entry of the next holder.
const WAKE_LIMIT: Duration = Duration::from_millis(50);
/// On slow machines, the limit is this multiple of the time of a bare message.
const WAKE_LIMIT_FACTOR: u32 = 10;

// ---- The peers leave the same records in the server as the originals.

#[tokio::test]
async fn the_spring_peer_writes_and_publishes_as_spring_does() {
    for (channel, topic) in [("new", "locks-channel:locks:orders/42"), ("old", "locks-channel")] {
        let server = server().await;
        let mut subscriber = subscribed(&server, topic).await;
        let mut peer = holder(&server, PeerLayout::Spring, &["--channel", channel]);
        expect(&mut peer, "held").await;
        let owner = text(&server, &["GET", "locks:orders/42"]).await;
        assert_eq!(owner.len(), 36, "{owner}");
        assert_eq!(owner.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        let lease = number(&server, &["PTTL", "locks:orders/42"]).await;
        assert!((1..=60_000).contains(&lease), "{lease}");
        peer.write_line("").unwrap();
        expect(&mut peer, "released").await;
        assert_eq!(
            next_message(&mut subscriber).await,
            (topic.to_owned(), "locks:orders/42".to_owned())
        );
        assert_eq!(number(&server, &["DBSIZE"]).await, 0);
    }
}

#[tokio::test]
async fn the_redisson_peer_writes_and_publishes_as_redisson_does() {
    let topic = "redisson_lock__channel:{orders/42}";
    let server = server().await;
    let mut subscriber = subscribed(&server, topic).await;
    let mut peer = holder(&server, PeerLayout::Redisson, &[]);
    expect(&mut peer, "held").await;
    let fields = server.send_command_args(&["HGETALL", "orders/42"]).await.unwrap();
    let fields: Vec<String> = fields.items().iter().map(|field| field.text().unwrap()).collect();
    let [owner, count] = &fields[..] else { panic!("{fields:?}") };
    let (id, thread) = owner.split_once(':').unwrap();
    assert_eq!(id.len(), 36, "{owner}");
    assert!(thread.parse::<u64>().is_ok(), "{owner}");
    assert_eq!(count, "1");
    let lease = number(&server, &["PTTL", "orders/42"]).await;
    assert!((1..=30_000).contains(&lease), "{lease}");
    peer.write_line("").unwrap();
    expect(&mut peer, "released").await;
    assert_eq!(next_message(&mut subscriber).await, (topic.to_owned(), "0".to_owned()));
    // The latch key of the release is deleted too.
    assert_eq!(number(&server, &["DBSIZE"]).await, 0);
}

// ---- Two processes, step by step.

#[tokio::test]
async fn a_holder_excludes_the_other_side() {
    for layout in [PeerLayout::Spring, PeerLayout::Redisson] {
        let server = server().await;
        let local = registry(&server, layout).await;
        let lock = local.obtain("orders/42");

        let mut peer = holder(&server, layout, &[]);
        expect(&mut peer, "held").await;
        assert!(lock.try_lock().await.unwrap().is_none(), "{layout:?}");
        peer.write_line("").unwrap();
        expect(&mut peer, "released").await;

        let guard = lock.try_lock().await.unwrap().unwrap();
        let mut peer = attempt(&server, layout);
        expect(&mut peer, "busy").await;
        guard.unlock().await.unwrap();
        let mut peer = attempt(&server, layout);
        expect(&mut peer, "held").await;
        expect(&mut peer, "released").await;
    }
}

/// Without the message, the peer would not poll for ten minutes.
#[tokio::test]
async fn a_waiting_peer_receives_our_release_message() {
    for (layout, options) in [
        (PeerLayout::Spring, &["--channel", "new"][..]),
        (PeerLayout::Spring, &["--channel", "old"]),
        (PeerLayout::Redisson, &[]),
    ] {
        let server = server().await;
        let local = registry(&server, layout).await;
        let options = [options, &["--lease-ms", "600000"]].concat();
        let lease = LockOptions::new().lease(Duration::from_secs(600));
        let guard = local.obtain("orders/42").lock_with(lease).await.unwrap();
        let mut peer = holder(&server, layout, &options);
        expect(&mut peer, "waiting").await;
        wait_until_subscribed(&server).await;
        guard.unlock().await.unwrap();
        expect(&mut peer, "held").await;
    }
}

/// Old and new versions of Spring do not notify each other, but we notify both.
#[tokio::test]
async fn a_release_notifies_old_and_new_versions_of_spring() {
    let server = server().await;
    let local = registry(&server, PeerLayout::Spring).await;
    let mut subscribers = [
        subscribed(&server, "locks-channel").await,
        subscribed(&server, "locks-channel:locks:k").await,
    ];
    local.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    for (subscriber, topic) in
        subscribers.iter_mut().zip(["locks-channel", "locks-channel:locks:k"])
    {
        assert_eq!(next_message(subscriber).await, (topic.to_owned(), "locks:k".to_owned()));
    }
}

#[tokio::test]
async fn the_lock_of_a_dead_peer_ends_with_its_lease() {
    for layout in [PeerLayout::Spring, PeerLayout::Redisson] {
        let server = server().await;
        let local = registry(&server, layout).await;
        let mut peer = holder(&server, layout, &["--lease-ms", "1000"]);
        expect(&mut peer, "held").await;
        peer.kill().unwrap();
        let lock = local.obtain("orders/42");
        within(LONG, lock.lock()).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn the_lock_of_our_dead_process_ends_with_its_lease() {
    for layout in [PeerLayout::Spring, PeerLayout::Redisson] {
        let server = server().await;
        let dead = registry(&server, layout).await;
        // Like a suspended process, it neither renews nor releases.
        let last = LockOptions::new().lease(Duration::from_secs(1)).auto_renew(false);
        let guard = dead.obtain("orders/42").lock_with(last).await.unwrap();
        // The peer receives no release message. It polls after its own lease (Spring) or at the end
        // of ours (Redisson).
        let mut peer = holder(&server, layout, &["--lease-ms", "20000"]);
        expect(&mut peer, "held").await;
        assert!(!guard.is_held());
        // The late release of our process does not affect the peer's lock either.
        guard.unlock().await.unwrap_err();
        let local = registry(&server, layout).await;
        assert!(local.obtain("orders/42").try_lock().await.unwrap().is_none(), "{layout:?}");
    }
}

/// An operator or Redisson's `forceUnlock` can delete a lock.
#[tokio::test]
async fn a_lock_deleted_by_another_program_is_lost() {
    for layout in [PeerLayout::Spring, PeerLayout::Redisson] {
        let server = server().await;
        let local = registry(&server, layout).await;
        let options = LockOptions::new().lease(Duration::from_secs(15));
        let guard = local.obtain("orders/42").lock_with(options).await.unwrap();
        assert_eq!(number(&server, &["DEL", lock_name(layout)]).await, 1);
        let mut peer = holder(&server, layout, &[]);
        expect(&mut peer, "held").await;
        within(LONG, guard.lost()).await;
        guard.unlock().await.unwrap_err();
        let mut other = attempt(&server, layout);
        expect(&mut other, "busy").await;
    }
}

// ---- Four processes, many critical sections.

#[tokio::test]
async fn a_lock_is_shared_with_spring() {
    check_sharing(&RedisServers::one().await, PeerLayout::Spring, &["--channel", "new"]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_spring_before_6_5_3() {
    check_sharing(&RedisServers::one().await, PeerLayout::Spring, &["--channel", "old"]).await;
}

/// A registry of Spring's default type publishes no releases and polls ten times a second.
#[tokio::test]
async fn a_lock_is_shared_with_a_spring_that_publishes_nothing() {
    let servers = RedisServers::one().await;
    run_until_in_time(&servers, PeerLayout::Spring, &["--spin"], FOUR_PROCESSES, |run| {
        run.check_fair_shares()?;
        // The peer's lease is a minute, so its expiry has not ended our waits.
        let longest = run.longest_wait(Side::Ours);
        in_time(longest < Duration::from_secs(30), || format!("we waited for {longest:?}"))
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_shared_with_redisson() {
    check_sharing(&RedisServers::one().await, PeerLayout::Redisson, &["--verb", "PUBLISH"]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_redisson_in_a_cluster() {
    check_sharing(&RedisServers::cluster().await, PeerLayout::Redisson, &["--verb", "SPUBLISH"])
        .await;
}

/// Redisson uses `PUBLISH` with servers older than version 7, or if it is configured so.
#[tokio::test]
async fn a_lock_is_shared_with_redisson_in_a_cluster_by_plain_messages() {
    check_sharing(&RedisServers::cluster().await, PeerLayout::Redisson, &["--verb", "PUBLISH"])
        .await;
}

async fn check_sharing(servers: &RedisServers, layout: PeerLayout, options: &[&str]) {
    run_until_in_time(servers, layout, options, FOUR_PROCESSES, |run| {
        run.check_fair_shares()?;
        run.check_fast_takeovers()
    })
    .await;
    run_until_in_time(servers, layout, options, TWO_PROCESSES, SectionRun::check_fast_wake_ups)
        .await;
}

/// Runs all processes until the times of a run pass `check_times`, at most three times, because a
/// busy machine can delay processes. Each run must also pass the checks that do not depend on time.
async fn run_until_in_time(
    servers: &RedisServers,
    layout: PeerLayout,
    options: &[&str],
    group: ProcessGroup,
    check_times: impl Fn(&SectionRun) -> Result<(), String>,
) {
    let mut problems = Vec::new();
    for _ in 0..3 {
        let run = run_sections_of_both(servers, layout, options, group).await;
        let Err(problem) = check_times(&run) else { return };
        println!("{problem}");
        problems.push(problem);
    }
    panic!("{problems:#?}");
}

fn in_time(is_in_time: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if is_in_time { Ok(()) } else { Err(problem()) }
}

/// The number of processes that share a lock, and their timing.
#[derive(Debug, Clone, Copy)]
struct ProcessGroup {
    processes_per_side: u32,
    /// The number of acquisitions of each process.
    sections: u32,
    hold_ms: u64,
    pause_ms: u64,
}

/// At least one process always waits; several race for each release.
const FOUR_PROCESSES: ProcessGroup =
    ProcessGroup { processes_per_side: 2, sections: 500, hold_ms: 1, pause_ms: 4 };
/// Each process waits again before the other releases, and there is no third process.
const TWO_PROCESSES: ProcessGroup =
    ProcessGroup { processes_per_side: 1, sections: 200, hold_ms: 5, pause_ms: 4 };

/// The critical sections that both sides ran under one lock.
struct SectionRun {
    group: ProcessGroup,
    key: String,
    /// In the order of their entries.
    sections: Vec<(Side, Section)>,
    /// The durations of a publish, its message and a ping, measured during the same run.
    bare_messages: Vec<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Ours,
    Theirs,
}

/// Runs all processes to their end, and checks mutual exclusion, the messages and the counter.
async fn run_sections_of_both(
    servers: &RedisServers,
    layout: PeerLayout,
    options: &[&str],
    group: ProcessGroup,
) -> SectionRun {
    let folder = TempDir::new().unwrap();
    let counter = folder.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let task = |number: u32| {
        let journal = folder.path().join(format!("journal{number}"));
        let (url, counter) = (servers.url(), counter.clone());
        let mut task =
            SectionTask::new(url, layout, namespace(layout), "orders/42", journal, counter);
        (task.sections, task.hold_ms, task.pause_ms) =
            (group.sections, group.hold_ms, group.pause_ms);
        task.plain_messages = options.contains(&"PUBLISH");
        task
    };
    let mut processes = Vec::new();
    for number in 0..2 * group.processes_per_side {
        let task = task(number);
        let (side, command) = if number < group.processes_per_side {
            (Side::Ours, our_command(&task))
        } else {
            (Side::Theirs, peer_command(&servers.first().url(), &task, options))
        };
        processes.push((side, task.journal, HelperProcess::spawn(command).unwrap()));
    }
    for (_, _, process) in &mut processes {
        expect(process, "ready").await;
    }
    for (_, _, process) in &mut processes {
        process.write_line("go").unwrap();
    }
    let mut bare_messages = Vec::new();
    // The first failure ends the test. The other processes could wait for a lock that the failed
    // process left behind.
    let all_done = try_join_all(processes.iter().map(|(_, _, process)| wait_for_success(process)));
    tokio::select! {
        all = all_done => drop(all.unwrap()),
        () = measure_bare_messages(servers.first(), &mut bare_messages) => {}
    }

    let mut sections: Vec<(Side, Section)> = Vec::new();
    for (side, journal, _) in &processes {
        let journal = fs::read_to_string(journal).unwrap();
        sections.extend(journal.lines().map(|line| (*side, serde_json::from_str(line).unwrap())));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    let run = SectionRun { group, key: "orders/42".into(), sections, bare_messages };
    run.print(&format!("{layout:?} {options:?}, {} each", group.processes_per_side));
    run.assert_mutual_exclusion();
    // No peer missed a message and had to poll.
    let fallbacks: u32 = run.sections.iter().map(|(_, section)| section.fallbacks).sum();
    assert_eq!(fallbacks, 0);
    let count = fs::read_to_string(&counter).unwrap();
    assert_eq!(count.trim(), (2 * group.processes_per_side * group.sections).to_string());
    run
}

/// Waits for the end of a process that must succeed.
async fn wait_for_success(process: &HelperProcess) -> Result<(), String> {
    let status = process.wait_exit(LONG).await.map_err(|late| late.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("{status}: {}", process.stderr())) }
}

/// Measures a hand-over without a lock under the current load: a message that another connection
/// receives, and a request after it.
async fn measure_bare_messages(server: &RedisServer, durations: &mut Vec<Duration>) {
    let mut publisher = server.connect().await.unwrap();
    let mut subscriber = subscribed(server, "bare").await;
    loop {
        let started = Instant::now();
        publisher.send_command_args(&["PUBLISH", "bare", "0"]).await.unwrap();
        next_message(&mut subscriber).await;
        publisher.send_command_args(&["PING"]).await.unwrap();
        durations.push(started.elapsed());
        sleep(Duration::from_millis(10)).await;
    }
}

impl SectionRun {
    fn assert_mutual_exclusion(&self) {
        let events = (0..).zip(&self.sections);
        let events = events.flat_map(|(number, (_, section))| section.events(&self.key, number));
        let checked = check(&History::from_events(events).unwrap()).unwrap();
        let local = (self.group.processes_per_side * self.group.sections) as usize;
        // Our grants have tokens, and the tokens grow.
        assert_eq!((checked.grants, checked.tokens, checked.unknown), (2 * local, local, 0));
    }

    /// Checks that each process had more than a tenth of its fair share while all processes worked.
    fn check_fair_shares(&self) -> Result<(), String> {
        let shares = self.shares();
        let all: usize = shares.values().sum();
        for ((side, client), sections) in &shares {
            let fair_share = all / shares.len();
            in_time(sections * 10 > fair_share, || {
                format!("{side:?} ({client}) has {sections} of {all}: {shares:?}")
            })?;
        }
        Ok(())
    }

    /// Checks that each side often takes over from the other, and does so at once.
    fn check_fast_takeovers(&self) -> Result<(), String> {
        for side in [Side::Ours, Side::Theirs] {
            let takeovers = self.takeovers(side);
            // A side without messages takes over only a few times, by chance.
            let count = takeovers.len();
            in_time(count > 100, || format!("{side:?} took over {count} times"))?;
            self.check_fast(side, &takeovers)?;
        }
        Ok(())
    }

    /// Checks that a waiter enters at once after the first release since it began to wait.
    fn check_fast_wake_ups(&self) -> Result<(), String> {
        for side in [Side::Ours, Side::Theirs] {
            let wakes = self.wakes(side);
            let count = wakes.len();
            in_time(count > 50, || format!("{side:?} waited {count} times"))?;
            self.check_fast(side, &wakes)?;
        }
        Ok(())
    }

    fn check_fast(&self, side: Side, spans: &[Duration]) -> Result<(), String> {
        let limit = WAKE_LIMIT.max(WAKE_LIMIT_FACTOR * median(&self.bare_messages));
        let median = median(spans);
        in_time(median < limit, || format!("{side:?}: {median:?} is not below {limit:?}"))
    }

    /// Returns the number of sections of each process while all processes worked.
    fn shares(&self) -> BTreeMap<(Side, u32), usize> {
        let mut work: BTreeMap<(Side, u32), (u64, u64)> = BTreeMap::new();
        for (side, section) in &self.sections {
            let (_, to) = work.entry((*side, section.client)).or_insert((section.asked, 0));
            *to = section.left;
        }
        let from = work.values().map(|(from, _)| *from).max().unwrap();
        let to = work.values().map(|(_, to)| *to).min().unwrap();
        let mut shares: BTreeMap<(Side, u32), usize> =
            work.keys().map(|process| (*process, 0)).collect();
        for (side, section) in &self.sections {
            if (from..=to).contains(&section.entered) {
                *shares.get_mut(&(*side, section.client)).unwrap() += 1;
            }
        }
        shares
    }

    /// Returns the duration of each takeover for which `side` waited: from the start of the other
    /// side's release to the entry of `side`.
    fn takeovers(&self, side: Side) -> Vec<Duration> {
        let pairs = self.sections.windows(2);
        let takeovers = pairs.filter_map(|pair| {
            let [(before, last), (after, next)] = pair else { return None };
            let waited = next.asked < last.leaving;
            (*before != side && *after == side && waited).then(|| span(last.leaving, next.entered))
        });
        takeovers.collect()
    }

    /// Returns, for each wait of `side`, the time from the first release during the wait to the
    /// entry.
    fn wakes(&self, side: Side) -> Vec<Duration> {
        let ends: Vec<u64> = self.sections.iter().map(|(_, section)| section.leaving).collect();
        let own = self.sections.iter().enumerate().filter(|(_, (of, _))| *of == side);
        let wakes = own.filter_map(|(number, (_, section))| {
            // Releases are in the order of the sections, because no sections overlap.
            let earlier = &ends[..number];
            let first = *earlier.get(earlier.partition_point(|end| *end < section.asked))?;
            Some(span(first, section.entered))
        });
        wakes.collect()
    }

    fn longest_wait(&self, side: Side) -> Duration {
        let sections = self.sections.iter().filter(|(of, _)| *of == side);
        sections.map(|(_, section)| span(section.asked, section.entered)).max().unwrap()
    }

    fn print(&self, what: &str) {
        let (first, last) = (&self.sections[0].1, &self.sections[self.sections.len() - 1].1);
        let (all, bare_messages) = (span(first.asked, last.left), median(&self.bare_messages));
        println!("{what}: {all:?}; a message alone {bare_messages:?}; shares {:?}", self.shares());
        for side in [Side::Ours, Side::Theirs] {
            let (takeovers, wakes) = (self.takeovers(side), self.wakes(side));
            println!(
                "  {side:?} took over {} times in {:?}; waited {} times, until {:?} after the first release; at most {:?} in all",
                takeovers.len(),
                median(&takeovers),
                wakes.len(),
                median(&wakes),
                self.longest_wait(side),
            );
        }
    }
}

fn span(from: u64, to: u64) -> Duration {
    Duration::from_nanos(to.saturating_sub(from))
}

fn median(spans: &[Duration]) -> Duration {
    let mut spans = spans.to_vec();
    spans.sort();
    spans.get(spans.len() / 2).copied().unwrap_or_default()
}

// ---- Servers and programs.

enum RedisServers {
    One(Box<RedisServer>),
    Cluster(RedisCluster),
}

impl RedisServers {
    async fn one() -> Self {
        Self::One(Box::new(server().await))
    }

    async fn cluster() -> Self {
        let options = RedisOptions::new().args(WITHOUT_PERSISTENCE);
        // No node fails. On a busy machine, nodes with a short time-out would suspect each other.
        let options = options.args(&["--cluster-node-timeout", "10000"]);
        Self::Cluster(RedisCluster::start_with(&options).await.unwrap())
    }

    fn url(&self) -> String {
        match self {
            Self::One(server) => server.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    fn first(&self) -> &RedisServer {
        match self {
            Self::One(server) => server,
            Self::Cluster(cluster) => cluster.node(cluster.nodes()[0]),
        }
    }
}

/// No server is restarted here, and disk writes would dominate a hand-over.
const WITHOUT_PERSISTENCE: &[&str] = &["--appendonly", "no"];

async fn server() -> RedisServer {
    RedisServer::start(WITHOUT_PERSISTENCE).await.unwrap()
}

fn namespace(layout: PeerLayout) -> &'static str {
    match layout {
        PeerLayout::Spring => "locks",
        // The name consists of the key alone.
        PeerLayout::Redisson => "",
    }
}

/// The name of the lock of "orders/42" in the server.
fn lock_name(layout: PeerLayout) -> &'static str {
    match layout {
        PeerLayout::Spring => "locks:orders/42",
        PeerLayout::Redisson => "orders/42",
    }
}

async fn registry(server: &RedisServer, layout: PeerLayout) -> Registry {
    let redis_layout = match layout {
        PeerLayout::Spring => Layout::Spring,
        PeerLayout::Redisson => Layout::Redisson,
    };
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let config = config.with_namespace(namespace(layout)).with_layout(redis_layout);
    let config = config.with_connect_timeout(CONNECT_TIMEOUT).with_response_timeout(TIMEOUT);
    let backend = Arc::new(RedisBackend::open(config).await.unwrap());
    Registry::builder(backend).timeout(TIMEOUT).build().unwrap()
}

/// Returns the command for a process of our side.
fn our_command(task: &SectionTask) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lock-sections"));
    command.arg(serde_json::to_string(task).unwrap());
    command
}

/// Returns the command for a process of the peer's side, for the same task.
fn peer_command(url: &str, task: &SectionTask, options: &[&str]) -> Command {
    let mut command = peer(url, task.layout, &task.key, options);
    command.arg("--on-cue").arg("--journal").arg(&task.journal);
    command.arg("--counter").arg(&task.counter);
    for (option, value) in [
        ("--sections", u64::from(task.sections)),
        ("--hold-ms", task.hold_ms),
        ("--pause-ms", task.pause_ms),
    ] {
        command.args([option, &value.to_string()]);
    }
    command
}

/// Starts a peer that acquires the lock of "orders/42" and holds it until it receives a line.
fn holder(server: &RedisServer, layout: PeerLayout, options: &[&str]) -> HelperProcess {
    let mut command = peer(&server.url(), layout, "orders/42", options);
    command.args(["--once", "hold"]);
    HelperProcess::spawn(command).unwrap()
}

/// Starts a peer that tries once to acquire the lock of "orders/42".
fn attempt(server: &RedisServer, layout: PeerLayout) -> HelperProcess {
    let mut command = peer(&server.url(), layout, "orders/42", &[]);
    command.args(["--once", "try"]);
    HelperProcess::spawn(command).unwrap()
}

fn peer(url: &str, layout: PeerLayout, key: &str, options: &[&str]) -> Command {
    let mut command = Command::new("python3");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/peer.py");
    // `-B` prevents compiled files among the sources.
    command.arg("-B").arg(program).args(["--url", url, "--key", key]);
    command.args(match layout {
        PeerLayout::Spring => ["--layout", "spring", "--namespace", namespace(layout)],
        PeerLayout::Redisson => ["--layout", "redisson", "--namespace", namespace(layout)],
    });
    command.args(options);
    command
}

async fn expect(process: &mut HelperProcess, line: &str) {
    let received = process.expect_line(|received| received == line, LONG).await;
    if let Err(late) = received {
        panic!("{late}");
    }
}

async fn subscribed(server: &RedisServer, channel: &str) -> RedisConnection {
    let mut subscriber = server.connect().await.unwrap();
    subscriber.send_command_args(&["SUBSCRIBE", channel]).await.unwrap().into_result().unwrap();
    subscriber
}

/// Returns the channel and the payload of the next message.
async fn next_message(subscriber: &mut RedisConnection) -> (String, String) {
    let message = within(LONG, subscriber.next_reply()).await.unwrap();
    let [kind, channel, received] = message.items() else { panic!("{message:?}") };
    assert_eq!(kind.text().as_deref(), Some("message"));
    (channel.text().unwrap(), received.text().unwrap())
}

/// Waits until a client has subscribed to a channel.
async fn wait_until_subscribed(server: &RedisServer) {
    eventually(LONG, async || {
        !text(server, &["CLIENT", "LIST", "TYPE", "pubsub"]).await.is_empty()
    })
    .await;
}

async fn text(server: &RedisServer, words: &[&str]) -> String {
    let answer = server.send_command_args(words).await.unwrap();
    answer.text().unwrap_or_else(|| panic!("{words:?}: {answer:?}"))
}

async fn number(server: &RedisServer, words: &[&str]) -> i64 {
    let answer = server.send_command_args(words).await.unwrap();
    answer.number().unwrap_or_else(|| panic!("{words:?}: {answer:?}"))
}
