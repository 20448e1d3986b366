//! `lockreg run --once-per` and `--tick`: whether the command is due, and the record that it ran.

use std::time::Duration;

use lock_registry::election::VacantRecord;
use lock_registry::once::{BeginOutcome, DoneRecord, Job, ScheduledJob, Tick, Ticks};
use lock_registry::{LockError, LockRegistryExt as _, Registry};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::Instant;

use crate::acquire::AcquireOptions;
use crate::args::OnceArgs;
use crate::exit::CliError;
use crate::lock::{HeldLock, LockRequest};
use crate::output::{Output, printable};
use crate::signals::{Signals, is_termination_signal};

/// The schedule of a command, before any access to the store.
#[derive(Debug)]
pub(crate) struct OnceCommand {
    schedule: TickSource,
    counts_failures: bool,
}

#[derive(Debug)]
enum TickSource {
    Period(Duration),
    Tick(Tick),
}

/// Whether the command is due.
#[derive(Debug)]
pub(crate) enum OnceOutcome {
    Due(HeldLock, Recording),
    /// The command already ran, or another process runs it. `begin` has reported this.
    NotDue,
    /// A signal requested the end of this process.
    Signal(Signal),
}

/// What to record when the command has ended.
#[derive(Debug)]
pub(crate) enum Recording {
    /// That the tick is done.
    Tick { ticks: Ticks, tick: Tick, counts_failures: bool },
    /// That the role has no leader.
    VacantRole(VacantRecord),
}

impl OnceCommand {
    pub(crate) fn from_args(args: &OnceArgs) -> Result<Option<Self>, CliError> {
        let schedule = match (args.once_per, &args.tick) {
            (Some(period), _) => TickSource::Period(period),
            (None, Some(tick)) => TickSource::Tick(parse_tick(tick)?),
            (None, None) if args.count_failures => {
                return Err(CliError::usage(
                    "--count-failures has no effect without --once-per or --tick; add one of them",
                ));
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { schedule, counts_failures: args.count_failures }))
    }

    fn schedule(&self, job: Job) -> ScheduledJob {
        match &self.schedule {
            TickSource::Period(period) => job.every(*period),
            TickSource::Tick(tick) => job.tick(tick.clone()),
        }
    }

    /// Acquires the lock if the command is due. The wait limit counts from `started_at`. Otherwise
    /// prints the reason to stderr, unless
    /// `--quiet` was given.
    pub(crate) async fn begin(
        &self,
        registry: &Registry,
        request: &LockRequest,
        options: &AcquireOptions,
        started_at: Instant,
        signals: &mut Signals,
        output: Output,
    ) -> Result<OnceOutcome, CliError> {
        let key = request.key();
        // While another process runs the command, the command is not due in this process. By
        // default, `lockreg` therefore does not wait.
        let wait = options.wait_limit.unwrap_or_default().saturating_sub(started_at.elapsed());
        let lock_options = options.lock_options.clone().wait(wait);
        let job = self.schedule(registry.once(key)).options(lock_options);
        let begun = tokio::select! {
            biased;
            begun = job.begin() => begun?,
            signal = signals.next_termination() => return Ok(OnceOutcome::Signal(signal)),
        };
        match begun {
            BeginOutcome::Due(guard, mut ticks) => {
                // At least one tick is due.
                let tick = ticks.next().ok_or(LockError::Closed)?;
                let counts_failures = self.counts_failures;
                let recording = Recording::Tick { ticks, tick, counts_failures };
                return Ok(OnceOutcome::Due(HeldLock::single(guard), recording));
            }
            BeginOutcome::AlreadyDone(record) => report_done(output, key, &record),
            _ => output.notice(
                "busy",
                &format!("{} is not run: another process holds its lock", printable(key)),
                json!({ "key": key }),
            ),
        }
        Ok(OnceOutcome::NotDue)
    }
}

impl Recording {
    /// Returns the tick of the command, if it has one.
    pub(crate) fn tick(&self) -> Option<String> {
        match self {
            Self::Tick { tick, .. } => Some(tick.to_string()),
            Self::VacantRole(_) => None,
        }
    }

    /// Writes the record after the command has ended with `status`. A tick is not done if the
    /// command failed and failures do not count. After a termination signal, which may already have
    /// ended the command, the store has [`CONFIRMATION_LIMIT`] to confirm the record.
    pub(crate) async fn complete(
        &self,
        guard: &HeldLock,
        status: u8,
        is_end_requested: bool,
        signals: &mut Signals,
    ) -> Result<(), CliError> {
        match self {
            Self::Tick { counts_failures: false, .. } if status != 0 => Ok(()),
            // `complete` may discard the remaining ticks. A clone suffices, because `lockreg` runs
            // only this tick.
            Self::Tick { ticks, tick, .. } => {
                let mut ticks = ticks.clone();
                tokio::select! {
                    biased;
                    completed = guard.complete(&mut ticks, tick) => Ok(completed?),
                    () = after_termination(is_end_requested, signals) => {
                        Err(CliError::Unconfirmed { key: guard.key().to_owned() })
                    }
                }
            }
            // An error is ignored: observers also detect the vacancy by the missing holder.
            Self::VacantRole(vacant_record) => {
                tokio::select! {
                    biased;
                    _ = guard.set_value(vacant_record.to_bytes()) => {}
                    () = after_termination(is_end_requested, signals) => {}
                }
                Ok(())
            }
        }
    }
}

/// Waits for a termination signal unless `is_end_requested`, then for [`CONFIRMATION_LIMIT`].
async fn after_termination(is_end_requested: bool, signals: &mut Signals) {
    // All other signals, such as SIGUSR1, are meant for the command, which has ended.
    while !is_end_requested && !is_termination_signal(signals.next_termination().await) {}
    tokio::time::sleep(CONFIRMATION_LIMIT).await;
}

/// How long `lockreg` waits for the confirmation of a record after a termination signal. A signal
/// that arrives at the end of the command must not prevent a record that the store can confirm.
const CONFIRMATION_LIMIT: Duration = Duration::from_secs(1);

/// Parses a tick, before any access to the store.
fn parse_tick(text: &str) -> Result<Tick, CliError> {
    let tick = Tick::from(text);
    // The usual cause is a script that passes an unset variable.
    if text.is_empty() {
        return Err(CliError::usage("--tick is empty; state a number or a name"));
    }
    // A larger number would be parsed as a name, and names have no order.
    if tick.number().is_none() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(CliError::usage(format!(
            "--tick is {text}, which is larger than the maximum {}; use a smaller number, or a name",
            u64::MAX
        )));
    }
    Ok(tick)
}

fn report_done(output: Output, key: &str, record: &DoneRecord) {
    let tick = record.tick.to_string();
    let at = humantime::format_rfc3339_seconds(record.at).to_string();
    let by = record.label.as_deref().map(|label| format!(" by {}", printable(label)));
    output.notice(
        "already_done",
        &format!(
            "{} is not run: it ran for tick {} at {at}{}",
            printable(key),
            printable(&tick),
            by.unwrap_or_default()
        ),
        json!({ "key": key, "tick": tick, "at": at, "label": record.label }),
    );
}
