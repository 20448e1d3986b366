//! Server failures, reconfigurations and restarts, and their effects on holders and waiters.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod refusals;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Capabilities, Claim, ClaimMode, Finding, Grant,
    Invalidations, Key, LockAdmin, LockBackend, LockError, LockGuard, LockOptions, LostReason,
    MemoryBackend, Queueing, Registry, Release, Renewal,
};
use registry_redis::{Layout, Publish, RedisBackend, RedisConfig};
use registry_testkit::redis::{RedisCluster, RedisServer};
use registry_testkit::waiter_race::assert_a_waiter_undoes_no_renewal;
use registry_testkit::{error_text, eventually, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Sufficient on any machine; reached only by a failing test.
const LONG: Duration = Duration::from_secs(60);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Returns a registry whose waiters depend on release messages, because they poll only once per
/// hour.
async fn open_without_polling(server: &RedisServer) -> Registry {
    open(server, |builder| builder.poll(secs(3_600)).lease(secs(300))).await
}

async fn open(
    server: &RedisServer,
    set_up: impl FnOnce(registry_core::RegistryBuilder) -> registry_core::RegistryBuilder,
) -> Registry {
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let backend = Arc::new(RedisBackend::open(config).await.unwrap());
    set_up(Registry::builder(backend)).build().unwrap()
}

/// Starts a waiter for `k` and returns once the server has its subscription.
async fn spawn_waiter(
    registry: &Registry,
    server: &RedisServer,
) -> tokio::task::JoinHandle<Result<LockGuard, LockError>> {
    let lock = registry.obtain("k");
    let waiter = tokio::spawn(async move { lock.lock().await });
    eventually(LONG, async || {
        server.send_command("PUBSUB NUMSUB lock-registry:{k}").await.unwrap().contains(":1")
    })
    .await;
    waiter
}

#[tokio::test]
async fn a_release_wakes_a_waiter_of_another_process() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry_a, registry_b) =
        (open_without_polling(&server).await, open_without_polling(&server).await);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let waiter = spawn_waiter(&registry_b, &server).await;
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = within(LONG, waiter).await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
}

#[tokio::test]
async fn a_forced_release_wakes_a_waiter_and_notifies_the_holder() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open(&server, |builder| builder.lease(secs(3))).await;
    let registry_b = open_without_polling(&server).await;
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let waiter = spawn_waiter(&registry_b, &server).await;
    assert!(registry_b.force_release("k").await.unwrap());
    assert!(within(LONG, waiter).await.unwrap().unwrap().is_held());
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
}

/// The release message may have been sent while no subscription existed.
#[tokio::test]
async fn a_waiter_is_woken_after_its_connection_was_closed() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry_a, registry_b) =
        (open_without_polling(&server).await, open_without_polling(&server).await);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let waiter = spawn_waiter(&registry_b, &server).await;
    assert_eq!(server.send_command("CLIENT KILL TYPE pubsub").await.unwrap(), ":1\r\n");
    guard.unlock().await.unwrap();
    assert!(within(LONG, waiter).await.unwrap().unwrap().is_held());
}

#[tokio::test]
async fn closed_connections_and_flushed_scripts_lose_no_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry_a, registry_b) =
        (open(&server, |b| b.lease(secs(30))).await, open_without_polling(&server).await);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    for command in ["CLIENT KILL TYPE normal", "SCRIPT FLUSH", "CLIENT KILL TYPE normal"] {
        server.send_command(command).await.unwrap();
        // The first command after the disconnection may fail, because it detects the disconnection.
        eventually(LONG, async || guard.extend(secs(30)).await.is_ok()).await;
        eventually(LONG, async || matches!(registry_b.obtain("k").try_lock().await, Ok(None)))
            .await;
    }
    guard.unlock().await.unwrap();
    assert!(registry_b.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_crash_of_a_durable_server_loses_no_lock() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open(&server, |builder| builder.lease(secs(60))).await;
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let token = guard.fencing_token();
    server.kill();
    assert!(guard.is_held());
    assert!(guard.extend(secs(60)).await.is_err(), "the server is down");
    server.restart().await.unwrap();
    let registry_b = open_without_polling(&server).await;
    assert!(registry_b.obtain("k").try_lock().await.unwrap().is_none());
    eventually(LONG, async || guard.extend(secs(60)).await.is_ok()).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    let next = registry_b.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
}

#[tokio::test]
async fn a_restart_without_data_notifies_the_holder_and_tokens_keep_growing() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open(&server, |builder| builder.lease(secs(6))).await;
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let token = guard.fencing_token();
    server.kill();
    server.delete_data().unwrap();
    server.restart().await.unwrap();
    let next = open_without_polling(&server).await.obtain("k").lock().await.unwrap();
    assert!(next.fencing_token() > token);
    let reason = within(LONG, guard.lost()).await;
    assert!(matches!(reason, LostReason::Gone | LostReason::Expired), "{reason:?}");
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert!(next.is_held(), "the next holder keeps its lock");
}

/// Combines in-process locks with the invalidations of a Redis server. No request fails while that
/// server is down, so the engine retries nothing and each counted verification follows an
/// invalidation.
#[derive(Debug)]
struct CountingBackend {
    locks: MemoryBackend,
    redis: RedisBackend,
    verified: AtomicU64,
}

