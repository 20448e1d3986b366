//! The database and the files beside it as the file system sees them: where they are, whether they can be used, whether they are
//! still the same.
//!
//! Never opens the file. POSIX drops all of a process's locks on a file when *any* of its descriptors is closed, those of
//! SQLite included, so that a second look at the bytes could let two writers in. Looking at names and inodes is harmless.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use registry_core::BackendError;
use registry_core::BackendErrorKind::{self, Denied, Misconfigured};

use crate::error::{Detached, detached};

/// Where the three files are that make a database in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    /// The write-ahead log.
    pub(super) wal: PathBuf,
    /// The index of the log, which the processes share; their locks on the log are on this file.
    shm: PathBuf,
}

impl Place {
    /// Finds the file's real place and refuses what cannot work, before anything is made.
    ///
    /// # Errors
    /// `Misconfigured` for a path that cannot name a database, `Denied` for one that this process may not write.
    pub(super) fn find(path: &Path) -> Result<Self, BackendError> {
        let no = |kind: BackendErrorKind, says: &str| {
            BackendError::new(kind, format!("sqlite file {path:?}: {says}")).as_refused()
        };
        let Some(text) = path.to_str() else {
            return Err(no(Misconfigured, "the path must be UTF-8"));
        };
        if text.is_empty() || text.starts_with(":memory:") {
            return Err(no(
                Misconfigured,
                "a database in memory excludes nobody; name a file, or use the in-process store",
            ));
        }
        if text.contains('\0') {
            return Err(no(Misconfigured, "the path must not contain NUL"));
        }

        // SQLite names the files beside the database after the real file, so links are followed here, once.
        let real = match fs::canonicalize(path) {
            Ok(real) => real,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let name = path
                    .file_name()
                    .filter(|_| !text.ends_with('/'))
                    .ok_or_else(|| no(Misconfigured, "name a file, not a folder"))?;
                // Not just any file: another process may have made it since.
                if path.symlink_metadata().is_ok_and(|file| file.is_symlink()) {
                    return Err(no(Misconfigured, "it is a link that leads nowhere"));
                }
                let folder = match path.parent() {
                    Some(folder) if !folder.as_os_str().is_empty() => folder,
                    _ => Path::new("."),
                };
                let folder = fs::canonicalize(folder).map_err(|error| match error.kind() {
                    ErrorKind::NotFound => no(
                        Misconfigured,
                        &format!("the folder {folder:?} does not exist; make it first"),
                    ),
                    _ => cannot_reach(path, error),
                })?;
                folder.join(name)
            }
            Err(error) => return Err(cannot_reach(path, error)),
        };
        let folder = real.parent().unwrap_or_else(|| Path::new("/"));
        match fs::metadata(&real) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(no(Misconfigured, "this is a folder; name a file in it"));
            }
            Ok(metadata) if !metadata.is_file() => {
                return Err(no(Misconfigured, "this is no regular file"));
            }
            Ok(metadata) if has_other_names(&metadata) => {
                return Err(detached(&real, Detached::OtherName).as_refused());
            }
            Ok(_) if is_mounted(&real) => {
                return Err(no(
                    Misconfigured,
                    "it is mounted by itself, so the files beside it (-wal, -shm) are not those of other \
                     containers; mount its folder instead",
                ));
            }
            Ok(_) if !may_write(&real) => {
                return Err(no(Denied, "this process may not write to it; give it write access"));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if !fs::metadata(folder).is_ok_and(|folder| folder.is_dir()) {
                    return Err(no(Misconfigured, &format!("{folder:?} is no folder")));
                }
            }
            Err(error) => return Err(cannot_reach(path, error)),
        }
        // Even an existing database needs it: the log and the shared memory come and go beside the file.
        if !may_write(folder) {
            return Err(no(
                Denied,
                &format!(
                    "this process may not make files in {folder:?}; give it write access to the folder"
                ),
            ));
        }
        let beside = |suffix: &str| {
            let mut name = OsString::from(&real);
            name.push(suffix);
            PathBuf::from(name)
        };
        Ok(Self { wal: beside("-wal"), shm: beside("-shm"), path: real })
    }

    /// Which database is under the path now.
    ///
    /// # Errors
    /// `Misconfigured` when there is none, or when it has another name too.
    pub(super) fn database(&self) -> Result<Identity, BackendError> {
        let database = self.look(&self.path, Detached::Database)?;
        if has_other_names(&database) {
            return Err(detached(&self.path, Detached::OtherName));
        }
        Ok(Identity::of(&database))
    }

    /// Which files are under the three names now.
    ///
    /// # Errors
    /// `Misconfigured` when one is missing, or when the database has another name too.
    pub(super) fn files(&self) -> Result<Files, BackendError> {
        Ok(Files {
            database: self.database()?,
            wal: Identity::of(&self.look(&self.wal, Detached::Log)?),
            shm: Identity::of(&self.look(&self.shm, Detached::SharedMemory)?),
        })
    }

    /// Checks that the files under the three names are still those that a connection has open.
    ///
    /// An open file lives on without its name. Who comes later makes a new one and finds it free of locks: the two would
    /// both believe to hold. This goes for the log and its index as well, because what was committed lately is nowhere
    /// else. SQLite itself removes them only when the last connection closes, and empties them in place.
    /// And it names them after the database, so that a database with two names has two logs.
    ///
    /// The three looks cost a microsecond or two.
    ///
    /// # Errors
    /// `Misconfigured` when one was removed or replaced, or when the database was given another name.
    pub(super) fn check(&self, opened: &Files) -> Result<(), BackendError> {
        let what = match self.files()? {
            files if files == *opened => return Ok(()),
            files if files.database != opened.database => Detached::Database,
            files if files.wal != opened.wal => Detached::Log,
            _ => Detached::SharedMemory,
        };
        Err(detached(&self.path, what))
    }

    fn look(&self, file: &Path, what: Detached) -> Result<Metadata, BackendError> {
        fs::metadata(file).map_err(|_| detached(&self.path, what))
    }

    /// Whether the index of the log is the one that this process works with.
    ///
    /// All connections of a process share the one that the first of them opened, so a new connection says nothing about
    /// it. Where the kernel does not tell, there is nothing to object.
    pub(super) fn shares_memory_by(&self, files: &Files) -> bool {
        let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return true };
        // By name first: asking a foreign file, perhaps of a server that has gone, could take for ever.
        descriptors.flatten().map(|descriptor| descriptor.path()).any(|descriptor| {
            fs::read_link(&descriptor).is_ok_and(|file| file.file_name() == self.shm.file_name())
                && fs::metadata(&descriptor).is_ok_and(|open| Identity::of(&open) == files.shm)
        })
    }
}

