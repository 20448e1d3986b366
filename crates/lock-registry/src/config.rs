//! Where options come from and which source wins. What options there are stands in `layer`, what a URL means in
//! `store_url`; `connect` opens the result.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{ConfigError, Observer, Registry};

use crate::connect;
use crate::layer::{Layer, OPTIONS, OptionRow, Origin};
use crate::layout::Layout;
use crate::scheme;
use crate::store_url::{Store, UrlText};

/// A lock store and how to use it, put together from several sources.
///
/// When an option is set by more than one source, the strongest wins: methods of this type, then the command line
/// ([`with_argument`](Self::with_argument)), then `LOCK_REGISTRY_*` variables, then the configuration file, then the query of the
/// store URL, then the default. The URL itself is chosen in the same way,
/// and only the query of the chosen URL counts.
///
/// | option | value | default |
/// |---|---|---|
/// | `url` | where the locks live | none: one must be given |
/// | `namespace` | locks of different namespaces never meet | the store's own |
/// | `lease` | how long a key stays taken if its holder dies, `100ms` (etcd: `2s`) to `1day` (ZooKeeper: half of the granted session; `mode=session` and `mode=row`: `1m`). In ZooKeeper the key is free when the session ends, after twice as long | `30s`; ZooKeeper half of the granted session, at most `30s` |
/// | `renew` | whether a held lock's lease is renewed | `true` |
/// | `poll` | the pause between two attempts of a waiter that no wake-up ends earlier, `1ms` to `1h`; longer while the store confirms its wake-ups | `250ms`; in a database with `layout=spring` `100ms`; ZooKeeper `2s` |
/// | `handoff` | how often in a row a lock may pass within this process before others get their turn, `0` (never) to `256` | `32`, and up to 64 within 20 ms of the grant |
/// | `timeout` | how long one operation of the store may stay unanswered, `10ms` to `1h` | `3s` |
/// | `label` | what others see when they ask who holds a lock | nothing |
/// | `layout` | how the store lays out its records: `native`, or that of a peer, `spring` (Redis, PostgreSQL, MariaDB, MySQL), `redisson` (Redis), `curator` (ZooKeeper) or `etcdctl` (etcd) | `native` |
/// | `busy_timeout` | SQL stores: how long a statement waits for other writers, `0s` (servers: `10ms`) to `1h`; MariaDB and MySQL round up to seconds | `2.5s`, servers `1s`; at most five sixths of a `timeout` that is set |
/// | `purge_after` | SQL stores: how long rows of free keys are kept, `0s` (servers: `1m`, and twice the longest wait for an answer) to `366days` | `1h` |
/// | `pool` | PostgreSQL, MariaDB, MySQL: how many connections there are for statements, besides one each for renewals, releases and (PostgreSQL) wake-ups | `4` |
/// | `mode` | PostgreSQL, MariaDB, MySQL: what a lock is: `lease`, a row; `session`, an advisory or named lock that ends with the connection of its holder; `row`, a row that a transaction locks | `lease` |
/// | `row_locks` | the same with `mode=row`: how many locks may be held at once, each by a connection of its own, `1` to `10000` | `16` |
/// | `schema` | PostgreSQL only: where the tables are | as the `search_path` says |
/// | `table_prefix` | PostgreSQL, MariaDB, MySQL: how the names of the tables begin | `lock_registry` |
/// | `create_schema` | PostgreSQL, MariaDB, MySQL: whether missing tables are made | `true` |
/// | `spring` | PostgreSQL, MariaDB, MySQL with `layout=spring`: `v7`, or `v6` for Spring Integration 6 and before, where `lease` must be given and be the peers' `timeToLive` | `v7` |
/// | `region` | the same: the region of Spring's table, in a namespace's stead | `DEFAULT` |
/// | `prefix` | the same: what stands before `LOCK` in the name of Spring's table | `INT_` |
/// | `prepared` | PostgreSQL only: whether the server keeps statements prepared; `false` behind a pooler in transaction mode | `true` |
/// | `listen` | PostgreSQL only: the URL of a connection, past a pooler, that receives release notifications; or `off`; never shown | that of the store; with `prepared=false` `off` |
/// | `sslmode` | PostgreSQL, MariaDB, MySQL: `disable`, `prefer`, `require`, `verify-ca` or `verify-full` | `prefer`; with `ca` `verify-full` |
/// | `connect_timeout` | Redis, ZooKeeper, etcd, PostgreSQL, MariaDB, MySQL: how long one connection attempt may take, and how long [`connect`](RegistryConfig::connect) repeats attempts that fail, `10ms` to `1h` | `2s`; ZooKeeper `5s` for an attempt |
/// | `token_memory` | Redis only: how long the newest token of a key is remembered after its last grant, `10ms` to `366days` | `1day` |
/// | `publish` | Redis only: how releases are told, `plain` by `PUBLISH`, `sharded` by `SPUBLISH`, or `auto` | `auto` |
/// | `replicas` | Redis but for quorums: how many replicas must have a grant before it counts | `0` |
/// | `fsync` | Redis but for quorums: whether a grant must be on disk, there too, before it counts | `false` |
/// | `replica_timeout` | Redis but for quorums: how long replicas and disks may take, `10ms` to less than `timeout` | `1s`; at most five sixths of a `timeout` that is set |
/// | `restart_guard` | Redis quorums only: how long a master has no vote after its start, `0s` to `366days` | `0s` |
/// | `db` | Redis at a socket only: the number of the database | `0` |
/// | `sentinel_password`, `sentinel_user` | Redis under sentinels only: the sentinels' own login; never shown | none |
/// | `session` | ZooKeeper only: how long the servers keep the session, and its locks, after the last word of this process, `400ms` to `1day`; they may grant less | twice the `lease`, or `30s` |
/// | `sessions` | ZooKeeper only: the limit of sessions, each with a connection, `1` to `32`. One holds nodes with 512 KiB of paths, about 5,000 short keys | `8` |
/// | `root` | ZooKeeper only: the node below the chroot that keys are below | `/lock-registry`; with `layout=curator` `/SpringIntegration-LockRegistry` |
/// | `naming` | ZooKeeper only: what the nodes of locks are called, as by `curator` or by `kazoo` | `curator` |
/// | `acl` | ZooKeeper only: who may touch nodes: `open`, `creator`, or a list such as `world:anyone:r,digest:USER:HASH:cdrwa`, which is never shown | `open` |
/// | `auth` | ZooKeeper only: a login by another scheme than that of user and password in the URL, `SCHEME:CREDENTIALS`; never shown | none |
/// | `ca` | encrypted Redis, ZooKeeper and etcd, PostgreSQL, MariaDB, MySQL: a file (PEM) with the certificate authorities that are trusted | those of the host |
/// | `cert`, `key` | encrypted Redis, ZooKeeper and etcd, PostgreSQL, MariaDB, MySQL: files (PEM) with the certificate that tells the servers who we are, and its private key; `key` is never shown | none |
///
/// Every option has the same name and form everywhere: `lease=30s` in a URL, `lease = "30s"` in TOML,
/// `LOCK_REGISTRY_LEASE=30s` in the environment. A name that is none of these is an error wherever it stands.
///
/// Neither `Debug` nor any error shows a user name, a password or a URL that cannot be understood.
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
    code: Layer,
    command_line: Layer,
    environment: Layer,
    file: Layer,
    observers: Vec<Arc<dyn Observer>>,
    connect_within: Option<Duration>,
    /// What was wrong in a section that was read as part of something larger; told by `check`, where nobody can
    /// print the surrounding text, which may hold a password.
    #[cfg(feature = "config")]
    pub(crate) deferred: Option<ConfigError>,
}

