//! The contestants, each used as its own documentation recommends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use distributed_lock_core::error::LockError;
use distributed_lock_core::traits::{DistributedLock as _, LockHandle as _, LockProvider as _};
use distributed_lock_redis::{RedisDistributedLock, RedisLockProvider};
use redis::Script;
use redis::aio::MultiplexedConnection;
use registry_core::{DistributedLock as OurLock, LockRegistry as _, Registry};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::redis::RedisServer;
use rslock::LockManager;

#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Bare,
    Ours,
    Rslock,
    DistributedLock,
    /// Has no mutual exclusion, which proves that overlaps are detected.
    Broken,
}

pub enum Contestant {
    Bare(Bare),
    Ours(Registry),
    Rslock(LockManager),
    DistributedLock(RedisLockProvider),
    Broken,
}

/// The state of one task.
pub enum Mine {
    Bare(Bare, String, String),
    Ours(OurLock),
    Rslock(LockManager, String),
    DistributedLock(RedisDistributedLock),
    Broken,
}

const LEASE: Duration = Duration::from_secs(30);

impl Contestant {
    pub async fn new(kind: Kind, server: &RedisServer) -> Self {
        let url = server.url();
        match kind {
            Kind::Bare => Self::Bare(Bare::connect(server).await),
            Kind::Ours => {
                let config = RedisConfig::from_url(&url).unwrap();
                let backend = RedisBackend::open(config).await.unwrap();
                Self::Ours(Registry::builder(Arc::new(backend)).build().unwrap())
            }
            Kind::Rslock => Self::Rslock(LockManager::new(vec![url])),
            Kind::DistributedLock => {
                Self::DistributedLock(RedisLockProvider::new(url).await.unwrap())
            }
            Kind::Broken => Self::Broken,
        }
    }

    pub fn of(&self, key: &str) -> Mine {
        match self {
            Self::Bare(bare) => {
                let id = format!("{:032x}", u128::from(NEXT.fetch_add(1, Ordering::Relaxed)));
                Mine::Bare(bare.clone(), key.to_owned(), id)
            }
            Self::Ours(registry) => Mine::Ours(registry.obtain(key)),
            Self::Rslock(manager) => Mine::Rslock(manager.clone(), key.to_owned()),
            Self::DistributedLock(provider) => Mine::DistributedLock(provider.create_lock(key)),
            Self::Broken => Mine::Broken,
        }
    }

    pub async fn section(&self, key: &str, work: impl FnOnce()) {
        self.of(key).section(work).await;
    }

    pub async fn close(&self) {
        if let Self::Ours(registry) = self {
            registry.close(Duration::from_secs(1)).await;
        }
    }
}

/// Ids for contestants that have none of their own.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Mine {
    /// Runs `work` while the lock is held.
    pub async fn section(&self, work: impl FnOnce()) {
        match self {
            Self::Bare(bare, key, id) => {
                while !bare.acquire(key, id).await {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                work();
                assert!(bare.release(key, id).await);
            }
            Self::Ours(lock) => {
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
                // This library gives up after a while even without a limit.
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
            Self::Broken => {
                work();
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The minimum that a correct lock must do. A grant expires and has a growing number. Only the
/// holder can release it, and the release notifies waiters.
#[derive(Clone)]
pub struct Bare {
    connection: MultiplexedConnection,
    acquire: Arc<Script>,
    release: Arc<Script>,
}

impl Bare {
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
