//! Locks in databases that are shared with Spring Integration's `JdbcLockRegistry`. `peers/peer.py`
//! acts as Spring, with the original statements of versions 7 and 6. Both sides exclude each other
//! and continue after each other's crash. Needs PostgreSQL and MariaDB.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use futures_util::future::try_join_all;
use lock_registry_tests::sections::{PeerLayout, Section, SectionTask};
use registry_core::{LockOptions, Registry};
use registry_testkit::check::check;
use registry_testkit::history::History;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::process::HelperProcess;
use registry_testkit::within;
use tempfile::TempDir;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(300);

const KEY: &str = "orders/42";

/// A database server.
enum SpringServer {
    Postgres(PostgresServer),
    MariaDb(MariaDbServer),
}

impl SpringServer {
    fn url(&self) -> String {
        match self {
            Self::Postgres(server) => server.url(),
            Self::MariaDb(server) => server.url(),
        }
    }
}

async fn servers() -> [SpringServer; 2] {
    [
        SpringServer::Postgres(PostgresServer::start().await.unwrap()),
        SpringServer::MariaDb(MariaDbServer::start().await.unwrap()),
    ]
}

const GENERATIONS: [&str; 2] = ["v7", "v6"];

/// The URL of our registry. The lease corresponds to Spring's `timeToLive`.
fn our_url(server: &SpringServer, generation: &str, lease_ms: u64) -> String {
    let lease = format!("lease={lease_ms}ms&poll=20ms");
    format!("{}?layout=spring&spring={generation}&region=R&{lease}", server.url())
}

/// Opens our registry, which creates the table. The peers start later.
async fn registry(server: &SpringServer, generation: &str, lease_ms: u64) -> Registry {
    lock_registry::connect(&our_url(server, generation, lease_ms)).await.unwrap()
}

#[tokio::test]
async fn a_holder_excludes_the_other_side() {
    for generation in GENERATIONS {
        for server in servers().await {
            let local = registry(&server, generation, 10_000).await;
            let lock = local.obtain(KEY);
            let mut peer = peer(&server, generation, &["--once", "hold"]);
            expect(&mut peer, "held").await;
            assert!(lock.try_lock().await.unwrap().is_none());
            let holder = lock.holders().await.unwrap().remove(0);
            assert!(holder.token.is_none() && holder.lease_left.is_some(), "{holder:?}");
            peer.write_line("").unwrap();
            expect(&mut peer, "released").await;

            let guard = lock.try_lock().await.unwrap().unwrap();
            let mut peer = attempt(&server, generation);
            expect(&mut peer, "busy").await;
            guard.unlock().await.unwrap();
            let mut peer = attempt(&server, generation);
            expect(&mut peer, "held").await;
            expect(&mut peer, "released").await;
        }
    }
}

#[tokio::test]
async fn spring_never_acquires_a_renewed_lock() {
    for generation in GENERATIONS {
        for server in servers().await {
            let local = registry(&server, generation, 1_000).await;
            let guard = local.obtain(KEY).lock().await.unwrap();
            let mut waiting = peer(&server, generation, &["--lease-ms", "1000", "--once", "hold"]);
            expect(&mut waiting, "waiting").await;
            // Three leases: a peer whose own lease ended its wait would hold the lock by then.
            let passed = tokio::time::timeout(Duration::from_secs(3), guard.lost()).await;
            assert!(passed.is_err(), "the lock was lost: {passed:?}");
            let mut other = peer(&server, generation, &["--lease-ms", "1000", "--once", "try"]);
            expect(&mut other, "busy").await;
            guard.unlock().await.unwrap();
            expect(&mut waiting, "held").await;
        }
    }
}

