//! Opens a ZooKeeper store from the servers of a URL and the options. Reads the files that options
//! name before it sends anything.

use registry_core::{BackendError, BackendErrorKind};
use registry_zk::{Acl, Layout as ZkLayout, Naming as ZkNaming, ZkBackend, ZkConfig};

#[cfg(feature = "zk-tls")]
use super::pem::Files;
use crate::layer::{Layer, Naming};
use crate::layout::Layout;
use crate::store_url::ZkServers;
use crate::value::{Secret, shown};

/// Validates the configuration without I/O. Files are not read.
pub(super) fn check(servers: &ZkServers, options: &Layer) -> Result<(), BackendError> {
    if servers.are_encrypted() && options.ca.is_none() {
        let says = "zookeeper: encrypted connections need option `ca`, the file with the certificate authorities that are trusted";
        return Err(BackendError::new(BackendErrorKind::Misconfigured, says).as_refused());
    }
    config(servers, options)?.check()
}

/// Opens the store of these servers.
pub(super) async fn open(servers: &ZkServers, options: &Layer) -> Result<ZkBackend, BackendError> {
    let config = config(servers, options)?;
    let config = if servers.are_encrypted() { encrypted(config, options)? } else { config };
    let backend = ZkBackend::open(config).await?;
    let longest = backend.session_timeout() / 2;
    match options.lease {
        // Returned here, because the message must name the servers' limit; the engine would name
        // only its own.
        Some(lease) if lease > longest => {
            let says = format!(
                "zookeeper: the servers grant sessions of at most {}, and so leases of at most {}; their limit is `maxSessionTimeout`, the \
                 lease that is asked for is {}",
                shown(backend.session_timeout()),
                shown(longest),
                shown(lease)
            );
            Err(BackendError::new(BackendErrorKind::Misconfigured, says).as_refused())
        }
        _ => Ok(backend),
    }
}

fn config(servers: &ZkServers, options: &Layer) -> Result<ZkConfig, BackendError> {
    Ok(limits(nodes(access(servers, options), options)?, options))
}

fn access(servers: &ZkServers, options: &Layer) -> ZkConfig {
    let mut config = ZkConfig::of_hosts(servers.hosts.clone());
    if let Some(chroot) = &servers.chroot {
        config = config.with_chroot(chroot);
    }
    if let Some((user, password)) = &servers.login {
        config = config.with_login(user.told(), password.told());
    }
    if let Some((scheme, credentials)) =
        options.auth.as_ref().and_then(|auth| auth.told().split_once(':'))
    {
        config = config.with_auth(scheme, credentials);
    }
    config
}

fn nodes(mut config: ZkConfig, options: &Layer) -> Result<ZkConfig, BackendError> {
    if options.layout == Some(Layout::Curator) {
        config = config.with_layout(ZkLayout::Curator);
    }
    if options.naming == Some(Naming::Kazoo) {
        config = config.with_naming(ZkNaming::Kazoo);
    }
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(root) = &options.root {
        config = config.with_root(root);
    }
    if let Some(acl) = options.acl.as_ref().map(Secret::told) {
        config = config.with_acl(Acl::parse(acl)?);
    }
    Ok(config)
}

fn limits(mut config: ZkConfig, options: &Layer) -> ZkConfig {
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
fn encrypted(config: ZkConfig, options: &Layer) -> Result<ZkConfig, BackendError> {
    let files = Files { store: "zookeeper" };
    let text = |pem: Vec<u8>| String::from_utf8_lossy(&pem).into_owned();
    let ca = options.ca.as_ref().expect("`check` has refused its absence");
    let config = config.with_certificate_authority(&text(files.certificates("ca", ca)?))?;
    let (Some(cert), Some(key)) = (&options.cert, &options.key) else { return Ok(config) };
    let certificate = text(files.certificates("cert", cert)?);
    config.with_client_certificate(&certificate, &text(files.private_key(key.told().as_ref())?))
}

#[cfg(not(feature = "zk-tls"))]
fn encrypted(_: ZkConfig, _: &Layer) -> Result<ZkConfig, BackendError> {
    unreachable!("its scheme is refused when the URL is parsed")
}
