//! Acquires the lock of `run` and `hold`, reports the holder during the wait, and closes the
//! registry.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use lock_registry::{
    FencingToken, Holder, LockError, LockOptions, Reach, Registry,
    observe::{LockEvent, Observer},
};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::args::AcquireArgs;
use crate::exit::{CliError, LOST};
use crate::lock::{HeldLock, RequestedLock};
use crate::output::{HolderView, Output, describe_holder, format_coarse, printable, whole_millis};
use crate::run::RunEnd;
use crate::signals::Signals;

/// The result of an acquisition.
#[derive(Debug)]
pub(crate) enum AcquireOutcome {
    Held(HeldLock),
    /// Other clients held the lock until the deadline.
    Busy,
    /// A signal requested the end of this process before the lock was acquired.
    Signal(Signal),
}

/// Records the holder of a busy lock, and the renewals of a held lock.
#[derive(Debug)]
pub(crate) struct LockObserver {
    last_seen: watch::Sender<Option<LastSeen>>,
    renewed: watch::Sender<()>,
}

impl LockObserver {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { last_seen: watch::Sender::new(None), renewed: watch::Sender::new(()) })
    }

    /// Returns a receiver that is notified after each renewal of the lease.
    pub(crate) fn renewals(&self) -> watch::Receiver<()> {
        self.renewed.subscribe()
    }
}

impl Observer for LockObserver {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::Busy { busy, .. } => {
                self.last_seen.send_replace(Some(LastSeen {
                    holder: busy.holder.clone(),
                    at: Instant::now(),
                }));
            }
            LockEvent::Renewed { .. } => {
                self.renewed.send_replace(());
            }
            _ => {}
        }
    }
}

/// The holder of the lock in the last response of the store.
#[derive(Debug, Clone)]
struct LastSeen {
    holder: Option<Holder>,
    /// The time of the response.
    at: Instant,
}

impl LastSeen {
    /// Returns the holder. Adjusts its times to the present, as if the holder had not changed.
    fn holder_now(&self) -> Option<Holder> {
        let passed = self.at.elapsed();
        let holder = self.holder.clone()?;
        let held_for = holder.held_for.map(|held| held + passed);
        let lease_left = holder.lease_left.map(|left| left.saturating_sub(passed));
        Some(holder.with_times(held_for, lease_left))
    }
}

/// The options of the command line for acquiring the lock.
#[derive(Debug)]
pub(crate) struct AcquireOptions {
    /// The time from the start for which failed attempts to connect are repeated and the lock is
    /// waited for. `None` if `--wait` is not set: connecting is then repeated for
    /// `connect_timeout`. The wait has no limit, or is zero for a command that runs once per tick.
    pub(crate) wait_limit: Option<Duration>,
    pub(crate) lock_options: LockOptions,
    pub(crate) min_hold: Duration,
    /// The exit status if the lock is not acquired in time.
    pub(crate) busy_status: u8,
}

impl AcquireOptions {
    pub(crate) fn from_args(args: &AcquireArgs) -> Self {
        Self {
            wait_limit: args.wait_limit(),
            lock_options: args.options(),
            min_hold: args.min_hold.unwrap_or_default(),
            busy_status: args.conflict_exit_code,
        }
    }
}

