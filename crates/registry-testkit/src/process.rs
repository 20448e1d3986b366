//! Helper processes that a test can pause, kill and query. Contains nothing specific to locks.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::eventually::TimeoutError;

/// The maximum time until the kernel reports a process as stopped.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A child process, which leads its own process group. Dropping this handle kills the group: the
/// child and its descendants in the group.
///
/// The handle observes the child's exit without reaping it. The process id therefore stays taken
/// until the handle is dropped, so that no signal can reach an unrelated process.
///
/// A killed *test* process runs no `Drop`. Helper programs should therefore exit at the end of
/// their standard input, which the kernel closes with the test. A stopped helper receives SIGHUP
/// from the kernel when its process group becomes orphaned. (A parent-death signal would need
/// `unsafe` code between fork and exec.)
///
/// The waits of this type use tokio's clock but wait for real events. Do not use them on paused
/// time.
#[derive(Debug)]
pub struct HelperProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    pid: Pid,
    output: watch::Receiver<ProcessOutput>,
    exit: watch::Receiver<Option<ExitStatus>>,
    /// The number of lines that [`expect_line`](Self::expect_line) has read.
    lines_read: usize,
}

/// The output of the process so far.
#[derive(Default)]
struct ProcessOutput {
    stdout: Vec<Arc<str>>,
    /// The standard output has ended.
    stdout_ended: bool,
    stderr: String,
}

// Omits the transcript: panic messages contain it, and each `Debug` output would repeat it.
impl fmt::Debug for ProcessOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessOutput").field("lines", &self.stdout.len()).finish_non_exhaustive()
    }
}

impl HelperProcess {
    /// Starts `command` with its standard input, output and error connected to this handle.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        let mut child = command.spawn()?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        // From here on, dropping `helper` kills the process on every error path.
        let (output_sender, output) = watch::channel(ProcessOutput::default());
        let (exit_sender, exit) = watch::channel(None);
        let helper = Self { child, stdin, pid, output, exit, lines_read: 0 };

