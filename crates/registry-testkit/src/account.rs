//! Another account to run as, for servers that refuse to be root.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use nix::unistd::{User, geteuid};

/// Whoever runs a server: an account of the operating system, or the user who runs the test.
#[derive(Debug, Clone)]
pub(crate) struct Account(Option<User>);

impl Account {
    /// The account `name`, if the test is run by root, who may choose. Everybody else runs servers as himself.
    pub(crate) fn for_root(name: &str) -> io::Result<Self> {
        if !geteuid().is_root() {
            return Ok(Self(None));
        }
        let missing = || io::Error::other(format!("there is no user {name} to run the server"));
        Ok(Self(Some(User::from_name(name)?.ok_or_else(missing)?)))
    }

    /// A command that runs `program` by this account. The process id stays that of the command.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(user) = &self.0 else { return Command::new(program) };
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={}", user.uid)).arg(format!("--regid={}", user.gid));
        command.arg("--clear-groups").arg(program);
        command
    }

    /// Gives a file or a folder, not what is in it, to this account.
    pub(crate) fn own(&self, path: &Path) -> io::Result<()> {
        let Some(user) = &self.0 else { return Ok(()) };
        chown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
    }
}
