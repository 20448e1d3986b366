//! Readers, writers, permits, upgrades and several keys in real processes, on each store that has
//! these modes. In two tests a process is killed, or paused beyond its lease. In two tests,
//! processes compete without a fault.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the tests print their measurements")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lock_registry::modes::ClaimMode;
use lock_registry::{LockRegistryExt, LostReason, Registry};
use registry_testkit::check::{check, check_modes};
use registry_testkit::eventually;
use registry_testkit::history::History;
use registry_testkit::holder::{
    BusyPrinter, CompetedLocks, Competition, HolderRequest, LockHolder, PendingReply,
    run_child_process, serve,
};
use tokio::time::Instant;

use crate::stores::{LONG, Store, config, long_or, on_each_store};

/// The lease of a process that is killed or paused.
const LEASE: Duration = secs(6);
/// The lease of processes that compete.
const COMPETITION_LEASE: Duration = secs(5);
/// The lease of the other processes: it does not expire even on a loaded machine.
const LONG_LEASE: Duration = secs(60);

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

async fn spawn_process(store: &Store, lease: Duration) -> LockHolder {
    LockHolder::spawn_test("modes::the_other_process", &store.url(lease)).await.unwrap()
}

async fn spawn_processes(store: &Store, number: u32) -> Vec<LockHolder> {
    join_all((0..number).map(|_| spawn_process(store, COMPETITION_LEASE))).await
}

on_each_store! {
    a_killed_process_leaves_no_lock_and_no_queue_entry,
    a_paused_process_loses_its_locks_and_waits_on,
    conversions_keep_the_time_of_the_grant,
    no_reader_and_no_writer_starves,
    several_keys_in_any_order_do_not_deadlock,
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
    run_child_process(async |url| {
        let config = config(&url).observer(Arc::new(BusyPrinter));
        serve(Arc::new(config.connect().await.unwrap())).await;
    });
}

const READER: &str = "held/reader";
const WRITER: &str = "held/writer";
const PERMITS: &str = "held/permits";
const UPGRADABLE: &str = "held/upgradable";
const WAITING_READER: &str = "awaited/reader";
const WAITING_WRITER: &str = "awaited/writer";
const WAITING_PERMITS: &str = "awaited/permits";
const WAITING_FAIR: &str = "awaited/fair";
const WAITING_UPGRADE: &str = "awaited/upgrade";

/// The locks that the victim holds: the process that is killed or paused.
const HELD: [(&str, ClaimMode); 4] = [
    (READER, ClaimMode::Shared),
    (WRITER, ClaimMode::Exclusive),
    (PERMITS, permits(2)),
    (UPGRADABLE, ClaimMode::Upgradable),
];

/// The keys for which the victim waits, without the key of the upgrade.
const AWAITED: [&str; 4] = [WAITING_READER, WAITING_WRITER, WAITING_PERMITS, WAITING_FAIR];

/// The units of each semaphore.
const UNITS: u32 = 3;

const fn permits(take: u32) -> ClaimMode {
    ClaimMode::Permits { take, of: UNITS }
}

/// A process that holds locks and waits for locks in every mode, and two processes that compete
/// with it.
struct Processes {
    victim: LockHolder,
    waits: Vec<PendingReply>,
    upgrade: PendingReply,
    first: LockHolder,
    second: LockHolder,
    second_in_queue: PendingReply,
    /// The registry of the test's own process.
    registry: Registry,
}

