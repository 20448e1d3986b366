//! Locks in ZooKeeper that are shared with other programs. Apache Curator (`peers/Curator.java`)
//! stands for Spring Integration too. kazoo (`peers/zoo.py`) runs unchanged, with additional names
//! to wait for, and renamed. All sides exclude each other, are granted the lock in order of
//! arrival, and continue after each other's crash. Needs ZooKeeper, Curator and a Java compiler.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the figures are worth a look")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use futures_util::future::try_join_all;
use lock_registry_tests::sections::{Form, Section, Task};
use registry_core::{LockGuard, LockRegistry, Registry};
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

/// The kinds of participants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    /// Ours, with Curator's names.
    Ours,
    /// Ours, with `naming=kazoo`.
    OursAsKazoo,
    Curator,
    /// kazoo unchanged.
    Kazoo,
    /// kazoo that also waits for Curator's names.
    KazooPatterned,
    /// kazoo with Curator's names.
    KazooRenamed,
}

use Who::{Curator, Kazoo, KazooPatterned, KazooRenamed, Ours, OursAsKazoo};

// ---- Three processes, many critical sections.

#[tokio::test]
async fn we_take_turns_with_curator() {
    take_turns(&[Ours, Curator, Curator]).await;
    take_turns(&[Ours, Ours, Curator]).await;
}

#[tokio::test]
async fn we_take_turns_with_kazoo_that_has_the_names_of_curator() {
    take_turns(&[Ours, KazooRenamed, KazooRenamed]).await;
}

#[tokio::test]
async fn we_take_turns_with_kazoo_that_waits_for_our_names() {
    take_turns(&[Ours, KazooPatterned, KazooPatterned]).await;
}

#[tokio::test]
async fn we_take_turns_with_kazoo_as_it_is_under_its_own_names() {
    take_turns(&[OursAsKazoo, Kazoo, Kazoo]).await;
}

#[tokio::test]
async fn curator_kazoo_and_we_take_turns() {
    take_turns(&[Ours, Curator, KazooRenamed]).await;
}

/// Some of our processes may already use kazoo's names while others do not.
#[tokio::test]
async fn ours_take_turns_under_either_name() {
    take_turns(&[Ours, OursAsKazoo, KazooPatterned]).await;
}

/// The number of acquisitions of each process.
const SECTIONS: u32 = 300;

/// Runs all processes at the same time, and checks mutual exclusion and that grants are in the
/// order of the queue.
async fn take_turns(who: &[Who]) {
    let server = server().await;
    let folder = TempDir::new().unwrap();
    let counter = folder.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let mut processes = Vec::new();
    for (number, &who) in who.iter().enumerate() {
        let journal = folder.path().join(format!("journal{number}"));
        let mut task =
            Task::new(server.url(), Form::Spring, "", KEY, journal.clone(), counter.clone());
        task.sections = SECTIONS;
        processes.push((who, journal, HelperProcess::spawn(program(who, task)).unwrap()));
    }
    for (_, _, process) in &mut processes {
        expect(process, "ready").await;
    }
    for (_, _, process) in &mut processes {
        process.write_line("go").unwrap();
    }
    // The first failure ends the test. The other processes could wait for a lock that the failed
    // process left behind.
    try_join_all(processes.iter().map(|(_, _, process)| done(process))).await.unwrap();

    let mut sections: Vec<(Who, Section)> = Vec::new();
    for (who, journal, _) in &processes {
        let journal = fs::read_to_string(journal).unwrap();
        sections.extend(journal.lines().map(|line| (*who, serde_json::from_str(line).unwrap())));
    }
    sections.sort_by_key(|(_, section)| section.entered);
    let events =
        (0..).zip(&sections).flat_map(|(number, (_, section))| section.events(KEY, number));
    let checked = check(&History::from_events(events).unwrap()).unwrap();
    let all = who.len() * SECTIONS as usize;
    assert_eq!((checked.grants, checked.tokens, checked.unknown), (all, all, 0));
    let count = fs::read_to_string(&counter).unwrap();
    assert_eq!(count.trim(), all.to_string());
    // The transaction id of a node is its position in the queue.
    let tokens: Vec<u64> = sections.iter().map(|(_, section)| section.token.unwrap()).collect();
    assert!(tokens.is_sorted_by(|one, next| one < next), "not in the order of arrival");
    changes_hands(&sections);
}

