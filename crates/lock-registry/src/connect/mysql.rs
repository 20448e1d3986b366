//! Opens a MariaDB or MySQL store from the server of a URL and the options. Reads the files that
//! options name before it connects.

use std::sync::Arc;

use registry_core::{BackendError, BackendErrorKind, LockBackend};
use registry_jdbc::{Encryption, MySqlBackend, MySqlConfig};

#[cfg(feature = "mysql-tls")]
use super::pem::PemFiles;
use crate::options::{Options, SERVER_TIME_MIN, SslMode};
use crate::store_url::{DatabaseAddress, DatabaseServer};
use crate::value::Secret;

/// Validates the configuration without I/O. Files are not read.
pub(super) fn check(server: &DatabaseServer, options: &Options) -> Result<(), BackendError> {
    let config = with_table_options(with_limits(connection_config(server), options), options);
    MySqlBackend::check(&config, &super::sql_mode(options))
}

/// Opens the store in this database.
pub(super) async fn open(
    server: &DatabaseServer,
    options: &Options,
) -> Result<Arc<dyn LockBackend>, BackendError> {
    let config = with_table_options(with_limits(connection_config(server), options), options);
    let config = with_encryption(config, options)?;
    Ok(Arc::new(MySqlBackend::open_mode(config, super::sql_mode(options)).await?))
}

fn connection_config(server: &DatabaseServer) -> MySqlConfig {
    let config = match &server.address {
        DatabaseAddress::Host((host, port)) => MySqlConfig::new(host, *port, &server.database),
        DatabaseAddress::Socket(socket, _) => MySqlConfig::unix(socket, &server.database),
    };
    match &server.login {
        Some(login) => {
            config.with_login(login.user.expose(), login.password.as_ref().map(Secret::expose))
        }
        None => config,
    }
}

fn with_table_options(mut config: MySqlConfig, options: &Options) -> MySqlConfig {
    if let Some(namespace) = &options.namespace {
        config = config.with_namespace(namespace);
    }
    if let Some(prefix) = &options.table_prefix {
        config = config.with_table_prefix(prefix);
    }
    if let Some(create) = options.create_schema {
        config = config.with_create_schema(create);
    }
    if let Some(purge_after) = options.purge_after {
        config = config.with_purge_after(purge_after);
    }
    config
}

fn with_limits(mut config: MySqlConfig, options: &Options) -> MySqlConfig {
    if let Some(pool) = options.pool {
        config = config.with_connections(pool);
    }
    if let Some(row_locks) = options.row_locks {
        config = config.with_row_locks(row_locks);
    }
    if let Some(connect_timeout) = options.connect_timeout {
        config = config.with_connect_timeout(connect_timeout);
    }
    let busy_timeout = match (options.busy_timeout, options.timeout) {
        (Some(busy_timeout), _) => busy_timeout,
        // The engine ignores the result of a statement that takes longer than its time-out.
        (None, Some(timeout)) => {
            MySqlConfig::BUSY_TIMEOUT.min(timeout * 5 / 6).max(SERVER_TIME_MIN)
        }
        (None, None) => MySqlConfig::BUSY_TIMEOUT,
    };
    // The connection must outlast the longest wait for a response.
    let longest = busy_timeout.max(options.timeout.unwrap_or_default());
    let response_timeout = MySqlConfig::RESPONSE_TIMEOUT.max(longest * 6 / 5);
    if options.purge_after.is_none() {
        // A row must be kept until every statement that could have read it has timed out.
        config = config.with_purge_after(MySqlConfig::PURGE_AFTER.max(response_timeout * 2));
    }
    config.with_busy_timeout(busy_timeout).with_response_timeout(response_timeout)
}

fn with_encryption(
    #[cfg_attr(not(feature = "mysql-tls"), expect(unused_mut, reason = "there are no files then"))]
    mut config: MySqlConfig,
    options: &Options,
) -> Result<MySqlConfig, BackendError> {
    #[cfg(not(feature = "mysql-tls"))]
    if options.ca.is_some() || options.cert.is_some() {
        return Err(tls_not_built_in());
    }
    #[cfg(feature = "mysql-tls")]
    {
        let files = PemFiles { store: "mysql" };
        if let Some(ca) = &options.ca {
            config = config.with_certificate_authority(files.certificates("ca", ca)?);
        }
        if let (Some(cert), Some(key)) = (&options.cert, &options.key) {
            let certificate = files.certificates("cert", cert)?;
            config = config
                .with_client_certificate(certificate, files.private_key(key.expose().as_ref())?);
        }
    }
    let Some(mode) = options.sslmode else { return Ok(config) };
    let encryption = match mode {
        SslMode::Disable => Encryption::Off,
        SslMode::Prefer => Encryption::Preferred,
        SslMode::Require => Encryption::Required,
        SslMode::VerifyCa => Encryption::VerifyAuthority,
        SslMode::VerifyFull => Encryption::VerifyHost,
    };
    if !cfg!(feature = "mysql-tls") && !matches!(mode, SslMode::Disable | SslMode::Prefer) {
        return Err(tls_not_built_in());
    }
    Ok(config.with_encryption(encryption))
}

fn tls_not_built_in() -> BackendError {
    let message = "mysql: encrypted connections are not built in; enable feature `mysql-tls` of lock-registry";
    BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
}
