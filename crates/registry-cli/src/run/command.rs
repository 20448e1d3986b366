//! Finds the program of a command by the rules of `execvp`, before the lock is acquired.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::exit::CliError;
use crate::output::redact_if_url;

/// A command whose program file was found.
#[derive(Debug)]
pub(crate) struct Program {
    /// The path of the program file.
    pub(crate) path: PathBuf,
    /// The command as given: its name and its arguments.
    pub(crate) argv: Vec<OsString>,
}

impl Program {
    /// Finds the program of `argv`, whose first element is its name.
    pub(crate) fn find(argv: Vec<OsString>) -> Result<Self, CliError> {
        let name = argv.first().map(OsString::as_os_str).unwrap_or_default();
        let path = find(name, std::env::var_os("PATH"))?;
        Ok(Self { path, argv })
    }
}

fn find(name: &OsStr, search_path: Option<OsString>) -> Result<PathBuf, CliError> {
    let not_found = |hint| {
        let shown = name.to_string_lossy();
        let shown = redact_if_url(&shown);
        CliError::CommandNotFound(format!("command {shown:?} not found; check its {hint}"))
    };
    if name.is_empty() {
        return Err(not_found("name"));
    }
    if name.as_bytes().contains(&b'/') {
        return match file_status(Path::new(name)) {
            FileStatus::Executable => Ok(name.into()),
            FileStatus::NotExecutable => Err(not_executable(name)),
            FileStatus::Absent => Err(not_found("path")),
        };
    }
    let search_path = search_path.unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut found_not_executable = false;
    for directory in std::env::split_paths(&search_path) {
        // An empty entry of PATH means the working directory.
        let candidate = if directory.as_os_str().is_empty() {
            Path::new(".").join(name)
        } else {
            directory.join(name)
        };
        match file_status(&candidate) {
            FileStatus::Executable => return Ok(candidate),
            FileStatus::NotExecutable => found_not_executable = true,
            FileStatus::Absent => {}
        }
    }
    Err(if found_not_executable { not_executable(name) } else { not_found("name and PATH") })
}

fn not_executable(name: &OsStr) -> CliError {
    let shown = name.to_string_lossy();
    let shown = redact_if_url(&shown);
    CliError::CommandNotExecutable(format!(
        "command {shown:?} is not executable; check that it is a file and that you have the permission to execute it"
    ))
}

enum FileStatus {
    Executable,
    NotExecutable,
    Absent,
}

fn file_status(path: &Path) -> FileStatus {
    match std::fs::metadata(path) {
        Ok(file) if file.is_file() && access(path, AccessFlags::X_OK).is_ok() => {
            FileStatus::Executable
        }
        Ok(_) => FileStatus::NotExecutable,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            FileStatus::NotExecutable
        }
        Err(_) => FileStatus::Absent,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn status(found: Result<PathBuf, CliError>) -> Result<PathBuf, u8> {
        found.map_err(|failure| failure.status())
    }

    #[test]
    fn a_program_is_found_by_the_rules_of_execvp() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (directory.path().join("first"), directory.path().join("second"));
        for path in [&first, &second] {
            std::fs::create_dir(path).unwrap();
        }
        for (file, mode) in
            [(first.join("job"), 0o644), (second.join("job"), 0o755), (first.join("data"), 0o644)]
        {
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        }
        let search_path = || std::env::join_paths([&first, &second]).ok();
        assert_eq!(status(find("job".as_ref(), search_path())), Ok(second.join("job")));
        assert_eq!(status(find("data".as_ref(), search_path())), Err(126));
        assert_eq!(status(find("absent".as_ref(), search_path())), Err(127));
        assert_eq!(status(find("".as_ref(), search_path())), Err(127));
        assert_eq!(status(find(first.as_os_str(), None)), Err(126));
        assert_eq!(status(find(second.join("job").as_os_str(), None)), Ok(second.join("job")));
        assert_eq!(status(find("sh".as_ref(), None)).map(|path| path.ends_with("sh")), Ok(true));
    }
}
