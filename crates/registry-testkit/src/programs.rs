//! Finds the programs of servers and their tools. Debian installs some of them only in `/usr/sbin`.
//! It installs those of PostgreSQL outside `PATH`, in one folder for each version.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder with Debian's versions of PostgreSQL.
const POSTGRES: &str = "/usr/lib/postgresql";
/// The folder that is searched after `PATH`. The `PATH` of a normal user often lacks this folder.
const SBIN: &str = "/usr/sbin";

/// Returns the program that `variable` names, or else the installed program `name`. If `variable`
/// is not set and the program is not installed, returns `name`. The error of starting it then names
/// the missing program.
pub(crate) fn find(variable: &str, name: &str) -> PathBuf {
    env::var_os(variable)
        .map(PathBuf::from)
        .or_else(|| find_installed(name))
        .unwrap_or_else(|| name.into())
}

/// Like [`find`], for the PostgreSQL server, whose companion programs are in the same folder.
pub(crate) fn find_postgres(variable: &str) -> PathBuf {
    let named = env::var_os(variable).map(PathBuf::from);
    // Symbolic links in `PATH` lead to the folder of the companion programs.
    let installed = || find_installed("postgres").and_then(|program| program.canonicalize().ok());
    named.or_else(installed).or_else(newest_postgres).unwrap_or_else(|| "postgres".into())
}

/// Returns the installed program `name`. An absolute path of an existing file is its own result.
pub(crate) fn find_installed(name: impl AsRef<Path>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from(SBIN)]);
    folders.map(|folder| folder.join(&name)).find(|program| program.is_file())
}

fn newest_postgres() -> Option<PathBuf> {
    let versions = fs::read_dir(Path::new(POSTGRES)).ok()?.filter_map(|entry| {
        let entry = entry.ok()?;
        let version: u32 = entry.file_name().to_str()?.parse().ok()?;
        let program = entry.path().join("bin/postgres");
        program.is_file().then_some((version, program))
    });
    versions.max().map(|(_, program)| program)
}