/// The three files of a database in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Files {
    pub(super) database: Identity,
    pub(super) wal: Identity,
    pub(super) shm: Identity,
}

/// Which file it is, whatever its name. An inode is not used again while the file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    #[cfg(unix)]
    fn of(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    #[cfg(not(unix))]
    fn of(_metadata: &Metadata) -> Self {
        Self { device: 0, inode: 0 }
    }
}

#[cfg(unix)]
fn has_other_names(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() > 1
}

#[cfg(not(unix))]
fn has_other_names(_metadata: &Metadata) -> bool {
    false
}

/// Whether the path is a mount point. Its neighbours are then those of the mount, not those of the file.
fn is_mounted(path: &Path) -> bool {
    let Some(path) = path.to_str() else { return false };
    fs::read_to_string("/proc/self/mountinfo").is_ok_and(|mounts| is_mount_point(path, &mounts))
}

/// `mounts` is as in `/proc/self/mountinfo`: a line for each, whose fifth word is where it is.
fn is_mount_point(path: &str, mounts: &str) -> bool {
    let escaped = path
        .replace('\\', r"\134")
        .replace(' ', r"\040")
        .replace('\t', r"\011")
        .replace('\n', r"\012");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(&*escaped))
}

fn cannot_reach(path: &Path, error: std::io::Error) -> BackendError {
    let (kind, says) = match error.kind() {
        ErrorKind::PermissionDenied => (Denied, "this process may not enter a folder on the way"),
        ErrorKind::NotADirectory => (Misconfigured, "a part of the path is a file, not a folder"),
        ErrorKind::InvalidFilename => (Misconfigured, "the path is too long"),
        _ => (Misconfigured, "the path cannot be followed"),
    };
    BackendError::new(kind, format!("sqlite file {path:?}: {says}")).with_source(error).as_refused()
}

/// Asks the system, because neither a mode nor an owner tells: think of root, access lists and read-only mounts.
#[cfg(target_os = "linux")]
fn may_write(path: &Path) -> bool {
    use nix::fcntl::{AT_FDCWD, AtFlags};
    use nix::unistd::{AccessFlags, faccessat};
    faccessat(AT_FDCWD, path, AccessFlags::W_OK, AtFlags::AT_EACCESS).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn may_write(_path: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_mounted_by_itself_is_known() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            90 22 254:0 /srv/locks.db /app/my\\040locks.db rw,relatime shared:1 - ext4 /dev/vda rw\n";
        assert!(is_mount_point("/app/my locks.db", mounts));
        assert!(!is_mount_point("/app/my", mounts) && !is_mount_point("/srv/locks.db", mounts));
    }
}