#[async_trait]
impl LockBackend for CountingBackend {
    fn capabilities(&self) -> Capabilities {
        self.locks.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.locks.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.verified.fetch_add(1, Ordering::Relaxed);
        self.locks.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.locks.release(claim).await
    }

    fn subscribe(&self, hints: Invalidations) {
        self.redis.subscribe(hints);
    }
}

#[tokio::test]
async fn after_an_outage_claims_are_verified_as_soon_as_the_server_is_back() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let backend = Arc::new(CountingBackend {
        locks: MemoryBackend::new(),
        redis: RedisBackend::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap(),
        verified: AtomicU64::new(0),
    });
    let lock_backend: Arc<dyn LockBackend> = Arc::<CountingBackend>::clone(&backend);
    let registry_a = Registry::builder(lock_backend).lease(secs(3_600)).build().unwrap();
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let verified = || backend.verified.load(Ordering::Relaxed);
    server.kill();
    eventually(LONG, async || verified() > 0).await;
    // Long enough for the first attempts to reconnect to fail.
    tokio::time::sleep(secs(1)).await;
    let before = verified();
    server.restart().await.unwrap();
    eventually(LONG, async || verified() > before).await;
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_lock_on_a_suspended_server_expires_at_the_end_of_its_lease() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open(&server, |builder| builder.lease(secs(2))).await;
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let until = guard.valid_until();
    server.pause().unwrap();
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Expired);
    assert!(!guard.is_held());
    server.resume().unwrap();
    let registry_b = open_without_polling(&server).await;
    let next = within(LONG, registry_b.obtain("k").lock()).await.unwrap();
    assert!(std::time::Instant::now() >= until);
    assert!(next.fencing_token() > guard.fencing_token());
}

#[tokio::test]
async fn a_foreign_value_is_never_overwritten() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open_without_polling(&server).await;
    server.send_command("RPUSH lock-registry:{list} precious").await.unwrap();
    server.send_command("SET lock-registry:{string} precious").await.unwrap();
    let error = registry_a.obtain("list").lock().await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!((source.kind(), source.refused()), (BackendErrorKind::Protocol, true));
    assert!(registry_a.obtain("string").try_lock().await.unwrap().is_none());
    let holder = registry_a.obtain("string").holders().await.unwrap().remove(0);
    assert_eq!((holder.token, holder.label, holder.lease_left), (None, None, None));
    assert!(server.send_command("GET lock-registry:{string}").await.unwrap().contains("precious"));
    assert!(
        server.send_command("LINDEX lock-registry:{list} 0").await.unwrap().contains("precious")
    );
}

#[tokio::test]
async fn many_waiters_use_two_connections_and_leave_no_subscription() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry_a, registry_b) =
        (open_without_polling(&server).await, open_without_polling(&server).await);
    let mut guards = Vec::new();
    let mut waiters = tokio::task::JoinSet::new();
    for key in 0..200 {
        let key = format!("many/{key}");
        guards.push(registry_a.obtain(&key).lock().await.unwrap());
        let lock = registry_b.obtain(&key);
        waiters.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    let subscribed =
        async || server.send_command("PUBSUB CHANNELS *").await.unwrap().starts_with("*200\r\n");
    eventually(LONG, subscribed).await;
    // Two connections of `registry_b`, one of `registry_a`, and the one of this query. The
    // connections of earlier queries may take a while to close.
    let has_few_connections =
        async || server.send_command("CLIENT LIST").await.unwrap().matches(" addr=").count() <= 4;
    eventually(LONG, has_few_connections).await;
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    within(LONG, async {
        while let Some(ended) = waiters.join_next().await {
            ended.unwrap()
        }
    })
    .await;
    let no_channels =
        async || server.send_command("PUBSUB CHANNELS *").await.unwrap().starts_with("*0\r\n");
    eventually(LONG, no_channels).await;
}

#[tokio::test]
async fn a_key_that_is_used_once_leaves_no_permanent_record() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let backend = RedisBackend::open(config.with_token_memory(secs(2))).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    let options = LockOptions::new().lease(secs(1));
    let token = {
        let guard = registry_a.obtain("k").lock_with(options.clone()).await.unwrap();
        let token = guard.fencing_token();
        guard.unlock().await.unwrap();
        token
    };
    eventually(LONG, async || server.send_command("DBSIZE").await.unwrap() == ":0\r\n").await;
    let guard = registry_a.obtain("k").lock_with(options).await.unwrap();
    assert!(guard.fencing_token() > token, "tokens still grow after the last token was deleted");
}

#[tokio::test]
async fn a_refused_login_is_reported_without_the_password() {
    let server = RedisServer::start(&["--requirepass", "opensesame"]).await.unwrap();
    for (url, kind) in [
        (server.url(), BackendErrorKind::Denied),
        (format!("redis://:hunter2@{}", server.addr()), BackendErrorKind::Denied),
        (format!("redis://unknown:hunter2@{}", server.addr()), BackendErrorKind::Denied),
        ("redis://:hunter2@127.0.0.1:1".to_owned(), BackendErrorKind::Transient),
    ] {
        let config = RedisConfig::from_url(&url).unwrap();
        let error = match RedisBackend::open(config).await {
            // Without a password, connecting succeeds and the first command is refused.
            Ok(backend) => backend.list().await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!((error.kind(), error.refused()), (kind, true), "{error:?}");
        let text = error_text(&error);
        assert!(!text.contains("hunter2") && !text.contains("opensesame"), "{text}");
    }
    let config = RedisConfig::from_url(&format!("redis://:opensesame@{}", server.addr())).unwrap();
    RedisBackend::open(config).await.unwrap();
}

/// Opens a connection over which the test changes the server's settings.
async fn connect_as_operator(server: &RedisServer, login: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.addr()).await.unwrap();
    send_line(&mut stream, login).await;
    stream
}

