//! Temporary folders for the files of SQLite.

use std::path::Path;
use std::{env, io};

use tempfile::TempDir;

/// Creates a temporary folder in memory, if the host has one and `TMPDIR` names no other. On a
/// disk, the commits of SQLite would take most of the time of a test.
pub fn temp_folder() -> io::Result<TempDir> {
    let in_memory = Path::new("/dev/shm");
    if env::var_os("TMPDIR").is_none() && in_memory.is_dir() {
        return tempfile::tempdir_in(in_memory).or_else(|_| tempfile::tempdir());
    }
    tempfile::tempdir()
}
