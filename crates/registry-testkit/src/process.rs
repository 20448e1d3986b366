//! Helper processes: somebody else who holds a lock, and who can be stopped, killed or asked. Knows nothing of locks.

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

use crate::eventually::NotInTime;

/// How long a stopped process may take until the kernel calls it stopped.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A child process that is killed with this handle, together with all that it started.
///
/// It leads a process group of its own, and the group is what dies. Its end is observed without reaping it: until the
/// handle is dropped the process id stays taken, so that no signal can hit a stranger.
///
/// A killed *test* process runs no `Drop`. Programs that are meant as helpers should therefore end at the end of their
/// standard input, which the kernel closes with the test; a stopped one gets SIGHUP from the kernel when its group
/// loses its parent. (Asking the kernel for a parent-death signal would need `unsafe` code between fork and exec.)
///
/// The waits of this type use tokio's clock but end by real events: do not use them on paused time.
#[derive(Debug)]
pub struct HelperProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    pid: Pid,
    heard: watch::Receiver<Heard>,
    exit: watch::Receiver<Option<ExitStatus>>,
    /// How many lines [`expect_line`](Self::expect_line) has read.
    read: usize,
}

/// What the process said so far.
#[derive(Default)]
struct Heard {
    stdout: Vec<Arc<str>>,
    /// No line will follow.
    stdout_ended: bool,
    stderr: String,
}

// A transcript in a panic message helps; a second one in every Debug of a test's state does not.
impl fmt::Debug for Heard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heard").field("lines", &self.stdout.len()).finish_non_exhaustive()
    }
}

impl HelperProcess {
    /// Starts `command` with its standard input, output and error connected to this handle.
    ///
    /// # Errors
    /// The operating system's, when the program cannot be started.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        let mut child = command.spawn()?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        // From here on dropping ends the process, whatever goes wrong.
        let (said, heard) = watch::channel(Heard::default());
        let (ended, exit) = watch::channel(None);
        let helper = Self { child, stdin, pid, heard, exit, read: 0 };

