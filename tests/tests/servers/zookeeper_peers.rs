//! Locks in ZooKeeper that are shared with other programs: Apache Curator (`peers/Curator.java`),
//! which Spring Integration also uses, and kazoo (`peers/zoo.py`). kazoo runs in three variants:
//! unchanged, waiting for Curator's node names too, and with Curator's node names. All sides
//! exclude each other, are granted the lock in order of arrival, and continue after each other's
//! crash. Needs ZooKeeper, Curator and a Java compiler.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use futures_util::future::try_join_all;
use lock_registry_tests::sections::{PeerLayout, Section, SectionTask};
use registry_core::{ClaimMode, LockError, LockGuard, LockRegistryExt as _, Registry};
use registry_testkit::check::check;
use registry_testkit::history::History;
use registry_testkit::process::HelperProcess;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use tempfile::TempDir;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(300);

const KEY: &str = "orders";
/// The path at which Spring Integration stores the lock of that key.
const PATH: &str = "/SpringIntegration-LockRegistry/orders";

/// The programs that share a lock, each in one variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Program {
    /// Ours, with Curator's node names.
    Ours,
    /// Ours, with `naming=kazoo`.
    OursAsKazoo,
    Curator,
    /// kazoo unchanged.
    Kazoo,
    /// kazoo that also waits for nodes with Curator's names.
    KazooPatterned,
    /// kazoo with Curator's node names.
    KazooRenamed,
    /// Ours as a reader, with `naming=curator-read-write`.
    OursReading,
    /// Ours as a writer, with `naming=curator-read-write`.
    OursWriting,
    /// A reader in Curator.
    CuratorReading,
    /// A writer in Curator.
    CuratorWriting,
    /// Ours with the exclusive lock of a semaphore, with `naming=curator-semaphore`.
    OursWithSemaphore,
    /// Curator with all units of a semaphore.
    CuratorWithSemaphore,
}

use Program::{
    Curator, CuratorReading, CuratorWithSemaphore, CuratorWriting, Kazoo, KazooPatterned,
    KazooRenamed, Ours, OursAsKazoo, OursReading, OursWithSemaphore, OursWriting,
};

impl Program {
    fn is_ours(self) -> bool {
        matches!(self, Ours | OursAsKazoo | OursReading | OursWriting | OursWithSemaphore)
    }

    fn is_reader(self) -> bool {
        matches!(self, OursReading | CuratorReading)
    }

    /// Returns the option `naming` of our programs.
    fn naming(self) -> &'static str {
        match self {
            OursAsKazoo => "kazoo",
            OursReading | OursWriting => "curator-read-write",
            OursWithSemaphore => "curator-semaphore",
            _ => "curator",
        }
    }
}

// ---- Three processes, many critical sections.

