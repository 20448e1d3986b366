//! Another process that takes locks on orders: the other side of every test "across two processes".
//!
//! The program `lock-holder` of this package obeys orders on its standard input and reports on its standard output, one line
//! of JSON each. [`LockHolder`] is its handle in the test; [`serve`] is its inside, for programs over other stores.

mod program;
mod protocol;
mod serve;

use std::io;
use std::process::Command;
use std::time::Duration;

use registry_core::FencingToken;

use crate::history::Event;
use crate::process::HelperProcess;

pub use program::{PROGRAM_VARIABLE, program};
pub use protocol::{HolderOptions, Order, Report};
pub use serve::{say, serve};

/// How long the program may take to start and to open its store.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A lock that the other process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Its token, from stores that have them.
    pub token: Option<FencingToken>,
    /// How long its guard was valid when it reported.
    pub valid_for: Duration,
}

impl Held {
    fn told(token: Option<u64>, valid_for_ms: u64) -> Self {
        let token = token.and_then(FencingToken::new);
        Self { token, valid_for: Duration::from_millis(valid_for_ms) }
    }
}

/// A process that takes locks on orders. It is killed with this handle; when the test itself is killed, it ends with its
/// standard input.
///
/// The orders of several keys go on at once. A second order to lock a key lets go of the first.
#[derive(Debug)]
pub struct LockHolder {
    process: HelperProcess,
    /// Reports that nobody has asked for yet.
    unread: Vec<Report>,
}

impl LockHolder {
    /// Starts the program `lock-holder`, which is built first if need be, and returns when its store is open.
    ///
    /// # Errors
    /// When the program cannot be built or started, or cannot open its store.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process; a build that has begun goes on.
    pub async fn spawn(options: &HolderOptions) -> io::Result<Self> {
        let program = tokio::task::spawn_blocking(program).await.map_err(io::Error::other)??;
        let mut command = Command::new(program);
        command.arg(serde_json::to_string(options)?);
        Self::spawn_command(command).await
    }

