//! Options from `LOCK_REGISTRY_*` variables. Feature `config`.

use std::ffi::OsString;

use registry_core::ConfigError;

use crate::config::RegistryConfig;
use crate::options::{Origin, VARIABLE_PREFIX};

impl RegistryConfig {
    /// Adds the options of this process's `LOCK_REGISTRY_*` variables. Code and the command line
    /// override these variables. The variables override the configuration file and the URL. Ignores
    /// the same variables as [`with_vars`](Self::with_vars).
    ///
    /// # Errors
    /// [`ConfigError`] if a variable with this prefix:
    ///
    /// - is unknown;
    /// - is not UTF-8;
    /// - has a value with invalid syntax;
    /// - sets an option that another variable has already set.
    ///
    /// [`check`](Self::check) also verifies that each value is in the range of its option.
    pub fn with_env(self) -> Result<Self, ConfigError> {
        self.with_vars(std::env::vars_os())
    }

    /// Adds the options of `variables`. Ignores:
    ///
    /// - variables without the prefix `LOCK_REGISTRY_`;
    /// - `LOCK_REGISTRY_LOG`, the log filter of the `lockreg` command;
    /// - the variables that Kubernetes sets in every pod for a service with the name
    ///   `lock-registry` or `lock-registry-…`: all names of the form `*_SERVICE_*`, `*_PORT` and
    ///   `*_PORT_*`.
    ///
    /// # Errors
    /// As [`RegistryConfig::with_env`].
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let variables =
    ///     [("LOCK_REGISTRY_URL", "memory:"), ("LOCK_REGISTRY_LEASE", "10s"), ("HOME", "/")];
    /// let config = RegistryConfig::new().with_vars(variables)?;
    /// # config.check()?;
    /// # Ok::<(), lock_registry::ConfigError>(())
    /// ```
    pub fn with_vars<N, V>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, ConfigError>
    where
        N: Into<OsString>,
        V: Into<OsString>,
    {
        for (variable, value) in variables {
            let (variable, value) = (variable.into(), value.into());
            let name = variable.to_string_lossy();
            if !name.starts_with(VARIABLE_PREFIX)
                || RESERVED.contains(&&*name)
                || is_service_link(&name)
            {
                continue;
            }
            let Some(value) = value.to_str() else {
                return Err(ConfigError::Invalid(format!(
                    "{name} is not UTF-8; set it to UTF-8 text"
                )));
            };
            self.options_mut(Origin::Environment).set_variable(&name, value)?;
        }
        Ok(self)
    }
}

/// Variables that have the prefix but are not options.
const RESERVED: &[&str] = &["LOCK_REGISTRY_LOG"];

/// Returns whether Kubernetes sets `variable` for a service. No option has such a name.
///
/// Source: "Discovering services" in the Kubernetes documentation of Services.
fn is_service_link(variable: &str) -> bool {
    variable.contains("_SERVICE_") || variable.contains("_PORT_") || variable.ends_with("_PORT")
}
