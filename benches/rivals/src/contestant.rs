//! The lock libraries that are compared, each used as its own documentation recommends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use distributed_lock_core::error::LockError;
use distributed_lock_core::traits::{DistributedLock as _, LockHandle as _, LockProvider as _};
use distributed_lock_redis::{RedisDistributedLock, RedisLockProvider};
use redis::Script;
use redis::aio::MultiplexedConnection;
use registry_core::{DistributedLock as EngineLock, Registry};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::redis::RedisServer;
use rslock::LockManager;

#[derive(Debug, Clone, Copy)]
pub enum ContestantKind {
    Bare,
    Engine,
    Rslock,
    DistributedLock,
    /// Has no mutual exclusion. It tests the detection of overlaps.
    Unsynchronized,
}

pub enum Contestant {
    Bare(ScriptLock),
    Engine(Registry),
    Rslock(LockManager),
    DistributedLock(RedisLockProvider),
    Unsynchronized,
}

/// The lock of one task.
pub enum TaskLock {
    Bare(ScriptLock, String, String),
    Engine(EngineLock),
    Rslock(LockManager, String),
    DistributedLock(RedisDistributedLock),
    Unsynchronized,
}

const LEASE: Duration = Duration::from_secs(30);

impl Contestant {
    pub async fn new(kind: ContestantKind, server: &RedisServer) -> Self {
        let url = server.url();
        match kind {
            ContestantKind::Bare => Self::Bare(ScriptLock::connect(server).await),
            ContestantKind::Engine => {
                let config = RedisConfig::from_url(&url).unwrap();
                let backend = RedisBackend::open(config).await.unwrap();
                Self::Engine(Registry::builder(Arc::new(backend)).build().unwrap())
            }
            ContestantKind::Rslock => Self::Rslock(LockManager::new(vec![url])),
            ContestantKind::DistributedLock => {
                Self::DistributedLock(RedisLockProvider::new(url).await.unwrap())
            }
            ContestantKind::Unsynchronized => Self::Unsynchronized,
        }
    }

    pub fn task_lock(&self, key: &str) -> TaskLock {
        match self {
            Self::Bare(bare) => {
                let id = format!("{:032x}", u128::from(NEXT_ID.fetch_add(1, Ordering::Relaxed)));
                TaskLock::Bare(bare.clone(), key.to_owned(), id)
            }
            Self::Engine(registry) => TaskLock::Engine(registry.obtain(key)),
            Self::Rslock(manager) => TaskLock::Rslock(manager.clone(), key.to_owned()),
            Self::DistributedLock(provider) => TaskLock::DistributedLock(provider.create_lock(key)),
            Self::Unsynchronized => TaskLock::Unsynchronized,
        }
    }

    pub async fn run_section(&self, key: &str, work: impl FnOnce()) {
        self.task_lock(key).run_section(work).await;
    }

    pub async fn close(&self) {
        if let Self::Engine(registry) = self {
            _ = registry.close(Duration::from_secs(1)).await;
        }
    }
}

/// The next owner id, for contestants that do not generate one.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl TaskLock {
    /// Runs `work` while the lock is held.
    pub async fn run_section(&self, work: impl FnOnce()) {
        match self {
            Self::Bare(bare, key, id) => {
                while !bare.acquire(key, id).await {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                work();
                assert!(bare.release(key, id).await);
            }
            Self::Engine(lock) => {
                let guard = lock.lock().await.unwrap();
                work();
                guard.unlock().await.unwrap();
            }
            Self::Rslock(manager, key) => {
                let guard = manager.acquire(key.as_str(), LEASE).await.unwrap();
                work();
                guard.release().await;
            }
            Self::DistributedLock(lock) => {
                // `acquire` of this library returns `Timeout` even without a time limit.
                let handle = loop {
                    match lock.acquire(None).await {
                        Ok(handle) => break handle,
                        Err(LockError::Timeout(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                };
                work();
                handle.release().await.unwrap();
            }
            Self::Unsynchronized => {
                work();
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The minimum that a correct lock must do. A grant expires and has a growing token. Only the
/// holder can release the lock, and the release publishes a message for waiters.
#[derive(Clone)]
pub struct ScriptLock {
    connection: MultiplexedConnection,
    acquire: Arc<Script>,
    release: Arc<Script>,
}

impl ScriptLock {
    async fn connect(server: &RedisServer) -> Self {
        let address =
            redis::ConnectionAddr::Tcp(server.addr().ip().to_string(), server.addr().port());
        let info = redis::IntoConnectionInfo::into_connection_info(address).unwrap();
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        let client = redis::Client::open(info.set_tcp_settings(tcp)).unwrap();
        let acquire = "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then \
            return redis.call('INCR', KEYS[2]) end return 0";
        let release = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
            redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '') return 1 end return 0";
        Self {
            connection: client.get_multiplexed_async_connection().await.unwrap(),
            acquire: Arc::new(Script::new(acquire)),
            release: Arc::new(Script::new(release)),
        }
    }

    async fn acquire(&self, key: &str, id: &str) -> bool {
        let mut call = self.acquire.key(key);
        call.key(format!("{key}:token")).arg(id).arg(30_000);
        let token: i64 = call.invoke_async(&mut self.connection.clone()).await.unwrap();
        token > 0
    }

    async fn release(&self, key: &str, id: &str) -> bool {
        let mut call = self.release.key(key);
        let freed: i64 = call.arg(id).invoke_async(&mut self.connection.clone()).await.unwrap();
        freed == 1
    }
}
