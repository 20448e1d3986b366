//! Data folders of servers: created once for each server program, then copied for each server.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::run_command;

/// Returns the folder that caches the data folder of `program`. It is next to the test programs, so
/// that cleaning the build removes it. An upgraded server program has a new folder.
fn cache_folder(program: &OsStr) -> io::Result<PathBuf> {
    let found = which(program);
    let metadata = fs::metadata(&found)?;
    let mut hasher = DefaultHasher::new();
    (&found, metadata.len(), metadata.modified()?).hash(&mut hasher);
    let name = found.file_name().unwrap_or(program).display().to_string();
    let tests = env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    Ok(tests.join("server-data").join(format!("{name}-{:016x}", hasher.finish())))
}

/// Returns the file that a command of this name runs.
fn which(program: &OsStr) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .unwrap_or_else(|| program.into())
}

/// Fills `data` with the initial data folder of `program`: a copy of the cached folder, if it
/// exists. Otherwise runs `create` and caches the result.
///
/// # Cancel safety
/// Dropping the future may leave `data` incomplete.
pub(crate) async fn fill(
    data: &Path,
    program: &OsStr,
    create: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let Ok(cached) = cache_folder(program) else { return create.await };
    if cached.is_dir() {
        return copy(&cached, data).await;
    }
    create.await?;
    // Several tests may run this concurrently. The rename publishes only complete copies, and the
    // first one stays.
    let Some(parent) = cached.parent() else { return Ok(()) };
    fs::create_dir_all(parent)?;
    let incomplete = tempfile::tempdir_in(parent)?;
    let complete = incomplete.path().join("data");
    copy(data, &complete).await?;
    _ = fs::rename(&complete, &cached);
    Ok(())
}

/// Copies a folder with its owners and modes.
async fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut command = Command::new("cp");
    command.arg("--archive").arg("--no-target-directory").arg(from).arg(to);
    run_command::run(command, "").await.map(drop)
}
