//! The paths of the database file, its log and its index. Checks that the files are usable, and
//! that they are still the same files.
//!
//! This module never opens the files. When a process closes *any* descriptor of a file, POSIX drops
//! all locks of the process on that file, including SQLite's locks. So opening and closing the file
//! here would permit two writers. Checks of names and inodes are harmless.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use registry_core::BackendError;
use registry_core::BackendErrorKind::{self, Denied, Misconfigured, Transient};

use super::error::{FileMismatch, at_path, file_mismatch_error};

/// The paths of the three files of an open database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DatabasePaths {
    pub(super) path: PathBuf,
    /// The write-ahead log.
    pub(super) wal: PathBuf,
    /// The index of the log, which the processes share. SQLite locks ranges of this file to protect
    /// the log.
    shm: PathBuf,
}

impl DatabasePaths {
    /// Resolves and checks the path of the database. Creates no file.
    ///
    /// # Errors
    /// `Misconfigured` for a path that cannot name a database, `Denied` for a path that this
    /// process may not search or write.
    pub(super) fn resolve(path: &Path) -> Result<Self, BackendError> {
        check_text(path)?;
        let resolved = resolve_links(path)?;
        check_file(path, &resolved)?;
        let with_suffix = |suffix: &str| {
            let mut name = OsString::from(&resolved);
            name.push(suffix);
            PathBuf::from(name)
        };
        Ok(Self { wal: with_suffix("-wal"), shm: with_suffix("-shm"), path: resolved })
    }

    /// Returns the identity of the database that is now at the path.
    ///
    /// # Errors
    /// `Misconfigured` if no file is at the path, or if the file has a second name. `Transient` if
    /// the state of the file cannot be read.
    pub(super) fn database_id(&self) -> Result<FileId, BackendError> {
        let metadata = self.metadata(&self.path, FileMismatch::Database)?;
        if has_hard_links(&metadata) {
            return Err(file_mismatch_error(&self.path, FileMismatch::HardLink));
        }
        Ok(FileId::of(&metadata))
    }

    /// Returns the identities of the files that are now at the three paths.
    ///
    /// # Errors
    /// `Misconfigured` if a file is missing, or if the database has a second name. `Transient` if
    /// the state of a file cannot be read.
    pub(super) fn current_ids(&self) -> Result<FileIds, BackendError> {
        Ok(FileIds {
            database: self.database_id()?,
            wal: FileId::of(&self.metadata(&self.wal, FileMismatch::Log)?),
            shm: FileId::of(&self.metadata(&self.shm, FileMismatch::SharedMemory)?),
        })
    }

    /// Checks that the files at the three paths are still the open files of a connection.
    ///
    /// An open file continues to exist without its name. A process that opens the path later
    /// creates a new file without locks, and both processes could hold the same lock. The same is
    /// true of the log and its index, because recent commits exist only in them. SQLite itself
    /// removes log and index only when the last connection closes, and otherwise empties them in
    /// place. SQLite names them after the database, so a database with two names has two logs.
    ///
    /// The three checks take one or two microseconds.
    ///
    /// # Errors
    /// `Misconfigured` if a file was removed or replaced, or if the database was given a second
    /// name. `Transient` if the state of a file cannot be read.
    pub(super) fn check(&self, opened: &FileIds) -> Result<(), BackendError> {
        let reason = match self.current_ids()? {
            ids if ids == *opened => return Ok(()),
            ids if ids.database != opened.database => FileMismatch::Database,
            ids if ids.wal != opened.wal => FileMismatch::Log,
            _ => FileMismatch::SharedMemory,
        };
        Err(file_mismatch_error(&self.path, reason))
    }

    fn metadata(&self, file: &Path, reason: FileMismatch) -> Result<Metadata, BackendError> {
        fs::metadata(file).map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => {
                file_mismatch_error(&self.path, reason)
            }
            _ => {
                let message =
                    "the state of the file cannot be read; check the permissions of its folder";
                at_path(Transient, &self.path, message).with_source(error)
            }
        })
    }

    /// Returns whether this process has this index of the log open, or `true` without `/proc`.
    ///
    /// All connections of a process share the index that the first connection opened, so a new
    /// connection does not reopen the index.
    pub(super) fn has_shared_memory_open(&self, ids: &FileIds) -> bool {
        let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return true };
        // The names are compared first, because `metadata` of an unrelated file on an unreachable
        // file server could block forever.
        descriptors.flatten().map(|descriptor| descriptor.path()).any(|descriptor| {
            fs::read_link(&descriptor).is_ok_and(|file| file.file_name() == self.shm.file_name())
                && fs::metadata(&descriptor).is_ok_and(|open| FileId::of(&open) == ids.shm)
        })
    }
}

fn refused(path: &Path, kind: BackendErrorKind, message: &str) -> BackendError {
    at_path(kind, path, message).as_refused()
}

/// Checks the path without reading the file system.
fn check_text(path: &Path) -> Result<(), BackendError> {
    let refuse = |message| Err(refused(path, Misconfigured, message));
    match path.to_str() {
        None => refuse("the path is not UTF-8; use another path"),
        Some(text) if text.is_empty() || text.starts_with(":memory:") => refuse(
            "a database in memory is not shared with other processes; name a file, or use the in-process store",
        ),
        Some(text) if text.contains('\0') => refuse("the path must not contain NUL"),
        Some(_) => Ok(()),
    }
}

