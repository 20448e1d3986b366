//! A second process that acquires locks on request, for tests across two processes.
//!
//! The other process is usually the test program itself, with one ignored test that calls
//! [`run_child_process`] and [`serve`]. [`LockHolder`] is the handle in the test. The two use the
//! [`protocol`] of the conformance suite's helper processes.

mod compete;
mod paused;
mod remote;
mod serve;

use std::error::Error;
use std::io::{self, Write as _};
use std::iter;
use std::process::Command;
use std::time::Duration;

use registry_conformance::remote::protocol::{self, Message, READY, Reply};
use registry_core::observe::Observer;
use registry_core::{ClaimMode, FencingToken, LockEvent, LockGuard, LostReason};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::history::HistoryEvent;
use crate::process::HelperProcess;

pub use compete::{CompetedLocks, Competition};
pub use paused::{assert_a_paused_holder_cannot_write, write_refused_by_server};
pub use serve::{FencedWriter, serve, serve_with_writer};

/// The maximum time for the program to start and to open its store.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Passes a URL to a test that [`child_process`] starts.
const URL_VARIABLE: &str = "TESTKIT_CHILD_PROCESS_URL";

/// Runs `program` with the URL that [`child_process`] passed, in a runtime of its own, and ends the
/// process. Returns at once if this test was not started as a child process.
///
/// # Panics
/// If no runtime can be created, or if `program` panics.
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
pub fn child_process(test: &str, url: &str) -> io::Result<Command> {
    let mut program = Command::new(std::env::current_exe()?);
    program.args([test, "--exact", "--ignored", "--nocapture"]).env(URL_VARIABLE, url);
    Ok(program)
}

/// Makes [`LockHolder::spawn_command`] return this error. Call this function instead of [`serve`].
pub fn report_failure(doing: &str, error: &(dyn Error + 'static)) {
    protocol::print_line(&Reply { reply_to: READY, result: Err(failure(doing, error)) });
}

/// Returns the text of an error and all its causes.
fn failure(doing: &str, error: &(dyn Error + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| (*error).source());
    let problem = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    format!("the lock holder failed to {doing}: {problem}")
}

/// A request to a lock holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum HolderRequest {
    /// Acquire the lock and hold it. Returns an `Option` of a [`HolderLock`], which is `None` if
    /// another client held the lock until the end of the wait.
    Lock {
        /// The lock's key.
        key: String,
        /// The mode.
        mode: ClaimMode,
        /// Whether the request has a place in the store's queue.
        fair: bool,
        /// The maximum wait; unlimited if `None`.
        wait: Option<Duration>,
    },
    /// Make an upgradable lock exclusive. Returns the [`HolderLock`].
    Upgrade {
        /// The lock's key.
        key: String,
    },
    /// Release the lock and wait for the store's answer.
    Unlock {
        /// The lock's key.
        key: String,
    },
    /// Drop the guard without waiting.
    Drop {
        /// The lock's key.
        key: String,
    },
    /// Return the [`HolderLock`] if the lock is held, otherwise `None`.
    Status {
        /// The lock's key.
        key: String,
    },
    /// Wait for the loss of the lock and return the [`LostReason`].
    Lost {
        /// The lock's key.
        key: String,
    },
    /// Write to the data that the lock protects, with the token of the held lock. The program must
    /// have a [`FencedWriter`].
    Write {
        /// The lock's key.
        key: String,
        /// The value to write.
        value: String,
    },
    /// Acquire and release the lock repeatedly, in sequence.
    Repeat {
        /// The lock's key.
        key: String,
        /// The number of rounds.
        rounds: u32,
    },
    /// Acquire and release the lock repeatedly from several concurrent tasks. Returns a
    /// [`HolderShare`]. The history does not contain these acquisitions.
    Contend {
        /// The lock's key.
        key: String,
        /// The number of tasks.
        tasks: u32,
        /// How long a task holds the lock each time.
        hold: Duration,
        /// The total duration. An acquisition that still waits at the end of `span` returns without
        /// the lock, and counts towards the longest wait.
        span: Duration,
    },
    /// Acquire and release locks repeatedly, in several tasks. Returns after all tasks have ended.
    Compete(Competition),
}

impl HolderRequest {
    /// Creates a request to lock `key`, without a limit to the wait.
    #[must_use]
    pub fn lock(key: &str) -> Self {
        Self::lock_in(key, ClaimMode::Exclusive)
    }

    /// Creates a request to lock `key` in a mode, without a limit to the wait.
    #[must_use]
    pub fn lock_in(key: &str, mode: ClaimMode) -> Self {
        Self::Lock { key: key.into(), mode, fair: false, wait: None }
    }