async fn send_line(stream: &mut TcpStream, command: &str) -> String {
    stream.write_all(format!("{command}\r\n").as_bytes()).await.unwrap();
    let mut reply = vec![0; 4_096];
    let read = stream.read(&mut reply).await.unwrap();
    String::from_utf8_lossy(&reply[..read]).into_owned()
}

/// An operator may change the server's password before or after the client's.
#[tokio::test]
async fn a_temporarily_refused_login_is_retried() {
    let server = RedisServer::start(&["--requirepass", "old"]).await.unwrap();
    let mut operator = connect_as_operator(&server, "AUTH old").await;
    let url = format!("redis://:old@{}", server.addr());
    let backend = RedisBackend::open(RedisConfig::from_url(&url).unwrap()).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    send_line(&mut operator, "CONFIG SET requirepass new").await;
    send_line(&mut operator, "CLIENT KILL TYPE normal SKIPME yes").await;
    let refused = async || {
        let Err(LockError::Backend { source, .. }) = registry_a.obtain("k").holders().await else {
            return false;
        };
        source.kind() == BackendErrorKind::Denied
    };
    eventually(LONG, refused).await;
    send_line(&mut operator, "CONFIG SET requirepass old").await;
    eventually(LONG, async || registry_a.obtain("k").holders().await.is_ok()).await;
}

/// A router that drops the state of its existing connections on request and forwards new ones. It
/// closes no connection.
struct StateDroppingRouter {
    url: String,
    drop_state: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl StateDroppingRouter {
    async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let drop_state = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn({
            let (server, is_dropping) = (server.addr(), Arc::clone(&drop_state));
            async move {
                let mut routes = tokio::task::JoinSet::new();
                loop {
                    let (mut client, _) = listener.accept().await.unwrap();
                    let mut server = TcpStream::connect(server).await.unwrap();
                    let predates_drop = !is_dropping.load(Ordering::SeqCst);
                    let is_dropping = Arc::clone(&is_dropping);
                    routes.spawn(async move {
                        let state_dropped = async {
                            while !(predates_drop && is_dropping.load(Ordering::SeqCst)) {
                                tokio::time::sleep(Duration::from_millis(5)).await;
                            }
                        };
                        tokio::select! {
                            biased;
                            () = state_dropped => std::future::pending().await,
                            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        }
                    });
                }
            }
        });
        Self { url, drop_state, task }
    }

    fn drop_state(&self) {
        self.drop_state.store(true, Ordering::SeqCst);
    }
}

impl Drop for StateDroppingRouter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A dead host or a router that dropped its state closes no connection.
#[tokio::test]
async fn an_unresponsive_connection_is_replaced() {
    let server = RedisServer::start(&[]).await.unwrap();
    let router = StateDroppingRouter::start(&server).await;
    let config = RedisConfig::from_url(&router.url).unwrap().with_response_timeout(secs(1));
    let backend = RedisBackend::open(config).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).lease(secs(60)).build().unwrap();
    let guard = registry_a.obtain("k").lock().await.unwrap();
    router.drop_state();
    // The router drops the state only when it next checks the flag.
    eventually(LONG, async || guard.extend(secs(60)).await.is_err()).await;
    eventually(LONG, async || guard.extend(secs(60)).await.is_ok()).await;
    guard.unlock().await.unwrap();
}

/// The default settings allow ten seconds per command.
#[tokio::test]
async fn a_lock_with_a_lease_of_five_seconds_survives_an_unresponsive_connection() {
    let server = RedisServer::start(&[]).await.unwrap();
    let router = StateDroppingRouter::start(&server).await;
    let backend = RedisBackend::open(RedisConfig::from_url(&router.url).unwrap()).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).lease(secs(5)).build().unwrap();
    let guard = registry_a.obtain("k").lock().await.unwrap();
    router.drop_state();
    let until = guard.valid_until() + secs(10);
    eventually(LONG, async || {
        assert!(guard.is_held(), "the lock is lost");
        guard.valid_until() > until
    })
    .await;
    guard.unlock().await.unwrap();
}

/// A new connection to a slow server would be as slow as the old one.
#[tokio::test]
async fn a_slow_server_keeps_its_connection() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open(&server, |builder| builder.lease(secs(60)).timeout(secs(30))).await;
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let connection_id = async || {
        let clients = server.send_command("CLIENT LIST").await.unwrap();
        let client =
            clients.lines().find(|line| line.contains("lib-name=") || line.contains("eval"));
        client.and_then(|line| line.split(' ').next()).map(str::to_owned)
    };
    let before = connection_id().await.unwrap();
    server.pause().unwrap();
    let renewing = tokio::spawn(async move {
        guard.extend(secs(60)).await.unwrap();
        guard
    });
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    server.resume().unwrap();
    let guard = within(LONG, renewing).await.unwrap();
    assert_eq!(connection_id().await.unwrap(), before);
    guard.unlock().await.unwrap();
}

