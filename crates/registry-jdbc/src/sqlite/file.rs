//! The database file as the file system sees it: where it is, whether it can be used, whether it is still the same.
//!
//! Never opens the file. POSIX drops all of a process's locks on a file when *any* of its descriptors is closed, those of
//! SQLite included, so that a second look at the bytes could let two writers in. Looking at names and inodes is harmless.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use registry_core::BackendError;
use registry_core::BackendErrorKind::{self, Denied, Misconfigured};

use crate::error::file_moved;

/// The database file and the write-ahead log beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) wal: PathBuf,
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
                if path.symlink_metadata().is_ok() {
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
        let mut wal = OsString::from(&real);
        wal.push("-wal");
        Ok(Self { path: real, wal: wal.into() })
    }

    /// Which file is under the path now.
    ///
    /// # Errors
    /// `Misconfigured` when there is none.
    pub(super) fn identity(&self) -> Result<Identity, BackendError> {
        fs::metadata(&self.path)
            .map(|metadata| Identity::of(&metadata))
            .map_err(|error| file_moved(&self.path).with_source(error))
    }

    /// Checks that the file under the path is still the one that was opened.
    ///
    /// An open file lives on without its name. Who comes later makes a new one and finds it free of locks: the two would
    /// both believe to hold. One look at an inode costs a microsecond.
    ///
    /// # Errors
    /// `Misconfigured` when it was removed or replaced.
    pub(super) fn check(&self, opened: Identity) -> Result<(), BackendError> {
        if self.identity()? == opened { Ok(()) } else { Err(file_moved(&self.path)) }
    }
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
