//! Finds the program `lock-holder` that matches the code under test, by building it with cargo.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde::Deserialize;

/// The environment variable that names a prebuilt `lock-holder`, for tests that run without cargo.
/// It has no `LOCK_REGISTRY_` prefix because `lockreg` rejects unknown variables with that prefix.
pub const PROGRAM_VARIABLE: &str = "TESTKIT_LOCK_HOLDER";

/// Returns the path of the program `lock-holder`, built from the same sources as this package.
///
/// Cargo passes the path of a program only to tests of the owning package. This function therefore
/// runs `cargo build`, once in each process. A build without changes takes a fraction of a second.
/// Cargo's own lock serializes concurrent builds by several test processes. The program is built in
/// the target folder and profile of the running test.
///
/// Blocks the thread until the program is built.
///
/// # Errors
/// Returns an error if cargo cannot be started, or if the program does not compile. The error
/// contains the compiler's messages.
pub fn program() -> io::Result<PathBuf> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(ready) = env::var_os(PROGRAM_VARIABLE) {
        return Ok(ready.into());
    }
    PROGRAM.get_or_init(build).clone().map_err(io::Error::other)
}

#[derive(Deserialize)]
struct CargoMessage {
    target: Option<CargoTarget>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
}

fn build() -> Result<PathBuf, String> {
    // `CARGO` names the cargo that runs the tests; the first cargo in `PATH` may be another one.
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--quiet", "--message-format=json-render-diagnostics"])
        .args(["--package", "registry-testkit", "--features", "lock-holder"])
        .args(["--bin", "lock-holder", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .stdin(Stdio::null());
    if let Ok(test) = env::current_exe() {
        command.args(target_args(&test));
    }
    // Build scripts would take these variables of the package under test for those of this package.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    let output = command.output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        let output_text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cannot build the lock holder: {}\n{output_text}", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let built = messages.lines().filter_map(|line| serde_json::from_str::<CargoMessage>(line).ok());
    let mut programs = built.filter_map(|message| {
        message.target.filter(|target| target.name == "lock-holder").and(message.executable)
    });
    programs.next().ok_or_else(|| format!("cargo built no lock holder: {messages}"))
}

/// Returns the arguments that make cargo build into the target folder of this test. The folder may
/// come from a command-line argument, which cargo does not pass on to tests.
fn target_args(test: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    let profile = test.ancestors().find(|folder| folder.ends_with("deps")).and_then(Path::parent);
    let Some(profile) = profile else { return arguments };
    if let Some(name) = profile.file_name().and_then(|name| name.to_str()) {
        // The only profile whose folder has a different name.
        let name = if name == "debug" { "dev" } else { name };
        arguments.extend(["--profile".into(), name.into()]);
    }
    // Cargo marks its target folder. With `--target`, there is a folder level in between.
    let target = profile.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    if let Some(target) = target.and_then(Path::to_str) {
        arguments.extend(["--target-dir".into(), target.into()]);
    }
    arguments
}