/// The server's host name may lead to another server at any time, so the client reconnects. It does
/// not reconnect after each refusal.
#[tokio::test]
async fn a_server_that_has_become_a_replica_is_not_flooded_with_connections() {
    let (server, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let registry_a = open(&server, |builder| builder).await;
    registry_a.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    server.send_command(&format!("REPLICAOF 127.0.0.1 {}", other.addr().port())).await.unwrap();
    let connections = async || {
        let stats = server.send_command("INFO stats").await.unwrap();
        let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().trim().parse::<u32>().unwrap()
    };
    let before = connections().await;
    for n in 0..300 {
        registry_a.obtain(&n.to_string()).try_lock().await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let new_connections = connections().await - before;
    assert!(new_connections < 30, "{new_connections} connections for 300 refusals");
}

/// By default, servers give new users no channel permissions. Such a user receives no wake-ups, and
/// everything else works.
#[tokio::test]
async fn a_user_without_channel_permissions_can_lock_and_gets_a_warning() {
    let server = RedisServer::start(&[]).await.unwrap();
    server.send_command("ACL SETUSER mute on >p ~* +@all resetchannels").await.unwrap();
    let url = format!("redis://mute:p@{}", server.addr());
    let open_mute = async || {
        let backend = RedisBackend::open(RedisConfig::from_url(&url).unwrap()).await.unwrap();
        Registry::builder(Arc::new(backend)).poll(Duration::from_millis(50)).build().unwrap()
    };
    let (registry_a, registry_b) = (open_mute().await, open_mute().await);
    let guard = registry_a.obtain("k").lock().await.unwrap();
    let lock = registry_b.obtain("k");
    let waiter = tokio::spawn(async move { lock.lock().await });
    let connections = async || {
        let stats = server.send_command("INFO stats").await.unwrap();
        let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().trim().parse::<u32>().unwrap()
    };
    let before = connections().await;
    tokio::time::sleep(secs(2)).await;
    let new_connections = connections().await - before;
    assert!(new_connections < 20, "{new_connections} connections in 2 s");
    guard.unlock().await.unwrap();
    assert!(within(LONG, waiter).await.unwrap().unwrap().is_held());
    let findings = registry_a.diagnose().await.unwrap();
    assert!(findings.iter().any(|finding| finding.message.contains("channel")), "{findings:?}");
}

#[tokio::test]
async fn diagnose_reports_a_server_without_the_publish_command() {
    let server = RedisServer::start(&["--rename-command", "SPUBLISH", ""]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    for (publish, is_reported) in [(Publish::Plain, false), (Publish::Sharded, true)] {
        let backend = RedisBackend::open(config.clone().with_publish(publish)).await.unwrap();
        let findings = backend.diagnose().await.unwrap();
        let reports = |finding: &Finding| finding.message.contains("SPUBLISH");
        assert_eq!(findings.iter().any(reports), is_reported, "{publish:?}: {findings:?}");
    }
}

/// Each member of a cluster executes `SPUBLISH` only for the channels of its own slots.
#[tokio::test]
async fn diagnose_finds_no_missing_publish_command_in_a_cluster() {
    let cluster = RedisCluster::start().await.unwrap();
    for layout in [Layout::Native, Layout::Redisson] {
        let config = RedisConfig::from_url(&cluster.url()).unwrap().with_layout(layout);
        let findings = RedisBackend::open(config).await.unwrap().diagnose().await.unwrap();
        let reports = |finding: &Finding| finding.message.contains("PUBLISH");
        assert!(!findings.iter().any(reports), "{layout:?}: {findings:?}");
    }
}

#[tokio::test]
async fn a_cancelled_waiter_leaves_no_subscription() {
    let server = RedisServer::start(&[]).await.unwrap();
    let (registry_a, registry_b) =
        (open_without_polling(&server).await, open_without_polling(&server).await);
    let mut guards = Vec::new();
    for key in 0..400 {
        let key = format!("many/{key}");
        guards.push(registry_a.obtain(&key).lock().await.unwrap());
        let lock = registry_b.obtain(&key);
        let _ = tokio::time::timeout(Duration::from_millis(3), lock.lock()).await;
    }
    let no_channels =
        async || server.send_command("PUBSUB CHANNELS *").await.unwrap().starts_with("*0\r\n");
    tokio::time::sleep(secs(3)).await;
    eventually(LONG, no_channels).await;
}

#[tokio::test]
async fn an_empty_foreign_value_counts_as_held() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open_without_polling(&server).await;
    server.send_command("SET lock-registry:{k} \"\"").await.unwrap();
    assert!(registry_a.obtain("k").try_lock().await.unwrap().is_none());
    assert!(registry_a.obtain("k").holders().await.unwrap().len() == 1);
}

#[tokio::test]
async fn a_token_that_cannot_grow_any_more_is_an_error() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open_without_polling(&server).await;
    server.send_command("SET lock-registry:{k}:token 9007199254740992").await.unwrap();
    let error = registry_a.obtain("k").try_lock().await.unwrap_err();
    assert!(matches!(error, LockError::Backend { .. }), "{error:?}");
}

#[tokio::test]
async fn a_server_is_reachable_over_a_unix_socket() {
    let server = RedisServer::start(&["--unixsocket", "redis.sock"]).await.unwrap();
    let url = format!("redis+unix://{}?db=3", server.folder().join("redis.sock").display());
    let backend = RedisBackend::open(RedisConfig::from_url(&url).unwrap()).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    let guard = registry_a.obtain("k").lock().await.unwrap();
    assert!(
        open_without_polling(&server).await.obtain("k").try_lock().await.unwrap().is_some(),
        "database 3"
    );
    guard.unlock().await.unwrap();
}

/// Several registries may share a backend.
#[tokio::test]
async fn closing_one_registry_keeps_the_subscriptions_of_the_others() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let shared = Arc::new(RedisBackend::open(config).await.unwrap());
    let registry = || Registry::builder(Arc::clone(&shared) as _).poll(secs(3_600));
    let (closed, open_registry) =
        (registry().build().unwrap(), registry().lease(secs(300)).build().unwrap());
    _ = closed.close(secs(5)).await;
    let registry_b = open_without_polling(&server).await;
    let guard = registry_b.obtain("k").lock().await.unwrap();
    let waiter = spawn_waiter(&open_registry, &server).await;
    guard.unlock().await.unwrap();
    assert!(within(LONG, waiter).await.unwrap().unwrap().is_held());
}

