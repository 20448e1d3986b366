//! Finds the programs of servers. Debian keeps some where only an administrator's path leads, and those of PostgreSQL off every path, a
//! folder for each version.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Where Debian's packages put each version of PostgreSQL.
const POSTGRES: &str = "/usr/lib/postgresql";
/// Where servers are that are no use to a normal user.
const ADMINISTRATOR: &str = "/usr/sbin";

/// The program that `variable` names, or the one called `name` that is installed, or `name` itself: then the error of starting it
/// tells what is missing.
pub(crate) fn server(variable: &str, name: &str) -> PathBuf {
    env::var_os(variable)
        .map(PathBuf::from)
        .or_else(|| on_path(name))
        .unwrap_or_else(|| name.into())
}

/// As [`server`], for the server of PostgreSQL, beside which are its companions.
pub(crate) fn postgres(variable: &str) -> PathBuf {
    let named = env::var_os(variable).map(PathBuf::from);
    // Links on the path lead to where the companions are.
    let installed = || on_path("postgres").and_then(|program| program.canonicalize().ok());
    named.or_else(installed).or_else(newest_postgres).unwrap_or_else(|| "postgres".into())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from(ADMINISTRATOR)]);
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
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
