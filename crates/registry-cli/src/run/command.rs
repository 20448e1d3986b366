//! Finds the program of a command by the rules of `execvp`, before the lock is acquired.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::exit::Failure;

/// A command that can be executed.
#[derive(Debug)]
pub(crate) struct Program {
    /// The path of the file.
    pub(crate) path: PathBuf,
    /// The command as given: its name and its arguments.
    pub(crate) argv: Vec<OsString>,
}

impl Program {
    /// Finds the program of `argv`, whose first element is its name.
    pub(crate) fn find(argv: Vec<OsString>) -> Result<Self, Failure> {
        let name = argv.first().map(OsString::as_os_str).unwrap_or_default();
        let path = find(name, std::env::var_os("PATH"))?;
        Ok(Self { path, argv })
    }
}

fn find(name: &OsStr, path: Option<OsString>) -> Result<PathBuf, Failure> {
    let not_found = || Failure::NotFound(format!("command {name:?} not found"));
    if name.is_empty() {
        return Err(not_found());
    }
    if name.as_bytes().contains(&b'/') {
        return match look(Path::new(name)) {
            Look::Executable => Ok(name.into()),
            Look::NotExecutable => Err(not_executable(name)),
            Look::Absent => Err(not_found()),
        };
    }
    let path = path.unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut denied = false;
    for folder in std::env::split_paths(&path) {
        // An empty entry means the working directory.
        let candidate = if folder.as_os_str().is_empty() {
            Path::new(".").join(name)
        } else {
            folder.join(name)
        };
        match look(&candidate) {
            Look::Executable => return Ok(candidate),
            Look::NotExecutable => denied = true,
            Look::Absent => {}
        }
    }
    Err(if denied { not_executable(name) } else { not_found() })
}

fn not_executable(name: &OsStr) -> Failure {
    Failure::NotExecutable(format!("command {name:?} is not executable"))
}

enum Look {
    Executable,
    NotExecutable,
    Absent,
}

fn look(path: &Path) -> Look {
    match std::fs::metadata(path) {
        Ok(file) if file.is_file() && access(path, AccessFlags::X_OK).is_ok() => Look::Executable,
        Ok(_) => Look::NotExecutable,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Look::NotExecutable,
        Err(_) => Look::Absent,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn status(found: Result<PathBuf, Failure>) -> Result<PathBuf, u8> {
        found.map_err(|failure| failure.status())
    }

    #[test]
    fn programs_are_found_as_execvp_finds_them() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("first"), folder.path().join("second"));
        for path in [&first, &second] {
            std::fs::create_dir(path).unwrap();
        }
        for (file, mode) in
            [(first.join("job"), 0o644), (second.join("job"), 0o755), (first.join("data"), 0o644)]
        {
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        }
        let path = || std::env::join_paths([&first, &second]).ok();
        assert_eq!(status(find("job".as_ref(), path())), Ok(second.join("job")));
        assert_eq!(status(find("data".as_ref(), path())), Err(126));
        assert_eq!(status(find("absent".as_ref(), path())), Err(127));
        assert_eq!(status(find("".as_ref(), path())), Err(127));
        assert_eq!(status(find(first.as_os_str(), None)), Err(126));
        assert_eq!(status(find(second.join("job").as_os_str(), None)), Ok(second.join("job")));
        assert_eq!(status(find("sh".as_ref(), None)).map(|path| path.ends_with("sh")), Ok(true));
    }
}