    /// Creates a request to lock `key` in the order of arrival, without a limit to the wait.
    #[must_use]
    pub fn lock_fair(key: &str) -> Self {
        Self::Lock { key: key.into(), mode: ClaimMode::Exclusive, fair: true, wait: None }
    }
}

/// The share of a contended lock that one process acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "a complete description of the share")]
pub struct HolderShare {
    /// How many times its tasks acquired the lock.
    pub grants: u32,
    /// The longest time during which none of its tasks held the lock.
    pub longest_wait: Duration,
}

/// A lock that the other process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HolderLock {
    /// The fencing token.
    pub token: FencingToken,
    /// How long the guard was still valid when the process sent the reply.
    pub valid_for: Duration,
}

impl HolderLock {
    fn of(guard: &LockGuard) -> Self {
        Self { token: guard.fencing_token(), valid_for: guard.valid_for() }
    }
}

/// Reports busy responses to [`LockHolder::wait_until_busy`].
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "it has no state")]
pub struct BusyPrinter;

impl Observer for BusyPrinter {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::Busy { key, .. } = event {
            protocol::print_line(&BusyNotice { busy_key: (*key).to_owned() });
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct BusyNotice {
    busy_key: String,
}

/// A request that was sent. The process executes it even if this value is dropped.
#[derive(Debug, Clone, Copy)]
pub struct PendingReply {
    number: u64,
    /// The number of output lines before the request.
    lines_before: usize,
}

/// A process that acquires locks on request. Dropping this handle kills the process. If the test
/// process is killed, the helper process ends at the end of its standard input.
///
/// Requests run concurrently. A second request to lock a key releases the first lock. All waits for
/// a reply have a limit; dropping such a wait leaves the request in force.
#[derive(Debug)]
pub struct LockHolder {
    process: HelperProcess,
    /// The number of the next message.
    next: u64,
}

impl LockHolder {
    /// Starts a program that calls [`serve`], and waits until it is ready.
    pub async fn spawn_command(command: Command) -> io::Result<Self> {
        let holder = Self { process: HelperProcess::spawn(command)?, next: READY + 1 };
        let ready = PendingReply { number: READY, lines_before: 0 };
        holder.reply::<()>(ready, START_LIMIT).await?;
        Ok(holder)
    }

    /// Starts this test program again as a [`child_process`], which must call [`serve`].
    pub async fn spawn_test(test: &str, url: &str) -> io::Result<Self> {
        Self::spawn_command(child_process(test, url)?).await
    }

    /// Returns the handle of the process, to pause it, kill it or wait for it.
    #[must_use]
    pub fn process(&self) -> &HelperProcess {
        &self.process
    }

    /// Closes the standard input of the process, as the kernel does when the test process ends. The
    /// helper process then releases all locks and ends.
    pub fn close_input(&mut self) {
        self.process.close_stdin();
    }

    /// Sends a request without waiting for its reply.
    ///
    /// # Errors
    /// Returns `BrokenPipe` if the process has ended.
    pub fn send(&mut self, request: &HolderRequest) -> io::Result<PendingReply> {
        self.send_message(|number| Message::Request(number, request))
    }

    fn send_message<'a>(
        &mut self,
        message: impl FnOnce(u64) -> Message<&'a HolderRequest>,
    ) -> io::Result<PendingReply> {
        let pending = PendingReply { number: self.next, lines_before: self.process.line_count() };
        self.next += 1;
        self.process.write_line(protocol::to_line(&message(pending.number)).trim_end())?;
        Ok(pending)
    }

    /// Cancels a request: the process drops the future that executes it.
    pub fn cancel(&mut self, request: PendingReply) -> io::Result<()> {
        self.send_message(|_| Message::Cancel(request.number)).map(drop)
    }

    /// Waits for the result of a request.
    ///
    /// # Errors
    /// Returns `TimedOut`, with all output of the process, if `limit` expires or the output has
    /// ended. Returns `Other` if the request failed, and `InvalidData` if the result is no `T`.
    ///
    /// # Cancel safety
    /// Dropping the future loses no reply.
    pub async fn reply<T: DeserializeOwned>(
        &self,
        pending: PendingReply,
        limit: Duration,
    ) -> io::Result<T> {
        let mut next_line = pending.lines_before;
        let result = |line: &str| {
            let reply: Reply<String> = serde_json::from_str(line).ok()?;
            (reply.reply_to == pending.number).then_some(reply.result)
        };
        let result =
            self.process.find_line(&mut next_line, result, limit).await.map_err(timed_out)?;
        Ok(serde_json::from_value(result.map_err(io::Error::other)?)?)
    }

