//! Helpers of the tests: a separate store for each test, and processes whose input, signals and
//! output lines the test controls.

use std::fs;
use std::io::{BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Longer than any step takes on a slow, busy machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// A store that no other test uses, in a temporary folder.
#[derive(Debug)]
pub(crate) struct TestStore {
    folder: TempDir,
}

/// Removes the environment variables that affect `lockreg` from the environment of `command`.
pub(crate) fn remove_lock_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LOCK") {
            command.env_remove(name);
        }
    }
}

impl TestStore {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns `lockreg` with these arguments. Removes environment variables that affect it. `T`
    /// names the folder of the store, for scripts.
    pub(crate) fn lockreg<const N: usize>(&self, arguments: [&str; N]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockreg"));
        command.args(arguments).env("XDG_STATE_HOME", self.folder()).env("T", self.folder());
        remove_lock_variables(&mut command);
        command
    }

    /// Runs `lockreg` until it ends.
    pub(crate) fn run<const N: usize>(&self, arguments: [&str; N]) -> CommandOutput {
        CommandOutput::of(&mut self.lockreg(arguments))
    }

    /// Starts `lockreg` with pipes as stdin, stdout and stderr.
    pub(crate) fn start<const N: usize>(&self, arguments: [&str; N]) -> TestProcess {
        TestProcess::start(&mut self.lockreg(arguments))
    }

    /// Returns the token of the holder of `key`, if the key is locked.
    pub(crate) fn holder(&self, key: &str) -> Option<u64> {
        self.shown(key)["token"].as_u64()
    }

    /// Returns how long the holder of `key` has held it.
    pub(crate) fn held_for(&self, key: &str) -> Option<Duration> {
        self.shown(key)["held_for_ms"].as_u64().map(Duration::from_millis)
    }

    fn shown(&self, key: &str) -> serde_json::Value {
        let done = self.run(["--json", "show", key]);
        let shown: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
        assert_eq!(shown["held"].as_bool(), Some(done.status == 0), "{done:?}");
        shown
    }
}

/// The result of a program that has ended.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CommandOutput {
    pub(crate) fn of(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).output().unwrap().into()
    }
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A running program. Dropping it ends the program.
#[derive(Debug)]
pub(crate) struct TestProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Lines,
    stderr: Lines,
}

impl TestProcess {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = Lines::of(child.stdout.take().unwrap());
        let stderr = Lines::of(child.stderr.take().unwrap());
        Self { stdin: child.stdin.take(), child, stdout, stderr }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits for the next line of stdout.
    pub(crate) fn next_line(&self) -> String {
        self.stdout.next()
    }

    /// Waits for the next line of stdout, and parses it as JSON.
    pub(crate) fn next_json(&self) -> serde_json::Value {
        serde_json::from_str(&self.next_line()).unwrap()
    }

    /// Waits for the next line of stderr that contains `part`.
    pub(crate) fn wait_for_stderr(&self, part: &str) -> String {
        loop {
            let line = self.stderr.next();
            if line.contains(part) {
                return line;
            }
        }
    }

    pub(crate) fn write_line(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Closes stdin, waits for the end, and returns the exit status.
    pub(crate) fn finish(mut self) -> i32 {
        self.close_stdin();
        self.wait()
    }

    /// Waits for the end without closing stdin, and returns the exit status.
    pub(crate) fn wait(&mut self) -> i32 {
        let mut status = None;
        wait_until("the end of the process", || {
            status = self.try_wait();
            status.is_some()
        });
        status.unwrap().code().unwrap_or(-1)
    }

    /// Returns the remaining lines of stderr, after the end.
    pub(crate) fn remaining_stderr(&self) -> String {
        self.stderr.rest()
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        // SIGTERM comes first, so that `lockreg` ends its command too. SIGKILL follows after a time
        // limit.
        let _ = kill(self.pid(), Signal::SIGCONT);
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = kill(self.pid(), Signal::SIGTERM);
            let requested_at = Instant::now();
            while self.child.try_wait().is_ok_and(|status| status.is_none())
                && requested_at.elapsed() < TEST_TIMEOUT / 6
            {
                std::thread::sleep(POLL_INTERVAL);
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The lines of a pipe, in the order of their arrival.
#[derive(Debug)]
struct Lines(Receiver<String>);

impl Lines {
    fn of(pipe: impl std::io::Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self(lines)
    }

    fn next(&self) -> String {
        self.0.recv_timeout(TEST_TIMEOUT).expect("another line")
    }

    fn rest(&self) -> String {
        let mut rest = String::new();
        while let Ok(line) = self.0.recv_timeout(TEST_TIMEOUT) {
            rest.push_str(&line);
            rest.push('\n');
        }
        rest
    }
}

/// Polls until `happened` returns true. For processes and files, which send no notification.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < TEST_TIMEOUT, "waited {TEST_TIMEOUT:?} for {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether the process runs. A zombie process does not run.
pub(crate) fn is_alive(pid: &str) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name, in parentheses, may contain any character.
    let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    !state.starts_with('Z') && !state.starts_with('X')
}

/// Returns the processes that `parent` has started and not reaped.
pub(crate) fn children(parent: Pid) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Returns whether `pid` is `lockreg` in the hidden role `role`.
pub(crate) fn has_role(pid: &str, role: &str) -> bool {
    let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.split('\0').nth(1) == Some(role)
}

/// Returns both ends of a full pipe.
pub(crate) fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    for chunk in [&[b'x'; 4_096][..], b"x"] {
        while writer.write(chunk).is_ok() {}
    }
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    (reader, writer)
}

/// Returns the contents of a file, or an empty text if it does not exist.
pub(crate) fn contents(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(mut file) = fs::File::open(path) {
        file.read_to_string(&mut text).unwrap();
    }
    text
}

/// Returns the path to which a test writes the picture `name` of the book. The folder is the value
/// of the environment variable `SCREENSHOTS`, by default a folder in the build folder.
pub(crate) fn screenshot_path(name: &str) -> PathBuf {
    let folder = std::env::var_os("SCREENSHOTS")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("screenshots"), PathBuf::from);
    fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}