impl RegistryConfig {
    /// The longest namespace, in bytes.
    pub const NAMESPACE_BYTES_MAX: usize = 255;

    /// A configuration in which nothing is set yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A configuration with this store URL. Its options are weaker than those of any other source.
    ///
    /// # Errors
    /// [`ConfigError`] when the URL is wrong or its store is not built in.
    pub fn from_url(url: &str) -> Result<Self, ConfigError> {
        let config = Self::new().url(url);
        config.check()?;
        Ok(config)
    }

    /// Sets the store URL. It is looked at when the configuration is checked or connected.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.code.url = Some(UrlText::new(url));
        self
    }

    /// Keeps these locks apart from those of other namespaces in the same store.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.code.namespace = Some(namespace.into());
        self
    }

    /// Sets how long a key stays taken if its holder dies.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.code.lease = Some(lease);
        self
    }

    /// Sets whether the leases of held locks are renewed.
    pub fn renew(mut self, renew: bool) -> Self {
        self.code.renew = Some(renew);
        self
    }

    /// Sets the pause between two attempts of a waiter that no wake-up ends earlier.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.code.poll = Some(poll);
        self
    }

    /// Sets how often in a row a lock may pass within this process; zero is never.
    pub fn handoff(mut self, handoff: u32) -> Self {
        self.code.handoff = Some(handoff);
        self
    }

    /// Sets how long one operation of the store may stay unanswered.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.code.timeout = Some(timeout);
        self
    }

    /// Sets what others see when they ask who holds a lock. Must hold no secret.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.code.label = Some(label.into());
        self
    }

    /// Sets how the store lays out its records.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.code.layout = Some(layout);
        self
    }

    /// Sets one option from text that stands on the program's command line, where it is called `--NAME` with dashes. Errors
    /// and [`settings`](Self::settings) name it so.
    ///
    /// # Errors
    /// [`ConfigError`] when there is no option `name`, it was set before, or the option cannot have this value.
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let error = RegistryConfig::new().with_argument("lease", "30").unwrap_err();
    /// assert!(error.to_string().starts_with("--lease is \"30\", which has no unit"));
    /// ```
    pub fn with_argument(mut self, name: &str, value: &str) -> Result<Self, ConfigError> {
        self.command_line.read(Origin::CommandLine, name, value)?;
        Ok(self)
    }

    /// Sets how long [`connect`](Self::connect) repeats connection attempts that fail, in place of the option `connect_timeout`. The
    /// first attempt may take `connect_timeout` even if that is longer.
    pub fn connect_within(mut self, limit: Duration) -> Self {
        self.connect_within = Some(limit);
        self
    }

    /// Adds an observer, which receives the events of the registry.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Checks everything that can be checked without I/O: the URL, every value, every name.
    ///
    /// # Errors
    /// [`ConfigError`] for the first thing that is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.resolve().map(drop)
    }

    /// Opens the store. Everything is checked before any I/O.
    ///
    /// Repeats an attempt that failed with a transient error (connection refused, name not resolved, server starting) with
    /// a growing pause until `connect_timeout`, or the time of [`connect_within`](Self::connect_within), is over. An error that
    /// a repetition cannot mend, such as a wrong password, is returned at once.
    ///
    /// # Errors
    /// [`ConfigError`] when something is wrong with the configuration or the store cannot be opened.
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened so far; a database file that was made stays.
    pub async fn connect(self) -> Result<Registry, ConfigError> {
        let resolved = self.resolve()?;
        connect::open(resolved, self.observers, self.connect_within).await
    }

    /// The options that are set, with the source that won. Free of secrets: the URL is shown as by
    /// [`redact_url`](crate::redact_url).
    ///
    /// # Errors
    /// As [`RegistryConfig::check`].
    pub fn settings(&self) -> Result<Vec<Setting>, ConfigError> {
        self.resolve()?;
        let layers = self.layers()?;
        let settings = OPTIONS.iter().filter_map(|row| {
            let (origin, value) =
                layers.iter().find_map(|(origin, layer)| Some((*origin, row.shown_in(layer)?)))?;
            Some(Setting { name: row.name, value, origin })
        });
        Ok(settings.collect())
    }

    /// The sources, strongest first.
    fn layers(&self) -> Result<[(Origin, Layer); 5], ConfigError> {
        let mut url = Layer::default();
        if let Some(text) = self.chosen_url() {
            for (name, value) in text.parse()?.options {
                url.read(Origin::Url, &name, value.told())?;
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

    fn chosen_url(&self) -> Option<&UrlText> {
        [&self.code, &self.command_line, &self.environment, &self.file]
            .into_iter()
            .find_map(|layer| layer.url.as_ref())
    }

    /// Checks everything and lets the strongest source of each option win.
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        #[cfg(feature = "config")]
        if let Some(error) = &self.deferred {
            return Err(error.clone());
        }
        let Some(url) = self.chosen_url() else {
            return Err(ConfigError::Invalid(format!(
                "no store URL is given; set one, such as `sqlite:PATH`; schemes are {}",
                scheme::known()
            )));
        };
        let store = url.parse()?.store;
        let layers = self.layers()?;
        for (origin, layer) in &layers {
            layer.check(*origin, store.scheme())?;
        }
        let mut options = Layer::default();
        for (_, layer) in layers.clone() {
            options = options.or(layer);
        }
        options.check_together(store.scheme(), |option| {
            let sets = |layer: &Layer| {
                OptionRow::find(option).is_some_and(|row| row.shown_in(layer).is_some())
            };
            layers.iter().find(|(_, layer)| sets(layer)).map_or(Origin::Code, |(origin, _)| *origin)
        })?;
        connect::check(&store, &options)?;
        Ok(Resolved { store, options })
    }

    /// The layer of a source that is read from text.
    #[cfg(feature = "config")]
    pub(crate) fn layer_mut(&mut self, origin: Origin) -> &mut Layer {
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
        for row in OPTIONS {
            for (origin, layer) in sources {
                if let Some(value) = row.shown_in(layer) {
                    debug.entry(&format_args!("{} ({origin})", row.name), &value);
                }
            }
        }
        debug.finish()
    }
}

/// One option that is set: its value as text, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setting {
    /// The option's name.
    pub name: &'static str,
    /// Its value, free of secrets.
    pub value: String,
    /// The source that won.
    pub origin: Origin,
}

/// A configuration that has been checked.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) store: Store,
    /// What is not set here is left to the store and the engine.
    pub(crate) options: Layer,
}

impl Layer {
    /// This layer, completed with what only `weaker` sets.
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