    /// Starts a program that calls [`serve`].
    ///
    /// # Errors
    /// When the program cannot be started, or cannot open its store.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn spawn_command(command: Command) -> io::Result<Self> {
        let mut holder = Self { process: HelperProcess::spawn(command)?, unread: Vec::new() };
        holder
            .report(START_LIMIT, |report| match report {
                Report::Ready { .. } => Some(Ok(())),
                Report::Failed { doing, problem, .. } => Some(Err(failed(doing, problem))),
                _ => None,
            })
            .await??;
        Ok(holder)
    }

    /// The process itself, to be paused, killed or waited for.
    #[must_use]
    pub fn process(&self) -> &HelperProcess {
        &self.process
    }

    /// Ends the process's input, as the death of this test would do: it lets go of everything and ends.
    pub fn close_input(&mut self) {
        self.process.close_stdin();
    }

    /// Gives an order and waits for nothing.
    ///
    /// # Errors
    /// `BrokenPipe` when the process is gone.
    pub fn order(&mut self, order: &Order) -> io::Result<()> {
        self.process.write_line(&serde_json::to_string(order)?)
    }

    /// The first report, in the order of their arrival, from which `such` makes something. The others stay for later calls.
    ///
    /// # Errors
    /// `TimedOut`, with all that the process said, when `limit` is over or nothing more will come.
    ///
    /// # Cancel safety
    /// No report is lost.
    pub async fn report<T>(
        &mut self,
        limit: Duration,
        mut such: impl FnMut(&Report) -> Option<T>,
    ) -> io::Result<T> {
        let found = self.unread.iter().enumerate();
        let found = found.filter_map(|(at, report)| Some((at, such(report)?))).next();
        if let Some((at, found)) = found {
            self.unread.remove(at);
            return Ok(found);
        }
        let unread = &mut self.unread;
        let next = |line: &str| {
            let report = serde_json::from_str(line).ok()?;
            let found = such(&report);
            if found.is_none() {
                unread.push(report);
            }
            found
        };
        self.process.expect_map(next, limit).await.map_err(timed_out)
    }

    /// Orders the lock of `key` and waits until it is held.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over; the order goes on. `Other` when the lock failed.
    ///
    /// # Cancel safety
    /// The order goes on.
    pub async fn lock(&mut self, key: &str, limit: Duration) -> io::Result<Held> {
        self.order(&Order::lock(key))?;
        self.held(key, limit).await
    }

    /// Orders one attempt to lock `key`. `None` when somebody else holds it.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over; the order goes on. `Other` when the attempt failed.
    ///
    /// # Cancel safety
    /// The order goes on.
    pub async fn try_lock(&mut self, key: &str, limit: Duration) -> io::Result<Option<Held>> {
        self.order(&Order::try_lock(key))?;
        self.answer(key, limit).await
    }

    /// Waits until a lock that was ordered before is held.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over; the order goes on. `Other` when the lock failed or its wait is over.
    ///
    /// # Cancel safety
    /// May be dropped at any time; no report is lost.
    pub async fn held(&mut self, key: &str, limit: Duration) -> io::Result<Held> {
        let answer = self.answer(key, limit).await?;
        answer.ok_or_else(|| io::Error::other("the lock is busy"))
    }

    async fn answer(&mut self, key: &str, limit: Duration) -> io::Result<Option<Held>> {
        self.report(limit, |report| match report {
            Report::Held { key: of, token, valid_for_ms } if of == key => {
                Some(Ok(Some(Held::told(*token, *valid_for_ms))))
            }
            Report::Busy { key: of } if of == key => Some(Ok(None)),
            _ => failure_of(key, report).map(Err),
        })
        .await?
    }

    /// Orders to let go of `key` and waits for the outcome.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over. `Other` when the lock had been lost or the release failed.
    ///
    /// # Cancel safety
    /// The order goes on.
    pub async fn unlock(&mut self, key: &str, limit: Duration) -> io::Result<()> {
        self.order(&Order::Unlock { key: key.into() })?;
        self.report(limit, |report| match report {
            Report::Released { key: of } | Report::Cancelled { key: of } if of == key => {
                Some(Ok(()))
            }
            _ => failure_of(key, report).map(Err),
        })
        .await?
    }

    /// Waits until the process reports that it has lost the lock of `key`, and tells the reason.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over.
    ///
    /// # Cancel safety
    /// May be dropped at any time; no report is lost.
    pub async fn lost(&mut self, key: &str, limit: Duration) -> io::Result<String> {
        self.report(limit, |report| match report {
            Report::Lost { key: of, reason } if of == key => Some(reason.clone()),
            _ => None,
        })
        .await
    }

    /// Asks whether the process believes that it holds `key`, and for how long.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn status(&mut self, key: &str, limit: Duration) -> io::Result<Option<Held>> {
        self.order(&Order::Status { key: key.into() })?;
        self.report(limit, |report| match report {
            Report::Status { key: of, held: false, .. } if of == key => Some(None),
            Report::Status { key: of, token, valid_for_ms, .. } if of == key => {
                Some(Some(Held::told(*token, *valid_for_ms)))
            }
            _ => None,
        })
        .await
    }

    /// Orders to let go of everything and to end, and waits for it.
    ///
    /// # Errors
    /// `TimedOut` when `limit` is over. `Other` when something could not be let go of.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn quit(mut self, limit: Duration) -> io::Result<()> {
        self.order(&Order::Quit)?;
        let clean = self
            .report(limit, |report| match report {
                Report::Closed { clean } => Some(*clean),
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

    /// What it has recorded so far, if [`HolderOptions::history`] asked for it. Complete once the process has ended, even
    /// if it was killed.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let lines = self.process.lines();
        let reports = lines.iter().filter_map(|line| serde_json::from_str(line).ok());
        let events = reports.filter_map(|report| match report {
            Report::Event(event) => Some(event),
            _ => None,
        });
        events.collect()
    }
}

fn failure_of(key: &str, report: &Report) -> Option<io::Error> {
    match report {
        Report::Failed { key: Some(of), doing, problem } if of == key => {
            Some(failed(doing, problem))
        }
        _ => None,
    }
}

fn failed(doing: &str, problem: &str) -> io::Error {
    io::Error::other(format!("the lock holder failed to {doing}: {problem}"))
}

fn timed_out(late: crate::NotInTime) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, late)
}
