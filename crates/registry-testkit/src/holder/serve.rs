//! The inside of a lock holder: obeys orders, over any registry. Each lock has a task of its own, so that an order that waits
//! holds up no other.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use registry_core::{DistributedLock, LockError, LockGuard, LockOptions, LockRegistry, LostReason};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::history::{Recorder, host_clock};
use crate::witness::{Witness, WitnessedGuard};

use super::protocol::{HolderOptions, Order, Report, millis};

/// How long the registry may take to give everything back at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Obeys the orders on this process's standard input until it ends or says so, and reports on its standard output.
///
/// `registry` is what it takes locks from; of `options` it uses only those that are not the registry's.
///
/// # Cancel safety
/// Dropping the future drops all guards; the input is read no more.
pub async fn serve(registry: Arc<dyn LockRegistry>, options: &HolderOptions) {
    let history = options.history;
    let recorder = Recorder::sending(host_clock(), process::id(), move |event| {
        if history {
            say(&Report::Event(event.clone()));
        }
    });
    let witness = Witness::new(&recorder, process::id());
    let mut orders = listen();
    let mut tasks = JoinSet::new();
    let mut locks: HashMap<String, mpsc::UnboundedSender<Command>> = HashMap::new();
    say(&Report::Ready { pid: process::id() });
    while let Some(order) = orders.recv().await {
        // Ended tasks are taken out, so that a long test does not pile them up.
        while tasks.try_join_next().is_some() {}
        match order {
            Order::Lock { key, wait_ms, lease_ms, renew } => {
                let (commands, obeyed) = mpsc::unbounded_channel();
                // An older order for this key hears that nobody gives it commands any more, and lets go.
                locks.insert(key.clone(), commands);
                let options = lock_options(wait_ms, lease_ms, renew);
                tasks.spawn(hold(witness.clone(), registry.obtain(&key), options, obeyed));
            }
            Order::Unlock { key } => tell(&mut locks, key, Command::Unlock),
            Order::Drop { key } => tell(&mut locks, key, Command::Drop),
            Order::Status { key } => tell(&mut locks, key, Command::Status),
            Order::Repeat { key, rounds, hold_ms } => {
                let hold = Duration::from_millis(hold_ms);
                tasks.spawn(repeat(witness.clone(), registry.obtain(&key), rounds, hold));
            }
            Order::Contend { key, tasks: count, hold_ms, for_ms } => {
                let [hold, span] = [hold_ms, for_ms].map(Duration::from_millis);
                tasks.spawn(contend(registry.obtain(&key), count, hold, span));
            }
            Order::Quit => break,
        }
    }
    drop(locks);
    tasks.shutdown().await;
    let closed = registry.close(CLOSE_LIMIT).await;
    say(&Report::Closed { clean: closed.is_clean() });
}

/// Writes one report to the standard output, at once. Whoever listened may be gone; then nobody misses it.
///
/// # Panics
/// Never: reports are plain data.
pub fn say(report: &Report) {
    let line = serde_json::to_string(report).expect("reports are plain data");
    // One write: two processes may share an output, and a stopped one must not leave half a line.
    _ = io::stdout().lock().write_all(format!("{line}\n").as_bytes());
    _ = io::stdout().lock().flush();
}

/// A thread reads the input: a task that waits for it would keep the runtime from shutting down.
fn listen() -> mpsc::UnboundedReceiver<Order> {
    let (heard, orders) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(order) => {
                    if heard.send(order).is_err() {
                        return;
                    }
                }
                Err(error) => say(&Report::failed(None, "read an order", &error)),
            }
        }
    });
    orders
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
        options = options.renew(renew);
    }
    options
}

/// What the task of a lock is told.
#[derive(Debug, Clone, Copy)]
enum Command {
    Unlock,
    Drop,
    Status,
}

fn tell(
    locks: &mut HashMap<String, mpsc::UnboundedSender<Command>>,
    key: String,
    command: Command,
) {
    if locks.get(&key).is_none_or(|lock| lock.send(command).is_err()) {
        locks.remove(&key);
        answer_without_lock(key, command);
    }
}

fn answer_without_lock(key: String, command: Command) {
    match command {
        Command::Status => say(&status(key, None)),
        Command::Unlock | Command::Drop => say(&Report::Failed {
            key: Some(key),
            doing: "release".into(),
            problem: "the lock was not asked for".into(),
        }),
    }
}

