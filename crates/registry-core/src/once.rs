//! Jobs that run once per tick of a schedule, over all processes.
//!
//! A lock alone cannot show whether the three o'clock run has happened: that run may have released
//! the lock already. The value block of the job's key therefore records the last completed tick. A
//! run acquires the lock of the key, compares the tick with the record, runs the work, and writes
//! the record under the lock. If a process crashes before it writes the record, another process
//! runs the tick after the lease has ended.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;

use crate::clock::Moment;
use crate::error::{InvalidOption, LockError};
use crate::event::{LockEvent, TickEnd};
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::local_lock::LocalLock;
use crate::lock::DistributedLock;
use crate::options::LockOptions;
use crate::owner::Owner;
use crate::value::ValueRead;

/// A job of a registry, from [`LockRegistryExt::once`](crate::LockRegistryExt::once).
/// [`tick`](Self::tick) or [`every`](Self::every) sets its schedule.
#[derive(Debug, Clone)]
#[must_use = "a job needs a schedule, and runs nothing until `run`"]
pub struct Job {
    lock: DistributedLock,
}

impl Job {
    pub(crate) fn new(lock: DistributedLock) -> Self {
        Self { lock }
    }

    /// Selects the tick: the number of a run, the time for which a scheduler planned it, or a name.
    ///
    /// All processes must derive the same tick. For example, derive a time from the cron expression
    /// that matched, not from the time at which the process woke up. A number or time is done if it
    /// is not larger than the last completed one. A [name](Tick::Name) is done only if it is the
    /// last completed one. A tick whose kind differs from that of the last completed one is not
    /// done.
    pub fn tick(self, tick: impl Into<Tick>) -> ScheduledJob {
        self.scheduled(TickSource::Tick(tick.into()))
    }

    /// Makes a tick due at each multiple of `period` since 1970 in UTC. The tick is the time at
    /// which its period begins, so a job may change its period. `period` is rounded down to whole
    /// milliseconds.
    ///
    /// The current time comes from the store's clock if clients can read this clock, so that hosts
    /// with different clocks agree. With etcd, the time comes from this host's clock. With
    /// ZooKeeper, it comes from the leader's clock. A process that has requested no lock in its
    /// current ZooKeeper session uses its host's clock for the check before the lock.
    pub fn every(self, period: Duration) -> ScheduledJob {
        self.scheduled(TickSource::Every(period))
    }

    fn scheduled(self, schedule: TickSource) -> ScheduledJob {
        let options = LockOptions::new().wait(Duration::ZERO);
        ScheduledJob { lock: self.lock, schedule, catch_up: CatchUp::Skip, options }
    }
}

/// One tick of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Tick {
    /// The number of a run. Consecutive runs have consecutive numbers.
    Number(u64),
    /// A time, in milliseconds since 1970 in UTC.
    Time(u64),
    /// A name without an order, such as a version. At least one byte, at most
    /// [`NAME_BYTES_MAX`](Self::NAME_BYTES_MAX) bytes, without a line break.
    Name(Arc<str>),
}

impl Tick {
    /// The maximum length of a [`Name`](Self::Name), in bytes.
    pub const NAME_BYTES_MAX: usize = 256;

    /// Returns the number, or the milliseconds since 1970. `None` for a name.
    #[must_use]
    pub const fn number(&self) -> Option<u64> {
        match self {
            Self::Number(number) | Self::Time(number) => Some(*number),
            Self::Name(_) => None,
        }
    }

    /// Returns whether this tick is done if `completed` is the last completed tick. See
    /// [`Job::tick`]. Ticks of different kinds have no order.
    fn is_done_after(&self, completed: &Self) -> bool {
        match (self, completed) {
            (Self::Number(tick), Self::Number(completed))
            | (Self::Time(tick), Self::Time(completed)) => tick <= completed,
            _ => self == completed,
        }
    }
}

impl From<u64> for Tick {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

/// Converts decimal digits to a [`Tick::Number`]. Any other text, and a number larger than
/// [`u64::MAX`], becomes a [`Tick::Name`].
impl From<&str> for Tick {
    fn from(text: &str) -> Self {
        // The parser also accepts a sign.
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        number.map_or_else(|| Self::Name(text.into()), Self::Number)
    }
}

/// Rounds down to whole milliseconds. A time before 1970 becomes zero.
impl From<SystemTime> for Tick {
    fn from(time: SystemTime) -> Self {
        Self::Time(unix_millis(time))
    }
}

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) | Self::Time(number) => fmt::Display::fmt(number, f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// What a call of [`ScheduledJob::run`] does with missed ticks. A tick is missed if no process has
/// run it and a later tick is due. A job that has never run has missed nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CatchUp {
    /// Missed ticks are never run. The current tick is run.
    #[default]
    Skip,
    /// The latest missed tick is run, and then the current one.
    Latest,
    /// All missed ticks are run in their order, and then the current one.
    All,
}