/// Acquires `lock`. `key` is the argument KEY. The wait counts from `started`, which is before
/// connecting.
pub(crate) async fn acquire(
    lock: &RequestedLock,
    key: &str,
    acquire_options: &AcquireOptions,
    started: Instant,
    observer: &LockObserver,
    signals: &mut Signals,
    output: Output,
) -> Result<AcquireOutcome, CliError> {
    let wait_limit = acquire_options.wait_limit;
    let mut options = acquire_options.lock_options.clone();
    if let Some(wait_limit) = wait_limit {
        options = options.wait(wait_limit.saturating_sub(started.elapsed()));
    }
    let mut acquiring = Box::pin(lock.lock(key, options));
    let mut reporter = WaitReporter::new(key, started, wait_limit != Some(Duration::ZERO), output);
    let mut redraw = tokio::time::interval(REDRAW_INTERVAL);
    let outcome = loop {
        tokio::select! {
            biased;
            outcome = &mut acquiring => break outcome,
            signal = signals.next_termination() => return Ok(AcquireOutcome::Signal(signal)),
            _ = redraw.tick() => {
                let seen = observer.last_seen.borrow().clone();
                if let Some(seen) = seen {
                    reporter.report(&seen);
                }
            }
        }
    };
    drop(reporter);
    match outcome {
        Ok(held) => return Ok(AcquireOutcome::Held(held)),
        Err(LockError::WaitElapsed { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let waited = started.elapsed();
    let holder = observer.last_seen.borrow().as_ref().and_then(LastSeen::holder_now);
    let limit_note = match wait_limit {
        None | Some(Duration::ZERO) => String::new(),
        Some(wait) => format!("; not acquired within {}", humantime::format_duration(wait)),
    };
    let held_key = busy_key(key, holder.as_ref());
    let holder_text = describe_holder(holder.as_ref());
    output.notice(
        "not_obtained",
        &format!("{held_key} is held by {holder_text}{limit_note}"),
        json!({ "key": key, "waited_ms": whole_millis(waited), "holder": holder.as_ref().map(HolderView::from) }),
    );
    Ok(AcquireOutcome::Busy)
}

/// Returns the key that another client holds. `key` is the argument KEY. With `--also`, another
/// client may hold a further key instead.
fn busy_key(key: &str, holder: Option<&Holder>) -> String {
    printable(holder.map_or(key, |holder| holder.key.as_str()))
}

/// Warns that a store with the reach `process` does not exclude other processes.
pub(crate) fn warn_if_process_local(registry: &Registry, output: Output) {
    let capabilities = registry.capabilities();
    if capabilities.reach == Reach::Process {
        let text = format!(
            "the {} store excludes only tasks of this process; set another store with --url",
            capabilities.store
        );
        output.notice("warning", &text, json!({ "store": capabilities.store }));
    }
}

/// Closes the registry, which releases its remaining locks.
pub(crate) async fn close(registry: &Registry) {
    _ = registry.close(CLOSE_LIMIT).await;
}

/// Closes the `registry` of a command that held no lock. A store that does not respond delays the
/// end of the command by at most [`SHORT_CLOSE_LIMIT`].
pub(crate) async fn close_without_locks(registry: &Registry) {
    let _ = timeout(SHORT_CLOSE_LIMIT, registry.close(Duration::ZERO)).await;
}

/// Closes `registry` at the end of `run`, `hold` or `elect`, and returns the exit status. Unless
/// the lock was lost, waits until `min_hold` is over. A signal ends this wait, and the key then
/// stays locked until its lease ends.
pub(crate) async fn close_after(
    registry: &Registry,
    ended: Result<RunEnd, CliError>,
    min_hold: Duration,
    signals: &mut Signals,
) -> Result<u8, CliError> {
    // The status alone does not show a loss: a command may exit with the same status.
    let is_lost = match &ended {
        Ok(ended) => matches!(ended, RunEnd::Lost { .. }),
        Err(failure) => failure.status() == LOST,
    };
    if is_lost {
        // The lock is already lost, and the caller should receive the exit status soon. The store
        // has one second to respond.
        let _ = timeout(SHORT_CLOSE_LIMIT, registry.close(Duration::ZERO)).await;
    } else {
        tokio::select! {
            _ = registry.close(CLOSE_LIMIT.saturating_add(min_hold)) => {}
            _ = signals.next_termination(), if !min_hold.is_zero() => {
                _ = registry.close(Duration::ZERO).await;
            }
        }
    }
    ended.map(RunEnd::status)
}

/// The interval at which the progress line is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_millis(200);
/// The interval at which output without a progress line repeats that `lockreg` waits.
const REMINDER_INTERVAL: Duration = Duration::from_secs(60);
/// The time limit for clearing the progress line when it is dropped.
const CLEAR_LIMIT: Duration = Duration::from_millis(100);
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for closing a registry that holds no lock.
const SHORT_CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Reports the holder during the wait, as one progress line on a terminal and otherwise as separate
/// lines.
struct WaitReporter<'a> {
    key: &'a str,
    output: Output,
    started: Instant,
    /// False for a single attempt, which is reported only after it has failed.
    is_enabled: bool,
    progress: Option<ProgressLine>,
    /// The token of the holder in the last report, and the time of the report.
    last_report: Option<(Option<FencingToken>, Instant)>,
}

impl<'a> WaitReporter<'a> {
    fn new(key: &'a str, started: Instant, is_enabled: bool, output: Output) -> Self {
        Self { key, output, started, is_enabled, progress: None, last_report: None }
    }

    fn report(&mut self, seen: &LastSeen) {
        if !self.is_enabled {
            return;
        }
        let holder = seen.holder_now();
        let key = busy_key(self.key, holder.as_ref());
        let text = format!("{key}, held by {}", describe_holder(holder.as_ref()));
        let waited = self.started.elapsed();
        if self.output.may_show_progress_line() {
            let progress = self.progress.get_or_insert_with(ProgressLine::start);
            // The line begins with the time, because a narrow terminal cuts off the end of the
            // line.
            progress.show(format!("waited {} for {text}", format_coarse(waited)));
            return;
        }
        let token = holder.as_ref().and_then(|holder| holder.token);
        if self
            .last_report
            .is_some_and(|(reported, at)| reported == token && at.elapsed() < REMINDER_INTERVAL)
        {
            return;
        }
        let text = if self.last_report.is_some() {
            format!("waited {} for {text}", format_coarse(waited))
        } else {
            format!("waiting for {text}")
        };
        self.last_report = Some((token, Instant::now()));
        self.output.notice(
            "waiting",
            &text,
            json!({ "key": self.key, "waited_ms": whole_millis(waited), "holder": holder.as_ref().map(HolderView::from) }),
        );
    }
}

/// A line on the terminal. Its own thread redraws the line, because a stopped terminal must not
/// block `lockreg`.
struct ProgressLine {
    texts: Option<SyncSender<String>>,
    ended: Receiver<()>,
}

impl ProgressLine {
    fn start() -> Self {
        let (texts, queue) = sync_channel::<String>(1);
        let (ended_sender, ended) = channel();
        // If the thread cannot start, `lockreg` continues without a progress line.
        let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
            let bar = progress_bar();
            for text in queue {
                bar.set_message(text);
                bar.tick();
            }
            bar.finish_and_clear();
            let _ = ended_sender.send(());
        });
        Self { texts: Some(texts), ended }
    }

    fn show(&self, text: String) {
        if let Some(texts) = &self.texts {
            // Sending fails if the thread has not taken the previous text yet. A newer text
            // follows.
            let _ = texts.try_send(text);
        }
    }
}

impl Drop for ProgressLine {
    /// Waits for at most [`CLEAR_LIMIT`], so that the line is cleared before other output.
    fn drop(&mut self) {
        self.texts = None;
        let _ = self.ended.recv_timeout(CLEAR_LIMIT);
    }
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} lockreg: {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner());
    // The progress bar draws to stderr.
    ProgressBar::new_spinner().with_style(style)
}