impl Processes {
    async fn start(store: &Store) -> Self {
        let mut victim = spawn_process(store, LEASE).await;
        let mut first = spawn_process(store, LONG_LEASE).await;
        let mut second = spawn_process(store, LONG_LEASE).await;
        let registry = store.connect(LONG_LEASE).await;
        for (key, mode) in [
            (WAITING_READER, ClaimMode::Exclusive),
            (WAITING_WRITER, ClaimMode::Shared),
            (WAITING_PERMITS, permits(1)),
            (WAITING_UPGRADE, ClaimMode::Shared),
        ] {
            first.lock_in(key, mode, LONG).await.unwrap();
        }
        let fair = first.send(&HolderRequest::lock_fair(WAITING_FAIR)).unwrap();
        first.held(fair, LONG).await.unwrap();
        for (key, mode) in HELD.into_iter().chain([(WAITING_UPGRADE, ClaimMode::Upgradable)]) {
            victim.lock_in(key, mode, LONG).await.unwrap();
        }
        second.lock_in(PERMITS, permits(1), LONG).await.unwrap();
        second.lock_in(UPGRADABLE, ClaimMode::Shared, LONG).await.unwrap();

        let mut waits = Vec::new();
        for request in [
            HolderRequest::lock_in(WAITING_READER, ClaimMode::Shared),
            HolderRequest::lock_in(WAITING_WRITER, ClaimMode::Exclusive),
            HolderRequest::lock_in(WAITING_PERMITS, permits(UNITS)),
            HolderRequest::lock_fair(WAITING_FAIR),
        ] {
            waits.push(victim.send(&request).unwrap());
        }
        let upgrade = victim.send(&HolderRequest::Upgrade { key: WAITING_UPGRADE.into() }).unwrap();
        for key in AWAITED {
            victim.wait_until_busy(key, LONG).await.unwrap();
        }
        let second_in_queue = second.send(&HolderRequest::lock_fair(WAITING_FAIR)).unwrap();
        second.wait_until_busy(WAITING_FAIR, LONG).await.unwrap();
        // The waiting writer and the waiting upgrade block new readers.
        for key in [WAITING_WRITER, WAITING_UPGRADE] {
            let lock = registry.obtain(key);
            let is_busy = |attempt: Result<Option<_>, _>| attempt.is_ok_and(|it| it.is_none());
            eventually(LONG, async || is_busy(lock.try_read().await)).await;
        }
        assert!(registry.obtain(READER).try_lock().await.unwrap().is_none());
        assert!(registry.obtain(WRITER).try_read().await.unwrap().is_none());
        assert!(registry.semaphore(PERMITS, UNITS).try_acquire().await.unwrap().is_none());
        Self { victim, waits, upgrade, first, second, second_in_queue, registry }
    }

    /// Pauses the victim while it is not writing. A process that is paused during a write to a
    /// SQLite file keeps the file's write lock, which blocks all other writers.
    async fn pause_victim(&self) {
        let spare = self.registry.obtain("spare");
        eventually(LONG, async || {
            self.victim.process().pause().await.unwrap();
            let can_write = spare.try_lock().await.is_ok();
            if !can_write {
                self.victim.process().resume().unwrap();
            }
            can_write
        })
        .await;
    }

    /// Acquires in the other processes what the victim held and waited for.
    async fn replace_victim(&mut self) {
        let begin = Instant::now();
        let mut first_requests = Vec::new();
        for (key, mode) in [
            (READER, ClaimMode::Exclusive),
            (WRITER, ClaimMode::Shared),
            (PERMITS, permits(2)),
            (UPGRADABLE, ClaimMode::Upgradable),
        ] {
            first_requests.push(self.first.send(&HolderRequest::lock_in(key, mode)).unwrap());
        }
        self.first.unlock(WAITING_READER, LONG).await.unwrap();
        self.first.unlock(WAITING_FAIR, LONG).await.unwrap();
        let mut second_requests = vec![self.second_in_queue];
        for (key, mode) in [
            (WRITER, ClaimMode::Shared),
            (WAITING_READER, ClaimMode::Exclusive),
            (WAITING_WRITER, ClaimMode::Shared),
            (WAITING_PERMITS, permits(2)),
            (WAITING_UPGRADE, ClaimMode::Shared),
        ] {
            second_requests.push(self.second.send(&HolderRequest::lock_in(key, mode)).unwrap());
        }
        for pending in first_requests {
            self.first.held(pending, LONG).await.unwrap();
        }
        for pending in second_requests {
            self.second.held(pending, LONG).await.unwrap();
        }
        let waited = begin.elapsed();
        assert!(waited < LEASE + secs(15), "after {waited:?}");
        // Neither the units of the victim nor those of the others are granted twice.
        for key in [PERMITS, WAITING_PERMITS] {
            let permit = self.registry.semaphore(key, UNITS).try_acquire().await.unwrap();
            assert!(permit.is_none(), "{key} has more than {UNITS} units");
        }
        for key in [WAITING_WRITER, WAITING_PERMITS, WAITING_UPGRADE] {
            assert!(self.first.status(key, LONG).await.unwrap().is_some(), "{key}");
        }
        for key in [PERMITS, UPGRADABLE] {
            assert!(self.second.status(key, LONG).await.unwrap().is_some(), "{key}");
        }
    }
}

/// Checks that no lock remains, and that no two processes held a lock at the same time in modes
/// that exclude each other.
async fn check_end(ended: [LockHolder; 3], registry: &Registry) {
    for key in [READER, WRITER, UPGRADABLE, WAITING_UPGRADE].into_iter().chain(AWAITED) {
        let guard = registry.obtain(key).try_lock_for(LONG).await.unwrap();
        guard.unwrap_or_else(|| panic!("{key} is held")).unlock().await.unwrap();
    }
    let all = registry.semaphore(PERMITS, UNITS).try_acquire_many(UNITS).await.unwrap();
    assert!(all.is_some(), "units are missing");
    let history = History::from_events(ended.iter().flat_map(LockHolder::events)).unwrap();
    let grants = check_modes(&history).unwrap_or_else(|found| panic!("{found}"));
    assert!(grants >= 22, "{grants} grants");
}

