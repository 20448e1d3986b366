//! `lockreg hold`: holds a lock for a script or a program in any language, until the stdin of
//! `lockreg` ends or a signal arrives.

use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;

use lock_registry::{FencingToken, LockError, LostReason, observe::Observer};
use serde::Serialize;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::acquire::{
    AcquireOptions, AcquireOutcome, LockObserver, acquire, close_after, warn_if_process_local,
};
use crate::args;
use crate::exit::{self, CliError};
use crate::lock::{HeldLock, LockRequest};
use crate::output::{Output, json_to_stdout, printable, whole_millis};
use crate::run::RunEnd;
use crate::signals::{Signals, is_termination_signal};
use crate::store::StoreConfig;

/// A validated `lockreg hold`, before any access to the store.
#[derive(Debug)]
pub(crate) struct HoldCommand {
    request: LockRequest,
    store: StoreConfig,
    acquire_options: AcquireOptions,
}

#[derive(Debug, Serialize)]
struct HeldLine {
    key: String,
    token: Option<u64>,
    valid_for_ms: u64,
}

#[derive(Debug, Serialize)]
struct LostLine {
    key: String,
    lost: LostReason,
}

impl HoldCommand {
    pub(crate) fn from_args(
        global: &args::GlobalArgs,
        hold: &args::HoldArgs,
    ) -> Result<Self, CliError> {
        let key = args::parse_key(&hold.key)?;
        let store = StoreConfig::choose(global)?.with_acquire_args(&hold.acquire)?;
        let request = LockRequest::from_args(key, &hold.acquire)?;
        Ok(Self { request, store, acquire_options: AcquireOptions::from_args(&hold.acquire) })
    }

    /// Acquires the lock, holds it until stdin ends, a signal arrives or the lock is lost, and
    /// releases it. Returns the exit status.
    pub(crate) async fn execute(
        self,
        mut signals: Signals,
        output: Output,
    ) -> Result<u8, CliError> {
        let Self { request, store, acquire_options } = self;
        let started_at = Instant::now();
        let observer = LockObserver::new();
        let registry = tokio::select! {
            registry = store.with_observer(Arc::clone(&observer) as Arc<dyn Observer>).open(output) => registry?,
            signal = signals.next_termination() => return Ok(exit::status_of_signal(signal as i32)),
        };
        warn_if_process_local(&registry, output);
        let lock = request.obtain(&registry);
        let ended = match acquire(
            &lock,
            request.key(),
            &acquire_options,
            started_at,
            &observer,
            &mut signals,
            output,
        )
        .await
        {
            Ok(AcquireOutcome::Busy) => Ok(RunEnd::Exited(acquire_options.busy_status)),
            Ok(AcquireOutcome::Signal(signal)) => Ok(RunEnd::by_signal(signal)),
            Ok(AcquireOutcome::Held(guard)) => {
                let has_fencing = registry.capabilities().fencing;
                hold_until_end(guard, has_fencing, &mut signals, output).await
            }
            Err(failure) => Err(failure),
        };
        close_after(&registry, ended, acquire_options.min_hold, &mut signals).await
    }
}

async fn hold_until_end(
    guard: HeldLock,
    has_fencing: bool,
    signals: &mut Signals,
    output: Output,
) -> Result<RunEnd, CliError> {
    let key = guard.key().to_owned();
    let token = guard.fencing_token().filter(|_| has_fencing).map(FencingToken::get);
    let held = HeldLine { key: key.clone(), token, valid_for_ms: whole_millis(guard.valid_for()) };
    let mut printing = Box::pin(print_line(held));
    let mut printed = None;
    let mut done = Box::pin(async {
        tokio::select! {
            () = wait_for_termination_signal(signals) => {}
            () = wait_for_stdin_end() => {}
        }
    });
    // If the line cannot be written, its reader does not know of the lock. The loop then ends, and
    // the lock is released.
    while !matches!(printed, Some(Err(_))) {
        tokio::select! {
            biased;
            (key, reason) = guard.lost() => {
                // The drop sends no release for the lost key. It releases the other keys of
                // `--also`.
                drop(guard);
                report_loss(output, key, reason).await;
                return Ok(RunEnd::Lost { is_end_requested: false });
            }
            written = &mut printing, if printed.is_none() => printed = Some(written),
            () = &mut done => break,
        }
    }
    if printed.is_none() {
        // The reader may still read the line after it has closed the stdin of `lockreg`. If the
        // reader never reads, the limit ends the wait.
        printed = timeout(READ_LIMIT, printing).await.ok();
    }
    let released = guard.unlock().await;
    match (released, printed) {
        (Err(LockError::Lost { key, reason, .. }), _) => {
            report_loss(output, key, reason).await;
            Ok(RunEnd::Lost { is_end_requested: false })
        }
        // The program that started `lockreg` did not learn of the lock, so a closed stdout, which
        // other commands ignore, is a failure here.
        (_, Some(Err(CliError::Output(error)))) => Err(CliError::Output(io::Error::other(error))),
        (_, Some(Err(failure))) => Err(failure),
        (Err(error), _) => Err(error.into()),
        (Ok(()), _) => Ok(RunEnd::Exited(0)),
    }
}

/// Prints the loss on stdout. If the write fails or takes longer than [`READ_LIMIT`], prints the
/// loss on stderr.
async fn report_loss(output: Output, key: String, reason: LostReason) {
    let line = print_line(LostLine { key: key.clone(), lost: reason });
    if !matches!(timeout(READ_LIMIT, line).await, Ok(Ok(()))) {
        output.alert(
            "lost",
            &format!("the lock {} was lost: {reason}", printable(&key)),
            json!({ "key": key, "lost": reason }),
        );
    }
}

/// Prints `value` on stdout and waits asynchronously until it is written. `lockreg` must handle
/// signals and a loss even if no process reads stdout.
async fn print_line(value: impl Serialize + Send + 'static) -> Result<(), CliError> {
    let (sender, written) = oneshot::channel();
    // The write may block forever, so it has a thread of its own, which ends with the process.
    std::thread::Builder::new()
        .name("stdout".to_owned())
        .spawn(move || {
            let _ = sender.send(json_to_stdout(&value));
        })
        .map_err(CliError::os("cannot start a thread"))?;
    written.await.unwrap_or_else(|error| Err(CliError::Output(io::Error::other(error))))
}

/// The time that the reader of stdout has for the last line before `lockreg` ends.
const READ_LIMIT: Duration = Duration::from_secs(1);

async fn wait_for_termination_signal(signals: &mut Signals) {
    while !is_termination_signal(signals.next_termination().await) {}
}

/// Waits until stdin ends or cannot be read, and ignores the input.
async fn wait_for_stdin_end() {
    let (sender, ended) = oneshot::channel();
    // A read may block forever, so it has a thread of its own, which ends with the process.
    let reader = std::thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let mut buffer = [0; 4_096];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
            }
        }
        let _ = sender.send(());
    });
    if reader.is_ok() {
        let _ = ended.await;
    }
}
