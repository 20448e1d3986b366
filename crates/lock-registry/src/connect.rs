//! From a checked configuration to an open registry.

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(any(
    feature = "postgres-tls",
    feature = "mysql-tls",
    feature = "redis-tls",
    feature = "zk-tls",
    feature = "etcd-tls"
))]
mod pem;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "zk")]
mod zk;

use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    BackendError, ConfigError, LockBackend, LockOptions, MemoryBackend, Observer,
    PassThroughBackend, Registry,
};
use tokio::time::{Instant, sleep, timeout};

use crate::config::{RegistryConfig, Resolved};
use crate::layer::Layer;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::layer::SpringVersion;
use crate::layout::Layout;
use crate::memory;
use crate::store_url::Store;

/// Opens the store at `url`; everything about it is said in the URL.
///
/// | URL | store |
/// |---|---|
/// | `memory:` | this process, a store of its own |
/// | `memory:NAME` | this process, the same store for everybody who names it |
/// | `sqlite:PATH`, `sqlite:///PATH` | the processes of this host, one file; feature `sqlite` |
/// | `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE` | all hosts that reach this PostgreSQL database; feature `postgres`, encrypted `postgres-tls` |
/// | `mysql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, `mariadb://…` | all hosts that reach this MariaDB or MySQL database; feature `mysql`, encrypted `mysql-tls` |
/// | `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]` | all hosts that reach this Redis or Valkey server; feature `redis` |
/// | `redis+unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE]` | the processes that reach its socket |
/// | `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],…/SERVICE[/DATABASE]` | all hosts that reach the master that these sentinels name |
/// | `redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],…` | all hosts that reach the cluster that these are some members of |
/// | `redis+quorum://[[USER]:PASSWORD@]HOST[:PORT],…[/DATABASE]` | all hosts that reach most of these masters, three or more, which know nothing of each other |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…`, `rediss+quorum://…` | the same over encrypted connections; feature `redis-tls` |
/// | `zk://[USER:PASSWORD@]HOST[:PORT],…[/CHROOT]` | all hosts that reach this ZooKeeper; feature `zk` |
/// | `zks://…` | the same over encrypted connections; feature `zk-tls` |
/// | `etcd://[USER:PASSWORD@]HOST[:PORT],…` | all hosts that reach the etcd cluster that these are members of; feature `etcd` |
/// | `etcds://…` | the same over encrypted connections; feature `etcd-tls` |
/// | `pass-through:` | none: callers of this registry take turns, nobody else is kept out; for tests, or to turn locking off |
///
/// Options follow as a query: `sqlite:locks.db?lease=10s&label=worker%201`. Special characters are percent-encoded. See
/// [`RegistryConfig`] for the options, and for other places to set them.
///
/// # Errors
/// [`ConfigError`] when the URL is wrong, its store is not built in, or the store cannot be opened. Everything that can be
/// checked is checked before any I/O. No error shows a password. [`ConfigError::NoRuntime`] outside a tokio runtime that has
/// time enabled.
///
/// # Cancel safety
/// Dropping the future closes what was opened so far; a database file that was made stays.
///
/// # Examples
/// ```
/// use lock_registry::LockRegistry;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let registry = lock_registry::connect("memory:").await?;
/// let guard = registry.obtain("orders/42").lock().await?;
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
pub async fn connect(url: &str) -> Result<Registry, ConfigError> {
    RegistryConfig::new().url(url).connect().await
}