#[tokio::test]
async fn the_lock_of_a_dead_peer_ends_with_its_time_to_live() {
    for generation in GENERATIONS {
        for server in servers().await {
            let local = registry(&server, generation, 1_000).await;
            let mut peer = peer(&server, generation, &["--lease-ms", "1000", "--once", "hold"]);
            expect(&mut peer, "held").await;
            peer.kill().unwrap();
            within(LONG, local.obtain(KEY).lock()).await.unwrap().unlock().await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_lock_of_our_dead_process_ends_with_its_lease() {
    for generation in GENERATIONS {
        for server in servers().await {
            let dead = registry(&server, generation, 1_000).await;
            // Like a suspended process, it neither renews nor releases.
            let last = LockOptions::new().lease(Duration::from_secs(1)).auto_renew(false);
            let guard = dead.obtain(KEY).lock_with(last).await.unwrap();
            let mut peer = peer(&server, generation, &["--lease-ms", "1000", "--once", "hold"]);
            expect(&mut peer, "held").await;
            assert!(!guard.is_held());
            // The late release of our process does not affect the peer's lock either.
            guard.unlock().await.unwrap_err();
        }
    }
}

#[tokio::test]
async fn a_lock_is_shared_with_spring_7_in_postgresql() {
    check_sharing(SpringServer::Postgres(PostgresServer::start().await.unwrap()), "v7").await;
}

#[tokio::test]
async fn a_lock_is_shared_with_spring_6_in_postgresql() {
    check_sharing(SpringServer::Postgres(PostgresServer::start().await.unwrap()), "v6").await;
}

#[tokio::test]
async fn a_lock_is_shared_with_spring_7_in_mariadb() {
    check_sharing(SpringServer::MariaDb(MariaDbServer::start().await.unwrap()), "v7").await;
}

#[tokio::test]
async fn a_lock_is_shared_with_spring_6_in_mariadb() {
    check_sharing(SpringServer::MariaDb(MariaDbServer::start().await.unwrap()), "v6").await;
}

const PROCESSES_PER_SIDE: u32 = 2;
/// The number of acquisitions of each process.
const SECTIONS: u32 = 300;

/// Two processes of each side increment a number in several steps, under mutual exclusion.
async fn check_sharing(server: SpringServer, generation: &str) {
    let folder = TempDir::new().unwrap();
    let counter = folder.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let mut processes = Vec::new();
    for number in 0..2 * PROCESSES_PER_SIDE {
        let journal = folder.path().join(format!("journal{number}"));
        let command = if number < PROCESSES_PER_SIDE {
            let url = our_url(&server, generation, 10_000);
            let (journal, counter) = (journal.clone(), counter.clone());
            let mut task = SectionTask::new(url, PeerLayout::Spring, "", KEY, journal, counter);
            task.sections = SECTIONS;
            let mut command = Command::new(env!("CARGO_BIN_EXE_lock-sections"));
            command.arg(serde_json::to_string(&task).unwrap());
            command
        } else {
            // The same poll interval as on our side. In Spring, it is `idleBetweenTries`.
            let mut command = peer_command(&server, generation, &["--on-cue", "--idle-ms", "20"]);
            command.arg("--journal").arg(&journal).arg("--counter").arg(&counter);
            command.args(["--sections", &SECTIONS.to_string()]);
            command
        };
        let mut process = HelperProcess::spawn(command).unwrap();
        // The processes start one by one: the first creates the table.
        expect(&mut process, "ready").await;
        processes.push((number < PROCESSES_PER_SIDE, journal, process));
    }
    for (_, _, process) in &mut processes {
        process.write_line("go").unwrap();
    }
    // The first failure ends the test. The other processes could wait for a lock that the failed
    // process left behind.
    try_join_all(processes.iter().map(|(_, _, process)| wait_for_success(process))).await.unwrap();

    let mut sections: Vec<(bool, Section)> = Vec::new();
    for (local, journal, _) in &processes {
        let journal = fs::read_to_string(journal).unwrap();
        sections.extend(journal.lines().map(|line| (*local, serde_json::from_str(line).unwrap())));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    let events = (0..).zip(&sections).flat_map(|(n, (_, section))| section.events(KEY, n));
    let checked = check(&History::from_events(events).unwrap()).unwrap();
    // Our grants have tokens, and the tokens grow.
    let local = (PROCESSES_PER_SIDE * SECTIONS) as usize;
    assert_eq!((checked.grants, checked.tokens, checked.unknown), (2 * local, local, 0));
    let count = fs::read_to_string(&counter).unwrap();
    assert_eq!(count.trim(), (2 * PROCESSES_PER_SIDE * SECTIONS).to_string());

    let changes = sections.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
    let (first, last) = (&sections[0].1, &sections[sections.len() - 1].1);
    let took = Duration::from_nanos(last.left - first.asked);
    println!("{generation}: {} sections in {took:?}, the side changed {changes} times", 2 * local);
    // Neither side starves until the other has finished.
    assert!(changes > 20, "the side changed {changes} times");
}

/// Waits for the end of a process that must succeed.
async fn wait_for_success(process: &HelperProcess) -> Result<(), String> {
    let status = process.wait_exit(LONG).await.map_err(|late| late.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("{status}: {}", process.stderr())) }
}

fn attempt(server: &SpringServer, generation: &str) -> HelperProcess {
    peer(server, generation, &["--once", "try"])
}

fn peer(server: &SpringServer, generation: &str, options: &[&str]) -> HelperProcess {
    HelperProcess::spawn(peer_command(server, generation, options)).unwrap()
}

fn peer_command(server: &SpringServer, generation: &str, options: &[&str]) -> Command {
    let mut command = Command::new("python3");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/peer.py");
    // `-B` prevents compiled files among the sources.
    command.arg("-B").arg(program).args(["--url", &server.url(), "--key", KEY]);
    command.args(["--layout", "spring", "--namespace", "R", "--generation", generation]);
    command.args(options);
    command
}

async fn expect(process: &mut HelperProcess, line: &str) {
    if let Err(late) = process.expect_line(|received| received == line, LONG).await {
        panic!("{late}");
    }
}