        let said = Arc::new(said);
        let listener = Arc::clone(&said);
        thread::Builder::new().name(format!("stdout of {pid}")).spawn(move || {
            if let Some(stdout) = stdout {
                listen(stdout, |line| {
                    listener.send_modify(|heard| heard.stdout.push(line.into()));
                });
            }
            listener.send_modify(|heard| heard.stdout_ended = true);
        })?;
        thread::Builder::new().name(format!("stderr of {pid}")).spawn(move || {
            if let Some(stderr) = stderr {
                listen(stderr, |line| {
                    said.send_modify(|heard| heard.stderr.extend([line, "\n"]));
                });
            }
        })?;
        thread::Builder::new().name(format!("exit of {pid}")).spawn(move || {
            ended.send_replace(exited(pid));
        })?;
        Ok(helper)
    }

    /// The process id, which stays taken until the handle is dropped.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The first line of standard output, after the lines already read, that is `such`. Other lines are passed over.
    ///
    /// # Errors
    /// [`NotInTime`], with everything that the process said, when `limit` is over or the output has ended.
    ///
    /// # Cancel safety
    /// Lines that were passed over stay read; none is lost.
    pub async fn expect_line(
        &mut self,
        mut such: impl FnMut(&str) -> bool,
        limit: Duration,
    ) -> Result<Arc<str>, NotInTime> {
        self.expect_map(|line| such(line).then(|| Arc::from(line)), limit).await
    }

    /// As [`expect_line`](Self::expect_line), for lines that are read into something else.
    ///
    /// # Errors
    /// As for [`expect_line`](Self::expect_line).
    ///
    /// # Cancel safety
    /// As for [`expect_line`](Self::expect_line).
    pub async fn expect_map<T>(
        &mut self,
        mut such: impl FnMut(&str) -> Option<T>,
        limit: Duration,
    ) -> Result<T, NotInTime> {
        let deadline = Instant::now() + limit;
        let mut heard = self.heard.clone();
        loop {
            let ended = {
                let heard = heard.borrow_and_update();
                for line in &heard.stdout[self.read..] {
                    self.read += 1;
                    if let Some(found) = such(line) {
                        return Ok(found);
                    }
                }
                heard.stdout_ended
            };
            if ended {
                return Err(self.not_in_time("ended without the line that was waited for"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !matches!(timeout(left, heard.changed()).await, Ok(Ok(()))) {
                return Err(
                    self.not_in_time(&format!("did not say what was expected in {limit:?}"))
                );
            }
        }
    }

    /// All lines of standard output so far, read or not.
    #[must_use]
    pub fn lines(&self) -> Vec<Arc<str>> {
        self.heard.borrow().stdout.clone()
    }

    /// Standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.heard.borrow().stderr.clone()
    }

    /// Writes one line to the standard input.
    ///
    /// # Errors
    /// The operating system's; `BrokenPipe` when the process is gone or its input was closed.
    pub fn write_line(&mut self, line: &str) -> io::Result<()> {
        let stdin = self.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        // One write, so that a helper that is stopped in between never sees half a line.
        stdin.write_all(format!("{line}\n").as_bytes())
    }

    /// Ends the standard input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Stops the process (SIGSTOP), and returns when it is stopped: from then on it does nothing.
    ///
    /// # Errors
    /// `NotFound` when the process has ended, `TimedOut` when it does not stop.
    ///
    /// # Cancel safety
    /// The signal is sent at the first poll; a dropped future only does not wait for its effect.
    pub async fn pause(&self) -> io::Result<()> {
        self.signal(Signal::SIGSTOP)?;
        let deadline = Instant::now() + STOP_LIMIT;
        // The kernel tells nobody but waiters, and a blocking wait would hold up the test's tasks.
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

    /// Lets a stopped process go on (SIGCONT).
    ///
    /// # Errors
    /// `NotFound` when the process has ended.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Asks the process to end (SIGTERM).
    ///
    /// # Errors
    /// `NotFound` when the process has ended.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::SIGTERM)
    }

    /// Ends the process at once, without its knowledge (SIGKILL). What it started lives on until the handle is dropped.
    ///
    /// # Errors
    /// `NotFound` when the process has ended.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::SIGKILL)
    }

    /// Sends a signal to the process alone.
    ///
    /// # Errors
    /// `NotFound` when the process has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.has_exited() {
            return Err(io::ErrorKind::NotFound.into());
        }
        signal::kill(self.pid, signal).map_err(io::Error::from)
    }

    /// Whether the process has ended.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Waits for the end of the process, and tells how it ended.
    ///
    /// # Errors
    /// [`NotInTime`], with everything that the process said, when `limit` is over.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn wait_exit(&self, limit: Duration) -> Result<ExitStatus, NotInTime> {
        let mut exit = self.exit.clone();
        let ended = timeout(limit, exit.wait_for(Option::is_some)).await;
        match ended.ok().and_then(|exit| *exit.ok()?) {
            Some(status) => Ok(status),
            None => Err(self.not_in_time(&format!("did not end within {limit:?}"))),
        }
    }

    fn not_in_time(&self, what: &str) -> NotInTime {
        let heard = self.heard.borrow();
        let stdout = heard.stdout.join("\n");
        let exit = self.exit.borrow();
        let alive = exit.map_or_else(|| "alive".to_owned(), |status| status.to_string());
        NotInTime::new(format!(
            "helper process {} ({alive}) {what}\n--- stdout\n{stdout}\n--- stderr\n{}---",
            self.pid, heard.stderr
        ))
    }
}

impl Drop for HelperProcess {
    fn drop(&mut self) {
        // The leader was not reaped, so the group's id is still its own, whether the leader lives or not.
        _ = signal::killpg(self.pid, Signal::SIGKILL);
        // Nothing survives SIGKILL, so this is short. It is what makes the id free.
        _ = self.child.wait();
    }
}

/// Waits for the end of `pid` and leaves it unreaped.
fn exited(pid: Pid) -> Option<ExitStatus> {
    loop {
        match waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(_, code)) => return Some(ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(_, signal, core)) => {
                let core = if core { 0x80 } else { 0 };
                return Some(ExitStatus::from_raw(signal as i32 | core));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            // The handle was dropped and has reaped it: nobody asks any more.
            Err(_) => return None,
        }
    }
}

/// Passes on each line, the last one even if it was not finished.
fn listen(output: impl Read, mut each: impl FnMut(&str)) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(output.read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        each(text.strip_suffix('\n').unwrap_or(&text));
        line.clear();
    }
}