/// The outcome of [`ScheduledJob::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the work may not have run"]
#[non_exhaustive]
pub enum Outcome<T> {
    /// This process has run the work and recorded the tick. Contains the output for the last tick.
    /// If this output is an `Err` of [`ScheduledJob::try_run`], its tick is not recorded.
    Ran(T),
    /// The tick was completed before, by this or another process.
    #[non_exhaustive]
    AlreadyDone {
        /// The last completed tick, which is the requested one or a later one.
        tick: Tick,
        /// When it was completed, by the clock that [`Job::every`] describes.
        at: SystemTime,
        /// The label of the process that completed it, if it has one.
        label: Option<String>,
    },
    /// Another holder has the lock of the job, and probably runs the work. This call may have run
    /// missed ticks before.
    Busy,
}

/// A job with its schedule.
#[derive(Debug, Clone)]
#[must_use = "a job runs nothing until `run`"]
pub struct ScheduledJob {
    lock: DistributedLock,
    schedule: TickSource,
    catch_up: CatchUp,
    options: LockOptions,
}

#[derive(Debug, Clone)]
enum TickSource {
    Tick(Tick),
    Every(Duration),
}

impl ScheduledJob {
    /// Sets what [`run`](Self::run) does with missed ticks. The default is [`CatchUp::Skip`]. Only
    /// numbers and the ticks of [`Job::every`] can be missed. A time or a name from [`Job::tick`]
    /// is always run alone.
    pub fn catch_up(mut self, catch_up: CatchUp) -> Self {
        self.catch_up = catch_up;
        self
    }

    /// Sets the options of the lock. Without [`LockOptions::wait`], [`run`](Self::run) does not
    /// wait, and returns [`Outcome::Busy`] while another holder has the lock. The label is recorded
    /// with each tick. The [owner](LockOptions::owner) is ignored, because a job is not re-entrant.
    pub fn options(mut self, options: LockOptions) -> Self {
        self.options = options;
        self.options.wait.get_or_insert(Duration::ZERO);
        self
    }

    /// Runs `work` for each tick that is due and not done.
    ///
    /// `work` receives the [`Run`] with the tick and the fencing token. If the lock is lost, `work`
    /// is dropped at its current `.await`, and the tick stays undone. A tick that is already done
    /// costs one read of the store.
    ///
    /// A crash between the end of `work` and the record makes another process repeat the tick. In
    /// an SQL store, `run_in` of `registry-jdbc` commits the record together with the work.
    ///
    /// # Errors
    /// As [`DistributedLock::value`] and [`DistributedLock::try_lock_with`]. [`LockError::Lost`] if
    /// the lock was lost before the store confirmed the record. [`LockError::Backend`] if the store
    /// did not confirm the record. If a write of the record was sent before such an error, the tick
    /// may or may not be recorded. [`LockError::InvalidOption`] for a period of less than a
    /// millisecond or an invalid name. [`LockError::ForeignValue`] if the value block of the key is
    /// not the record of a job.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work` and releases the lock in the background. The tick that was
    /// running stays undone, unless its record was just being written.
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// # use registry_core::once::Outcome;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let report = registry.once("report").tick(7);
    /// let outcome = report.run(|run| async move { run.tick().number() }).await?;
    /// assert_eq!(outcome, Outcome::Ran(Some(7)));
    /// assert!(matches!(report.run(|_| async {}).await?, Outcome::AlreadyDone { .. }));
    /// # Ok(()) }
    /// ```
    pub async fn run<W, F>(&self, mut work: W) -> Result<Outcome<F::Output>, LockError>
    where
        W: FnMut(Run) -> F,
        F: Future,
    {
        let work = |run| work(run).map(Ok::<F::Output, std::convert::Infallible>);
        Ok(match self.try_run(work).await? {
            Outcome::Ran(Ok(output)) => Outcome::Ran(output),
            Outcome::AlreadyDone { tick, at, label } => Outcome::AlreadyDone { tick, at, label },
            Outcome::Busy => Outcome::Busy,
        })
    }

