//! The configuration of a registry from a URL, a file, the environment and code.

// Merges the options of all sources by precedence. The options are in `options`, the meaning of
// URLs is in `store_url`, and `connect` opens the result.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{ConfigError, Observer, Registry};

use crate::connect;
use crate::options::{OPTIONS, OptionSpec, Options};
use crate::scheme;
use crate::store_url::{StoreLocation, UrlText};

pub use crate::layout::Layout;
pub use crate::options::Origin;
pub use crate::store_url::redact_url;
pub use crate::value::parse_duration;

/// The configuration of a registry: its lock store and options, merged from several sources.
///
/// If several sources set an option, the strongest source wins. From strongest to weakest:
/// - methods of this type,
/// - the command line ([`with_argument`](Self::with_argument)),
/// - `LOCK_REGISTRY_*` variables,
/// - the configuration file,
/// - the query of the store URL,
/// - the default.
///
/// The URL itself is chosen in the same way. Only the query of the chosen URL counts.
///
/// # Options
/// All stores:
/// - `url`: the location of the lock store. Required.
/// - `namespace`: locks in different namespaces are independent. Default: the store's own.
/// - `lease`: how long a key stays locked after its holder dies. `100ms` (etcd: `2s`) to `1day`; at
///   most half of the granted session in ZooKeeper, and `1m` with `mode=session` and `mode=row`. In
///   ZooKeeper the key is free when the session ends, after twice as long. Default: `30s`; in
///   ZooKeeper half of the granted session, at most `30s`.
/// - `renew`: whether the lease of a held lock is renewed. Default: `true`.
/// - `poll`: the pause between two attempts of a waiter, unless a notification ends it. `1ms` to
///   `1h`; longer while the store confirms its notifications. Default: `250ms`; with
///   `layout=spring` in a database `100ms`; in ZooKeeper `2s`.
/// - `handoff`: maximum number of consecutive hand-overs of a lock within this process, before
///   other processes can acquire it. `0` (none) to `256`. Default: `32`, and up to 64 within 20 ms
///   of the grant.
/// - `timeout`: how long the store may take to respond to one operation. `10ms` to `1h`. Default:
///   `3s`.
/// - `label`: text shown to other clients that ask for the holder of a lock. Default: none.
/// - `layout`: the format of the store's records: `native`, or that of a peer. Peers are `spring`
///   (Redis, PostgreSQL, MariaDB, MySQL), `redisson` (Redis), `curator` (ZooKeeper) and `etcdctl`
///   (etcd). Default: `native`.
///
/// SQL stores:
/// - `busy_timeout`: how long a statement waits for other writers. `0s` (servers: `10ms`) to `1h`;
///   MariaDB and MySQL round up to seconds. Default: `2.5s`, servers `1s`; at most five sixths of a
///   `timeout` that is set.
/// - `purge_after`: how long rows of free keys are kept. `0s` to `366days`; for servers at least
///   `1m`, and twice the longest wait for a response. Default: `1h`.
///
/// PostgreSQL, MariaDB and MySQL:
/// - `pool`: number of connections for statements. Renewals, releases and (PostgreSQL)
///   notifications have one further connection each. Default: `4`.
/// - `mode`: the kind of lock. `lease` is a row. `session` is an advisory or named lock that ends
///   with the connection of its holder. `row` is a row that a transaction locks. Default: `lease`.
/// - `row_locks`: with `mode=row`, how many locks can be held at once, each by its own connection.
///   `1` to `10000`. Default: `16`.
/// - `table_prefix`: prefix of the table names. Default: `lock_registry`.
/// - `create_schema`: whether missing tables are created. Default: `true`.
/// - `spring`: with `layout=spring`, the version of Spring Integration: `v7`, or `v6` for version 6
///   and earlier. `v6` requires `lease`, with the value of the peers' `timeToLive`. Default: `v7`.
/// - `region`: with `layout=spring`, the region of Spring's table, which replaces the namespace.
///   Default: `DEFAULT`.
/// - `prefix`: with `layout=spring`, the prefix of `LOCK` in the name of Spring's table. Default:
///   `INT_`.
/// - `sslmode`: `disable`, `prefer`, `require`, `verify-ca` or `verify-full`. Default: `prefer`;
///   with `ca` `verify-full`.
///
/// PostgreSQL only:
/// - `schema`: the schema of the tables. Default: from the `search_path`.
/// - `prepared`: whether the server keeps prepared statements. Set `false` behind a pooler in
///   transaction mode. Default: `true`.
/// - `listen`: the URL of a direct connection, past any pooler, that receives release
///   notifications; or `off`. Never shown. Default: the store's URL; with `prepared=false` `off`.
///
/// All servers (Redis, ZooKeeper, etcd, PostgreSQL, MariaDB, MySQL):
/// - `connect_timeout`: how long one connection attempt may take, and how long
///   [`connect`](RegistryConfig::connect) repeats failed attempts. `10ms` to `1h`. Default: `2s`;
///   in ZooKeeper `5s` for an attempt.
///
/// Redis only:
/// - `token_memory`: how long the newest token of a key is kept after its last grant. `10ms` to
///   `366days`. Default: `1day`.
/// - `publish`: how releases are published: `plain` by `PUBLISH`, `sharded` by `SPUBLISH`, or
///   `auto`. Default: `auto`.
/// - `replicas`: not for quorums; how many replicas must have a grant before it counts. Default:
///   `0`.
/// - `fsync`: not for quorums; whether a grant must be on disk before it counts, also on replicas.
///   Default: `false`.
/// - `replica_timeout`: not for quorums; how long replicas and disks may take. `10ms` to less than
///   `timeout`. Default: `1s`; at most five sixths of a `timeout` that is set.
/// - `restart_guard`: quorums only; how long a master has no vote after its start. `0s` to
///   `366days`. Default: `0s`.
/// - `db`: sockets only; the database number. Default: `0`.
/// - `sentinel_password`, `sentinel_user`: sentinels only; the login at the sentinels. Never shown.
///   Default: none.
///
/// ZooKeeper only:
/// - `session`: how long the servers keep the session and its locks after the last message of this
///   process. `400ms` to `1day`; the servers may grant less. Default: twice the `lease`, or `30s`.
/// - `sessions`: the limit of sessions, each with a connection. `1` to `32`. One session holds
///   nodes with 512 KiB of paths, about 5,000 short keys. Default: `8`.
/// - `root`: the parent node of all keys, below the chroot. Default: `/lock-registry`; with
///   `layout=curator` `/SpringIntegration-LockRegistry`.
/// - `naming`: the names of lock nodes, as in `curator` or in `kazoo`. Default: `curator`.
/// - `acl`: the rights to nodes: `open`, `creator`, or a list such as
///   `world:anyone:r,digest:USER:HASH:cdrwa`, which is never shown. Default: `open`.
/// - `auth`: a login `SCHEME:CREDENTIALS`, for schemes other than user and password in the URL.
///   Never shown. Default: none.
///
/// PostgreSQL, MariaDB and MySQL, and encrypted Redis, ZooKeeper and etcd:
/// - `ca`: a PEM file with the trusted certificate authorities. Required for encrypted ZooKeeper.
///   Default for other stores: those of the host.
/// - `cert`, `key`: PEM files with this client's certificate and its private key. `key` is never
///   shown. Default: none.
///
/// Every option has the same name and form in each source: `lease=30s` in a URL, `lease = "30s"` in
/// TOML, `LOCK_REGISTRY_LEASE=30s` in the environment. Any other name is an error in every source.
///
/// `Debug` and errors never show a user name, a password or a URL that cannot be parsed.
///
/// # Examples
/// ```
/// # use std::time::Duration;
/// # use lock_registry::{LockRegistry, RegistryConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let registry = RegistryConfig::from_url("memory:?lease=10s&poll=1s")?
///     .lease(Duration::from_secs(20))
///     .connect()
///     .await?;
/// let guard = registry.obtain("orders/42").lock().await?;
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
#[must_use = "a configuration does nothing until it is connected"]
pub struct RegistryConfig {
    code: Options,
    command_line: Options,
    environment: Options,
    file: Options,
    observers: Vec<Arc<dyn Observer>>,
    connect_within: Option<Duration>,
    /// The first error of a deserialized section. `check` returns it, because a deserializer's
    /// error would quote the surrounding text, which may contain a password.
    #[cfg(feature = "config")]
    pub(crate) deferred_error: Option<ConfigError>,
}

