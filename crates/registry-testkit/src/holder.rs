//! A second process that acquires locks on request, for tests across two processes.
//!
//! The other process is usually the test program itself, with one ignored test that calls
//! [`run_child_process`] and [`serve`]. It reads commands from its standard input and writes
//! reports to its standard output. Each command and each report is one line of JSON. [`LockHolder`]
//! is the handle in the test.

mod paused;
mod protocol;
mod serve;

use std::io::{self, Write as _};
use std::process::Command;
use std::time::Duration;

use registry_core::FencingToken;

use crate::history::HistoryEvent;
use crate::process::HelperProcess;

pub use paused::assert_a_paused_holder_cannot_write;
pub use protocol::{HolderCommand, HolderReport};
pub use serve::{FencedWriter, serve, serve_with_writer, write_report};

/// The maximum time for the program to start and to open its store.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Passes a URL to a test that [`child_process`] starts.
const URL_VARIABLE: &str = "TESTKIT_CHILD_PROCESS_URL";

/// Runs `program` with the URL that [`child_process`] passed, in a runtime of its own, and ends the
/// process. Returns at once if this test was not started as a child process.
///
/// # Panics
/// If no runtime can be created.
pub fn run_child_process(program: impl AsyncFnOnce(String)) {
    let Ok(url) = std::env::var(URL_VARIABLE) else { return };
    // Ends the line that the test harness has begun.
    _ = writeln!(io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.expect("a runtime can be created").block_on(program(url));
    // Exits at once, so that the test harness prints nothing more.
    std::process::exit(0);
}

/// Returns the command that runs this test program again, with only the ignored test `test`, which
/// must call [`run_child_process`]. `url` is passed to it.
///
/// # Errors
/// Returns an error if the path of this program is unknown.
pub fn child_process(test: &str, url: &str) -> io::Result<Command> {
    let mut program = Command::new(std::env::current_exe()?);
    program.args([test, "--exact", "--ignored", "--nocapture"]).env(URL_VARIABLE, url);
    Ok(program)
}

/// A lock that the other process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderLock {
    /// The fencing token, if the store issues tokens.
    pub token: Option<FencingToken>,
    /// How long the guard was still valid when the process sent the report.
    pub valid_for: Duration,
}

impl HolderLock {
    fn from_report(token: Option<u64>, valid_for_ms: u64) -> Self {
        let token = token.and_then(FencingToken::new);
        Self { token, valid_for: Duration::from_millis(valid_for_ms) }
    }
}

/// A process that acquires locks on request. Dropping this handle kills the process. If the test
/// process is killed, the helper process ends at the end of its standard input.
///
/// Commands for different keys run concurrently. A second command to lock a key releases the first
/// lock.
#[derive(Debug)]
pub struct LockHolder {
    process: HelperProcess,
    /// Reports that no call has consumed yet.
    unread: Vec<HolderReport>,
}

