//! Chooses and opens the store. All configuration errors are returned before any access to a file
//! or a server.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lock_registry::{LockRegistry as _, Observer, Reach, Registry, RegistryConfig, Setting};
use serde_json::json;

use crate::args::{Global, Taking};
use crate::exit::Failure;
use crate::say::Say;

/// A store whose configuration is checked, but which is not open yet.
#[derive(Debug)]
pub(crate) struct Store {
    config: RegistryConfig,
    /// The folder to create before opening. Only for the default store.
    folder: Option<PathBuf>,
    /// Whether the default store is used because neither a URL nor `--local` was given.
    is_implicit: bool,
    require_reach: Option<Reach>,
}

impl Store {
    /// Chooses the store of the command line, else of the environment, else the SQLite file of this
    /// user.
    pub(crate) fn choose(global: &Global) -> Result<Self, Failure> {
        let mut config = RegistryConfig::new().with_env()?;
        let mut folder = None;
        if let Some(url) = &global.url {
            config = config.with_argument("url", url)?;
        } else if global.local || std::env::var_os("LOCK_REGISTRY_URL").is_none() {
            if global.require_reach.is_some_and(|required| Reach::from(required) > Reach::Host) {
                return Err(Failure::usage(
                    "the default store excludes processes of this host only, and --require-reach asks for network; \
                     name a store with --url or LOCK_REGISTRY_URL",
                ));
            }
            let state = state_folder(|name| std::env::var_os(name))?;
            config = config.url(sqlite_url(&state.join("locks.db")));
            folder = Some(state);
        }
        if let Some(namespace) = &global.namespace {
            config = config.with_argument("namespace", namespace)?;
        }
        config.check()?;
        let is_implicit = folder.is_some() && !global.local;
        let require_reach = global.require_reach.map(Reach::from);
        Ok(Self { config, folder, is_implicit, require_reach })
    }

    /// Adds the options of a command that acquires a lock.
    pub(crate) fn taking(mut self, taking: &Taking) -> Result<Self, Failure> {
        if let Some(lease) = &taking.lease {
            self.config = self.config.with_argument("lease", lease)?;
        }
        if let Some(label) = &taking.label {
            self.config = self.config.with_argument("label", label)?;
        } else if !self.settings()?.iter().any(|setting| setting.name == "label") {
            self.config = self.config.label(default_label());
        }
        if let Some(wait) = taking.wait {
            self.config = self.config.connect_within(wait);
        }
        self.config.check()?;
        Ok(self)
    }

    /// Adds an observer of registry events.
    pub(crate) fn observed(mut self, observer: Arc<dyn Observer>) -> Self {
        self.config = self.config.observer(observer);
        self
    }

    /// Returns the settings and their origins.
    pub(crate) fn settings(&self) -> Result<Vec<Setting>, Failure> {
        Ok(self.config.settings()?)
    }

    /// Opens the store, and checks its reach.
    pub(crate) async fn open(self, say: Say) -> Result<Registry, Failure> {
        if self.is_implicit && !io::stderr().is_terminal() {
            say.notice(
                "warning",
                "locks are in a file of this host and exclude no other host; name a store with --url or \
                 LOCK_REGISTRY_URL, or say --local",
                json!({ "store": "sqlite" }),
            );
        }
        if let Some(folder) = &self.folder {
            // A user with write access here can break every lock.
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .map_err(|source| Failure::Folder { folder: folder.clone(), source })?;
        }
        let registry = self.config.connect().await?;
        let capabilities = registry.capabilities();
        match self.require_reach {
            Some(required) if capabilities.reach < required => Err(Failure::usage(format!(
                "the {} store excludes {} only, and --require-reach asks for {required}; name another store with --url",
                capabilities.store, capabilities.reach
            ))),
            _ => Ok(registry),
        }
    }
}

/// Returns the folder for state that persists over reboots, by the XDG base directory
/// specification.
fn state_folder(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Failure> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    match state {
        Some(state) => Ok(state.join("lock-registry")),
        None => Err(Failure::usage(
            "neither XDG_STATE_HOME nor HOME is an absolute path, so there is no default store; name one with --url",
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

    fn folder(variables: &[(&str, &str)]) -> Option<PathBuf> {
        state_folder(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
        .ok()
    }

    #[test]
    fn the_default_store_is_where_xdg_says() {
        assert_eq!(
            folder(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]),
            Some("/s/lock-registry".into())
        );
        assert_eq!(folder(&[("HOME", "/h")]), Some("/h/.local/state/lock-registry".into()));
        assert_eq!(
            folder(&[("XDG_STATE_HOME", "s"), ("HOME", "/h")]),
            Some("/h/.local/state/lock-registry".into())
        );
        assert_eq!(folder(&[("HOME", "")]), None);
    }

    #[test]
    fn any_path_survives_the_url() {
        assert_eq!(sqlite_url(Path::new("/a b?#%/ü.db")), "sqlite:/a%20b%3F%23%25/%C3%BC.db");
    }
}
