//! Opens a ZooKeeper store from the servers of a URL and the options. Reads the files that options
//! name before it connects.

use registry_core::{BackendError, BackendErrorKind};
use registry_zk::{Acl, Layout as ZkLayout, Naming as ZkNaming, ZkBackend, ZkConfig};

#[cfg(feature = "zk-tls")]
use super::pem::PemFiles;
use crate::layout::Layout;
use crate::options::{NodeNaming, Options};
use crate::store_url::ZkServers;
use crate::value::{Secret, format_duration};

/// Validates the configuration without I/O. Files are not read.
pub(super) fn check(servers: &ZkServers, options: &Options) -> Result<(), BackendError> {
    if servers.are_encrypted() && options.ca.is_none() {
        let message = "zookeeper: encrypted connections require option `ca`; set it to the file of the trusted certificate authorities";
        return Err(BackendError::new(BackendErrorKind::Misconfigured, message).as_refused());
    }
    config(servers, options)?.check()
}

/// Opens the store of these servers.
pub(super) async fn open(
    servers: &ZkServers,
    options: &Options,
) -> Result<ZkBackend, BackendError> {
    let config = config(servers, options)?;
    let config = if servers.are_encrypted() { with_encryption(config, options)? } else { config };
    let backend = ZkBackend::open(config).await?;
    let lease_max = backend.session_timeout() / 2;
    match options.lease {
        // Returned here, because the message must name the servers' limit; the engine would name
        // only its own.
        Some(lease) if lease > lease_max => {
            let message = format!(
                "zookeeper: the lease is {}, more than the maximum {}, half of the granted session of {}; set a shorter `lease`, or raise \
                 `maxSessionTimeout` on the servers",
                format_duration(lease),
                format_duration(lease_max),
                format_duration(backend.session_timeout())
            );
            Err(BackendError::new(BackendErrorKind::Misconfigured, message).as_refused())
        }
        _ => Ok(backend),
    }
}

fn config(servers: &ZkServers, options: &Options) -> Result<ZkConfig, BackendError> {
    Ok(with_limits(with_node_options(with_servers(servers, options), options)?, options))
}

fn with_servers(servers: &ZkServers, options: &Options) -> ZkConfig {
    let mut config = ZkConfig::of_hosts(servers.hosts.clone());
    if let Some(chroot) = &servers.chroot {
        config = config.with_chroot(chroot);
    }
    if let Some((user, password)) = &servers.login {
        config = config.with_login(user.expose(), password.expose());
    }
    if let Some((scheme, credentials)) =
        options.auth.as_ref().and_then(|auth| auth.expose().split_once(':'))
    {
        config = config.with_auth(scheme, credentials);
    }
    config
}

fn with_node_options(mut config: ZkConfig, options: &Options) -> Result<ZkConfig, BackendError> {
    if options.layout == Some(Layout::Curator) {
        config = config.with_layout(ZkLayout::Curator);
    }
    if options.naming == Some(NodeNaming::Kazoo) {
        config = config.with_naming(ZkNaming::Kazoo);
    }
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(root) = &options.root {
        config = config.with_root(root);
    }
    if let Some(acl) = options.acl.as_ref().map(Secret::expose) {
        config = config.with_acl(Acl::parse(acl)?);
    }
    Ok(config)
}

fn with_limits(mut config: ZkConfig, options: &Options) -> ZkConfig {
    match (options.session, options.lease) {
        (Some(session), _) => config = config.with_session_timeout(session),
        (None, Some(lease)) => {
            config = config.with_session_timeout((lease * 2).max(ZkConfig::SESSION_TIMEOUT_MIN));
        }
        (None, None) => {}
    }
    if let Some(sessions) = options.sessions {
        config = config.with_sessions_max(sessions);
    }
    if let Some(connect_timeout) = options.connect_timeout {
        config = config.with_connect_timeout(connect_timeout);
    }
    if let Some(timeout) = options.timeout {
        // The engine ignores a response that arrives after its time-out.
        config = config.with_request_timeout(timeout * 5 / 6);
    }
    config
}

#[cfg(feature = "zk-tls")]
fn with_encryption(config: ZkConfig, options: &Options) -> Result<ZkConfig, BackendError> {
    let files = PemFiles { store: "zookeeper" };
    let text = |pem: Vec<u8>| String::from_utf8_lossy(&pem).into_owned();
    let ca = options.ca.as_ref().expect("`check` has refused its absence");
    let config = config.with_certificate_authority(&text(files.certificates("ca", ca)?))?;
    let (Some(cert), Some(key)) = (&options.cert, &options.key) else { return Ok(config) };
    let certificate = text(files.certificates("cert", cert)?);
    config.with_client_certificate(&certificate, &text(files.private_key(key.expose().as_ref())?))
}

#[cfg(not(feature = "zk-tls"))]
fn with_encryption(_: ZkConfig, _: &Options) -> Result<ZkConfig, BackendError> {
    unreachable!("its scheme is refused when the URL is parsed")
}