    /// Sends a request and waits for its result.
    pub async fn request<T: DeserializeOwned>(
        &mut self,
        request: HolderRequest,
        limit: Duration,
    ) -> io::Result<T> {
        let pending = self.send(&request)?;
        self.reply(pending, limit).await
    }

    /// Acquires the lock of `key`.
    pub async fn lock(&mut self, key: &str, limit: Duration) -> io::Result<HolderLock> {
        let pending = self.send(&HolderRequest::lock(key))?;
        self.held(pending, limit).await
    }

    /// Tries once to acquire the lock of `key`. Returns `None` if another client holds the lock.
    pub async fn try_lock(&mut self, key: &str, limit: Duration) -> io::Result<Option<HolderLock>> {
        let (mode, wait) = (ClaimMode::Exclusive, Some(Duration::ZERO));
        let request = HolderRequest::Lock { key: key.into(), mode, fair: false, wait };
        self.request(request, limit).await
    }

    /// Waits until a lock that was requested earlier is held.
    ///
    /// # Errors
    /// As [`reply`](Self::reply). Returns `Other` if the lock was busy until the end of the wait.
    ///
    /// # Cancel safety
    /// Dropping the future loses no reply.
    pub async fn held(&self, pending: PendingReply, limit: Duration) -> io::Result<HolderLock> {
        let held: Option<HolderLock> = self.reply(pending, limit).await?;
        held.ok_or_else(|| io::Error::other("the lock is busy"))
    }

    /// Acquires the lock of `key` in a mode.
    pub async fn lock_in(
        &mut self,
        key: &str,
        mode: ClaimMode,
        limit: Duration,
    ) -> io::Result<HolderLock> {
        let pending = self.send(&HolderRequest::lock_in(key, mode))?;
        self.held(pending, limit).await
    }

    /// Waits until the store has responded that another claim holds `key`. A response before this
    /// call counts as well. The registry must have the [`BusyPrinter`].
    pub async fn wait_until_busy(&self, key: &str, limit: Duration) -> io::Result<()> {
        let is_busy = |line: &str| {
            let notice: BusyNotice = serde_json::from_str(line).ok()?;
            (notice.busy_key == key).then_some(())
        };
        self.process.find_line(&mut 0, is_busy, limit).await.map_err(timed_out)
    }

    /// Releases the lock of `key`.
    ///
    /// # Errors
    /// As [`request`](Self::request), also if the lock had been lost.
    pub async fn unlock(&mut self, key: &str, limit: Duration) -> io::Result<()> {
        self.request(HolderRequest::Unlock { key: key.into() }, limit).await
    }

    /// Writes `value` under the lock of `key`.
    ///
    /// # Errors
    /// As [`request`](Self::request), also if the write was refused.
    pub async fn write(&mut self, key: &str, value: &str, limit: Duration) -> io::Result<()> {
        self.request(HolderRequest::Write { key: key.into(), value: value.into() }, limit).await
    }

    /// Waits until the process has lost the lock of `key`, and returns the reason.
    pub async fn lost(&mut self, key: &str, limit: Duration) -> io::Result<LostReason> {
        self.request(HolderRequest::Lost { key: key.into() }, limit).await
    }

    /// Returns the lock of `key`, with its remaining validity, if the process has a guard that is
    /// still held. Otherwise returns `None`.
    pub async fn status(&mut self, key: &str, limit: Duration) -> io::Result<Option<HolderLock>> {
        self.request(HolderRequest::Status { key: key.into() }, limit).await
    }

    /// Makes the process release all locks and end, and waits until it has ended.
    ///
    /// # Errors
    /// As [`reply`](Self::reply). Also returns an error if a lock could not be released, or if the
    /// exit status of the process is not zero.
    pub async fn quit(mut self, limit: Duration) -> io::Result<()> {
        let pending = self.send_message(Message::Close)?;
        let clean: bool = self.reply(pending, limit).await?;
        let exit = self.process.wait_exit(limit).await.map_err(timed_out)?;
        if clean && exit.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("closed cleanly: {clean}, {exit}")))
        }
    }

    /// Returns the events recorded so far. The record is complete once the standard output of the
    /// process has ended, even if the process was killed. The end of the process can be detected
    /// shortly before the end of its output.
    #[must_use]
    pub fn events(&self) -> Vec<HistoryEvent> {
        let lines = self.process.lines();
        lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

fn timed_out(late: crate::TimeoutError) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, late)
}
