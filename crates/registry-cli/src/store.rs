//! Which store is meant, and opening it. Everything that can be wrong is found before anything is touched.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lock_registry::{LockOptions, Observer, Registry, RegistryConfig, Setting};

use crate::args::{Global, Taking};
use crate::exit::Failure;

/// A store that was found to be configured correctly, not opened yet.
#[derive(Debug)]
pub(crate) struct Store {
    config: RegistryConfig,
    /// The folder that must be there first. Only for the store that is used when none is named.
    folder: Option<PathBuf>,
}

impl Store {
    /// The store that the command line, or else the environment, names; or else this user's own file.
    pub(crate) fn choose(global: &Global) -> Result<Self, Failure> {
        let mut config = RegistryConfig::new().with_env()?;
        let mut folder = None;
        if let Some(url) = &global.url {
            config = config.url(url);
        } else if std::env::var_os("LOCK_REGISTRY_URL").is_none() {
            let state = state_folder(|name| std::env::var_os(name))?;
            config = config.url(sqlite_url(&state.join("locks.db")));
            folder = Some(state);
        }
        if let Some(namespace) = &global.namespace {
            at_most(RegistryConfig::NAMESPACE_BYTES_MAX, "--namespace", namespace)?;
            config = config.namespace(namespace);
        }
        config.check()?;
        Ok(Self { config, folder })
    }

    /// The same for somebody who takes locks in this way.
    pub(crate) fn taking(mut self, taking: &Taking) -> Result<Self, Failure> {
        if let Some(lease) = taking.lease {
            self.config = self.config.lease(lease);
        }
        if let Some(label) = &taking.label {
            at_most(LockOptions::LABEL_BYTES_MAX, "--label", label)?;
            self.config = self.config.label(label);
        }
        if !self.settings()?.iter().any(|setting| setting.name == "label") {
            self.config = self.config.label(default_label());
        }
        self.config.check()?;
        Ok(self)
    }

    /// The same, with somebody who is told what happens.
    pub(crate) fn observed(mut self, observer: Arc<dyn Observer>) -> Self {
        self.config = self.config.observer(observer);
        self
    }

    /// What is set, and by whom.
    pub(crate) fn settings(&self) -> Result<Vec<Setting>, Failure> {
        Ok(self.config.settings()?)
    }

    /// Opens it.
    pub(crate) async fn open(self) -> Result<Registry, Failure> {
        if let Some(folder) = &self.folder {
            // Who can write here can break every lock.
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .map_err(|source| Failure::Folder { folder: folder.clone(), source })?;
        }
        Ok(self.config.connect().await?)
    }
}

/// Refuses a text that is too long, by the name that whoever gave it knows: to the configuration, a flag is code.
fn at_most(bytes_max: usize, flag: &str, text: &str) -> Result<(), Failure> {
    if text.len() > bytes_max {
        let bytes = text.len();
        return Err(Failure::usage(format!("{flag} has {bytes} bytes, more than {bytes_max}")));
    }
    Ok(())
}

/// Where the XDG base directory specification puts what must outlive a reboot but is nobody's data.
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