/// A managed service may assign a host name to another server while the old server remains as the
/// new server's replica.
#[tokio::test]
async fn a_host_name_that_moves_to_another_server_is_followed() {
    let (old, new) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let moved = Arc::new(AtomicBool::new(false));
    let forwarder = tokio::spawn({
        let (moved, old, new) = (Arc::clone(&moved), old.addr(), new.addr());
        async move {
            let mut routes = tokio::task::JoinSet::new();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let server = if moved.load(Ordering::SeqCst) { new } else { old };
                routes.spawn(async move {
                    let mut server = TcpStream::connect(server).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        }
    });
    let backend = RedisBackend::open(RedisConfig::from_url(&url).unwrap()).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    registry_a.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    moved.store(true, Ordering::SeqCst);
    old.send_command(&format!("REPLICAOF 127.0.0.1 {}", new.addr().port())).await.unwrap();
    let guard = within(LONG, registry_a.obtain("k").lock()).await.unwrap();
    assert!(new.send_command("EXISTS lock-registry:{k}").await.unwrap().starts_with(":1"));
    guard.unlock().await.unwrap();
    forwarder.abort();
}

/// The future is polled once, then its runtime is dropped.
#[test]
fn a_runtime_that_ends_during_an_acquisition_causes_no_panic() {
    use std::task::{Context, Waker};

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (quorum, registry_a) = runtime.block_on(async {
        let quorum = registry_testkit::redis::RedisQuorum::start(3).await.unwrap();
        let config = RedisConfig::from_url(&quorum.url()).unwrap();
        let backend = RedisBackend::open(config).await.unwrap();
        (quorum, Registry::builder(Arc::new(backend)).build().unwrap())
    });
    let lock = registry_a.obtain("k");
    let mut acquiring = Box::pin(lock.lock());
    {
        let _inside = runtime.enter();
        let _ = acquiring.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
    drop(runtime);
    drop(acquiring);
    drop(quorum);
}

/// A lock whose name is the token key of another lock would destroy that token or its own record.
#[tokio::test]
async fn a_key_that_collides_with_a_token_key_is_refused() {
    let server = RedisServer::start(&[]).await.unwrap();
    for (layout, namespace, key) in [
        (Layout::Redisson, "", "lock-registry:token:{victim}"),
        (Layout::Redisson, "", "lock-registry:fence:x"),
        (Layout::Spring, "lock-registry", "token:{lock-registry:victim}"),
    ] {
        let config = RedisConfig::from_url(&server.url()).unwrap().with_layout(layout);
        let backend = RedisBackend::open(config.with_namespace(namespace)).await.unwrap();
        let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
        let error = registry_a.obtain(key).lock().await.unwrap_err();
        assert!(matches!(error, LockError::InvalidKey { .. }), "{error:?}");
    }
}

/// In the foreign layouts the record is only the holder's id, and any program may have written it.
#[tokio::test]
async fn foreign_holder_ids_count_as_held_and_are_listed() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let config = config.with_layout(Layout::Spring).with_namespace("ns");
    let backend = RedisBackend::open(config).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    for (n, strange) in ["[", "%b", "((((((", "%", "a-b[%"].iter().enumerate() {
        let key = format!("k{n}");
        // Creates the token key, which the scripts then compare with the foreign id.
        registry_a.obtain(&key).lock().await.unwrap().unlock().await.unwrap();
        server.send_command_args(&["SET", &format!("ns:{key}"), strange]).await.unwrap();
        assert!(registry_a.obtain(&key).try_lock().await.unwrap().is_none(), "{strange}");
        assert!(registry_a.obtain(&key).holders().await.unwrap().len() == 1, "{strange}");
    }
    server.send_command("SADD lock-registry:token:{ns:k0} x").await.unwrap();
    assert_eq!(registry_a.list().await.unwrap().len(), 5);
}

#[tokio::test]
async fn a_hash_that_is_no_lock_is_not_broken() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap().with_layout(Layout::Redisson);
    let backend = RedisBackend::open(config).await.unwrap();
    let registry_a = Registry::builder(Arc::new(backend)).build().unwrap();
    server.send_command("HSET k a 1 b 2").await.unwrap();
    assert!(registry_a.obtain("k").try_lock().await.unwrap().is_none());
    assert!(!registry_a.force_release("k").await.unwrap());
    assert_eq!(server.send_command("HLEN k").await.unwrap(), ":2\r\n");
}

#[tokio::test]
async fn a_corrupt_record_is_listed_as_held_and_hides_no_other_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = open_without_polling(&server).await;
    let guard = registry_a.obtain("intact").lock().await.unwrap();
    server.send_command("SET lock-registry:{corrupt} +;x").await.unwrap();
    let holders = registry_a.list().await.unwrap();
    let mut keys: Vec<_> = holders.iter().map(|holder| holder.key.as_str()).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["corrupt", "intact"]);
    let error = registry_a.obtain("corrupt").holders().await.unwrap_err();
    assert!(error_text(&error).contains("corrupt; break the lock"), "{error:?}");
    guard.unlock().await.unwrap();
}

