//! Selects and opens the store. This module returns configuration errors before any access to a
//! file or a server. Exception: `--require-reach` is checked after the store is opened. For the
//! default store, it is also checked before.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lock_registry::{Reach, Registry, RegistryConfig, config::Setting, observe::Observer};
use serde_json::json;

use crate::args::{AcquireArgs, GlobalArgs};
use crate::exit::CliError;
use crate::output::Output;

/// The valid configuration of a store that is not open yet.
#[derive(Debug)]
pub(crate) struct StoreConfig {
    config: RegistryConfig,
    /// The directory to create before opening the default store. `None` for any other store.
    directory: Option<PathBuf>,
    /// The default store is used because neither a URL nor `--local` was given.
    is_implicit_default: bool,
    require_reach: Option<Reach>,
}

impl StoreConfig {
    /// Selects the store: first the URL of the command line, then the URL of the environment, then
    /// the SQLite file of this user. With `--local`, selects the SQLite file.
    pub(crate) fn choose(global: &GlobalArgs) -> Result<Self, CliError> {
        let mut config = RegistryConfig::new().with_env()?;
        let mut directory = None;
        if let Some(url) = &global.url {
            config = config.with_argument("url", url)?;
        } else if global.local || std::env::var_os("LOCK_REGISTRY_URL").is_none() {
            if global.require_reach.is_some_and(|required| Reach::from(required) > Reach::Host) {
                return Err(CliError::usage(
                    "--require-reach requires network, but the default store reaches only this host; set another \
                     store with --url, or with LOCK_REGISTRY_URL and without --local",
                ));
            }
            let state = state_directory(|name| std::env::var_os(name))?;
            config = config.url(sqlite_url(&state.join("locks.db")));
            directory = Some(state);
        }
        if let Some(namespace) = &global.namespace {
            config = config.with_argument("namespace", namespace)?;
        }
        config.check()?;
        let is_implicit_default = directory.is_some() && !global.local;
        let require_reach = global.require_reach.map(Reach::from);
        Ok(Self { config, directory, is_implicit_default, require_reach })
    }

    /// Sets the lease, the label and the time limit for connecting of a command that acquires a
    /// lock.
    pub(crate) fn with_acquire_args(self, args: &AcquireArgs) -> Result<Self, CliError> {
        self.with_connect_options(args.lease.as_deref(), args.label.as_deref(), args.wait)
    }

    /// Sets the lease, the label (default: `HOST:PID`), and the time for which failed connection
    /// attempts are repeated.
    pub(crate) fn with_connect_options(
        mut self,
        lease: Option<&str>,
        label: Option<&str>,
        connect_limit: Option<Duration>,
    ) -> Result<Self, CliError> {
        if let Some(lease) = lease {
            self.config = self.config.with_argument("lease", lease)?;
        }
        if let Some(label) = label {
            self.config = self.config.with_argument("label", label)?;
        } else if !self.settings()?.iter().any(|setting| setting.name == "label") {
            self.config = self.config.label(default_label());
        }
        if let Some(connect_limit) = connect_limit {
            self.config = self.config.connect_within(connect_limit);
        }
        self.config.check()?;
        Ok(self)
    }

    /// Adds an observer of registry events.
    pub(crate) fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.config = self.config.observer(observer);
        self
    }

    /// Returns the settings and their origins.
    pub(crate) fn settings(&self) -> Result<Vec<Setting>, CliError> {
        Ok(self.config.settings()?)
    }

    /// Opens the store, and checks its reach.
    pub(crate) async fn open(self, output: Output) -> Result<Registry, CliError> {
        if self.is_implicit_default && !io::stderr().is_terminal() {
            output.notice(
                "warning",
                "locks are stored in a local file and do not exclude other hosts; set a store with --url or \
                 LOCK_REGISTRY_URL, or confirm the file with --local",
                json!({ "store": "sqlite" }),
            );
        }
        if let Some(directory) = &self.directory {
            // The mode excludes other users, because a user with write access can break every lock.
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .map_err(|source| CliError::Directory { directory: directory.clone(), source })?;
        }
        let registry = self.config.connect().await?;
        let capabilities = registry.capabilities();
        match self.require_reach {
            Some(required) if capabilities.reach < required => Err(CliError::usage(format!(
                "--require-reach requires {}, but the {} store reaches only {}; set another store with --url",
                format!("{required:?}").to_lowercase(),
                capabilities.store,
                capabilities.reach
            ))),
            _ => Ok(registry),
        }
    }
}

/// Returns the directory for state that persists over reboots, as defined by the XDG base directory
/// specification.
fn state_directory(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CliError> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    match state {
        Some(state) => Ok(state.join("lock-registry")),
        None => Err(CliError::usage(
            "neither XDG_STATE_HOME nor HOME is an absolute path, so no default store exists; set a store with --url",
        )),
    }
}

fn sqlite_url(path: &Path) -> String {
    let mut url = "sqlite:".to_owned();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                url.push(char::from(*byte))
            }
            other => {
                let _ = write!(url, "%{other:02X}");
            }
        }
    }
    url
}

fn default_label() -> String {
    let host = nix::unistd::gethostname()
        .map_or_else(|_| "?".into(), |host| host.to_string_lossy().into_owned());
    format!("{host}:{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(variables: &[(&str, &str)]) -> Option<PathBuf> {
        state_directory(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
        .ok()
    }

    #[test]
    fn the_default_store_is_in_the_xdg_state_directory() {
        assert_eq!(
            directory(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]),
            Some("/s/lock-registry".into())
        );
        assert_eq!(directory(&[("HOME", "/h")]), Some("/h/.local/state/lock-registry".into()));
        assert_eq!(
            directory(&[("XDG_STATE_HOME", "s"), ("HOME", "/h")]),
            Some("/h/.local/state/lock-registry".into())
        );
        assert_eq!(directory(&[("HOME", "")]), None);
    }

    #[test]
    fn a_path_is_percent_encoded_in_the_url() {
        assert_eq!(sqlite_url(Path::new("/a b?#%/ü.db")), "sqlite:/a%20b%3F%23%25/%C3%BC.db");
    }
}