impl RegistryConfig {
    /// Maximum length of a namespace in bytes.
    pub const NAMESPACE_BYTES_MAX: usize = 255;

    /// Returns a configuration without any option.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a configuration with this store URL. The options in its query are weaker than those
    /// of any other source.
    ///
    /// # Errors
    /// [`ConfigError`] if the URL is invalid or its store is not built in.
    pub fn from_url(url: &str) -> Result<Self, ConfigError> {
        let config = Self::new().url(url);
        config.check()?;
        Ok(config)
    }

    /// Sets the store URL. It is parsed when the configuration is checked or connected.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.code.url = Some(UrlText::new(url));
        self
    }

    /// Separates these locks from those of other namespaces in the same store.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.code.namespace = Some(namespace.into());
        self
    }

    /// Sets how long a key stays locked after its holder dies.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.code.lease = Some(lease);
        self
    }

    /// Sets whether the leases of held locks are renewed.
    pub fn renew(mut self, renew: bool) -> Self {
        self.code.renew = Some(renew);
        self
    }

    /// Sets the pause between two attempts of a waiter, unless a notification ends it.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.code.poll = Some(poll);
        self
    }

    /// Sets the maximum number of consecutive hand-overs of a lock within this process. Zero
    /// disables hand-over.
    pub fn handoff(mut self, handoff: u32) -> Self {
        self.code.handoff = Some(handoff);
        self
    }

    /// Sets how long the store may take to respond to one operation.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.code.timeout = Some(timeout);
        self
    }

    /// Sets the text shown to other clients that ask for the holder of a lock. It must not contain
    /// a secret.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.code.label = Some(label.into());
        self
    }

    /// Sets the format of the store's records.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.code.layout = Some(layout);
        self
    }

    /// Sets one option from text of the program's command line. Errors and
    /// [`settings`](Self::settings) call it `--NAME`, with dashes.
    ///
    /// # Errors
    /// [`ConfigError`] if the option `name` does not exist, is already set, or does not accept this
    /// value.
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let error = RegistryConfig::new().with_argument("lease", "30").unwrap_err();
    /// assert!(error.to_string().starts_with("--lease is \"30\", which has no unit"));
    /// ```
    pub fn with_argument(mut self, name: &str, value: &str) -> Result<Self, ConfigError> {
        self.command_line.set(Origin::CommandLine, name, value)?;
        Ok(self)
    }

    /// Sets how long [`connect`](Self::connect) repeats failed connection attempts, instead of the
    /// option `connect_timeout`. The first attempt may take `connect_timeout` even if that is
    /// longer.
    pub fn connect_within(mut self, limit: Duration) -> Self {
        self.connect_within = Some(limit);
        self
    }

    /// Adds an observer, which receives the events of the registry.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Validates the URL, every value and every name, without I/O.
    ///
    /// # Errors
    /// [`ConfigError`] for the first problem found.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.resolve().map(drop)
    }

    /// Opens the store. Everything is validated before any I/O.
    ///
    /// Repeats an attempt that fails with a transient error: connection refused, name not resolved,
    /// or server starting. The pause grows with each attempt, until `connect_timeout` or the time
    /// of [`connect_within`](Self::connect_within) is over. Any other error, such as a wrong
    /// password, is returned at once.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is invalid or the store cannot be opened.
    ///
    /// # Cancel safety
    /// Dropping the future closes all connections opened so far. A database file that was created
    /// remains.
    pub async fn connect(self) -> Result<Registry, ConfigError> {
        let resolved = self.resolve()?;
        connect::open(resolved, self.observers, self.connect_within).await
    }

    /// Returns the options that are set, each with the source that won. Contains no secrets: the
    /// URL is shown as by [`redact_url`].
    ///
    /// # Errors
    /// As [`RegistryConfig::check`].
    pub fn settings(&self) -> Result<Vec<Setting>, ConfigError> {
        self.resolve()?;
        let sources = self.options_by_source()?;
        let settings = OPTIONS.iter().filter_map(|spec| {
            let (origin, value) = sources
                .iter()
                .find_map(|(origin, options)| Some((*origin, spec.redacted_value(options)?)))?;
            Some(Setting { name: spec.name, value, origin })
        });
        Ok(settings.collect())
    }

    /// Returns the options of each source, strongest first.
    fn options_by_source(&self) -> Result<[(Origin, Options); 5], ConfigError> {
        let mut url = Options::default();
        if let Some(text) = self.selected_url() {
            for (name, value) in text.parse()?.options {
                url.set(Origin::Url, &name, value.expose())?;
            }
        }
        Ok([
            (Origin::Code, self.code.clone()),
            (Origin::CommandLine, self.command_line.clone()),
            (Origin::Environment, self.environment.clone()),
            (Origin::File, self.file.clone()),
            (Origin::Url, url),
        ])
    }

    fn selected_url(&self) -> Option<&UrlText> {
        [&self.code, &self.command_line, &self.environment, &self.file]
            .into_iter()
            .find_map(|options| options.url.as_ref())
    }

    /// Validates the configuration and merges the sources by precedence.
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        #[cfg(feature = "config")]
        if let Some(error) = &self.deferred_error {
            return Err(error.clone());
        }
        let Some(url) = self.selected_url() else {
            return Err(ConfigError::Invalid(format!(
                "no store URL is set; set `url`, for example to `sqlite:PATH`; known schemes: {}",
                scheme::known()
            )));
        };
        let store = url.parse()?.store;
        let sources = self.options_by_source()?;
        for (origin, options) in &sources {
            options.check(*origin, store.scheme())?;
        }
        let mut merged = Options::default();
        for (_, source) in sources.clone() {
            merged = merged.or(source);
        }
        merged.check_combinations(store.scheme(), |option| {
            let is_set = |options: &Options| {
                OptionSpec::find(option).is_some_and(|spec| spec.redacted_value(options).is_some())
            };
            sources
                .iter()
                .find(|(_, options)| is_set(options))
                .map_or(Origin::Code, |(origin, _)| *origin)
        })?;
        connect::check(&store, &merged)?;
        Ok(Resolved { store, options: merged })
    }

    /// Returns the options of a source that is read from text.
    #[cfg(feature = "config")]
    pub(crate) fn options_mut(&mut self, origin: Origin) -> &mut Options {
        match origin {
            Origin::Environment => &mut self.environment,
            Origin::File => &mut self.file,
            Origin::CommandLine => &mut self.command_line,
            Origin::Code | Origin::Url => &mut self.code,
        }
    }
}