/// Starts a server that responds like a sentinel. Its reported master is `master`, an address and
/// the configuration epoch.
async fn start_fake_sentinel(
    master: Arc<std::sync::Mutex<(std::net::SocketAddr, u64)>>,
) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let master = Arc::clone(&master);
            tokio::spawn(async move {
                let mut request = vec![0; 64 * 1_024];
                while let Ok(read @ 1..) = client.read(&mut request).await {
                    let mut replies = String::new();
                    for command in String::from_utf8_lossy(&request[..read]).split('*').skip(1) {
                        replies += &if command.contains("SENTINEL") {
                            let (master, epoch) = *master.lock().unwrap();
                            let (ip, port) = (master.ip().to_string(), master.port().to_string());
                            let fields =
                                ["ip", &ip, "port", &port, "config-epoch", &epoch.to_string()];
                            let text = |text: &str| format!("${}\r\n{text}\r\n", text.len());
                            format!("*6\r\n{}", fields.map(text).concat())
                        } else if command.contains("SUBSCRIBE") {
                            "*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n".to_owned()
                        } else {
                            "+OK\r\n".to_owned()
                        };
                    }
                    if client.write_all(replies.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    addr
}

/// When one connection has moved to the new master, the other connections must follow. The old
/// master is still running and reports that it is the master.
#[tokio::test]
async fn all_connections_follow_a_new_master() {
    let (old, new) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let master = Arc::new(std::sync::Mutex::new((old.addr(), 1)));
    let sentinel = start_fake_sentinel(Arc::clone(&master)).await;
    let open = async || {
        let hosts = [(sentinel.ip().to_string(), sentinel.port())];
        let backend = RedisBackend::open(RedisConfig::sentinel(hosts, "x")).await.unwrap();
        let builder = Registry::builder(Arc::new(backend)).poll(secs(3_600));
        builder.lease(secs(300)).build().unwrap()
    };
    let (registry_a, registry_b) = (open().await, open().await);
    let held = registry_b.obtain("k").lock().await.unwrap();
    assert!(registry_a.obtain("k").try_lock().await.unwrap().is_none());
    *master.lock().unwrap() = (new.addr(), 2);
    // The waiter opens the subscriber connection to the new master.
    let lock = registry_a.obtain("k");
    let waiter = tokio::spawn(async move { lock.lock().await });
    let is_at_new_master = async || {
        let Ok(Some(probe)) = registry_a.obtain("probe").try_lock().await else { return false };
        let exists =
            new.send_command("EXISTS lock-registry:{probe}").await.unwrap().starts_with(":1");
        probe.unlock().await.is_ok() && exists
    };
    eventually(LONG, is_at_new_master).await;
    assert!(within(LONG, waiter).await.unwrap().unwrap().is_held());
    assert_eq!(within(LONG, held.lost()).await, LostReason::Gone);
}

/// One call renews all claims and requests client tracking of all their keys.
#[tokio::test]
async fn a_holder_of_many_locks_is_notified_of_each_removed_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    // Renewals start after a third of the lease.
    let registry = open(&server, |builder| builder.lease(secs(600))).await;
    let mut guards = Vec::new();
    for n in 0..5 {
        guards.push(registry.obtain(&n.to_string()).lock().await.unwrap());
    }
    let tracked = async || {
        let info = server.send_command("INFO stats").await.unwrap();
        info.contains("tracking_total_keys:5")
    };
    eventually(LONG, tracked).await;
    for (n, guard) in guards.iter().enumerate() {
        server.send_command(&format!("DEL lock-registry:{{{n}}}")).await.unwrap();
        assert_eq!(within(secs(5), guard.lost()).await, LostReason::Gone, "{n}");
    }
}

/// The client drops a connection without a timely response, although the server may only be slow.
/// Invalidations over the dropped connection do not arrive.
#[tokio::test]
async fn a_holder_is_notified_of_a_loss_after_its_connection_was_replaced() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let config = config.with_response_timeout(Duration::from_millis(300));
    let backend = Arc::new(RedisBackend::open(config).await.unwrap());
    let registry = Registry::builder(backend).lease(secs(600)).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let tracked = async || {
        let info = server.send_command("INFO stats").await.unwrap();
        info.contains("tracking_total_keys:1\r\n")
    };
    eventually(LONG, tracked).await;
    server.pause().unwrap();
    registry.obtain("another").try_lock().await.unwrap_err();
    server.resume().unwrap();
    // This request opens a new connection.
    eventually(LONG, async || registry.obtain("a third").lock().await.is_ok()).await;
    eventually(LONG, tracked).await;
    assert!(guard.is_held());
    server.send_command("DEL lock-registry:{k}").await.unwrap();
    assert_eq!(within(secs(5), guard.lost()).await, LostReason::Gone);
}

/// Makes one attempt.
async fn granted(backend: &RedisBackend, claim: &Claim) -> Result<Grant, String> {
    match backend.try_acquire(claim).await {
        Ok(Attempt::Granted(grant)) => Ok(grant),
        other => Err(format!("{claim:?} is not granted: {other:?}")),
    }
}

/// The last mode is that of a withdrawn upgrade.
#[tokio::test]
async fn a_conversion_that_reaches_no_replica_keeps_the_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    let port = server.addr().port().to_string();
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port]).await.unwrap();
    let in_sync = async || server.send_command("WAIT 1 10").await.unwrap().contains(":1");
    eventually(LONG, in_sync).await;
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let config = config.with_replicas(1).with_replica_timeout(secs(1));
    let backend = RedisBackend::open(config).await.unwrap();
    for mode in [ClaimMode::Exclusive, ClaimMode::Shared, ClaimMode::Upgradable] {
        let key = Key::new(&format!("{mode:?}")).unwrap();
        let claim = Claim::new(key.clone(), secs(600)).with_mode(ClaimMode::Upgradable);
        let token = eventually(LONG, async || granted(&backend, &claim).await).await.token;
        let conversion = claim.converted_to(mode).restricted_to_grant(token);
        replica.pause().unwrap();
        let error = backend.try_acquire(&conversion).await.unwrap_err();
        assert!(error.is_retryable() && !error.refused(), "{mode:?}: {error:?}");
        assert_eq!(backend.inspect(&key).await.unwrap().len(), 1, "{mode:?}");
        replica.resume().unwrap();
        eventually(LONG, async || granted(&backend, &conversion).await).await;
        assert_eq!(backend.release(&conversion).await.unwrap(), Release::Freed, "{mode:?}");
    }
}

