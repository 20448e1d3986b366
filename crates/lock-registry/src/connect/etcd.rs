//! Opens an etcd store from the members of a URL and the options.

use registry_core::BackendError;
use registry_etcd::{EtcdBackend, EtcdConfig, Layout as EtcdLayout};

#[cfg(feature = "etcd-tls")]
use super::pem::PemFiles;
use crate::layout::Layout;
use crate::options::Options;
use crate::store_url::EtcdMembers;

/// Validates the configuration without I/O. Files are not read.
pub(super) fn check(cluster: &EtcdMembers, options: &Options) -> Result<(), BackendError> {
    config(cluster, options).check()
}

/// Opens the store of these members.
pub(super) async fn open(
    cluster: &EtcdMembers,
    options: &Options,
) -> Result<EtcdBackend, BackendError> {
    let config = config(cluster, options);
    #[cfg(feature = "etcd-tls")]
    let config = if cluster.are_encrypted() { with_encryption(config, options)? } else { config };
    EtcdBackend::open(config).await
}

fn config(cluster: &EtcdMembers, options: &Options) -> EtcdConfig {
    let mut config = EtcdConfig::new(cluster.members.clone());
    if let Some((user, password)) = &cluster.login {
        config = config.with_login(user.expose(), password.expose());
    }
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if options.layout == Some(Layout::Etcdctl) {
        config = config.with_layout(EtcdLayout::Etcdctl);
    }
    if let Some(connect_timeout) = options.connect_timeout {
        config = config.with_connect_timeout(connect_timeout);
    }
    if let Some(timeout) = options.timeout {
        // The client must switch from a silent member within the engine's time-out.
        config = config.with_response_timeout(timeout);
    }
    config
}

#[cfg(feature = "etcd-tls")]
fn with_encryption(mut config: EtcdConfig, options: &Options) -> Result<EtcdConfig, BackendError> {
    let files = PemFiles { store: "etcd" };
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