        let output_sender = Arc::new(output_sender);
        let stdout_sender = Arc::clone(&output_sender);
        thread::Builder::new().name(format!("stdout of {pid}")).spawn(move || {
            if let Some(stdout) = stdout {
                read_lines(stdout, |line| {
                    stdout_sender.send_modify(|output| output.stdout.push(line.into()));
                });
            }
            stdout_sender.send_modify(|output| output.stdout_ended = true);
        })?;
        thread::Builder::new().name(format!("stderr of {pid}")).spawn(move || {
            if let Some(stderr) = stderr {
                read_lines(stderr, |line| {
                    output_sender.send_modify(|output| output.stderr.extend([line, "\n"]));
                });
            }
        })?;
        thread::Builder::new().name(format!("exit of {pid}")).spawn(move || {
            exit_sender.send_replace(wait_unreaped(pid));
        })?;
        Ok(helper)
    }

    /// Returns the process id. It stays taken until the handle is dropped.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the first unread line of standard output for which `predicate` returns true. Skips
    /// other lines.
    ///
    /// # Errors
    /// Returns [`TimeoutError`], with all output of the process, if `limit` expires or the output
    /// has ended.
    ///
    /// # Cancel safety
    /// Dropping the future leaves all lines unread.
    pub async fn expect_line(
        &mut self,
        mut predicate: impl FnMut(&str) -> bool,
        limit: Duration,
    ) -> Result<Arc<str>, TimeoutError> {
        self.expect_map(|line| predicate(line).then(|| Arc::from(line)), limit).await
    }

    /// Like [`expect_line`](Self::expect_line), but returns the value that `predicate` extracts
    /// from the line.
    pub async fn expect_map<T>(
        &mut self,
        predicate: impl FnMut(&str) -> Option<T>,
        limit: Duration,
    ) -> Result<T, TimeoutError> {
        let mut next_line = self.lines_read;
        let found = self.find_line(&mut next_line, predicate, limit).await;
        self.lines_read = next_line;
        found
    }

    /// Like [`expect_map`](Self::expect_map), from line `next_line` on. Advances `next_line` beyond
    /// each line that it checks.
    pub(crate) async fn find_line<T>(
        &self,
        next_line: &mut usize,
        mut predicate: impl FnMut(&str) -> Option<T>,
        limit: Duration,
    ) -> Result<T, TimeoutError> {
        let deadline = Instant::now() + limit;
        let mut output = self.output.clone();
        loop {
            let ended = {
                let output = output.borrow_and_update();
                for line in &output.stdout[*next_line..] {
                    *next_line += 1;
                    if let Some(found) = predicate(line) {
                        return Ok(found);
                    }
                }
                output.stdout_ended
            };
            if ended {
                return Err(self.timeout_error("ended without the expected line"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !matches!(timeout(left, output.changed()).await, Ok(Ok(()))) {
                return Err(self
                    .timeout_error(&format!("did not print the expected line within {limit:?}")));
            }
        }
    }

    /// Returns the number of lines of standard output so far.
    pub(crate) fn line_count(&self) -> usize {
        self.output.borrow().stdout.len()
    }

    /// Returns all lines of standard output so far, read or not.
    #[must_use]
    pub fn lines(&self) -> Vec<Arc<str>> {
        self.output.borrow().stdout.clone()
    }

    /// Returns the standard error output so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.output.borrow().stderr.clone()
    }

    /// Writes one line to the standard input.
    ///
    /// # Errors
    /// Returns the error of the operating system; `BrokenPipe` if the process has ended or its
    /// input is closed.
    pub fn write_line(&mut self, line: &str) -> io::Result<()> {
        let stdin = self.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        // A single write, so that a helper that is stopped in between never reads half a line.
        stdin.write_all(format!("{line}\n").as_bytes())
    }

    /// Closes the standard input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Stops the process (SIGSTOP) and returns once it is stopped. From then on it executes
    /// nothing.
    ///
    /// # Errors
    /// Returns `NotFound` if the process has ended, and `TimedOut` if it does not stop.
    ///
    /// # Cancel safety
    /// The first poll sends the signal. Dropping the future only ends the wait for its effect.
    pub async fn pause(&self) -> io::Result<()> {
        self.signal(Signal::SIGSTOP)?;
        let deadline = Instant::now() + STOP_LIMIT;
        // Outside Linux, only `waitid` reports a stop. A blocking call would block the test's
        // tasks.
        while Instant::now() < deadline {
            let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            match waitid(Id::Pid(self.pid), flags) {
                Ok(WaitStatus::Stopped(..)) => return Ok(()),
                Ok(_) if self.has_exited() => return Err(io::ErrorKind::NotFound.into()),
                Ok(_) | Err(Errno::EINTR) => sleep(Duration::from_millis(1)).await,
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Resumes a stopped process (SIGCONT).
    ///
    /// # Errors
    /// Returns `NotFound` if the process has ended.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Sends SIGTERM to the process.
    ///
    /// # Errors
    /// Returns `NotFound` if the process has ended.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::SIGTERM)
    }

    /// Kills the process immediately (SIGKILL). Its descendants live until the handle is dropped.
    ///
    /// # Errors
    /// Returns `NotFound` if the process has ended.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::SIGKILL)
    }

    /// Sends a signal to the process only, not to its group.
    ///
    /// # Errors
    /// Returns `NotFound` if the process has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.has_exited() {
            return Err(io::ErrorKind::NotFound.into());
        }
        signal::kill(self.pid, signal).map_err(io::Error::from)
    }

    /// Returns whether the process has ended.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Waits until the process has ended and returns its exit status.
    ///
    /// # Errors
    /// Returns [`TimeoutError`], with all output of the process, if `limit` expires.
    pub async fn wait_exit(&self, limit: Duration) -> Result<ExitStatus, TimeoutError> {
        let mut exit = self.exit.clone();
        let ended = timeout(limit, exit.wait_for(Option::is_some)).await;
        match ended.ok().and_then(|exit| *exit.ok()?) {
            Some(status) => Ok(status),
            None => Err(self.timeout_error(&format!("did not end within {limit:?}"))),
        }
    }

    fn timeout_error(&self, problem: &str) -> TimeoutError {
        let output = self.output.borrow();
        let stdout = output.stdout.join("\n");
        let exit = self.exit.borrow();
        let status = exit.map_or_else(|| "alive".to_owned(), |status| status.to_string());
        TimeoutError::new(format!(
            "helper process {} ({status}) {problem}\n--- stdout\n{stdout}\n--- stderr\n{}---",
            self.pid, output.stderr
        ))
    }
}

impl Drop for HelperProcess {
    fn drop(&mut self) {
        // The leader is not reaped yet, so the group id is still valid even if the leader has
        // ended.
        _ = signal::killpg(self.pid, Signal::SIGKILL);
        // No process survives SIGKILL, so this wait is short. Reaping frees the process id.
        _ = self.child.wait();
    }
}

/// Waits until `pid` has ended and leaves it unreaped.
fn wait_unreaped(pid: Pid) -> Option<ExitStatus> {
    loop {
        match waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(_, code)) => return Some(ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(_, signal, core)) => {
                let core = if core { 0x80 } else { 0 };
                return Some(ExitStatus::from_raw(signal as i32 | core));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            // `Drop` has reaped the process, so no caller needs the status.
            Err(_) => return None,
        }
    }
}

/// Calls `each` for each line, including a last line without a newline.
fn read_lines(output: impl Read, mut each: impl FnMut(&str)) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(output.read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        each(text.strip_suffix('\n').unwrap_or(&text));
        line.clear();
    }
}
