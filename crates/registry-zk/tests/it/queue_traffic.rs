//! Cost of a queue for its waiters and the servers: packets per client, as counted by the server.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]
#![expect(clippy::print_stdout, reason = "the measured values are shown with --nocapture")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use registry_core::{LockGuard, LockOptions, LockRegistryExt as _, Registry};
use registry_testkit::zookeeper::{ClientStats, ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use registry_zk::{ZkBackend, ZkConfig};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use zookeeper_client::{Acls, Client, CreateMode};

/// Long enough for any machine; only a failing test reaches it.
const LONG: Duration = Duration::from_secs(60);
/// So long that no periodic request is sent during a test.
const SESSION: Duration = Duration::from_secs(100);
/// The node of the lock `k`.
const LOCK: &str = "/lock-registry/default/k";

async fn server() -> ZooKeeperServer {
    ZooKeeperServer::start_with(ZooKeeperOptions::new().without_fsync()).await.unwrap()
}

/// A client with its own session.
struct TestClient {
    backend: Arc<ZkBackend>,
    registry: Registry,
}

impl TestClient {
    async fn open(server: &ZooKeeperServer, session: Duration) -> Self {
        let config = ZkConfig::new(&server.addr().to_string()).unwrap();
        let backend = ZkBackend::open(config.with_session_timeout(session)).await.unwrap();
        let backend = Arc::new(backend);
        let builder = Registry::builder(Arc::clone(&backend) as Arc<_>);
        let lease = backend.session_timeout() / 2;
        Self { registry: builder.lease(lease).build().unwrap(), backend }
    }

    /// Returns the server's counters of this client.
    async fn stats(&self, server: &ZooKeeperServer) -> ClientStats {
        let session = self.backend.session_id().unwrap();
        let clients = server.clients().await.unwrap();
        *clients.iter().find(|client| client.session == session).unwrap()
    }

    async fn lock(&self) -> LockGuard {
        self.registry.obtain("k").lock().await.unwrap()
    }
}

async fn queue_length(operator: &Client) -> usize {
    operator.list_children(LOCK).await.map_or(0, |children| children.len())
}

/// Waits until the server has this many watches. Then each waiter has sent all its requests.
async fn wait_for_watches(server: &ZooKeeperServer, watches: u64) {
    let has_all = async || server.metric("zk_watch_count").await.unwrap() >= watches;
    // On a loaded machine, thousands of waiters take more than a minute.
    eventually(LONG * 5, has_all).await;
}

#[tokio::test]
async fn a_waiter_behind_500_others_receives_one_event() {
    const OTHERS: usize = 500;
    let server = server().await;
    let operator = Client::connect(&server.addr().to_string()).await.unwrap();
    operator.mkdir(LOCK, &CreateMode::Container.with_acls(Acls::anyone_all())).await.unwrap();
    let ephemeral = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let others = (0..OTHERS).map(|other| {
        let path = format!("{LOCK}/_c_00000000-0000-4000-8000-{other:012}-lock-");
        let operator = &operator;
        let ephemeral = &ephemeral;
        async move {
            let (_, number) = operator.create(&path, b"another", ephemeral).await?;
            Ok::<_, zookeeper_client::Error>(format!("{path}{number}"))
        }
    });
    let others = try_join_all(others).await.unwrap();

    let client = TestClient::open(&server, SESSION).await;
    let lock = client.registry.obtain("k");
    let waiter_task = tokio::spawn(async move { lock.lock().await });
    eventually(LONG, async || queue_length(&operator).await == OTHERS + 1).await;
    wait_for_watches(&server, 1).await;
    let before = client.stats(&server).await;
    // Deletes each head in turn, until the waiter is the head.
    for other in &others {
        assert!(!waiter_task.is_finished());
        operator.delete(other, None).await.unwrap();
    }
    let guard = within(LONG, waiter_task).await.unwrap().unwrap();
    // The server counts a packet after it has sent it.
    eventually(LONG, async || client.stats(&server).await.events() > before.events()).await;
    let after = client.stats(&server).await;
    let requests = after.received - before.received;
    println!("{} events, {requests} requests and pings", after.events() - before.events());
    assert_eq!(after.events() - before.events(), 1);
    // One check, which is two requests. The others are pings and session confirmations,
    // which are sent at intervals; a slow server receives more.
    assert!(requests <= 40, "{requests}");
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn the_end_of_the_head_wakes_exactly_one_client() {
    const WAITING: usize = 20;
    let server = server().await;
    let operator = Client::connect(&server.addr().to_string()).await.unwrap();
    let head = TestClient::open(&server, SESSION).await;
    let guard = head.lock().await;
    let clients = join_all((0..WAITING).map(|_| TestClient::open(&server, SESSION))).await;
    let mut waiter_tasks = JoinSet::new();
    for (number, client) in clients.iter().enumerate() {
        let lock = client.registry.obtain("k");
        waiter_tasks.spawn(async move { (number, lock.lock().await.unwrap()) });
        // Started one after the other, so that their order is known.
        eventually(LONG, async || queue_length(&operator).await == number + 2).await;
    }
    wait_for_watches(&server, WAITING as u64).await;
    let events = async || -> Vec<u64> {
        let counts = clients.iter().map(async |client| client.stats(&server).await.events());
        join_all(counts).await
    };
    let start = settled_events(&server, &clients).await;

    // The first head ends with its session, the others by releases.
    server.end_session(head.backend.session_id().unwrap()).await.unwrap();
    for next in 0..WAITING {
        let (number, guard) = within(LONG, waiter_tasks.join_next()).await.unwrap().unwrap();
        assert_eq!(number, next, "in the order of arrival");
        // A client that has released its lock is also notified of the end of its own node.
        let expected = |counts: Vec<u64>| {
            counts[next] == start[next] + 1 && counts[next + 1..] == start[next + 1..]
        };
        eventually(LONG, async || expected(events().await)).await;
        guard.unlock().await.unwrap();
    }
    drop(guard);
}

/// Waits until the server has counted all packets, and returns the events of each client. The
/// server counts a packet after it has sent or handled it, so a single read may be off by one.
async fn settled_events(server: &ZooKeeperServer, clients: &[TestClient]) -> Vec<u64> {
    let events = async || -> Vec<u64> {
        join_all(clients.iter().map(async |client| client.stats(server).await.events())).await
    };
    let mut last = events().await;
    eventually(LONG, async || {
        let before = std::mem::replace(&mut last, events().await);
        last == before
    })
    .await;
    last
}

/// Waits until the server has counted these events of each client, and no others.
async fn wait_for_events(server: &ZooKeeperServer, clients: &[TestClient], expected: &[u64]) {
    eventually(LONG, async || settled_events(server, clients).await == expected).await;
}

#[tokio::test]
async fn a_released_permit_wakes_only_the_claims_that_it_may_let_in() {
    const UNITS: u32 = 2;
    const WAITING: usize = 12;
    let server = server().await;
    let operator = Client::connect(&server.addr().to_string()).await.unwrap();
    let holder = TestClient::open(&server, SESSION).await;
    let semaphore = holder.registry.semaphore("k", UNITS);
    let mut held = vec![semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    let clients = join_all((0..WAITING).map(|_| TestClient::open(&server, SESSION))).await;
    let mut waiter_tasks = JoinSet::new();
    for (number, client) in clients.iter().enumerate() {
        let semaphore = client.registry.semaphore("k", UNITS);
        waiter_tasks.spawn(async move { (number, semaphore.acquire().await.unwrap()) });
        eventually(LONG, async || queue_length(&operator).await == number + 3).await;
    }
    // Each waiter watches the two claims before its own, and the holder watches its two nodes.
    wait_for_watches(&server, 2 * WAITING as u64 + 2).await;
    let before = settled_events(&server, &clients).await;
    held.pop().unwrap().unlock().await.unwrap();
    let (first, guard) = within(LONG, waiter_tasks.join_next()).await.unwrap().unwrap();
    assert_eq!(first, 0, "in the order of arrival");
    // The first two waiters watched the released claim.
    let expected = (0..).zip(&before).map(|(waiter, before)| before + u64::from(waiter < 2));
    wait_for_events(&server, &clients, &expected.collect::<Vec<_>>()).await;
    drop((held, guard));
    while let Some(next) = within(LONG, waiter_tasks.join_next()).await {
        next.unwrap().1.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn the_end_of_a_reader_wakes_no_claim_but_the_next_writer() {
    const READERS: usize = 8;
    let server = server().await;
    let operator = Client::connect(&server.addr().to_string()).await.unwrap();
    let holder = TestClient::open(&server, SESSION).await;
    let lock = holder.registry.obtain("k");
    let mut held = Vec::new();
    for label in ["first", "last"] {
        // Readers with different labels do not share a grant.
        held.push(lock.read_with(LockOptions::new().label(label)).await.unwrap());
    }
    // A writer, and readers behind it, which watch the writer only.
    let clients = join_all((0..=READERS).map(|_| TestClient::open(&server, SESSION))).await;
    let mut waiter_tasks = JoinSet::new();
    for (number, client) in clients.iter().enumerate() {
        let lock = client.registry.obtain("k");
        waiter_tasks.spawn(async move {
            let guard = if number == 0 { lock.lock().await } else { lock.read().await };
            (number, guard.unwrap())
        });
        eventually(LONG, async || queue_length(&operator).await == number + 3).await;
    }
    // The holder watches its two nodes too.
    wait_for_watches(&server, 1 + READERS as u64 + 2).await;
    let before = settled_events(&server, &clients).await;
    held.pop().unwrap().unlock().await.unwrap();
    let mut expected = before;
    expected[0] += 1;
    wait_for_events(&server, &clients, &expected).await;
    held.pop().unwrap().unlock().await.unwrap();
    let (first, writer) = within(LONG, waiter_tasks.join_next()).await.unwrap().unwrap();
    assert_eq!(first, 0, "in the order of arrival");
    expected[0] += 1;
    wait_for_events(&server, &clients, &expected).await;
    writer.unlock().await.unwrap();
    while let Some(reader) = within(LONG, waiter_tasks.join_next()).await {
        drop(reader.unwrap());
    }
    // The client of the writer may be notified of the end of its own node.
    let after = settled_events(&server, &clients).await;
    expected.iter_mut().for_each(|events| *events += 1);
    expected[0] = after[0];
    wait_for_events(&server, &clients, &expected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_idle_waiters_send_few_requests() {
    const WAITERS: usize = 2_000;
    // A loaded machine does not respond to 2,000 simultaneous requests in time.
    const CONCURRENT: usize = 100;
    const TIME: Duration = Duration::from_secs(30);
    const LIST_INTERVAL: Duration = Duration::from_secs(90);
    let server = server().await;
    // The default session time-out.
    let default_timeout = Duration::from_secs(30);
    let waiter = TestClient::open(&server, default_timeout).await;
    let holder = TestClient::open(&server, SESSION).await;
    let keys: Vec<_> = (0..WAITERS).map(|number| format!("idle/{number}")).collect();
    let mut guards = Vec::new();
    let mut waiter_tasks = JoinSet::new();
    let mut started_at_each = Vec::new();
    for keys in keys.chunks(CONCURRENT) {
        let held = keys.iter().map(async |key| holder.registry.obtain(key).lock().await.unwrap());
        guards.extend(join_all(held).await);
        for key in keys {
            let lock = waiter.registry.obtain(key);
            started_at_each.push(Instant::now());
            waiter_tasks.spawn(async move { lock.lock().await });
        }
        // One watch for each held lock and one for each waiter.
        wait_for_watches(&server, (guards.len() + waiter_tasks.len()) as u64).await;
    }
    // The pause between two polls grows with the time waited, so polls are frequent at first.
    sleep(TIME).await;
    let received = async || -> u64 {
        let sessions = waiter.backend.session_ids();
        let clients = server.clients().await.unwrap().into_iter();
        clients
            .filter(|client| sessions.contains(&client.session))
            .map(|client| client.received)
            .sum()
    };
    let (before, started_at) = (received().await, Instant::now());
    sleep(TIME).await;
    let (requests, elapsed) = (received().await - before, started_at.elapsed());
    println!("{requests} requests in {elapsed:?}, {} sessions", waiter.backend.session_ids().len());
    // On a loaded machine, the first waiters have waited long enough to list their queues again,
    // with two requests each.
    let lists = started_at_each.iter().filter(|at| at.elapsed() >= LIST_INTERVAL).count() as u64;
    // Requests that all waiters of a session share, confirmations of the session, and pings.
    let shared = 12 * waiter.backend.session_ids().len() as u64 * elapsed.as_secs();
    let limit = 2 * lists + shared;
    assert!(requests < limit, "{requests} in {elapsed:?}, not fewer than {limit}");
    // The waiters are still woken.
    drop(guards);
    while let Some(result) = within(LONG, waiter_tasks.join_next()).await {
        drop(result.unwrap().unwrap());
    }
}

/// Holds this many locks for `time`, and returns how many packets the client has sent meanwhile.
async fn packets_sent_while_held(server: &ZooKeeperServer, locks: usize, time: Duration) -> u64 {
    let client = TestClient::open(server, Duration::from_secs(10)).await;
    let mut guards = Vec::new();
    for lock in 0..locks {
        guards.push(client.registry.obtain(&format!("held/{lock}")).lock().await.unwrap());
    }
    // The first verification of each lock is over.
    wait_for_watches(server, locks as u64).await;
    sleep(Duration::from_secs(6)).await;
    let (before, started_at) = (client.stats(server).await, Instant::now());
    sleep(time).await;
    let (after, elapsed) = (client.stats(server).await, started_at.elapsed());
    assert!(guards.iter().all(LockGuard::is_held));
    let sent = after.received - before.received;
    println!("{locks} locks held for {elapsed:?}: {sent} packets");
    assert_eq!(after.events(), before.events());
    drop(guards);
    _ = client.registry.close(LONG).await;
    sent
}

#[tokio::test]
async fn a_thousand_held_locks_cause_no_more_requests_than_one() {
    const TIME: Duration = Duration::from_secs(10);
    let server = server().await;
    let one = packets_sent_while_held(&server, 1, TIME).await;
    let many = packets_sent_while_held(&server, 1_000, TIME).await;
    // A confirmation per tenth of the session time-out, a verification before each third of the
    // lease, and the client's own pings.
    assert!(one <= 30, "{one}");
    assert!(many <= one + 10, "{many} for a thousand, {one} for one");
}