/// The lease of the reader that renews is shorter than that of the other one.
#[tokio::test]
async fn a_renewal_does_not_shorten_the_lease_of_another_reader_of_a_key_without_expiry() {
    let server = RedisServer::start(&[]).await.unwrap();
    let backend = RedisBackend::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap();
    let reader = |lease| Claim::new(Key::new("k").unwrap(), lease).with_mode(ClaimMode::Shared);
    let (short, long) = (reader(secs(10)), reader(secs(600)));
    granted(&backend, &short).await.unwrap();
    granted(&backend, &long).await.unwrap();
    server.send_command("PERSIST lock-registry:{k}").await.unwrap();
    assert!(matches!(backend.renew(&[short]).await[0], Ok(Renewal::Renewed(_))));
    assert_eq!(server.send_command("PTTL lock-registry:{k}").await.unwrap(), ":-1\r\n");
}

#[tokio::test]
async fn a_user_without_the_right_to_set_an_expiry_leaves_no_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    server.send_command("ACL SETUSER worker on >p ~* &* +@all -pexpire").await.unwrap();
    let url = format!("redis://worker:p@{}", server.addr());
    let config = RedisConfig::from_url(&url).unwrap().with_layout(Layout::Redisson);
    let backend = RedisBackend::open(config).await.unwrap();
    let claim = Claim::new(Key::new("k").unwrap(), secs(600));
    let error = backend.try_acquire(&claim).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Denied, true), "{error:?}");
    assert_eq!(server.send_command("EXISTS k").await.unwrap(), ":0\r\n");
}

/// The renewals use several connections. The server must not treat a write on one of them as a
/// foreign change for the others.
#[tokio::test]
async fn renewals_that_wait_for_replicas_trigger_no_verification() {
    let server = RedisServer::start(&[]).await.unwrap();
    let port = server.addr().port().to_string();
    let _replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port]).await.unwrap();
    let in_sync = async || server.send_command("WAIT 1 10").await.unwrap().contains(":1");
    eventually(LONG, in_sync).await;
    let config = RedisConfig::from_url(&server.url()).unwrap().with_replicas(1);
    let backend = Arc::new(RedisBackend::open(config).await.unwrap());
    let registry = Registry::builder(backend).lease(secs(600)).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        guard.extend(secs(600)).await.unwrap();
    }
    let calls = async || {
        let info = server.send_command("INFO commandstats").await.unwrap();
        let scripts = info.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
        scripts.split(',').next().unwrap().to_owned()
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = calls().await;
    tokio::time::sleep(secs(1)).await;
    assert_eq!(calls().await, before);
    server.send_command("DEL lock-registry:{k}").await.unwrap();
    assert_eq!(within(secs(5), guard.lost()).await, LostReason::Gone);
}

#[tokio::test]
async fn a_process_that_reacquires_at_once_alternates_with_a_waiting_process() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registries =
        [open(&server, |builder| builder).await, open(&server, |builder| builder).await];
    let held = registries[0].obtain("k").lock().await.unwrap();
    let waiter = spawn_waiter(&registries[1], &server).await;
    held.unlock().await.unwrap();
    within(LONG, waiter).await.unwrap().unwrap().unlock().await.unwrap();
    // Each registry reacquires the lock right after its release. Without fairness, one of them
    // would hold it nearly all the time.
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut contenders = tokio::task::JoinSet::new();
    for (name, registry) in registries.into_iter().enumerate() {
        let order = Arc::clone(&order);
        contenders.spawn(async move {
            let lock = registry.obtain("k");
            loop {
                let guard = lock.lock().await.unwrap();
                // Long enough for an attempt of the other registry.
                tokio::time::sleep(Duration::from_millis(2)).await;
                let turns = {
                    let mut order = order.lock().unwrap();
                    order.push(name);
                    order.len()
                };
                guard.unlock().await.unwrap();
                if turns >= 100 {
                    return;
                }
            }
        });
    }
    while let Some(ended) = within(LONG, contenders.join_next()).await {
        ended.unwrap();
    }
    let order = order.lock().unwrap();
    let changes = order.windows(2).filter(|two| two[0] != two[1]).count();
    assert!(changes >= 20, "{changes} changes in {} turns", order.len());
}