/// Another process always waits, so a process is rarely granted the lock twice in a row.
fn changes_hands(sections: &[(Who, Section)]) {
    let mut takeovers: BTreeMap<(Who, Who), usize> = BTreeMap::new();
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
async fn done(process: &HelperProcess) -> Result<(), String> {
    let status = process.wait_exit(LONG).await.map_err(|late| late.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("{status}: {}", process.stderr())) }
}

// ---- Two processes, step by step.

/// Which participants each one waits for: the table in the book.
#[tokio::test]
async fn who_waits_for_whom() {
    let server = server().await;
    for (holder, excluded, let_in) in [
        (Ours, &[OursAsKazoo, Curator, KazooPatterned, KazooRenamed][..], &[Kazoo][..]),
        (OursAsKazoo, &[Ours, Kazoo, KazooPatterned, KazooRenamed], &[Curator]),
        (Curator, &[Ours, OursAsKazoo, KazooPatterned, KazooRenamed], &[Kazoo]),
        (Kazoo, &[Ours, OursAsKazoo, KazooPatterned, KazooRenamed], &[Curator]),
        (KazooPatterned, &[Ours, OursAsKazoo, Kazoo, KazooRenamed], &[Curator]),
        (KazooRenamed, &[Ours, OursAsKazoo, Curator, KazooPatterned], &[Kazoo]),
    ] {
        let held = Held::by(&server, holder).await;
        let attempts = excluded.iter().map(|who| (who, true));
        for (who, is_excluded) in attempts.chain(let_in.iter().map(|who| (who, false))) {
            let gets_in = gets_in(&server, *who).await;
            assert_eq!(gets_in, !is_excluded, "{who:?} while {holder:?} has it");
        }
        held.let_go().await;
        assert!(gets_in(&server, Ours).await, "after {holder:?}");
    }
}

#[tokio::test]
async fn who_has_it_is_told_whoever_it_is() {
    let server = server().await;
    let ours = registry(&server, Ours, "").await;
    let lock = ours.obtain(KEY);
    // Curator stores the address of its host.
    for (who, label) in [(Curator, None), (KazooRenamed, Some("peer")), (Kazoo, Some("peer"))] {
        let held = Held::by(&server, who).await;
        let holder = lock.holder().await.unwrap().unwrap();
        println!("{who:?}: {holder:?}");
        assert!(holder.token.is_some());
        assert!(holder.label.is_some() && (label.is_none() || holder.label.as_deref() == label));
        let listed = ours.list().await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0].key.as_str(), KEY);
        held.let_go().await;
        assert!(lock.holder().await.unwrap().is_none());
    }
}

#[tokio::test]
async fn the_dead_are_outlived_by_their_session() {
    let server = server().await;
    let ours = registry(&server, Ours, "").await;
    for who in [Curator, KazooRenamed] {
        let Held::There(peer) = Held::by_with(&server, who, 1_000).await else { unreachable!() };
        peer.kill().unwrap();
        let guard = within(LONG, ours.obtain(KEY).lock()).await.unwrap();
        guard.unlock().await.unwrap();
    }
    // The reverse: one of our processes dies, and the peers acquire its lock.
    let folder = TempDir::new().unwrap();
    let (journal, counter) = (folder.path().join("journal"), folder.path().join("counter"));
    fs::write(&counter, "0").unwrap();
    let mut task = Task::new(server.url(), Form::Spring, "", KEY, journal, counter);
    task.url = our_url(&server, Ours, "&session=1s");
    task.hold_ms = 1_000_000;
    let mut dead = HelperProcess::spawn(ours_at_work(&task)).unwrap();
    expect(&mut dead, "ready").await;
    dead.write_line("go").unwrap();
    let lock = ours.obtain(KEY);
    eventually(LONG, async || lock.holder().await.unwrap()).await;
    dead.kill().unwrap();
    Held::by(&server, Curator).await.let_go().await;
}

#[tokio::test]
async fn a_lock_that_was_broken_goes_to_the_next_in_line_whoever_it_is() {
    let server = server().await;
    let ours = registry(&server, Ours, "").await;
    let other = registry(&server, Ours, "").await;
    let guard = ours.obtain(KEY).lock().await.unwrap();
    let mut peer = peer(&server, Curator, 10_000, &["--once", "hold"]);
    expect(&mut peer, "waiting").await;
    eventually(LONG, async || server.figure("zk_watch_count").await.unwrap() > 0).await;
    other.force_release(KEY).await.unwrap();
    expect(&mut peer, "held").await;
    within(LONG, guard.lost()).await;
    guard.unlock().await.unwrap_err();
    assert!(!gets_in(&server, Ours).await);
    // No client notifies Curator of the loss, so it releases the node that it believes to hold.
    peer.write_line("").unwrap();
    expect(&mut peer, "released").await;
}

