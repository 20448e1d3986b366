//! Options from `LOCK_REGISTRY_*` variables. Feature `config`.

use std::ffi::OsString;

use registry_core::ConfigError;

use crate::config::RegistryConfig;
use crate::layer::{Origin, VARIABLE_PREFIX};

impl RegistryConfig {
    /// Adds the options that `LOCK_REGISTRY_*` variables of this process set. They are weaker than code and stronger than
    /// everything else.
    ///
    /// # Errors
    /// [`ConfigError`] when a variable of this prefix is unknown, is not UTF-8 or has a value that its option cannot have.
    pub fn with_env(self) -> Result<Self, ConfigError> {
        self.with_vars(std::env::vars_os())
    }

    /// Adds the options that `variables` set; others than `LOCK_REGISTRY_*` are passed over.
    ///
    /// `LOCK_REGISTRY_LOG`, which tells the `lockreg` command what to log, is no option and is passed over too.
    ///
    /// # Errors
    /// As [`RegistryConfig::with_env`].
    ///
    /// # Examples
    /// ```
    /// # use lock_registry::RegistryConfig;
    /// let variables = [("LOCK_REGISTRY_URL", "memory:"), ("LOCK_REGISTRY_LEASE", "10s"), ("HOME", "/")];
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
            if !name.starts_with(VARIABLE_PREFIX) || RESERVED.contains(&&*name) {
                continue;
            }
            let Some(value) = value.to_str() else {
                return Err(ConfigError::Invalid(format!("{name} is not UTF-8")));
            };
            self.layer_mut(Origin::Environment).read_variable(&name, value)?;
        }
        Ok(self)
    }
}

/// Variables of our prefix that are no options.
const RESERVED: &[&str] = &["LOCK_REGISTRY_LOG"];