/// Tokens that are reserved for hand-overs but not used must not run ahead of the server's clock.
/// After a loss of all data, the clock is the server's only source of tokens.
#[tokio::test]
async fn unused_tokens_are_not_ahead_of_the_clock_when_all_data_is_lost() {
    for layout in [Layout::Native, Layout::Redisson, Layout::Spring] {
        let server = RedisServer::start(&[]).await.unwrap();
        let config = RedisConfig::from_url(&server.url()).unwrap().with_layout(layout);
        let backend = Arc::new(RedisBackend::open(config).await.unwrap());
        // Tokens follow the clock in microseconds, so each grant reserves the tokens of one second.
        // If a release kept the unused tokens reserved, tokens would outrun the clock even on a
        // slow machine.
        let block = 1_000_000;
        let new_claim = || {
            let key = Key::new("k").unwrap();
            Claim::new(key, secs(300)).with_token_block(block)
        };
        let mut last = None;
        for _ in 0..3 {
            for _ in 0..20 {
                let claim = new_claim();
                let Attempt::Granted(grant) = backend.try_acquire(&claim).await.unwrap() else {
                    panic!("no other client acquires the lock");
                };
                assert!(Some(grant.token) > last, "{layout:?}: {:?} after {last:?}", grant.token);
                last = Some(grant.token);
                backend.release(&claim.with_token_block(1)).await.unwrap();
            }
            server.send_command("FLUSHALL").await.unwrap();
        }
    }
}

/// A waiter with a confirmed subscription polls at the end of the holder's lease, and otherwise at
/// growing intervals.
#[tokio::test]
async fn a_thousand_idle_waiters_send_few_requests() {
    const KEYS: u32 = 1_000;
    let server = RedisServer::start(&[]).await.unwrap();
    let lease = |builder: registry_core::RegistryBuilder| builder.lease(secs(300));
    let (holder, waiting) = (open(&server, lease).await, open(&server, lease).await);
    let mut guards = Vec::new();
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..KEYS {
        guards.push(holder.obtain(&format!("k{n}")).lock().await.unwrap());
        let lock = waiting.obtain(&format!("k{n}"));
        waiters.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    let requests = async || -> u64 {
        let stats = server.send_command("INFO commandstats").await.unwrap();
        let scripts = stats.lines().filter(|line| line.contains("cmdstat_evalsha"));
        let calls = scripts
            .filter_map(|line| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok());
        calls.sum::<u64>()
    };
    // Measures requests over time, once the polling intervals have grown.
    tokio::time::sleep(secs(20)).await;
    let before = requests().await;
    tokio::time::sleep(secs(10)).await;
    let request_count = requests().await - before;
    assert!(request_count > 0 || before > u64::from(KEYS), "nothing was counted");
    assert!(
        request_count <= u64::from(4 * KEYS),
        "{request_count} requests of {KEYS} waiters in 10 s"
    );
    drop(guards);
    while let Some(served) = within(LONG, waiters.join_next()).await {
        served.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_that_joins_the_queue_undoes_no_renewal() {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let [holding, waiting] = [
        RedisBackend::open(config.clone()).await.unwrap(),
        RedisBackend::open(config).await.unwrap(),
    ];
    assert_a_waiter_undoes_no_renewal(&holding, &waiting).await;
}

/// A claim that waits for permits blocks the permits behind it even if enough units are free.
#[tokio::test]
async fn the_grant_of_queued_permits_wakes_the_claims_behind_it() {
    let server = RedisServer::start(&[]).await.unwrap();
    let backend = RedisBackend::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap();
    let claim = |take| {
        let claim = Claim::new(Key::new("k").unwrap(), secs(600));
        claim.with_mode(ClaimMode::Permits { take, of: 2 }).with_queueing(Queueing::Join)
    };
    let wait_in_queue = async |claim: &Claim| match backend.try_acquire(claim).await {
        Ok(Attempt::Busy(busy)) => busy,
        other => panic!("{claim:?} does not wait: {other:?}"),
    };
    let (both, first, second) = (claim(2), claim(1), claim(1));
    granted(&backend, &both).await.unwrap();
    wait_in_queue(&first).await;
    let busy = wait_in_queue(&second).await;
    // The confirmation of the subscription ends this wait.
    within(LONG, backend.wait(&second, &busy)).await;
    let busy = wait_in_queue(&second).await;
    backend.release(&both).await.unwrap();
    // The message of the release ends this wait.
    within(LONG, backend.wait(&second, &busy)).await;
    let busy = wait_in_queue(&second).await;
    let woken = within(LONG, backend.wait(&second, &busy));
    let (grant, ()) = tokio::join!(granted(&backend, &first), woken);
    grant.unwrap();
    granted(&backend, &second).await.unwrap();
}
