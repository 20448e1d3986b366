//! The function `connect`, and `open`, which opens a registry from a validated configuration.

use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::time::Duration;

use registry_core::config::{
    BackendConfig, Host, InvalidValue, parse_count, parse_switch, parse_time,
};
use registry_core::{BackendError, ConfigError, LockBackend, Observer, Registry};
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::{RegistryConfig, Resolved};
use crate::options::Options;

/// Opens the registry of the store at `url`.
///
/// Stores in this process:
/// - `memory:`: a separate store for each registry.
/// - `memory:NAME`: one store for all registries of this process with this name and namespace.
/// - `pass-through:`: no store. Callers of this registry acquire a lock one after the other; other
///   registries are not excluded. For tests, or to turn locking off.
///
/// Stores of this host:
/// - `sqlite:PATH`, `sqlite:///PATH`: one file, for all processes of this host. Feature `sqlite`.
///
/// Stores for all hosts that reach them:
/// - `postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, `postgresql://…`: a PostgreSQL database.
///   Feature `postgres`, with encryption `postgres-tls`.
/// - `mysql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, `mariadb://…`: a MariaDB or MySQL database.
///   Feature `mysql`, with encryption `mysql-tls`.
/// - `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`: a Redis or Valkey server. Feature `redis`.
/// - `redis+unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE]`: the Redis server at this socket. Other
///   hosts may reach the same server over TCP. Feature `redis`.
/// - `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],…/SERVICE[/DATABASE]`: the master that these
///   sentinels name. Feature `redis`.
/// - `redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],…`: the cluster that these members belong to.
///   Feature `redis`.
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
/// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled. No error shows a
/// password. The configuration is validated before any I/O, as by [`RegistryConfig::check`].
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

/// Opens the registry that `resolved` describes. If the store is remote, repeats an attempt that
/// fails with a transient error until `limit` is over. The default of `limit` is the option
/// `connect_timeout`.
pub(crate) async fn open(
    resolved: Resolved,
    observers: Vec<Arc<dyn Observer>>,
    limit: Option<Duration>,
    #[cfg(feature = "metrics")] metric_names: registry_core::observe::KeyNames,
) -> Result<Registry, ConfigError> {
    // Stores open connections on the runtime. Without a runtime, some client libraries panic.
    Registry::check_runtime()?;
    let Resolved { store, options } = resolved;
    #[cfg(feature = "metrics")]
    let metrics = registry_core::observe::MetricsObserver::new(store.scheme()).names(metric_names);
    #[cfg(feature = "tracing")]
    let tracing = registry_core::observe::TracingObserver::new().store(store.scheme());
    let limit = match limit {
        Some(limit) => limit,
        None => parse_option(&options, "connect_timeout", parse_time)?.unwrap_or(CONNECT_TIMEOUT),
    };
    let backend = open_with_retries(limit, &*store).await?;
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
        builder = builder.observer(Arc::new(tracing));
    }
    if let Some(lease) = parse_option(&options, "lease", parse_time)? {
        builder = builder.lease(lease);
    }
    if let Some(renew) = parse_option(&options, "renew", parse_switch)? {
        builder = builder.auto_renew(renew);
    }
    if let Some(fair) = parse_option(&options, "fair", parse_switch)? {
        builder = builder.fair(fair);
    }
    if let Some(waiters) = parse_option(&options, "waiters", parse_switch)? {
        builder = builder.waiters(waiters);
    }
    if let Some(poll) = parse_option(&options, "poll", parse_time)?.or_else(|| store.poll()) {
        builder = builder.poll(poll);
    }
    if let Some(handoff) = parse_option(&options, "handoff", parse_count)? {
        builder = builder.handoff(handoff);
    }
    if let Some(timeout) = parse_option(&options, "timeout", parse_time)? {
        builder = builder.timeout(timeout);
    }
    if let Some(label) = options.get("label") {
        builder = builder.label(label);
    }
    for observer in observers {
        builder = builder.observer(observer);
    }
    builder.build()
}

/// Parses the value of `option`. Returns `None` if the option is not set.
fn parse_option<T>(
    options: &Options,
    option: &str,
    parse: fn(&str) -> Result<T, InvalidValue>,
) -> Result<Option<T>, ConfigError> {
    let invalid = |problem| ConfigError::Invalid(format!("option {option:?} {problem}"));
    options.get(option).map(|value| parse(value).map_err(invalid)).transpose()
}

/// Opens the backend of `store`. If the store is remote, repeats an attempt that failed with a
/// transient error until `limit` is over.
async fn open_with_retries(
    limit: Duration,
    store: &dyn BackendConfig,
) -> Result<Arc<dyn LockBackend>, ConfigError> {
    let deadline = Instant::now() + limit.min(CONNECT_TIMEOUT_MAX);
    let mut pause = RETRY_PAUSE;
    // The loop terminates, because the deadline is fixed and the pause is never zero.
    loop {
        let source = match store.open().await {
            Ok(backend) => return Ok(backend),
            Err(source) => source,
        };
        if !store.is_remote() || !source.is_retryable() || Instant::now() + pause >= deadline {
            let is_retryable = source.is_retryable();
            let unresolved = if is_retryable { unresolved_host(store.hosts()).await } else { None };
            let source = match unresolved {
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

/// Returns the first of `hosts` whose lookup fails within [`RESOLVE_LIMIT`]. Client libraries
/// report such a host only as a lost connection.
async fn unresolved_host(hosts: Vec<Host>) -> Option<String> {
    let deadline = Instant::now() + RESOLVE_LIMIT;
    let lookups = hosts.into_iter().map(|(host, port)| {
        tokio::task::spawn_blocking(move || {
            (host.as_str(), port).to_socket_addrs().is_err().then_some(host)
        })
    });
    // All lookups start before the first one is awaited.
    for lookup in lookups.collect::<Vec<_>>() {
        if let Ok(Ok(Some(host))) = timeout_at(deadline, lookup).await {
            return Some(host);
        }
    }
    None
}

/// The default time for which failed connection attempts are repeated.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum time for which attempts are repeated. A much larger limit would overflow `Instant`.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The time limit for resolving all host names, to explain a failed connection.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);