    /// As [`run`](Self::run), for work that can fail. After an `Err`, the tick stays undone, so
    /// that a later call can run it again. This call then runs no further tick.
    ///
    /// # Errors
    /// As [`run`](Self::run). An error of `work` is in [`Outcome::Ran`].
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_run<W, F, T, E>(&self, mut work: W) -> Result<Outcome<Result<T, E>>, LockError>
    where
        W: FnMut(Run) -> F,
        F: Future<Output = Result<T, E>>,
    {
        let mut output = None;
        loop {
            let (guard, mut ticks) = match (self.begin().await?, output) {
                (BeginOutcome::Due(guard, ticks), _) => (guard, ticks),
                // Another process has run the remaining ticks.
                (BeginOutcome::AlreadyDone(_), Some(output)) => {
                    return Ok(Outcome::Ran(Ok(output)));
                }
                (BeginOutcome::AlreadyDone(record), None) => return Ok(record.already_done()),
                (BeginOutcome::Busy, _) => return Ok(Outcome::Busy),
            };
            output = None;
            let mut is_last = false;
            while let Some(tick) = ticks.next() {
                let run = Run::new(tick.clone(), guard.fencing_token());
                let failure_event = TickEventGuard::of(&self.lock);
                match guard.protect(work(run)).await? {
                    Ok(tick_output) => output = Some(tick_output),
                    Err(error) => {
                        release(guard).await;
                        return Ok(Outcome::Ran(Err(error)));
                    }
                }
                ticks.complete(&guard, &tick).await?;
                failure_event.forget();
                is_last = tick == ticks.newest;
            }
            release(guard).await;
            // After a repeated write, `ticks` ends early. The loop runs the remaining ticks under
            // another claim.
            if is_last {
                // `begin` returns at least one tick that is due.
                return output.map(|output| Outcome::Ran(Ok(output))).ok_or(LockError::Closed);
            }
        }
    }

    /// Acquires the lock of the job if a tick is due. For backends that write the record in another
    /// way than [`Ticks::complete`]. Applications call [`run`](Self::run) instead.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn begin(&self) -> Result<BeginOutcome, LockError> {
        let failure_event = TickEventGuard::of(&self.lock);
        let begun = self.begin_unobserved().await?;
        match &begun {
            BeginOutcome::Due(..) => failure_event.forget(),
            BeginOutcome::AlreadyDone(record) => {
                failure_event.end(TickEnd::AlreadyDone, Some(record.at))
            }
            BeginOutcome::Busy => failure_event.end(TickEnd::Busy, None),
        }
        Ok(begun)
    }

    async fn begin_unobserved(&self) -> Result<BeginOutcome, LockError> {
        if let TickSource::Every(period) = &self.schedule
            && *period < Duration::from_millis(1)
        {
            let problem = "is less than a millisecond; use a longer period";
            return Err(InvalidOption::new("period", *period, problem).into());
        }
        if let TickSource::Tick(Tick::Name(name)) = &self.schedule
            && (name.is_empty() || name.len() > Tick::NAME_BYTES_MAX || name.contains('\n'))
        {
            return Err(InvalidOption::tick_name(name, Tick::NAME_BYTES_MAX).into());
        }
        // Reads without the lock first, because most calls find that the tick is done.
        if let Checked::Done(record) = self.check(&self.lock.read_value().await?)? {
            return Ok(BeginOutcome::AlreadyDone(record));
        }
        // Two runs of one owner would otherwise enter the lock together, and run the same tick.
        let options = self.options.clone().owner(&Owner::new());
        let Some(guard) = self.lock.try_lock_with(options).await? else {
            return Ok(BeginOutcome::Busy);
        };
        match self.check(&guard.read_value().await?)? {
            Checked::Due(ticks) => Ok(BeginOutcome::Due(guard, ticks)),
            Checked::Done(record) => {
                release(guard).await;
                Ok(BeginOutcome::AlreadyDone(record))
            }
        }
    }

    /// Compares the record in the value block with the schedule.
    fn check(&self, read: &ValueRead) -> Result<Checked, LockError> {
        let read_at = Moment::now();
        let record = match &read.value {
            Some(value) => Some(DoneRecord::parse(&value.bytes).ok_or_else(|| {
                let (key, expected) = (self.lock.key().to_owned(), "the record of a job");
                LockError::ForeignValue { key, expected }
            })?),
            None => None,
        };
        let now = read.now.unwrap_or_else(host_time);
        let (newest, step) = match &self.schedule {
            TickSource::Tick(tick) => (tick.clone(), 1),
            TickSource::Every(period) => {
                let period = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
                (Tick::Time(unix_millis(now) / period * period), period)
            }
        };
        let due = |first| Ticks { next: Some(first), newest: newest.clone(), step, now, read_at };
        let Some(record) = record else { return Ok(Checked::Due(due(newest.clone()))) };
        if newest.is_done_after(&record.tick) {
            return Ok(Checked::Done(record));
        }
        let is_period = matches!(self.schedule, TickSource::Every(_));
        // The last completed and the current tick, if the ticks between them count as missed.
        let (done, current) = match (&record.tick, &newest) {
            (Tick::Number(done), Tick::Number(current)) => (*done, *current),
            (Tick::Time(done), Tick::Time(current)) if is_period => (*done, *current),
            _ => return Ok(Checked::Due(due(newest.clone()))),
        };
        let first = match self.catch_up {
            CatchUp::Skip => current,
            CatchUp::Latest => current.saturating_sub(step),
            CatchUp::All => done / step * step + step,
        };
        let first = if first <= done { current } else { first.min(current) };
        let first = if is_period { Tick::Time(first) } else { Tick::Number(first) };
        Ok(Checked::Due(due(first)))
    }
}