impl fmt::Debug for RegistryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sources = [
            (Origin::Code, &self.code),
            (Origin::CommandLine, &self.command_line),
            (Origin::Environment, &self.environment),
            (Origin::File, &self.file),
        ];
        let mut debug = f.debug_map();
        for spec in OPTIONS {
            for (origin, options) in sources {
                if let Some(value) = spec.redacted_value(options) {
                    debug.entry(&format_args!("{} ({origin})", spec.name), &value);
                }
            }
        }
        debug.finish()
    }
}

/// One option that is set: its value as text, and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setting {
    /// The option's name.
    pub name: &'static str,
    /// The option's value, without secrets.
    pub value: String,
    /// The source that won.
    pub origin: Origin,
}

/// A validated configuration.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) store: StoreLocation,
    /// Options that are not set here have the default of the store or the engine.
    pub(crate) options: Options,
}

impl Options {
    /// Returns these options, completed with the options that only `weaker` sets.
    fn or(self, weaker: Self) -> Self {
        Self {
            url: self.url.or(weaker.url),
            namespace: self.namespace.or(weaker.namespace),
            lease: self.lease.or(weaker.lease),
            renew: self.renew.or(weaker.renew),
            poll: self.poll.or(weaker.poll),
            handoff: self.handoff.or(weaker.handoff),
            timeout: self.timeout.or(weaker.timeout),
            label: self.label.or(weaker.label),
            layout: self.layout.or(weaker.layout),
            busy_timeout: self.busy_timeout.or(weaker.busy_timeout),
            purge_after: self.purge_after.or(weaker.purge_after),
            pool: self.pool.or(weaker.pool),
            mode: self.mode.or(weaker.mode),
            row_locks: self.row_locks.or(weaker.row_locks),
            schema: self.schema.or(weaker.schema),
            table_prefix: self.table_prefix.or(weaker.table_prefix),
            create_schema: self.create_schema.or(weaker.create_schema),
            spring: self.spring.or(weaker.spring),
            region: self.region.or(weaker.region),
            prefix: self.prefix.or(weaker.prefix),
            prepared: self.prepared.or(weaker.prepared),
            listen: self.listen.or(weaker.listen),
            sslmode: self.sslmode.or(weaker.sslmode),
            connect_timeout: self.connect_timeout.or(weaker.connect_timeout),
            token_memory: self.token_memory.or(weaker.token_memory),
            publish: self.publish.or(weaker.publish),
            replicas: self.replicas.or(weaker.replicas),
            fsync: self.fsync.or(weaker.fsync),
            replica_timeout: self.replica_timeout.or(weaker.replica_timeout),
            restart_guard: self.restart_guard.or(weaker.restart_guard),
            db: self.db.or(weaker.db),
            sentinel_user: self.sentinel_user.or(weaker.sentinel_user),
            sentinel_password: self.sentinel_password.or(weaker.sentinel_password),
            session: self.session.or(weaker.session),
            sessions: self.sessions.or(weaker.sessions),
            root: self.root.or(weaker.root),
            naming: self.naming.or(weaker.naming),
            acl: self.acl.or(weaker.acl),
            auth: self.auth.or(weaker.auth),
            ca: self.ca.or(weaker.ca),
            cert: self.cert.or(weaker.cert),
            key: self.key.or(weaker.key),
        }
    }
}
