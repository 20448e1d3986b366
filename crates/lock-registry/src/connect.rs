//! Opens a registry from a validated configuration. Called by `RegistryConfig::connect`.

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
    BackendError, ConfigError, LockBackend, MemoryBackend, Observer, PassThroughBackend, Registry,
};
use tokio::time::{Instant, sleep, timeout};

use crate::config::{RegistryConfig, Resolved};
use crate::layout::Layout;
use crate::memory;
use crate::options::Options;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::options::{LockMode, SpringVersion};
use crate::store_url::StoreLocation;

/// Opens the registry of the store at `url`.
///
/// Stores in this process:
/// - `memory:`: a separate store for each registry.
/// - `memory:NAME`: one store for all registries that use this name.
/// - `pass-through:`: no store. Callers of this registry acquire a lock one after the other; other
///   registries are not excluded. For tests, or to turn locking off.
///
/// Stores of this host:
/// - `sqlite:PATH`, `sqlite:///PATH`: one file, for all processes of this host. Feature `sqlite`.
/// - `redis+unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE]`: the Redis server at this socket, for all
///   processes that reach it. Feature `redis`.
///
/// Stores for all hosts that reach them:
/// - `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`: a PostgreSQL database. Feature
///   `postgres`, with encryption `postgres-tls`.
/// - `mysql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, `mariadb://…`: a MariaDB or MySQL database.
///   Feature `mysql`, with encryption `mysql-tls`.
/// - `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`: a Redis or Valkey server. Feature `redis`.
/// - `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],…/SERVICE[/DATABASE]`: the master that these
///   sentinels name. Feature `redis`.
/// - `redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],…`: the cluster of these members, not
///   necessarily all of them. Feature `redis`.
/// - `redis+quorum://[[USER]:PASSWORD@]HOST[:PORT],…[/DATABASE]`: a majority of these independent
///   masters, three or more. Feature `redis`.
/// - `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…`, `rediss+quorum://…`: the same over
///   encrypted connections. Feature `redis-tls`.
/// - `zk://[USER:PASSWORD@]HOST[:PORT],…[/CHROOT]`: a ZooKeeper ensemble. Feature `zk`.
/// - `zks://…`: the same over encrypted connections. Feature `zk-tls`.
/// - `etcd://[USER:PASSWORD@]HOST[:PORT],…`: the etcd cluster of these members. Feature `etcd`.
/// - `etcds://…`: the same over encrypted connections. Feature `etcd-tls`.
///
/// Options follow as a query: `sqlite:locks.db?lease=10s&label=worker%201`. Special characters are
/// percent-encoded. See [`RegistryConfig`] for the options and their other sources.
///
/// # Errors
/// [`ConfigError`] if the URL is invalid, its store is not built in, or the store cannot be opened.
/// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled. Everything is
/// validated before any I/O where possible. No error shows a password.
///
/// # Cancel safety
/// Dropping the future closes all connections opened so far. A database file that was created
/// remains.
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