/// A process that holds the lock.
enum Held {
    Here { guard: LockGuard, _registry: Registry },
    There(HelperProcess),
}

impl Held {
    async fn by(server: &ZooKeeperServer, who: Who) -> Self {
        Self::by_with(server, who, 10_000).await
    }

    async fn by_with(server: &ZooKeeperServer, who: Who, session_ms: u32) -> Self {
        if matches!(who, Ours | OursAsKazoo) {
            let ours = registry(server, who, "").await;
            let guard = within(LONG, ours.obtain(KEY).lock()).await.unwrap();
            return Self::Here { guard, _registry: ours };
        }
        let mut peer = peer(server, who, session_ms, &["--once", "hold"]);
        expect(&mut peer, "held").await;
        Self::There(peer)
    }

    async fn let_go(self) {
        match self {
            Self::Here { guard, .. } => guard.unlock().await.unwrap(),
            Self::There(mut peer) => {
                peer.write_line("").unwrap();
                expect(&mut peer, "released").await;
            }
        }
    }
}

/// Whether a participant that tries once is granted the lock. If so, the lock is released.
async fn gets_in(server: &ZooKeeperServer, who: Who) -> bool {
    if matches!(who, Ours | OursAsKazoo) {
        let ours = registry(server, who, "").await;
        let Some(guard) = ours.obtain(KEY).try_lock().await.unwrap() else { return false };
        guard.unlock().await.unwrap();
        return true;
    }
    let mut peer = peer(server, who, 10_000, &["--once", "try"]);
    let answer = peer.expect_line(|line| ["held", "busy"].contains(&line), LONG).await.unwrap();
    done(&peer).await.unwrap();
    &*answer == "held"
}

// ---- Servers and programs.

async fn server() -> ZooKeeperServer {
    // No server is restarted here.
    ZooKeeperServer::start_with(ZooKeeperOptions::new().without_fsync()).await.unwrap()
}

fn our_url(server: &ZooKeeperServer, who: Who, options: &str) -> String {
    let naming = if who == OursAsKazoo { "kazoo" } else { "curator" };
    format!("{}?layout=curator&naming={naming}{options}", server.url())
}

async fn registry(server: &ZooKeeperServer, who: Who, options: &str) -> Registry {
    lock_registry::connect(&our_url(server, who, options)).await.unwrap()
}

/// The command of `who` for a task whose URL is the server's.
fn program(who: Who, mut task: Task) -> Command {
    if matches!(who, Ours | OursAsKazoo) {
        let naming = if who == OursAsKazoo { "kazoo" } else { "curator" };
        task.url = format!("{}?layout=curator&naming={naming}", task.url);
        return ours_at_work(&task);
    }
    let mut command = theirs(who, &task.url, 10_000);
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

fn ours_at_work(task: &Task) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lock-sections"));
    command.arg(serde_json::to_string(task).unwrap());
    command
}

fn peer(server: &ZooKeeperServer, who: Who, session_ms: u32, options: &[&str]) -> HelperProcess {
    let mut command = theirs(who, &server.url(), session_ms);
    command.args(options);
    HelperProcess::spawn(command).unwrap()
}

/// The command of a peer that acquires the lock at [`PATH`].
fn theirs(who: Who, url: &str, session_ms: u32) -> Command {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    let session_ms = session_ms.to_string();
    let layout = match who {
        Curator => {
            // The manifest of `curator-recipes.jar` names its dependencies.
            const CLASSES: &str =
                "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar";
            let mut command = Command::new("java");
            // The process is short-lived and is started often.
            command.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
            command.args(["-cp", CLASSES]).arg(peers.join("Curator.java"));
            command.args(["--url", url, "--path", PATH, "--session-ms", &session_ms]);
            return command;
        }
        Kazoo => "stock",
        KazooPatterned => "patterned",
        KazooRenamed => "renamed",
        Ours | OursAsKazoo => unreachable!("ours is no peer"),
    };
    let mut command = Command::new("python3");
    // `-B` prevents compiled files among the sources.
    command.arg("-B").arg(peers.join("peer.py"));
    command.args(["--url", url, "--layout", layout, "--key", PATH, "--lease-ms", &session_ms]);
    command
}

async fn expect(process: &mut HelperProcess, line: &str) {
    let said = process.expect_line(|said| said == line, LONG).await;
    if let Err(late) = said {
        panic!("{late}");
    }
}
