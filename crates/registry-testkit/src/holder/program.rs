//! Finds the program `lock-holder`, as it belongs to the code under test: it asks cargo to build it.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde::Deserialize;

/// The environment variable that names a ready-built `lock-holder`, for tests that run without cargo. Not a `LOCK_REGISTRY_` variable: `lockreg`
/// refuses those that it does not know.
pub const PROGRAM_VARIABLE: &str = "TESTKIT_LOCK_HOLDER";

/// The path of the program `lock-holder`, built from the sources that this package was built from.
///
/// Cargo tells only the tests of the owning package where a program is, so this asks cargo itself, once in each process.
/// When nothing has changed that takes a fraction of a second; cargo's own lock lets several test processes ask at once.
/// The program lands in the target folder and profile of the running test.
///
/// It blocks until the program is built.
///
/// # Errors
/// When cargo cannot be started or the program does not compile; with the compiler's messages.
pub fn program() -> io::Result<PathBuf> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(ready) = env::var_os(PROGRAM_VARIABLE) {
        return Ok(ready.into());
    }
    PROGRAM.get_or_init(build).clone().map_err(io::Error::other)
}

#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

fn build() -> Result<PathBuf, String> {
    // The cargo that runs the tests, not another one that may come first in the path.
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--quiet", "--message-format=json-render-diagnostics"])
        .args(["--package", "registry-testkit", "--features", "lock-holder"])
        .args(["--bin", "lock-holder", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .stdin(Stdio::null());
    if let Ok(test) = env::current_exe() {
        command.args(place_of(&test));
    }
    // What cargo says of the package under test would be taken for this one's by build scripts.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    let output = command.output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cannot build the lock holder: {}\n{said}", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let built = messages.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    let mut programs = built.filter_map(|message| {
        message.target.filter(|target| target.name == "lock-holder").and(message.executable)
    });
    programs.next().ok_or_else(|| format!("cargo built no lock holder: {messages}"))
}

/// The arguments that make cargo build where this test was built: the target folder may have been given to cargo by
/// an argument that nobody repeats to us.
fn place_of(test: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    let profile = test.ancestors().find(|folder| folder.ends_with("deps")).and_then(Path::parent);
    let Some(profile) = profile else { return arguments };
    if let Some(name) = profile.file_name().and_then(|name| name.to_str()) {
        // The one profile whose folder is not called like it.
        let name = if name == "debug" { "dev" } else { name };
        arguments.extend(["--profile".into(), name.into()]);
    }
    // Cargo marks its target folder; with `--target` there is a level in between.
    let target = profile.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    if let Some(target) = target.and_then(Path::to_str) {
        arguments.extend(["--target-dir".into(), target.into()]);
    }
    arguments
}
