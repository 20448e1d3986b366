//! The implementation of a lock holder: executes commands over any registry. Each lock has its own
//! task, so a command that waits delays no other command.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Debug;
use std::io::{self, BufRead, Write};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{DistributedLock, LockError, LockGuard, LockOptions, LockRegistry, LostReason};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::history::{Recorder, host_clock};
use crate::recording_client::{RecordedGuard, RecordingClient};

use super::protocol::{HolderCommand, HolderReport, millis};

/// The maximum time for the registry to release all locks when it closes.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Executes the commands from standard input and reports on standard output, with each step of each
/// lock. Returns after the command `quit` or the end of the input.
///
/// # Cancel safety
/// Dropping the future drops all guards and stops reading the input.
pub async fn serve(registry: Arc<dyn LockRegistry>) {
    execute_commands(registry, None).await;
}

/// Executes the commands as [`serve`] does, and `write` commands with `writer`.
///
/// # Cancel safety
/// Dropping the future drops all guards and stops reading the input.
pub async fn serve_with_writer(registry: Arc<dyn LockRegistry>, writer: Arc<dyn FencedWriter>) {
    execute_commands(registry, Some(writer)).await;
}

async fn execute_commands(registry: Arc<dyn LockRegistry>, writer: Option<Arc<dyn FencedWriter>>) {
    let recorder = Recorder::forwarding(host_clock(), process::id(), |event| {
        write_report(&HolderReport::HistoryEvent(event.clone()));
    });
    let recording_client = RecordingClient::new(&recorder, process::id());
    let mut input = read_commands();
    let mut tasks = JoinSet::new();
    let mut locks: HashMap<String, mpsc::UnboundedSender<LockCommand>> = HashMap::new();
    write_report(&HolderReport::Ready { pid: process::id() });
    while let Some(command) = input.recv().await {
        // Without this, finished tasks would accumulate in a long test.
        while tasks.try_join_next().is_some() {}
        match command {
            HolderCommand::Lock { key, wait_ms, lease_ms, renew } => {
                let (commands, command_receiver) = mpsc::unbounded_channel();
                // Replaces the sender of an older command for this key. The task of that command
                // sees its channel closed and drops its guard.
                locks.insert(key.clone(), commands);
                let options = lock_options(wait_ms, lease_ms, renew);
                let (client, lock) = (recording_client.clone(), registry.obtain(&key));
                tasks.spawn(hold(client, lock, options, command_receiver, writer.clone()));
            }
            HolderCommand::Unlock { key } => forward(&mut locks, key, LockCommand::Unlock),
            HolderCommand::Drop { key } => forward(&mut locks, key, LockCommand::Drop),
            HolderCommand::Status { key } => forward(&mut locks, key, LockCommand::Status),
            HolderCommand::Write { key, value } => {
                forward(&mut locks, key, LockCommand::Write(value));
            }
            HolderCommand::Repeat { key, rounds, hold_ms } => {
                let hold = Duration::from_millis(hold_ms);
                tasks.spawn(repeat(recording_client.clone(), registry.obtain(&key), rounds, hold));
            }
            HolderCommand::Contend { key, tasks: count, hold_ms, for_ms } => {
                let [hold, span] = [hold_ms, for_ms].map(Duration::from_millis);
                tasks.spawn(contend(registry.obtain(&key), count, hold, span));
            }
            HolderCommand::Quit => break,
        }
    }
    drop(locks);
    tasks.shutdown().await;
    let closed = registry.close(CLOSE_LIMIT).await;
    write_report(&HolderReport::Closed { clean: closed.is_clean() });
}

/// Writes one report to the standard output and flushes it. Ignores write errors, because the
/// reader may have ended.
///
/// # Panics
/// Never: reports contain only plain data.
pub fn write_report(report: &HolderReport) {
    let line = serde_json::to_string(report).expect("reports are plain data");
    // A single write: two processes may share an output, and a stopped process must not leave half
    // a line.
    _ = io::stdout().lock().write_all(format!("{line}\n").as_bytes());
    _ = io::stdout().lock().flush();
}

/// Reads the input on a thread: a tokio task that reads stdin would block the runtime's shutdown.
fn read_commands() -> mpsc::UnboundedReceiver<HolderCommand> {
    let (sender, input) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(command) => {
                    if sender.send(command).is_err() {
                        return;
                    }
                }
                Err(error) => write_report(&HolderReport::failed(None, "read a command", &error)),
            }
        }
    });
    input
}