/// Emits the event of a failed tick when dropped. [`end`](Self::end) emits the event of another
/// outcome instead, and [`forget`](Self::forget) emits none.
struct TickEventGuard<'a>(Option<&'a LocalLock>);

impl<'a> TickEventGuard<'a> {
    fn of(lock: &'a DistributedLock) -> Self {
        Self(lock.local_lock().ok().map(|local_lock| &**local_lock))
    }

    fn end(mut self, end: TickEnd, completed_at: Option<SystemTime>) {
        if let Some(local_lock) = self.0.take() {
            emit_tick(local_lock, end, completed_at);
        }
    }

    /// Drops this value without an event.
    fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for TickEventGuard<'_> {
    fn drop(&mut self) {
        if let Some(local_lock) = self.0 {
            emit_tick(local_lock, TickEnd::Failed, None);
        }
    }
}

fn emit_tick(local_lock: &LocalLock, end: TickEnd, completed_at: Option<SystemTime>) {
    let key = local_lock.key().as_str();
    local_lock.engine().emit(|| LockEvent::Tick { key, end, completed_at });
}

/// The result of comparing a schedule with the record.
enum Checked {
    Done(DoneRecord),
    Due(Ticks),
}

/// The result of [`ScheduledJob::begin`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BeginOutcome {
    /// Ticks are due, and this process has the lock.
    Due(LockGuard, Ticks),
    /// The tick is done.
    AlreadyDone(DoneRecord),
    /// Another holder has the lock.
    Busy,
}

/// The ticks that this process must run.
#[derive(Debug, Clone)]
pub struct Ticks {
    next: Option<Tick>,
    newest: Tick,
    /// The difference between two consecutive ticks.
    step: u64,
    /// The time at `read_at`, on the clock that [`Job::every`] describes.
    now: SystemTime,
    read_at: Moment,
}

impl Ticks {
    /// Returns the record that `tick` is done, for the value block of the job.
    #[must_use]
    pub fn record(&self, guard: &LockGuard, tick: &Tick) -> Vec<u8> {
        self.done_record(guard, tick).to_bytes()
    }

    fn done_record(&self, guard: &LockGuard, tick: &Tick) -> DoneRecord {
        let at = self.now + Moment::now().since(self.read_at);
        let label = guard.claim().label().map(str::to_owned);
        DoneRecord { tick: tick.clone(), at, label }
    }

    /// Records that `tick` is done.
    ///
    /// A write that fails with a [retryable](LockError::is_retryable) error is repeated while the
    /// lock is held, for at most the length of a lease. Without the record, the tick would run
    /// twice. After a repeated write, this iterator ends, and [`ScheduledJob::begin`] returns the
    /// remaining ticks under another claim.
    ///
    /// # Errors
    /// As [`LockGuard::set_value`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the tick may or may not be recorded.
    pub async fn complete(&mut self, guard: &LockGuard, tick: &Tick) -> Result<(), LockError> {
        let record = self.done_record(guard, tick);
        let is_repeated = guard.set_value_while_held(record.to_bytes()).await?;
        let local_lock = guard.hold().grant().local_lock();
        emit_tick(local_lock, TickEnd::Done, Some(record.at));
        if is_repeated {
            // An earlier write may still arrive, and must not replace the record of a later tick.
            // `begin` returns the remaining ticks under another claim.
            self.next = None;
        }
        Ok(())
    }
}

/// Returns the ticks in their order. Call [`Ticks::complete`] when the work of a tick is done.
impl Iterator for Ticks {
    type Item = Tick;