/// Refuses what the store itself would refuse before it sends anything. Files that options name are not looked at.
#[cfg_attr(
    not(any(
        feature = "postgres",
        feature = "mysql",
        feature = "redis",
        feature = "zk",
        feature = "etcd"
    )),
    expect(unused_variables, reason = "there is no server then")
)]
pub(crate) fn check(store: &Store, options: &Layer) -> Result<(), ConfigError> {
    let checked: Result<(), BackendError> = match store {
        Store::Memory { .. } | Store::PassThrough | Store::Sqlite { .. } => Ok(()),
        #[cfg(feature = "postgres")]
        Store::Postgres(server) => postgres::check(server, options),
        #[cfg(feature = "mysql")]
        Store::MySql(server) => mysql::check(server, options),
        #[cfg(feature = "redis")]
        Store::Redis(servers) => redis::check(servers, options),
        #[cfg(feature = "zk")]
        Store::Zk(servers) => zk::check(servers, options),
        #[cfg(feature = "etcd")]
        Store::Etcd(cluster) => etcd::check(cluster, options),
        #[cfg(not(all(
            feature = "postgres",
            feature = "mysql",
            feature = "redis",
            feature = "zk",
            feature = "etcd"
        )))]
        _ => unreachable!("its scheme is refused when the URL is parsed"),
    };
    checked.map_err(|error| ConfigError::Invalid(error.to_string()))
}

/// Opens what `resolved` describes, repeating failed attempts for `limit` or else for `connect_timeout`.
pub(crate) async fn open(
    resolved: Resolved,
    observers: Vec<Arc<dyn Observer>>,
    limit: Option<Duration>,
) -> Result<Registry, ConfigError> {
    // Stores open connections on the runtime; some would panic without one.
    Registry::check_runtime()?;
    let Resolved { store, options } = resolved;
    #[cfg(feature = "metrics")]
    let metrics = registry_core::observe::MetricsObserver::new(store.scheme());
    let is_zookeeper = matches!(store, Store::Zk(_));
    let is_database = matches!(store, Store::Postgres(_) | Store::MySql(_));
    let limit = limit.or(options.connect_timeout).unwrap_or(CONNECT_TIMEOUT);
    let backend = backend_within(limit, &store, &options).await?;
    let mut builder = Registry::builder(backend);
    #[cfg(feature = "metrics")]
    {
        builder = builder.observer(Arc::new(metrics));
    }
    #[cfg(feature = "tracing")]
    {
        builder = builder.observer(Arc::new(registry_core::observe::TracingObserver::new()));
    }
    if let Some(lease) = options.lease {
        builder = builder.lease(lease);
    }
    if let Some(renew) = options.renew {
        builder = builder.renew(renew);
    }
    if let Some(poll) = options.poll {
        builder = builder.poll(poll);
    } else if is_database && options.layout == Some(Layout::Spring) {
        // Its peers tell nobody of a release, and look as often themselves.
        builder = builder.poll(SPRING_POLL);
    } else if is_zookeeper {
        // Those who wait are told in turn, over a session that does not forget; so a look of their own is a mere precaution.
        builder = builder.poll(ZOOKEEPER_POLL);
    }
    if let Some(handoff) = options.handoff {
        builder = builder.handoff(handoff);
    }
    if let Some(timeout) = options.timeout {
        builder = builder.timeout(timeout);
    }
    if let Some(label) = options.label {
        builder = builder.label(label);
    }
    for observer in observers {
        builder = builder.observer(observer);
    }
    builder.build()
}

/// Opens the backend of `store`, repeating an attempt that failed with a transient error until `limit` is over.
async fn backend_within(
    limit: Duration,
    store: &Store,
    options: &Layer,
) -> Result<Arc<dyn LockBackend>, ConfigError> {
    let deadline = Instant::now() + limit.min(LockOptions::WAIT_MAX);
    let mut pause = RETRY_PAUSE;
    // Ends: the pause only grows, up to RETRY_PAUSE_MAX, and the deadline is fixed.
    loop {
        let source = match backend(store.clone(), options).await {
            Ok(backend) => return Ok(backend),
            Err(source) => source,
        };
        let is_file = matches!(store, Store::Sqlite { .. });
        if is_file || !source.is_retryable() || Instant::now() + pause >= deadline {
            let source = match unresolved_host(store).await {
                Some(host) => {
                    BackendError::transient(format!("cannot resolve {host}")).with_source(source)
                }
                None => source,
            };
            return Err(ConfigError::open(store.scheme(), store.address(), source));
        }
        sleep(pause).await;
        pause = (pause * 2).min(RETRY_PAUSE_MAX);
    }
}