/// Takes a lock and keeps it until it is told otherwise.
async fn hold(
    witness: Witness,
    lock: DistributedLock,
    options: LockOptions,
    mut commands: mpsc::UnboundedReceiver<Command>,
) {
    take_and_keep(&witness, &lock, options, &mut commands).await;
    // A command that came while the last one was obeyed gets its answer too.
    commands.close();
    while let Some(command) = commands.recv().await {
        answer_without_lock(lock.key().to_owned(), command);
    }
}

async fn take_and_keep(
    witness: &Witness,
    lock: &DistributedLock,
    options: LockOptions,
    commands: &mut mpsc::UnboundedReceiver<Command>,
) {
    let key = lock.key().to_owned();
    // In a block of its own: "cancelled" is told when the acquisition has been dropped.
    let acquired = {
        let acquiring = witness.lock_with(lock, options);
        tokio::pin!(acquiring);
        loop {
            tokio::select! {
                acquired = &mut acquiring => break Some(acquired),
                command = commands.recv() => match command {
                    Some(Command::Status) => say(&status(key.clone(), None)),
                    None | Some(Command::Unlock | Command::Drop) => break None,
                },
            }
        }
    };
    match acquired {
        Some(Ok(Some(guard))) => {
            say(&held(key, &guard));
            keep(guard, commands).await;
        }
        Some(Ok(None)) => say(&Report::Busy { key }),
        Some(Err(error)) => say(&Report::failed(Some(key), "acquire", &error)),
        None => say(&Report::Cancelled { key }),
    }
}

async fn keep(guard: WitnessedGuard, commands: &mut mpsc::UnboundedReceiver<Command>) {
    let key = guard.key().to_owned();
    let lost = guard.lost();
    tokio::pin!(lost);
    let mut told = false;
    loop {
        tokio::select! {
            biased;
            reason = &mut lost, if !told => {
                told = true;
                guard.note();
                say(&Report::Lost { key: key.clone(), reason: reason_name(reason) });
            }
            command = commands.recv() => match command {
                Some(Command::Status) => say(&status(key.clone(), Some(&guard))),
                Some(Command::Unlock) => {
                    return match guard.unlock().await {
                        Ok(()) => say(&Report::Released { key }),
                        Err(error) => say(&Report::failed(Some(key), "release", &error)),
                    };
                }
                None | Some(Command::Drop) => {
                    drop(guard);
                    return say(&Report::Dropped { key });
                }
            },
        }
    }
}

async fn repeat(witness: Witness, lock: DistributedLock, rounds: u32, hold: Duration) {
    let key = lock.key().to_owned();
    for _ in 0..rounds {
        match round(&witness, &lock, hold).await {
            // A lease that ended is part of the history, not the end of it.
            Ok(()) | Err(LockError::Lost { .. }) => {}
            Err(error) => return say(&Report::failed(Some(key), "repeat", &error)),
        }
    }
    say(&Report::Repeated { key, rounds });
}

/// Counts how often `tasks` tasks get the lock within `span`, and for how long none of them does.
async fn contend(lock: DistributedLock, tasks: u32, hold: Duration, span: Duration) {
    let key = lock.key().to_owned();
    let end = Instant::now() + span;
    // The number of grants, when the last one was, and the longest wait for one.
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
            return say(&Report::failed(Some(key), "contend", &error));
        }
    }
    let (grants, _, longest) = *share.lock().unwrap_or_else(PoisonError::into_inner);
    say(&Report::Contended { key, grants, longest_wait_ms: millis(longest) });
}

async fn round(witness: &Witness, lock: &DistributedLock, hold: Duration) -> Result<(), LockError> {
    if let Some(guard) = witness.lock_with(lock, LockOptions::new()).await? {
        if !hold.is_zero() {
            sleep(hold).await;
        }
        guard.unlock().await?;
    }
    Ok(())
}

fn held(key: String, guard: &LockGuard) -> Report {
    let token = guard.fencing_token().map(u64::from);
    Report::Held { key, token, valid_for_ms: millis(guard.valid_for()) }
}

fn status(key: String, guard: Option<&LockGuard>) -> Report {
    Report::Status {
        key,
        held: guard.is_some_and(LockGuard::is_held),
        token: guard.and_then(LockGuard::fencing_token).map(u64::from),
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