/// Closes the input of the process, so that it releases its locks and exits.
async fn end(mut process: LockHolder) -> LockHolder {
    process.close_input();
    process.process().wait_exit(LONG).await.unwrap();
    process
}

async fn a_killed_process_leaves_no_lock_and_no_queue_entry(store: Store) {
    let mut processes = Processes::start(&store).await;
    processes.victim.process().kill().unwrap();
    processes.replace_victim().await;
    processes.victim.process().wait_exit(LONG).await.unwrap();
    let Processes { victim, first, second, registry, .. } = processes;
    check_end([victim, end(first).await, end(second).await], &registry).await;
}

async fn a_paused_process_loses_its_locks_and_waits_on(store: Store) {
    let mut processes = Processes::start(&store).await;
    processes.pause_victim().await;
    processes.replace_victim().await;
    processes.victim.process().resume().unwrap();
    let Processes { mut victim, waits, upgrade, first, second, registry, .. } = processes;
    for (key, _) in HELD {
        let reason = victim.lost(key, LONG).await.unwrap();
        assert!([LostReason::Expired, LostReason::Gone].contains(&reason), "{key}: {reason}");
        assert_eq!(victim.status(key, LONG).await.unwrap(), None, "{key}");
    }
    let upgraded = victim.held(upgrade, LONG).await.unwrap_err().to_string();
    assert!(upgraded.contains("lost"), "{upgraded}");
    let ended = [end(first).await, end(second).await];
    for pending in waits {
        victim.held(pending, LONG).await.unwrap();
    }
    let [first, second] = ended;
    check_end([end(victim).await, first, second], &registry).await;
}

async fn conversions_keep_the_time_of_the_grant(store: Store) {
    let registry = store.connect(LONG_LEASE).await;
    let lock = registry.obtain("prices");
    let held_for = async || match lock.holders().await.unwrap().as_slice() {
        [holder] => holder.held_for,
        other => panic!("one holder: {other:?}"),
    };
    let guard = lock.upgradable().await.unwrap();
    if held_for().await.is_none() {
        // ZooKeeper stores the time of its own clock, but does not return the present time.
        assert_eq!(registry.capabilities().store, "zookeeper");
        return;
    }
    let mut last = None;
    eventually(LONG, async || {
        last = held_for().await;
        last >= Some(secs(1))
    })
    .await;
    let guard = guard.upgrade().await.unwrap();
    assert!(held_for().await >= last, "after the upgrade");
    let guard = guard.downgrade().await.unwrap();
    assert!(held_for().await >= last, "after the downgrade");
    guard.unlock().await.unwrap();
}

/// Eight readers in each of four processes, and a writer in two of them.
async fn no_reader_and_no_writer_starves(store: Store) {
    let mut processes = spawn_processes(&store, 4).await;
    // On a loaded machine, one process may hardly run, so two unfair runs are accepted.
    let mut unfair = Vec::new();
    while let Err(share) = run_competition(&store, &mut processes).await {
        unfair.push(share);
        assert!(unfair.len() < 3, "{unfair:#?}");
    }
}

/// Lets the processes compete for one lock. The error is the summary of the readers, or of the
/// writers, if one of them waited too long or had too few grants.
async fn run_competition(store: &Store, processes: &mut [LockHolder]) -> Result<(), ShareSummary> {
    let span = long_or(secs(60), secs(3));
    const READERS: u32 = 8;
    let shares = compete(processes, |process| {
        let competition = |first_client, tasks, mode| Competition {
            first_client: process * CLIENTS + first_client,
            tasks,
            locks: CompetedLocks::One { key: "prices".into(), mode },
            hold: Duration::from_millis(20),
            pause: Duration::ZERO,
            span,
        };
        let mut competitions = vec![competition(0, READERS, ClaimMode::Shared)];
        if process < 2 {
            competitions.push(competition(READERS, 1, ClaimMode::Exclusive));
        }
        competitions
    })
    .await;
    check_modes(&shares.history).unwrap_or_else(|found| panic!("{found}"));
    let is_writer = |client: u32| client % CLIENTS == READERS;
    let (writers, readers) = shares.split(is_writer);
    println!("{}: {:?} the longest section", store.url, shares.longest_section);
    println!("  writers: {writers:?}");
    println!("  readers: {readers:?}");
    assert_eq!((writers.clients, readers.clients), (2, 4 * READERS as usize));
    let bound = shares.longest_section * 3 + COMPETITION_LEASE;
    for share in [writers, readers] {
        // Each client has at least an eighth of the average, even if the run is shorter than a
        // lease.
        let is_fair = share.fewest_grants * 8 * share.clients >= share.grants;
        if share.longest_wait > bound || !is_fair {
            return Err(share);
        }
    }
    Ok(())
}