/// Returns the path without symbolic links, because SQLite names log and index after the real
/// file. The file need not exist, its folder must.
fn resolve_links(path: &Path) -> Result<PathBuf, BackendError> {
    match fs::canonicalize(path) {
        Ok(resolved) => return Ok(resolved),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(path_error(path, error)),
    }
    let refuse = |message: &str| refused(path, Misconfigured, message);
    let is_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    let name = path.file_name().filter(|_| !is_folder);
    let name = name.ok_or_else(|| refuse("name a file, not a folder"))?;
    // This checks only for a link: another process may have created the file since.
    if path.symlink_metadata().is_ok_and(|file| file.is_symlink()) {
        return Err(refuse(
            "the path is a symbolic link to a missing file; create the file or remove the link",
        ));
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = fs::canonicalize(folder).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            refuse(&format!("the folder {folder:?} does not exist; create it first"))
        }
        _ => path_error(path, error),
    })?;
    Ok(folder.join(name))
}

/// Checks kind and access of the file, if it exists, and of its folder. `path` is the configured
/// path of `resolved`.
fn check_file(path: &Path, resolved: &Path) -> Result<(), BackendError> {
    let refuse = |message: &str| Err(refused(path, Misconfigured, message));
    let folder = resolved.parent().unwrap_or_else(|| Path::new("/"));
    match fs::metadata(resolved) {
        Ok(metadata) if metadata.is_dir() => {
            return refuse("the path is a folder; name a file in it");
        }
        Ok(metadata) if !metadata.is_file() => {
            return refuse("the path is no regular file; name a regular file");
        }
        Ok(metadata) if has_hard_links(&metadata) => {
            return Err(file_mismatch_error(resolved, FileMismatch::HardLink).as_refused());
        }
        Ok(_) if is_mounted(resolved) => {
            return refuse(
                "the file is mounted by itself, so the files next to it (-wal, -shm) are not those of other \
                 containers; mount its folder instead",
            );
        }
        Ok(_) if !is_writable(resolved) => {
            let message = "this process has no write access to the file; grant write access";
            return Err(refused(path, Denied, message));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            if !fs::metadata(folder).is_ok_and(|folder| folder.is_dir()) {
                return refuse(&format!("{folder:?} is no folder; name a file in a folder"));
            }
        }
        Err(error) => return Err(path_error(path, error)),
    }
    // An existing database also needs a writable folder, because SQLite creates and deletes the
    // log and the index in it.
    if !is_writable(folder) {
        let message = format!(
            "this process has no write access to the folder {folder:?}; grant write access"
        );
        return Err(refused(path, Denied, &message));
    }
    Ok(())
}

/// The identities of the three files of an open database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIds {
    pub(super) database: FileId,
    pub(super) wal: FileId,
    pub(super) shm: FileId,
}

/// The identity of a file, independent of its name. The system does not reuse the inode of an open
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
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
fn has_hard_links(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() > 1
}

#[cfg(not(unix))]
fn has_hard_links(_metadata: &Metadata) -> bool {
    false
}

/// Returns whether the path is a mount point. If so, log and index would be in the mount point's
/// folder, not in the folder of the mounted file.
fn is_mounted(path: &Path) -> bool {
    let Some(path) = path.to_str() else { return false };
    fs::read_to_string("/proc/self/mountinfo").is_ok_and(|mounts| is_mount_point(path, &mounts))
}

/// Returns whether `mounts` contains the mount point `path`. `mounts` has the format of
/// `/proc/self/mountinfo`: one line for each mount, with the mount point in the fifth field.
fn is_mount_point(path: &str, mounts: &str) -> bool {
    let escaped = path
        .replace('\\', r"\134")
        .replace(' ', r"\040")
        .replace('\t', r"\011")
        .replace('\n', r"\012");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(&*escaped))
}

fn path_error(path: &Path, error: std::io::Error) -> BackendError {
    let (kind, message) = match error.kind() {
        ErrorKind::PermissionDenied => {
            (Denied, "this process has no search permission for a folder of the path; grant it")
        }
        ErrorKind::NotADirectory => {
            (Misconfigured, "a part of the path is a file, not a folder; correct the path")
        }
        ErrorKind::InvalidFilename => (Misconfigured, "the path is too long; use a shorter one"),
        _ => (Misconfigured, "the path cannot be resolved; check it"),
    };
    at_path(kind, path, message).with_source(error).as_refused()
}

/// Returns whether this process may write to the path. Calls `faccessat`, because mode and owner
/// are not sufficient: root, access lists and read-only mounts also matter.
#[cfg(target_os = "linux")]
fn is_writable(path: &Path) -> bool {
    use nix::fcntl::{AT_FDCWD, AtFlags};
    use nix::unistd::{AccessFlags, faccessat};
    faccessat(AT_FDCWD, path, AccessFlags::W_OK, AtFlags::AT_EACCESS).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn is_writable(_path: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_a_mount_point_is_detected() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            90 22 254:0 /srv/locks.db /app/my\\040locks.db rw,relatime shared:1 - ext4 /dev/vda rw\n";
        assert!(is_mount_point("/app/my locks.db", mounts));
        assert!(!is_mount_point("/app/my", mounts) && !is_mount_point("/srv/locks.db", mounts));
    }
}