impl LockHolder {
    /// Starts a program that calls [`serve`].
    ///
    /// # Errors
    /// Returns an error if the program cannot be started, or cannot open its store.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn spawn_command(command: Command) -> io::Result<Self> {
        let mut holder = Self { process: HelperProcess::spawn(command)?, unread: Vec::new() };
        holder
            .report(START_LIMIT, |report| match report {
                HolderReport::Ready { .. } => Some(Ok(())),
                HolderReport::Failed { doing, problem, .. } => Some(Err(failed(doing, problem))),
                _ => None,
            })
            .await??;
        Ok(holder)
    }

    /// Starts this test program again as a [`child_process`], which must call [`serve`].
    ///
    /// # Errors
    /// Returns an error if the program cannot be started, or cannot open its store.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn spawn_test(test: &str, url: &str) -> io::Result<Self> {
        Self::spawn_command(child_process(test, url)?).await
    }

    /// Returns the handle of the process, to pause it, kill it or wait for it.
    #[must_use]
    pub fn process(&self) -> &HelperProcess {
        &self.process
    }

    /// Closes the standard input of the process, as the death of this test would. The process then
    /// releases all locks and ends.
    pub fn close_input(&mut self) {
        self.process.close_stdin();
    }

    /// Sends a command without waiting for its reports.
    ///
    /// # Errors
    /// Returns `BrokenPipe` if the process has ended.
    pub fn send_command(&mut self, command: &HolderCommand) -> io::Result<()> {
        self.process.write_line(&serde_json::to_string(command)?)
    }

    /// Returns the first value that `extract` extracts from a report, in order of arrival. All
    /// other reports stay available to later calls.
    ///
    /// # Errors
    /// Returns `TimedOut`, with all output of the process, if `limit` expires or the output has
    /// ended.
    ///
    /// # Cancel safety
    /// Dropping the future loses no report.
    pub async fn report<T>(
        &mut self,
        limit: Duration,
        mut extract: impl FnMut(&HolderReport) -> Option<T>,
    ) -> io::Result<T> {
        let found = self.unread.iter().enumerate();
        let found = found.filter_map(|(at, report)| Some((at, extract(report)?))).next();
        if let Some((at, found)) = found {
            self.unread.remove(at);
            return Ok(found);
        }
        let unread = &mut self.unread;
        let next = |line: &str| {
            let report = serde_json::from_str(line).ok()?;
            let found = extract(&report);
            if found.is_none() {
                unread.push(report);
            }
            found
        };
        self.process.expect_map(next, limit).await.map_err(timed_out)
    }

    /// Sends a command to lock `key` and waits until the lock is held.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires; the command stays in force. Returns `Other` if the
    /// lock failed.
    ///
    /// # Cancel safety
    /// The command stays in force.
    pub async fn lock(&mut self, key: &str, limit: Duration) -> io::Result<HolderLock> {
        self.send_command(&HolderCommand::lock(key))?;
        self.held(key, limit).await
    }

    /// Sends a command to try once to lock `key`. Returns `None` if another client holds the lock.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires; the command stays in force. Returns `Other` if the
    /// attempt failed.
    ///
    /// # Cancel safety
    /// The command stays in force.
    pub async fn try_lock(&mut self, key: &str, limit: Duration) -> io::Result<Option<HolderLock>> {
        self.send_command(&HolderCommand::try_lock(key))?;
        self.lock_outcome(key, limit).await
    }

    /// Waits until a lock that was requested earlier is held.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires; the command stays in force. Returns `Other` if the
    /// lock failed or its wait has expired.
    ///
    /// # Cancel safety
    /// Dropping the future at any time loses no report.
    pub async fn held(&mut self, key: &str, limit: Duration) -> io::Result<HolderLock> {
        let lock_outcome = self.lock_outcome(key, limit).await?;
        lock_outcome.ok_or_else(|| io::Error::other("the lock is busy"))
    }

    async fn lock_outcome(&mut self, key: &str, limit: Duration) -> io::Result<Option<HolderLock>> {
        self.report(limit, |report| match report {
            HolderReport::Held { key: of, token, valid_for_ms } if of == key => {
                Some(Ok(Some(HolderLock::from_report(*token, *valid_for_ms))))
            }
            HolderReport::Busy { key: of } if of == key => Some(Ok(None)),
            _ => failure_of(key, report).map(Err),
        })
        .await?
    }

    /// Sends a command to release `key` and waits for the outcome.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires. Returns `Other` if the lock had been lost or the
    /// release failed.
    ///
    /// # Cancel safety
    /// The command stays in force.
    pub async fn unlock(&mut self, key: &str, limit: Duration) -> io::Result<()> {
        self.send_command(&HolderCommand::Unlock { key: key.into() })?;
        self.report(limit, |report| match report {
            HolderReport::Released { key: of } | HolderReport::Cancelled { key: of }
                if of == key =>
            {
                Some(Ok(()))
            }
            _ => failure_of(key, report).map(Err),
        })
        .await?
    }

    /// Sends a command to write `value` under the lock of `key`, and waits for the outcome.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires. Returns `Other` if the write was refused.
    ///
    /// # Cancel safety
    /// The command stays in force.
    pub async fn write(&mut self, key: &str, value: &str, limit: Duration) -> io::Result<()> {
        self.send_command(&HolderCommand::Write { key: key.into(), value: value.into() })?;
        self.report(limit, |report| match report {
            HolderReport::Written { key: of } if of == key => Some(Ok(())),
            _ => failure_of(key, report).map(Err),
        })
        .await?
    }

    /// Waits until the process reports the loss of the lock of `key`, and returns the reason.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires.
    ///
    /// # Cancel safety
    /// Dropping the future at any time loses no report.
    pub async fn lost(&mut self, key: &str, limit: Duration) -> io::Result<String> {
        self.report(limit, |report| match report {
            HolderReport::Lost { key: of, reason } if of == key => Some(reason.clone()),
            _ => None,
        })
        .await
    }

    /// Returns the lock of `key` if the process believes that it holds it, with the remaining
    /// validity.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires.
    ///
    /// # Cancel safety
    /// Dropping the future at any time has no effect.
    pub async fn status(&mut self, key: &str, limit: Duration) -> io::Result<Option<HolderLock>> {
        self.send_command(&HolderCommand::Status { key: key.into() })?;
        self.report(limit, |report| match report {
            HolderReport::Status { key: of, held: false, .. } if of == key => Some(None),
            HolderReport::Status { key: of, token, valid_for_ms, .. } if of == key => {
                Some(Some(HolderLock::from_report(*token, *valid_for_ms)))
            }
            _ => None,
        })
        .await
    }

    /// Sends a command to release all locks and to end, and waits until the process has ended.
    ///
    /// # Errors
    /// Returns `TimedOut` if `limit` expires. Returns `Other` if a lock could not be released.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn quit(mut self, limit: Duration) -> io::Result<()> {
        self.send_command(&HolderCommand::Quit)?;
        let clean = self
            .report(limit, |report| match report {
                HolderReport::Closed { clean } => Some(*clean),
                _ => None,
            })
            .await?;
        let exit = self.process.wait_exit(limit).await.map_err(timed_out)?;
        if clean && exit.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("closed cleanly: {clean}, {exit}")))
        }
    }

    /// Returns the events recorded so far. The record is complete once the process has ended, even
    /// if it was killed.
    #[must_use]
    pub fn events(&self) -> Vec<HistoryEvent> {
        let lines = self.process.lines();
        let reports = lines.iter().filter_map(|line| serde_json::from_str(line).ok());
        let events = reports.filter_map(|report| match report {
            HolderReport::HistoryEvent(event) => Some(event),
            _ => None,
        });
        events.collect()
    }
}

fn failure_of(key: &str, report: &HolderReport) -> Option<io::Error> {
    match report {
        HolderReport::Failed { key: Some(of), doing, problem } if of == key => {
            Some(failed(doing, problem))
        }
        _ => None,
    }
}

fn failed(doing: &str, problem: &str) -> io::Error {
    io::Error::other(format!("the lock holder failed to {doing}: {problem}"))
}

fn timed_out(late: crate::TimeoutError) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, late)
}
