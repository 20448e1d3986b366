//! Runs servers under another account, for servers that refuse to run as root.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use nix::unistd::{User, geteuid};

/// The account that runs a server: a named account, or the user that runs the test.
#[derive(Debug, Clone)]
pub(crate) struct ServerUser(Option<User>);

impl ServerUser {
    /// Returns the account `name` if the test runs as root. Without a name, or for another user,
    /// servers run as the current user.
    ///
    /// # Errors
    /// Returns an error if the account does not exist.
    pub(crate) fn for_root(name: Option<&str>) -> io::Result<Self> {
        let Some(name) = name.filter(|_| geteuid().is_root()) else { return Ok(Self(None)) };
        let missing = || io::Error::other(format!("there is no user {name} to run the server"));
        Ok(Self(Some(User::from_name(name)?.ok_or_else(missing)?)))
    }

    /// Creates a command that runs `program` under this account. The program keeps the process id
    /// of the command.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(user) = &self.0 else { return Command::new(program) };
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={}", user.uid)).arg(format!("--regid={}", user.gid));
        command.arg("--clear-groups").arg(program);
        command
    }

    /// Changes the owner of a file or a folder, but not of the folder's contents, to this account.
    pub(crate) fn chown(&self, path: &Path) -> io::Result<()> {
        let Some(user) = &self.0 else { return Ok(()) };
        chown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
    }
}