#[tokio::test]
async fn a_lock_is_shared_with_curator() {
    check_sharing(&[Ours, Curator, Curator]).await;
    check_sharing(&[Ours, Ours, Curator]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_kazoo_under_the_names_of_curator() {
    check_sharing(&[Ours, KazooRenamed, KazooRenamed]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_kazoo_that_waits_for_our_names() {
    check_sharing(&[Ours, KazooPatterned, KazooPatterned]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_unchanged_kazoo_under_its_own_names() {
    check_sharing(&[OursAsKazoo, Kazoo, Kazoo]).await;
}

#[tokio::test]
async fn a_lock_is_shared_with_curator_and_kazoo() {
    check_sharing(&[Ours, Curator, KazooRenamed]).await;
}

#[tokio::test]
async fn a_readers_writer_lock_is_shared_with_curator() {
    check_sharing(&[OursWriting, CuratorWriting, CuratorWriting]).await;
    check_sharing(&[OursWriting, OursWriting, CuratorWriting]).await;
}

/// An exclusive lock excludes all units of a semaphore in Curator.
#[tokio::test]
async fn the_exclusive_lock_of_a_semaphore_is_shared_with_curator() {
    check_sharing(&[OursWithSemaphore, CuratorWithSemaphore, CuratorWithSemaphore]).await;
    check_sharing(&[OursWithSemaphore, OursWithSemaphore, CuratorWithSemaphore]).await;
}

/// During a change of the option `naming`, only some of our processes use kazoo's names.
#[tokio::test]
async fn our_processes_share_a_lock_under_both_names() {
    check_sharing(&[Ours, OursAsKazoo, KazooPatterned]).await;
}

/// The number of acquisitions of each process.
const SECTIONS: u32 = 300;

/// Runs all processes at the same time, and checks mutual exclusion and that grants are in the
/// order of the queue.
async fn check_sharing(programs: &[Program]) {
    let server = server().await;
    let folder = TempDir::new().unwrap();
    let counter = folder.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let mut processes = Vec::new();
    for (number, &program) in programs.iter().enumerate() {
        let journal = folder.path().join(format!("journal{number}"));
        let mut task = SectionTask::new(
            server.url(),
            PeerLayout::Spring,
            "",
            KEY,
            journal.clone(),
            counter.clone(),
        );
        task.sections = SECTIONS;
        processes.push((
            program,
            journal,
            HelperProcess::spawn(sections_command(program, task)).unwrap(),
        ));
    }
    for (_, _, process) in &mut processes {
        expect(process, "ready").await;
    }
    for (_, _, process) in &mut processes {
        process.write_line("go").unwrap();
    }
    // The first failure ends the test. The other processes could wait for a lock that the failed
    // process left behind.
    try_join_all(processes.iter().map(|(_, _, process)| wait_for_success(process))).await.unwrap();

    let mut sections: Vec<(Program, Section)> = Vec::new();
    for (program, journal, _) in &processes {
        let journal = fs::read_to_string(journal).unwrap();
        sections
            .extend(journal.lines().map(|line| (*program, serde_json::from_str(line).unwrap())));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    let events =
        (0..).zip(&sections).flat_map(|(number, (_, section))| section.events(KEY, number));
    let checked = check(&History::from_events(events).unwrap()).unwrap();
    let all = programs.len() * SECTIONS as usize;
    assert_eq!((checked.grants, checked.tokens, checked.unknown), (all, all, 0));
    let count = fs::read_to_string(&counter).unwrap();
    assert_eq!(count.trim(), all.to_string());
    // The transaction id of a node is its position in the queue.
    let tokens: Vec<u64> = sections.iter().map(|(_, section)| section.token.unwrap()).collect();
    assert!(tokens.is_sorted_by(|one, next| one < next), "not in the order of arrival");
    assert_alternates(&sections);
}

/// Checks that a process is rarely granted the lock twice in a row: another process always waits.
fn assert_alternates(sections: &[(Program, Section)]) {
    let mut takeovers: BTreeMap<(Program, Program), usize> = BTreeMap::new();
    for pair in sections.windows(2) {
        if pair[0].1.client != pair[1].1.client {
            *takeovers.entry((pair[0].0, pair[1].0)).or_default() += 1;
        }
    }
    println!("{takeovers:?}");
    let all: usize = takeovers.values().sum();
    assert!(all * 2 > sections.len(), "{all} of {}", sections.len());
}

/// Waits for the end of a process that must succeed.
async fn wait_for_success(process: &HelperProcess) -> Result<(), String> {
    let status = process.wait_exit(LONG).await.map_err(|late| late.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("{status}: {}", process.stderr())) }
}

// ---- Two processes, step by step.

/// The book has a table of the programs that wait for each other's locks.
#[tokio::test]
async fn each_program_waits_for_the_documented_programs() {
    let server = server().await;
    for (holder, excluded, admitted) in [
        (Ours, &[OursAsKazoo, Curator, KazooPatterned, KazooRenamed][..], &[Kazoo][..]),
        (OursAsKazoo, &[Ours, Kazoo, KazooPatterned, KazooRenamed], &[Curator]),
        (Curator, &[Ours, OursAsKazoo, KazooPatterned, KazooRenamed], &[Kazoo]),
        (Kazoo, &[Ours, OursAsKazoo, KazooPatterned, KazooRenamed], &[Curator]),
        (KazooPatterned, &[Ours, OursAsKazoo, Kazoo, KazooRenamed], &[Curator]),
        (KazooRenamed, &[Ours, OursAsKazoo, Curator, KazooPatterned], &[Kazoo]),
    ] {
        let held = ProgramHold::by(&server, holder).await;
        let attempts = excluded.iter().map(|program| (program, true));
        for (program, is_excluded) in
            attempts.chain(admitted.iter().map(|program| (program, false)))
        {
            let is_granted = try_once(&server, *program).await;
            assert_eq!(is_granted, !is_excluded, "{program:?} while {holder:?} has it");
        }
        held.release().await;
        assert!(try_once(&server, Ours).await, "after {holder:?}");
    }
}

/// Readers of both programs hold the lock together, and each writer excludes all others.
#[tokio::test]
async fn readers_and_writers_of_curator_and_ours_exclude_each_other() {
    let programs = [OursReading, OursWriting, CuratorReading, CuratorWriting];
    let server = server().await;
    for holder in programs {
        let held = ProgramHold::by(&server, holder).await;
        for program in programs {
            let is_granted = try_once(&server, program).await;
            let is_shared = holder.is_reader() && program.is_reader();
            assert_eq!(is_granted, is_shared, "{program:?} while {holder:?} has it");
        }
        held.release().await;
        assert!(try_once(&server, OursWriting).await, "after {holder:?}");
    }
}

/// A writer of either program that waits for a reader of the other blocks new readers of both. It
/// is granted the lock when the reader has left.
#[tokio::test]
async fn a_waiting_writer_blocks_readers_of_both_programs() {
    let server = server().await;
    let local = registry(&server, OursWriting, "").await;
    let lock = local.obtain(KEY);
    let has_writer = async || !try_once(&server, OursReading).await;

    let reader = lock.read().await.unwrap();
    let mut writer = peer(&server, CuratorWriting, 10_000, &["--once", "hold"]);
    expect(&mut writer, "waiting").await;
    eventually(LONG, has_writer).await;
    assert!(!try_once(&server, CuratorReading).await);
    assert!(reader.is_held());
    reader.unlock().await.unwrap();
    expect(&mut writer, "held").await;
    assert!(lock.try_read().await.unwrap().is_none());
    writer.write_line("").unwrap();
    expect(&mut writer, "released").await;

    let reader = ProgramHold::by(&server, CuratorReading).await;
    let waiting = lock.clone();
    let writer = tokio::spawn(async move { waiting.lock().await.unwrap() });
    eventually(LONG, has_writer).await;
    assert!(!try_once(&server, CuratorReading).await);
    assert!(!writer.is_finished());
    reader.release().await;
    let writer = within(LONG, writer).await.unwrap();
    assert!(!try_once(&server, CuratorReading).await);
    writer.unlock().await.unwrap();
    assert!(try_once(&server, CuratorReading).await);
}

/// In Curator, the recipes at one path do not exclude each other. Ours do not either.
#[tokio::test]
async fn a_mutex_and_a_readers_writer_lock_at_one_path_are_two_locks() {
    let server = server().await;
    for (holder, admitted) in [
        (Ours, [OursReading, OursWriting, CuratorReading, CuratorWriting]),
        (CuratorWriting, [Ours, Ours, Curator, Curator]),
        (OursWriting, [Ours, Ours, Curator, Curator]),
    ] {
        let held = ProgramHold::by(&server, holder).await;
        for program in admitted {
            assert!(try_once(&server, program).await, "{program:?} while {holder:?} has it");
        }
        held.release().await;
    }
}

/// Returns the options of a Curator process that takes `take` of three units.
fn units<'a>(once: &'a str, take: &'a str) -> [&'a str; 6] {
    ["--once", once, "--units", "3", "--take", take]
}

/// Returns whether a Curator process that tries once is granted `take` of three units.
async fn try_units(server: &ZooKeeperServer, take: &str) -> bool {
    let mut peer = peer(server, CuratorWithSemaphore, 10_000, &units("try", take));
    let answer = peer.expect_line(|line| ["held", "busy"].contains(&line), LONG).await.unwrap();
    wait_for_success(&peer).await.unwrap();
    &*answer == "held"
}

#[tokio::test]
async fn the_units_of_a_semaphore_are_shared_with_curator() {
    let server = server().await;
    let local = registry(&server, OursWithSemaphore, "").await;
    let semaphore = local.semaphore(KEY, 3);
    let try_ours = async |take| {
        let guard = semaphore.try_acquire_many(take).await.unwrap();
        let is_granted = guard.is_some();
        if let Some(guard) = guard {
            guard.unlock().await.unwrap();
        }
        is_granted
    };
    assert!(try_units(&server, "3").await);
    let ours = semaphore.acquire_many(2).await.unwrap();
    assert!(!try_units(&server, "2").await);
    assert!(local.obtain(KEY).try_lock().await.unwrap().is_none());
    let mut theirs = peer(&server, CuratorWithSemaphore, 10_000, &units("hold", "1"));
    expect(&mut theirs, "held").await;
    assert!(!try_ours(1).await);
    let holders = local.list().await.unwrap();
    assert_eq!(holders.len(), 2, "{holders:?}");
    assert_eq!(holders.iter().map(|it| it.mode.units()).sum::<u32>(), 3, "{holders:?}");
    theirs.write_line("").unwrap();
    expect(&mut theirs, "released").await;
    assert!(try_ours(1).await);
    assert!(!try_ours(2).await);

    // Curator waits for our units, and our caller waits for the units of Curator.
    let mut theirs = peer(&server, CuratorWithSemaphore, 10_000, &units("hold", "2"));
    expect(&mut theirs, "waiting").await;
    eventually(LONG, async || !try_ours(1).await).await;
    ours.unlock().await.unwrap();
    expect(&mut theirs, "held").await;
    assert!(try_ours(1).await);
    let waiting = semaphore.clone();
    let all = tokio::spawn(async move { waiting.acquire_many(3).await.unwrap() });
    eventually(LONG, async || !try_units(&server, "1").await).await;
    theirs.write_line("").unwrap();
    expect(&mut theirs, "released").await;
    let all = within(LONG, all).await.unwrap();
    assert!(!try_units(&server, "1").await);
    all.unlock().await.unwrap();

    // The exclusive lock waits until no unit is taken, and excludes takers.
    let mut theirs = peer(&server, CuratorWithSemaphore, 10_000, &units("hold", "1"));
    expect(&mut theirs, "held").await;
    let lock = local.obtain(KEY);
    let exclusive = tokio::spawn(async move { lock.lock().await.unwrap() });
    eventually(LONG, async || !try_units(&server, "1").await).await;
    assert!(!exclusive.is_finished());
    theirs.write_line("").unwrap();
    expect(&mut theirs, "released").await;
    let exclusive = within(LONG, exclusive).await.unwrap();
    assert!(!try_units(&server, "1").await);
    exclusive.unlock().await.unwrap();
    assert!(try_units(&server, "3").await);
}

/// When the session of a dead process ends, its units become free.
#[tokio::test]
async fn the_units_of_a_dead_process_in_curator_return() {
    let server = server().await;
    let local = registry(&server, OursWithSemaphore, "").await;
    let mut theirs = peer(&server, CuratorWithSemaphore, 10_000, &units("hold", "2"));
    expect(&mut theirs, "held").await;
    theirs.kill().unwrap();
    let semaphore = local.semaphore(KEY, 3);
    within(LONG, semaphore.acquire_many(3)).await.unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn curators_readers_are_reported_and_upgrades_are_refused() {
    let server = server().await;
    let local = registry(&server, OursReading, "").await;
    let lock = local.obtain(KEY);
    let held = ProgramHold::by(&server, CuratorReading).await;
    let guard = lock.read().await.unwrap();
    let holders = local.list().await.unwrap();
    assert_eq!(holders.len(), 2, "{holders:?}");
    assert!(holders.iter().all(|it| it.mode == ClaimMode::Shared && it.token.is_some()));
    let refused = lock.upgradable().await.unwrap_err();
    assert!(matches!(refused, LockError::Unsupported { capability: "upgradable", .. }));
    guard.unlock().await.unwrap();
    held.release().await;
    let writer = lock.lock().await.unwrap();
    let refused = writer.downgrade().await.unwrap_err();
    assert!(matches!(refused, LockError::Unsupported { capability: "upgradable", .. }));
}

#[tokio::test]
async fn the_holder_is_reported_for_every_program() {
    let server = server().await;
    let local = registry(&server, Ours, "").await;
    let lock = local.obtain(KEY);
    // Curator stores the address of its host.
    for (program, label) in [(Curator, None), (KazooRenamed, Some("peer")), (Kazoo, Some("peer"))] {
        let held = ProgramHold::by(&server, program).await;
        let holder = lock.holders().await.unwrap().remove(0);
        println!("{program:?}: {holder:?}");
        assert!(holder.token.is_some());
        assert!(holder.label.is_some() && (label.is_none() || holder.label.as_deref() == label));
        let listed = local.list().await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0].key.as_str(), KEY);
        held.release().await;
        assert!(lock.holders().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn the_lock_of_a_dead_process_ends_with_its_session() {
    let server = server().await;
    let local = registry(&server, Ours, "").await;
    for program in [Curator, KazooRenamed] {
        let ProgramHold::Remote(peer) = ProgramHold::by_with(&server, program, 10_000).await else {
            unreachable!()
        };
        peer.kill().unwrap();
        let guard = within(LONG, local.obtain(KEY).lock()).await.unwrap();
        guard.unlock().await.unwrap();
    }
    // The reverse: one of our processes dies, and the peers acquire its lock.
    let folder = TempDir::new().unwrap();
    let (journal, counter) = (folder.path().join("journal"), folder.path().join("counter"));
    fs::write(&counter, "0").unwrap();
    let mut task = SectionTask::new(server.url(), PeerLayout::Spring, "", KEY, journal, counter);
    task.url = our_url(&server, Ours, "&session=10s");
    task.hold_ms = 1_000_000;
    let mut dead = HelperProcess::spawn(our_command(&task)).unwrap();
    expect(&mut dead, "ready").await;
    dead.write_line("go").unwrap();
    let lock = local.obtain(KEY);
    eventually(LONG, async || lock.holders().await.unwrap().pop()).await;
    dead.kill().unwrap();
    ProgramHold::by(&server, Curator).await.release().await;
}

#[tokio::test]
async fn a_broken_lock_passes_to_the_next_in_the_queue() {
    let server = server().await;
    let local = registry(&server, Ours, "").await;
    let other = registry(&server, Ours, "").await;
    let guard = local.obtain(KEY).lock().await.unwrap();
    let mut peer = peer(&server, Curator, 10_000, &["--once", "hold"]);
    expect(&mut peer, "waiting").await;
    eventually(LONG, async || server.metric("zk_watch_count").await.unwrap() > 0).await;
    other.force_release(KEY).await.unwrap();
    expect(&mut peer, "held").await;
    within(LONG, guard.lost()).await;
    guard.unlock().await.unwrap_err();
    assert!(!try_once(&server, Ours).await);
    // The forced release did not affect the lock of the peer.
    peer.write_line("").unwrap();
    expect(&mut peer, "released").await;
}

/// A process that holds the lock.
enum ProgramHold {
    Local { guard: LockGuard, _registry: Registry },
    Remote(HelperProcess),
}

impl ProgramHold {
    async fn by(server: &ZooKeeperServer, program: Program) -> Self {
        Self::by_with(server, program, 10_000).await
    }

    async fn by_with(server: &ZooKeeperServer, program: Program, session_ms: u32) -> Self {
        if program.is_ours() {
            let local = registry(server, program, "").await;
            let lock = local.obtain(KEY);
            let acquired =
                async { if program.is_reader() { lock.read().await } else { lock.lock().await } };
            let guard = within(LONG, acquired).await.unwrap();
            return Self::Local { guard, _registry: local };
        }
        let mut peer = peer(server, program, session_ms, &["--once", "hold"]);
        expect(&mut peer, "held").await;
        Self::Remote(peer)
    }

    async fn release(self) {
        match self {
            Self::Local { guard, .. } => guard.unlock().await.unwrap(),
            Self::Remote(mut peer) => {
                peer.write_line("").unwrap();
                expect(&mut peer, "released").await;
            }
        }
    }
}

/// Returns whether a program that tries once is granted the lock. A granted lock is released.
async fn try_once(server: &ZooKeeperServer, program: Program) -> bool {
    if program.is_ours() {
        let local = registry(server, program, "").await;
        let lock = local.obtain(KEY);
        let acquired =
            if program.is_reader() { lock.try_read().await } else { lock.try_lock().await };
        let Some(guard) = acquired.unwrap() else { return false };
        guard.unlock().await.unwrap();
        return true;
    }
    let mut peer = peer(server, program, 10_000, &["--once", "try"]);
    let answer = peer.expect_line(|line| ["held", "busy"].contains(&line), LONG).await.unwrap();
    wait_for_success(&peer).await.unwrap();
    &*answer == "held"
}

// ---- Servers and programs.

async fn server() -> ZooKeeperServer {
    // Before any lock is held: on a loaded machine, compiling can take as long as a lease.
    tokio::task::spawn_blocking(compile_curator_peer).await.unwrap().unwrap();
    // No server is restarted here.
    ZooKeeperServer::start_with(ZooKeeperOptions::new().without_fsync()).await.unwrap()
}

/// Long enough for any machine; reached only by a test that fails.
const TIMEOUTS: &str = "&timeout=60s&connect_timeout=60s";

fn our_url(server: &ZooKeeperServer, program: Program, options: &str) -> String {
    let naming = program.naming();
    format!("{}?layout=curator&naming={naming}{TIMEOUTS}{options}", server.url())
}

async fn registry(server: &ZooKeeperServer, program: Program, options: &str) -> Registry {
    lock_registry::connect(&our_url(server, program, options)).await.unwrap()
}

/// The command of `program` for a task whose URL is the server's.
fn sections_command(program: Program, mut task: SectionTask) -> Command {
    if program.is_ours() {
        let naming = program.naming();
        task.url = format!("{}?layout=curator&naming={naming}{TIMEOUTS}", task.url);
        return our_command(&task);
    }
    let mut command = peer_command(program, &task.url, 10_000);
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

fn our_command(task: &SectionTask) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lock-sections"));
    command.arg(serde_json::to_string(task).unwrap());
    command
}

fn peer(
    server: &ZooKeeperServer,
    program: Program,
    session_ms: u32,
    options: &[&str],
) -> HelperProcess {
    let mut command = peer_command(program, &server.url(), session_ms);
    command.args(options);
    HelperProcess::spawn(command).unwrap()
}

/// The class path of Curator. The manifest of `curator-recipes.jar` names its dependencies.
const CURATOR_CLASSES: &str = "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar";

/// Compiles `peers/Curator.java` once for all test processes, and returns the folder of the
/// classes. Compiling takes longer than most uses of the program.
fn compile_curator_peer() -> io::Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/Curator.java");
    let mut hasher = DefaultHasher::new();
    fs::read(&source)?.hash(&mut hasher);
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let classes = parent.join(format!("curator-{:016x}", hasher.finish()));
    if !classes.is_dir() {
        fs::create_dir_all(parent)?;
        let incomplete = tempfile::tempdir_in(parent)?;
        let mut javac = Command::new("javac");
        // Without the option, the encoding depends on the locale.
        javac.args(["-encoding", "UTF-8", "-cp", CURATOR_CLASSES]);
        javac.arg("-d").arg(incomplete.path().join("classes"));
        let output = javac.arg(source).output()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let renamed = fs::rename(incomplete.path().join("classes"), &classes);
        // Another process may have published the classes first.
        if !classes.is_dir() {
            renamed?;
        }
    }
    Ok(classes)
}

/// The command of a peer that acquires the lock at [`PATH`].
fn peer_command(program: Program, url: &str, session_ms: u32) -> Command {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    let session_ms = session_ms.to_string();
    let layout = match program {
        Curator | CuratorReading | CuratorWriting | CuratorWithSemaphore => {
            let mut command = Command::new("java");
            // The process is short-lived and is started often.
            command.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
            let classes = compile_curator_peer().unwrap();
            command.arg("-cp").arg(format!("{CURATOR_CLASSES}:{}", classes.display()));
            command.arg("Curator");
            command.args(["--url", url, "--path", PATH, "--session-ms", &session_ms]);
            command.args([
                "--recipe",
                match program {
                    CuratorReading => "read",
                    CuratorWriting => "write",
                    CuratorWithSemaphore => "semaphore",
                    _ => "mutex",
                },
            ]);
            return command;
        }
        Kazoo => "stock",
        KazooPatterned => "patterned",
        KazooRenamed => "renamed",
        Ours | OursAsKazoo | OursReading | OursWriting | OursWithSemaphore => {
            unreachable!("our own process is no peer")
        }
    };
    let mut command = Command::new("python3");
    // `-B` prevents compiled files among the sources.
    command.arg("-B").arg(peers.join("peer.py"));
    command.args(["--url", url, "--layout", layout, "--key", PATH, "--lease-ms", &session_ms]);
    command
}

async fn expect(process: &mut HelperProcess, line: &str) {
    let received = process.expect_line(|received| received == line, LONG).await;
    if let Err(late) = received {
        panic!("{late}");
    }
}