/// The first host of `store` whose name has no address. Client libraries report that as a lost connection.
async fn unresolved_host(store: &Store) -> Option<String> {
    for (host, port) in store.hosts() {
        let (host, port) = (host.clone(), *port);
        let looked_up = tokio::task::spawn_blocking(move || {
            (host.as_str(), port).to_socket_addrs().is_err().then_some(host)
        });
        if let Ok(Ok(Some(host))) = timeout(RESOLVE_LIMIT, looked_up).await {
            return Some(host);
        }
    }
    None
}

/// How long connecting is repeated where neither the options nor the caller say so.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long an error message may wait for the resolver.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);

async fn backend(store: Store, options: &Layer) -> Result<Arc<dyn LockBackend>, BackendError> {
    Ok(match store {
        Store::Memory { name: None } => Arc::new(MemoryBackend::new()),
        Store::Memory { name: Some(name) } => {
            Arc::new(memory::named(name, options.namespace.clone()))
        }
        Store::PassThrough => Arc::new(PassThroughBackend::new()),
        #[cfg(feature = "sqlite")]
        Store::Sqlite { path } => {
            Arc::new(registry_jdbc::SqliteBackend::open(sqlite_config(path, options)).await?)
        }
        #[cfg(not(feature = "sqlite"))]
        Store::Sqlite { .. } => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "postgres")]
        Store::Postgres(server) => postgres::open(&server, options).await?,
        #[cfg(not(feature = "postgres"))]
        Store::Postgres(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "mysql")]
        Store::MySql(server) => mysql::open(&server, options).await?,
        #[cfg(not(feature = "mysql"))]
        Store::MySql(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "redis")]
        Store::Redis(servers) => Arc::new(redis::open(&servers, options).await?),
        #[cfg(feature = "zk")]
        Store::Zk(servers) => Arc::new(zk::open(&servers, options).await?),
        #[cfg(not(feature = "zk"))]
        Store::Zk(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(not(feature = "redis"))]
        Store::Redis(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "etcd")]
        Store::Etcd(cluster) => Arc::new(etcd::open(&cluster, options).await?),
        #[cfg(not(feature = "etcd"))]
        Store::Etcd(_) => unreachable!("its scheme is refused when the URL is parsed"),
    })
}

/// The table of Spring's that locks are shared with, if they are.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn spring_table(options: &Layer) -> Option<registry_jdbc::SpringTable> {
    if options.layout != Some(Layout::Spring) {
        return None;
    }
    let mut table = match (options.spring, options.lease) {
        (Some(SpringVersion::V6), Some(lease)) => registry_jdbc::SpringTable::v6(lease),
        _ => registry_jdbc::SpringTable::v7(),
    };
    if let Some(region) = &options.region {
        table = table.with_region(region);
    }
    if let Some(prefix) = &options.prefix {
        table = table.with_prefix(prefix);
    }
    Some(table)
}

/// `idleBetweenTries`, unless it is set there.
const SPRING_POLL: Duration = Duration::from_millis(100);

const ZOOKEEPER_POLL: Duration = Duration::from_secs(2);

#[cfg(feature = "sqlite")]
fn sqlite_config(path: std::path::PathBuf, options: &Layer) -> registry_jdbc::SqliteConfig {
    let mut config = registry_jdbc::SqliteConfig::new(path);
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(purge_after) = options.purge_after {
        config = config.with_purge_after(purge_after);
    }
    match (options.busy_timeout, options.timeout) {
        (Some(busy_timeout), _) => config = config.with_busy_timeout(busy_timeout),
        // A statement that outlives the engine's patience is of no use to anybody.
        (None, Some(timeout)) => {
            let shorter = config.busy_timeout.min(timeout * 5 / 6);
            config = config.with_busy_timeout(shorter);
        }
        (None, None) => {}
    }
    config
}
