//! The database file, its log and its index in the file system: their paths, whether they are
//! usable, and whether they are still the same files.
//!
//! Never opens the files. POSIX drops all of a process's locks on a file when *any* of its
//! descriptors is closed, including SQLite's locks. Reading the file would therefore allow two
//! writers. Checking names and inodes is harmless.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use registry_core::BackendError;
use registry_core::BackendErrorKind::{self, Denied, Misconfigured};

use crate::error::{Detached, detached};

/// The paths of the three files of an open database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    /// The write-ahead log.
    pub(super) wal: PathBuf,
    /// The index of the log, which the processes share. SQLite's locks on the log are on this file.
    shm: PathBuf,
}

impl Place {
    /// Finds the file's real path and checks it, before any file is created.
    ///
    /// # Errors
    /// `Misconfigured` for a path that cannot name a database, `Denied` for one that this process
    /// may not write.
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

        // SQLite names log and index after the real file, so links are resolved here, once.
        let real = match fs::canonicalize(path) {
            Ok(real) => real,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let name = path
                    .file_name()
                    .filter(|_| !text.ends_with('/'))
                    .ok_or_else(|| no(Misconfigured, "name a file, not a folder"))?;
                // Checks for a link, not for any file: another process may have created the file
                // since.
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
        // An existing database needs it too: the log and the index are created and deleted next to
        // the file.
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

    /// Returns the identity of the database that is now at the path.
    ///
    /// # Errors
    /// `Misconfigured` if there is none, or if it has a second name.
    pub(super) fn database(&self) -> Result<Identity, BackendError> {
        let database = self.look(&self.path, Detached::Database)?;
        if has_other_names(&database) {
            return Err(detached(&self.path, Detached::OtherName));
        }
        Ok(Identity::of(&database))
    }

    /// Returns the identities of the files that are now at the three paths.
    ///
    /// # Errors
    /// `Misconfigured` if one is missing, or if the database has a second name.
    pub(super) fn files(&self) -> Result<Files, BackendError> {
        Ok(Files {
            database: self.database()?,
            wal: Identity::of(&self.look(&self.wal, Detached::Log)?),
            shm: Identity::of(&self.look(&self.shm, Detached::SharedMemory)?),
        })
    }

    /// Checks that the files at the three paths are still those that a connection has open.
    ///
    /// An open file continues to exist without its name. A process that opens the path later
    /// creates a new file without locks, and both processes could hold the same lock. The same is
    /// true of the log and its index, because recent commits exist only there. SQLite itself
    /// removes them only when the last connection closes, and otherwise empties them in place.
    /// SQLite names them after the database, so a database with two names has two logs.
    ///
    /// The three checks take one or two microseconds.
    ///
    /// # Errors
    /// `Misconfigured` if a file was removed or replaced, or if the database was given a second
    /// name.
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

    /// Returns whether this process has this index of the log open.
    ///
    /// All connections of a process share the index that the first of them opened, so opening a new
    /// connection does not verify it. Without `/proc`, returns `true`.
    pub(super) fn shares_memory_by(&self, files: &Files) -> bool {
        let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return true };
        // Compares names first: `metadata` of another descriptor's file, perhaps on an unreachable
        // file server, could block forever.
        descriptors.flatten().map(|descriptor| descriptor.path()).any(|descriptor| {
            fs::read_link(&descriptor).is_ok_and(|file| file.file_name() == self.shm.file_name())
                && fs::metadata(&descriptor).is_ok_and(|open| Identity::of(&open) == files.shm)
        })
    }
}

/// The identities of the three files of an open database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Files {
    pub(super) database: Identity,
    pub(super) wal: Identity,
    pub(super) shm: Identity,
}

/// The identity of a file, whatever its name. The system does not reuse the inode of an open file.
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

/// Returns whether the path is a mount point. Its log and index would then be those of the mount,
/// not those of the file.
fn is_mounted(path: &Path) -> bool {
    let Some(path) = path.to_str() else { return false };
    fs::read_to_string("/proc/self/mountinfo").is_ok_and(|mounts| is_mount_point(path, &mounts))
}

/// `mounts` has the format of `/proc/self/mountinfo`: one line per mount, with the mount point in
/// the fifth field.
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

/// Asks the system, because mode and owner do not decide: root, access lists and read-only mounts
/// matter too.
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