fn lock_options(wait_ms: Option<u64>, lease_ms: Option<u64>, renew: Option<bool>) -> LockOptions {
    let mut options = LockOptions::new();
    if let Some(wait) = wait_ms {
        options = options.wait(Duration::from_millis(wait));
    }
    if let Some(lease) = lease_ms {
        options = options.lease(Duration::from_millis(lease));
    }
    if let Some(renew) = renew {
        options = options.auto_renew(renew);
    }
    options
}

/// Writes to data that a lock protects.
#[async_trait]
pub trait FencedWriter: Debug + Send + Sync {
    /// Writes `value` with the token, or the claim, of `guard`, whether the lock is held or lost.
    ///
    /// # Errors
    /// If the write was refused, or its outcome is unknown.
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// A command to the task of one lock.
#[derive(Debug)]
enum LockCommand {
    Unlock,
    Drop,
    Status,
    Write(String),
}

fn forward(
    locks: &mut HashMap<String, mpsc::UnboundedSender<LockCommand>>,
    key: String,
    command: LockCommand,
) {
    let unsent = match locks.get(&key) {
        Some(lock) => lock.send(command).err().map(|unsent| unsent.0),
        None => Some(command),
    };
    if let Some(command) = unsent {
        locks.remove(&key);
        answer_without_lock(key, command);
    }
}

fn answer_without_lock(key: String, command: LockCommand) {
    match command {
        LockCommand::Status => write_report(&status(key, None)),
        LockCommand::Unlock | LockCommand::Drop | LockCommand::Write(_) => {
            write_report(&HolderReport::Failed {
                key: Some(key),
                doing: "use the lock".into(),
                problem: "the lock was not requested".into(),
            })
        }
    }
}

/// Acquires a lock and holds it until a command ends it or the sender is dropped.
async fn hold(
    recording_client: RecordingClient,
    lock: DistributedLock,
    options: LockOptions,
    mut commands: mpsc::UnboundedReceiver<LockCommand>,
    writer: Option<Arc<dyn FencedWriter>>,
) {
    acquire_and_hold(&recording_client, &lock, options, &mut commands, writer.as_deref()).await;
    // A command that arrived during the last one is answered as well.
    commands.close();
    while let Some(command) = commands.recv().await {
        answer_without_lock(lock.key().to_owned(), command);
    }
}

async fn acquire_and_hold(
    recording_client: &RecordingClient,
    lock: &DistributedLock,
    options: LockOptions,
    commands: &mut mpsc::UnboundedReceiver<LockCommand>,
    writer: Option<&dyn FencedWriter>,
) {
    let key = lock.key().to_owned();
    // The block drops the acquisition before `cancelled` is reported.
    let acquired = {
        let acquiring = recording_client.lock_with(lock, options);
        tokio::pin!(acquiring);
        loop {
            tokio::select! {
                acquired = &mut acquiring => break Some(acquired),
                command = commands.recv() => match command {
                    Some(LockCommand::Status) => write_report(&status(key.clone(), None)),
                    Some(command @ LockCommand::Write(_)) => {
                        answer_without_lock(key.clone(), command);
                    }
                    None | Some(LockCommand::Unlock | LockCommand::Drop) => break None,
                },
            }
        }
    };
    match acquired {
        Some(Ok(Some(guard))) => {
            write_report(&held(key, &guard));
            hold_until_command(guard, commands, writer).await;
        }
        Some(Ok(None)) => write_report(&HolderReport::Busy { key }),
        Some(Err(error)) => write_report(&HolderReport::failed(Some(key), "acquire", &error)),
        None => write_report(&HolderReport::Cancelled { key }),
    }
}

async fn hold_until_command(
    guard: RecordedGuard,
    commands: &mut mpsc::UnboundedReceiver<LockCommand>,
    writer: Option<&dyn FencedWriter>,
) {
    let key = guard.key().to_owned();
    let lost = guard.lost();
    tokio::pin!(lost);
    let mut is_loss_reported = false;
    loop {
        tokio::select! {
            biased;
            reason = &mut lost, if !is_loss_reported => {
                is_loss_reported = true;
                guard.record_state();
                write_report(&HolderReport::Lost { key: key.clone(), reason: reason_name(reason) });
            }
            command = commands.recv() => match command {
                Some(LockCommand::Status) => write_report(&status(key.clone(), Some(&guard))),
                Some(LockCommand::Write(value)) => {
                    write_report(&write(writer, &guard, &value).await);
                }
                Some(LockCommand::Unlock) => {
                    return match guard.unlock().await {
                        Ok(()) => write_report(&HolderReport::Released { key }),
                        Err(error) => write_report(&HolderReport::failed(Some(key), "release", &error)),
                    };
                }
                None | Some(LockCommand::Drop) => {
                    drop(guard);
                    return write_report(&HolderReport::Dropped { key });
                }
            },
        }
    }
}

async fn write(writer: Option<&dyn FencedWriter>, guard: &LockGuard, value: &str) -> HolderReport {
    let key = guard.key().to_owned();
    let written = match writer {
        Some(writer) => writer.write(guard, value).await,
        None => Err("this program has no writer".into()),
    };
    match written {
        Ok(()) => HolderReport::Written { key },
        Err(error) => HolderReport::failed(Some(key), "write", &*error),
    }
}

async fn repeat(
    recording_client: RecordingClient,
    lock: DistributedLock,
    rounds: u32,
    hold: Duration,
) {
    let key = lock.key().to_owned();
    for _ in 0..rounds {
        match round(&recording_client, &lock, hold).await {
            // A lost lease is a recorded event and does not end the rounds.
            Ok(()) | Err(LockError::Lost { .. }) => {}
            Err(error) => return write_report(&HolderReport::failed(Some(key), "repeat", &error)),
        }
    }
    write_report(&HolderReport::Repeated { key, rounds });
}

/// Counts the acquisitions of `tasks` tasks within `span`, and measures the longest time without a
/// holder among them.
async fn contend(lock: DistributedLock, tasks: u32, hold: Duration, span: Duration) {
    let key = lock.key().to_owned();
    let end = Instant::now() + span;
    // The number of grants, the start of the current wait, and the longest wait.
    let share = Arc::new(Mutex::new((0_u32, Instant::now(), Duration::ZERO)));
    let mut workers = JoinSet::new();
    for _ in 0..tasks {
        let (lock, share) = (lock.clone(), Arc::clone(&share));
        workers.spawn(async move {
            while Instant::now() < end {
                let left = end.saturating_duration_since(Instant::now());
                let guard = lock.try_lock_for(left).await?;
                {
                    let mut share = share.lock().unwrap_or_else(PoisonError::into_inner);
                    share.0 += u32::from(guard.is_some());
                    share.2 = share.2.max(share.1.elapsed());
                    share.1 = Instant::now();
                }
                let Some(guard) = guard else { break };
                sleep(hold).await;
                share.lock().unwrap_or_else(PoisonError::into_inner).1 = Instant::now();
                guard.unlock().await?;
            }
            Ok::<_, LockError>(())
        });
    }
    for ended in workers.join_all().await {
        if let Err(error) = ended {
            return write_report(&HolderReport::failed(Some(key), "contend", &error));
        }
    }
    let (grants, _, longest) = *share.lock().unwrap_or_else(PoisonError::into_inner);
    write_report(&HolderReport::Contended { key, grants, longest_wait_ms: millis(longest) });
}

async fn round(
    recording_client: &RecordingClient,
    lock: &DistributedLock,
    hold: Duration,
) -> Result<(), LockError> {
    if let Some(guard) = recording_client.lock_with(lock, LockOptions::new()).await? {
        if !hold.is_zero() {
            sleep(hold).await;
        }
        guard.unlock().await?;
    }
    Ok(())
}

fn held(key: String, guard: &LockGuard) -> HolderReport {
    let token = Some(guard.fencing_token().get());
    HolderReport::Held { key, token, valid_for_ms: millis(guard.valid_for()) }
}

fn status(key: String, guard: Option<&LockGuard>) -> HolderReport {
    HolderReport::Status {
        key,
        held: guard.is_some_and(LockGuard::is_held),
        token: guard.map(|guard| guard.fencing_token().get()),
        valid_for_ms: guard.map_or(0, |guard| millis(guard.valid_for())),
    }
}

fn reason_name(reason: LostReason) -> String {
    match reason {
        LostReason::Expired => "expired".into(),
        LostReason::Gone => "gone".into(),
        LostReason::MaxHold => "max_hold".into(),
        LostReason::Closed => "closed".into(),
        other => format!("{other:?}"),
    }
}