    fn next(&mut self) -> Option<Tick> {
        let tick = self.next.take()?;
        self.next = match (&tick, &self.newest) {
            (Tick::Number(number), Tick::Number(newest)) if number < newest => {
                Some(Tick::Number(number.saturating_add(self.step)))
            }
            (Tick::Time(time), Tick::Time(newest)) if time < newest => {
                Some(Tick::Time(time.saturating_add(self.step)))
            }
            _ => None,
        };
        Some(tick)
    }
}

/// The argument of a job's work: the tick and the fencing token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    tick: Tick,
    token: FencingToken,
}

impl Run {
    /// Creates the argument of the work for one tick.
    #[must_use]
    pub const fn new(tick: Tick, token: FencingToken) -> Self {
        Self { tick, token }
    }

    /// Returns the tick.
    #[must_use]
    pub const fn tick(&self) -> &Tick {
        &self.tick
    }

    /// Returns the fencing token of the run. Send it with each write, so that a run that was paused
    /// beyond its lease cannot write after its successor.
    #[must_use]
    pub const fn fencing_token(&self) -> FencingToken {
        self.token
    }
}

/// The record of the last completed tick, in the value block of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DoneRecord {
    /// The tick.
    pub tick: Tick,
    /// When it was completed.
    pub at: SystemTime,
    /// The label of the process that completed it.
    pub label: Option<String>,
}

impl DoneRecord {
    /// Returns the outcome for a caller of this tick or an earlier one.
    pub fn already_done<T>(self) -> Outcome<T> {
        Outcome::AlreadyDone { tick: self.tick, at: self.at, label: self.label }
    }

    /// Parses the value block of a job. Returns `None` for any other value block.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        // The label comes last, because it may contain line breaks.
        let mut lines = text.splitn(4, '\n');
        if lines.next()? != HEADER {
            return None;
        }
        let tick = match lines.next()?.split_once(' ')? {
            ("tick", number) => Tick::Number(number.parse().ok()?),
            ("name", name) => Tick::Name(name.into()),
            ("time", unix_millis) => Tick::Time(unix_millis.parse().ok()?),
            _ => return None,
        };
        let at = lines.next()?.strip_prefix("at ")?.parse().ok().filter(|at| *at < AT_LIMIT)?;
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(at))?;
        let label = match lines.next() {
            Some(line) => Some(line.strip_prefix("label ")?.to_owned()),
            None => None,
        };
        Some(Self { tick, at, label })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let kind = match self.tick {
            Tick::Number(_) => "tick",
            Tick::Time(_) => "time",
            Tick::Name(_) => "name",
        };
        let label = self.label.iter().map(|label| format!("\nlabel {label}")).collect::<String>();
        format!("{HEADER}\n{kind} {}\nat {}{label}", self.tick, unix_millis(self.at)).into_bytes()
    }
}

/// The first line of the record. The number is the version of the format.
const HEADER: &str = "lock-registry job 1";
/// The start of the year 10000 in UTC, in milliseconds since 1970. RFC 3339 cannot express it.
const AT_LIMIT: u64 = 253_402_300_800_000;

/// Releases the lock. Ignores the outcome, which does not change the value block.
async fn release(guard: LockGuard) {
    _ = guard.unlock().await;
}

pub(crate) fn unix_millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns this host's wall clock, for stores whose clock clients cannot read.
#[expect(clippy::disallowed_methods, reason = "no lease depends on it, only the schedule")]
pub(crate) fn host_time() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_digits_is_a_number_and_any_other_text_is_a_name() {
        for (text, number) in [
            ("0", Some(0)),
            ("007", Some(7)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("+7", None),
            ("-7", None),
            ("", None),
            ("7a", None),
        ] {
            assert_eq!(Tick::from(text).number(), number, "{text}");
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_764_081_600_123);
        for tick in [Tick::Number(0), Tick::Number(u64::MAX), Tick::Time(7), "v1 2".into()] {
            for label in [None, Some(""), Some("host 1\nline 2")] {
                let tick = tick.clone();
                let record = DoneRecord { tick, at, label: label.map(str::to_owned) };
                assert_eq!(DoneRecord::parse(&record.to_bytes()), Some(record));
            }
        }
        for other in [
            "",
            "x",
            HEADER,
            "lock-registry job 1\ntick x\nat 1",
            "lock-registry job 1\ntick 1\nat 253402300800000",
            "lock-registry job 2",
        ] {
            assert_eq!(DoneRecord::parse(other.as_bytes()), None, "{other:?}");
        }
    }
}
