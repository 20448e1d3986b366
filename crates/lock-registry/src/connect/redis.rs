//! Opens a Redis store from the servers of a URL and the options. Reads the files that options name
//! before it connects.

use std::time::Duration;

use registry_core::BackendError;
use registry_redis::{Layout as RedisLayout, Publish as RedisPublish, RedisBackend, RedisConfig};

#[cfg(feature = "redis-tls")]
use super::pem::PemFiles;
use crate::layout::Layout;
use crate::options::{Options, PublishMode, SERVER_TIME_MIN};
use crate::store_url::{RedisServers, RedisTopology};
use crate::value::Secret;

/// Validates the configuration without I/O. Files are not read.
pub(super) fn check(servers: &RedisServers, options: &Options) -> Result<(), BackendError> {
    config(servers, options).check()
}

/// Opens the store of these servers.
pub(super) async fn open(
    servers: &RedisServers,
    options: &Options,
) -> Result<RedisBackend, BackendError> {
    let config = config(servers, options);
    #[cfg(feature = "redis-tls")]
    let config = if servers.are_encrypted() { with_encryption(config, options)? } else { config };
    RedisBackend::open(config).await
}

fn config(servers: &RedisServers, options: &Options) -> RedisConfig {
    let config = topology_config(servers).with_database(options.db.unwrap_or(servers.database));
    with_record_options(with_limits(with_logins(config, servers, options), options), options)
}

fn topology_config(servers: &RedisServers) -> RedisConfig {
    match &servers.topology {
        RedisTopology::Standalone((host, port)) => RedisConfig::new(host, *port),
        RedisTopology::Socket(path) => RedisConfig::unix(path),
        RedisTopology::Sentinels { sentinels, service } => {
            RedisConfig::sentinel(sentinels.clone(), service)
        }
        RedisTopology::Cluster(members) => RedisConfig::cluster(members.clone()),
        RedisTopology::Quorum(masters) => RedisConfig::quorum(masters.clone()),
    }
}

fn with_logins(mut config: RedisConfig, servers: &RedisServers, options: &Options) -> RedisConfig {
    if let Some(login) = &servers.login {
        config =
            config.with_login(login.user.as_ref().map(Secret::expose), login.password.expose());
    }
    if let Some(password) = &options.sentinel_password {
        let user = options.sentinel_user.as_ref().map(Secret::expose);
        config = config.with_sentinel_login(user, password.expose());
    }
    config
}

/// Sets the format of records, and the conditions under which a grant counts.
fn with_record_options(mut config: RedisConfig, options: &Options) -> RedisConfig {
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(layout) = options.layout {
        config = config.with_layout(match layout {
            // `options::check` refuses `Curator` and `Etcdctl` for Redis.
            Layout::Native | Layout::Curator | Layout::Etcdctl => RedisLayout::Native,
            Layout::Spring => RedisLayout::Spring,
            Layout::Redisson => RedisLayout::Redisson,
        });
    }
    if let Some(publish) = options.publish {
        config = config.with_publish(match publish {
            PublishMode::Auto => RedisPublish::Auto,
            PublishMode::Plain => RedisPublish::Plain,
            PublishMode::Sharded => RedisPublish::Sharded,
        });
    }
    if let Some(token_memory) = options.token_memory {
        config = config.with_token_memory(token_memory);
    }
    if let Some(replicas) = options.replicas {
        config = config.with_replicas(replicas);
    }
    if let Some(fsync) = options.fsync {
        config = config.with_fsync(fsync);
    }
    if let Some(restart_guard) = options.restart_guard {
        config = config.with_restart_guard(restart_guard);
    }
    config
}

fn with_limits(mut config: RedisConfig, options: &Options) -> RedisConfig {
    if let Some(connect_timeout) = options.connect_timeout {
        config = config.with_connect_timeout(connect_timeout);
    }
    if let Some(timeout) = options.timeout {
        // The connection must outlast the engine's time-out.
        let longer = RedisConfig::RESPONSE_TIMEOUT.max(timeout * 6 / 5);
        config = config.with_response_timeout(longer);
    }
    match (options.replica_timeout, options.timeout) {
        (Some(replica_timeout), _) => config.with_replica_timeout(replica_timeout),
        // The engine ignores a grant whose wait for replicas takes longer than its time-out.
        (None, Some(timeout)) => {
            config.with_replica_timeout(REPLICA_TIMEOUT.min(timeout * 5 / 6).max(SERVER_TIME_MIN))
        }
        (None, None) => config,
    }
}

/// The default of `RedisConfig`.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(feature = "redis-tls")]
fn with_encryption(
    mut config: RedisConfig,
    options: &Options,
) -> Result<RedisConfig, BackendError> {
    let files = PemFiles { store: "redis" };
    config = config.with_tls();
    if let Some(ca) = &options.ca {
        config = config.with_certificate_authority(files.certificates("ca", ca)?);
    }
    if let (Some(cert), Some(key)) = (&options.cert, &options.key) {
        let certificate = files.certificates("cert", cert)?;
        config =
            config.with_client_certificate(certificate, files.private_key(key.expose().as_ref())?);
    }
    Ok(config)
}
