//! Data folders of servers: created once for each server program, then copied for each server.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::managed_server::{ManagedServer, ServerDescription};
use crate::{programs, run_command};

/// Returns the folder that caches the data folder of `program`. It is next to the test programs, so
/// that cleaning the build removes it. An upgraded server program has a new folder.
fn cache_folder(program: &Path) -> io::Result<PathBuf> {
    let found = programs::find_installed(program).unwrap_or_else(|| program.to_owned());
    let metadata = fs::metadata(&found)?;
    let mut hasher = DefaultHasher::new();
    (&found, metadata.len(), metadata.modified()?).hash(&mut hasher);
    let name = found.file_name().unwrap_or_default().display().to_string();
    let tests = env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    Ok(tests.join("server-data").join(format!("{name}-{:016x}", hasher.finish())))
}

/// Creates the data folder of a new server by running `init_command`. Later servers of the same
/// program receive a copy of it.
///
/// # Cancel safety
/// Dropping the future may leave the server's data folder incomplete. The cached folder stays
/// complete.
pub(crate) async fn copy_or_initialize<S: ServerDescription>(
    server: &ManagedServer<S>,
    init_command: Command,
) -> io::Result<()> {
    let data = server.data();
    let Ok(cached) = cache_folder(&server.options.program) else {
        return initialize(server, init_command).await;
    };
    if cached.is_dir() {
        return copy(&cached, &data).await;
    }
    initialize(server, init_command).await?;
    // Several tests may run this concurrently. The rename publishes only complete copies. It fails
    // if another test has already published one.
    let Some(parent) = cached.parent() else { return Ok(()) };
    fs::create_dir_all(parent)?;
    let incomplete = tempfile::tempdir_in(parent)?;
    let complete = incomplete.path().join("data");
    copy(&data, &complete).await?;
    _ = fs::rename(&complete, &cached);
    Ok(())
}

/// Creates the data folder of a new server without the cache.
pub(crate) async fn initialize<S: ServerDescription>(
    server: &ManagedServer<S>,
    init_command: Command,
) -> io::Result<()> {
    let output = run_command::run(init_command, "").await;
    output.map(drop).map_err(|error| server.start_error(&error.to_string()))
}

/// Copies a folder with its owners and modes.
async fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut command = Command::new("cp");
    command.arg("--archive").arg("--no-target-directory").arg(from).arg(to);
    run_command::run(command, "").await.map(drop)
}