/// Runs the store's own validation without I/O. Does not read files that options name.
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
pub(crate) fn check(store: &StoreLocation, options: &Options) -> Result<(), ConfigError> {
    let checked: Result<(), BackendError> = match store {
        StoreLocation::Memory { .. }
        | StoreLocation::PassThrough
        | StoreLocation::Sqlite { .. } => Ok(()),
        #[cfg(feature = "postgres")]
        StoreLocation::Postgres(server) => postgres::check(server, options),
        #[cfg(feature = "mysql")]
        StoreLocation::MySql(server) => mysql::check(server, options),
        #[cfg(feature = "redis")]
        StoreLocation::Redis(servers) => redis::check(servers, options),
        #[cfg(feature = "zk")]
        StoreLocation::Zk(servers) => zk::check(servers, options),
        #[cfg(feature = "etcd")]
        StoreLocation::Etcd(cluster) => etcd::check(cluster, options),
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

/// Opens the registry that `resolved` describes. Repeats failed attempts for `limit`, by default
/// for `connect_timeout`.
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
    let is_zookeeper = matches!(store, StoreLocation::Zk(_));
    let is_database = matches!(store, StoreLocation::Postgres(_) | StoreLocation::MySql(_));
    let limit = limit.or(options.connect_timeout).unwrap_or(CONNECT_TIMEOUT);
    let backend = open_with_retries(limit, &store, &options).await?;
    let mut builder = Registry::builder(backend);
    let address = store.address();
    if !address.is_empty() {
        builder = builder.address(address);
    }
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
        builder = builder.auto_renew(renew);
    }
    if let Some(poll) = options.poll {
        builder = builder.poll(poll);
    } else if is_database && options.layout == Some(Layout::Spring) {
        // Spring's peers publish no release, and poll at the same interval.
        builder = builder.poll(SPRING_POLL);
    } else if is_zookeeper {
        // The session notifies each waiter when its predecessor ends, so polling is only a
        // precaution.
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

/// Opens the backend of `store`. Repeats an attempt that failed with a transient error until
/// `limit` is over.
async fn open_with_retries(
    limit: Duration,
    store: &StoreLocation,
    options: &Options,
) -> Result<Arc<dyn LockBackend>, ConfigError> {
    let deadline = Instant::now() + limit.min(CONNECT_TIMEOUT_MAX);
    let mut pause = RETRY_PAUSE;
    // Terminates: the deadline is fixed, and the pause is never zero.
    loop {
        let source = match open_backend(store.clone(), options).await {
            Ok(backend) => return Ok(backend),
            Err(source) => source,
        };
        let is_file = matches!(store, StoreLocation::Sqlite { .. });
        if is_file || !source.is_retryable() || Instant::now() + pause >= deadline {
            let source = match unresolved_host(store).await {
                Some(host) => {
                    BackendError::transient(format!("cannot resolve {host}; check the host name"))
                        .with_source(source)
                }
                None => source,
            };
            return Err(ConfigError::open(store.scheme(), store.address(), source));
        }
        sleep(pause).await;
        pause = (pause * 2).min(RETRY_PAUSE_MAX);
    }
}

/// Returns the first host of `store` whose name cannot be resolved. Client libraries report that as
/// a lost connection.
async fn unresolved_host(store: &StoreLocation) -> Option<String> {
    for (host, port) in store.hosts() {
        let (host, port) = (host.clone(), *port);
        let lookup = tokio::task::spawn_blocking(move || {
            (host.as_str(), port).to_socket_addrs().is_err().then_some(host)
        });
        if let Ok(Ok(Some(host))) = timeout(RESOLVE_LIMIT, lookup).await {
            return Some(host);
        }
    }
    None
}

/// Default time for which failed connection attempts are repeated.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A larger limit would overflow the clock.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Maximum time that an error message waits for the resolver.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);

async fn open_backend(
    store: StoreLocation,
    options: &Options,
) -> Result<Arc<dyn LockBackend>, BackendError> {
    Ok(match store {
        StoreLocation::Memory { name: None } => Arc::new(MemoryBackend::new()),
        StoreLocation::Memory { name: Some(name) } => {
            Arc::new(memory::named(name, options.namespace.clone()))
        }
        StoreLocation::PassThrough => Arc::new(PassThroughBackend::new()),
        #[cfg(feature = "sqlite")]
        StoreLocation::Sqlite { path } => {
            Arc::new(registry_jdbc::SqliteBackend::open(sqlite_config(path, options)).await?)
        }
        #[cfg(not(feature = "sqlite"))]
        StoreLocation::Sqlite { .. } => {
            unreachable!("its scheme is refused when the URL is parsed")
        }
        #[cfg(feature = "postgres")]
        StoreLocation::Postgres(server) => postgres::open(&server, options).await?,
        #[cfg(not(feature = "postgres"))]
        StoreLocation::Postgres(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "mysql")]
        StoreLocation::MySql(server) => mysql::open(&server, options).await?,
        #[cfg(not(feature = "mysql"))]
        StoreLocation::MySql(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "redis")]
        StoreLocation::Redis(servers) => Arc::new(redis::open(&servers, options).await?),
        #[cfg(feature = "zk")]
        StoreLocation::Zk(servers) => Arc::new(zk::open(&servers, options).await?),
        #[cfg(not(feature = "zk"))]
        StoreLocation::Zk(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(not(feature = "redis"))]
        StoreLocation::Redis(_) => unreachable!("its scheme is refused when the URL is parsed"),
        #[cfg(feature = "etcd")]
        StoreLocation::Etcd(cluster) => Arc::new(etcd::open(&cluster, options).await?),
        #[cfg(not(feature = "etcd"))]
        StoreLocation::Etcd(_) => unreachable!("its scheme is refused when the URL is parsed"),
    })
}

/// Returns what a lock in a database server is.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn sql_mode(options: &Options) -> registry_jdbc::SqlMode {
    if options.layout != Some(Layout::Spring) {
        return match options.mode {
            None | Some(LockMode::Lease) => registry_jdbc::SqlMode::Lease,
            Some(LockMode::Session) => registry_jdbc::SqlMode::Session,
            Some(LockMode::Row) => registry_jdbc::SqlMode::Row,
        };
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
    registry_jdbc::SqlMode::Spring(table)
}

/// The default of Spring's `idleBetweenTries`.
const SPRING_POLL: Duration = Duration::from_millis(100);

const ZOOKEEPER_POLL: Duration = Duration::from_secs(2);

#[cfg(feature = "sqlite")]
fn sqlite_config(path: std::path::PathBuf, options: &Options) -> registry_jdbc::SqliteConfig {
    let mut config = registry_jdbc::SqliteConfig::new(path);
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(purge_after) = options.purge_after {
        config = config.with_purge_after(purge_after);
    }
    match (options.busy_timeout, options.timeout) {
        (Some(busy_timeout), _) => config = config.with_busy_timeout(busy_timeout),
        // The engine ignores the result of a statement that takes longer than its time-out.
        (None, Some(timeout)) => {
            let shorter = config.busy_timeout.min(timeout * 5 / 6);
            config = config.with_busy_timeout(shorter);
        }
        (None, None) => {}
    }
    config
}