/// Eight processes repeatedly lock three of six keys.
async fn several_keys_in_any_order_do_not_deadlock(store: Store) {
    let span = long_or(secs(60), secs(2));
    let keys: Vec<String> = (0..6).map(|number| format!("accounts/{number}")).collect();
    let mut processes = spawn_processes(&store, 8).await;
    let in_order = CompetedLocks::InOrder { keys: keys.clone(), take: 3 };
    let any_order = CompetedLocks::All { keys, take: 3 };
    let mut rates = Vec::new();
    for (run, locks) in [in_order, any_order].into_iter().enumerate() {
        let first_client = if run == 0 { 0 } else { CLIENTS / 2 };
        let shares = compete(&mut processes, |process| {
            let first_client = process * CLIENTS + first_client;
            let (locks, hold, pause) = (locks.clone(), Duration::from_millis(5), Duration::ZERO);
            vec![Competition { first_client, tasks: 1, locks, hold, pause, span }]
        })
        .await;
        check(&shares.history).unwrap_or_else(|found| panic!("{found}"));
        let (all, _) = shares.split(|_| true);
        assert_eq!(all.clients, processes.len());
        println!("{}: {all:?}", store.url);
        assert!(all.fewest_grants > 0, "{all:?}");
        rates.push(all.grants);
    }
    // In short runs, the load of the machine may differ between the two.
    if span >= secs(60) {
        assert!(rates[1] * 2 >= rates[0], "{rates:?}");
    }
}

/// The client numbers of a process begin with a multiple of this number.
const CLIENTS: u32 = 1_000;

/// What the clients of a competition have acquired.
struct Shares {
    history: History,
    /// The longest time from a grant to the call of its release.
    longest_section: Duration,
    /// The number of grants and the longest wait of each client.
    clients: BTreeMap<u32, (usize, Duration)>,
}

/// The shares of some of the clients.
#[derive(Debug)]
struct ShareSummary {
    clients: usize,
    grants: usize,
    fewest_grants: usize,
    longest_wait: Duration,
}

impl Shares {
    fn of(history: History) -> Self {
        let mut longest_section = Duration::ZERO;
        let mut clients = BTreeMap::new();
        for grant in &history.grants {
            let (grants, longest_wait) = clients.entry(grant.client).or_default();
            *grants += 1;
            let waited = Duration::from_nanos(grant.acquire.to - grant.acquire.from);
            *longest_wait = waited.max(*longest_wait);
            let released = grant.release.map_or(grant.acquire.to, |release| release.window.from);
            let section = Duration::from_nanos(released - grant.acquire.to);
            longest_section = longest_section.max(section);
        }
        Self { history, longest_section, clients }
    }

    /// Returns the shares of the clients for which `predicate` returns true, and of the others.
    fn split(&self, predicate: impl Fn(u32) -> bool) -> (ShareSummary, ShareSummary) {
        let (chosen, others): (Vec<_>, Vec<_>) =
            self.clients.iter().partition(|(client, _)| predicate(**client));
        let summary = |shares: Vec<(&u32, &(usize, Duration))>| ShareSummary {
            clients: shares.len(),
            grants: shares.iter().map(|(_, (grants, _))| grants).sum(),
            fewest_grants: shares.iter().map(|(_, (grants, _))| *grants).min().unwrap_or(0),
            longest_wait: shares.iter().map(|(_, (_, wait))| *wait).max().unwrap_or_default(),
        };
        (summary(chosen), summary(others))
    }
}

/// Runs the competitions of each process at the same time, and returns the shares once all tasks
/// have ended. A task that waits forever fails the test.
async fn compete(
    processes: &mut [LockHolder],
    competitions: impl Fn(u32) -> Vec<Competition>,
) -> Shares {
    let before: Vec<_> = processes.iter().map(|process| process.events().len()).collect();
    let mut pending = Vec::new();
    for (number, process) in processes.iter_mut().enumerate() {
        for competition in competitions(u32::try_from(number).unwrap()) {
            let request = HolderRequest::Compete(competition);
            pending.push((number, process.send(&request).unwrap()));
        }
    }
    for (number, pending) in pending {
        processes[number].reply::<()>(pending, LONG * 2).await.unwrap();
    }
    let events = processes
        .iter()
        .zip(before)
        .flat_map(|(process, before)| process.events().into_iter().skip(before));
    Shares::of(History::from_events(events).unwrap())
}
