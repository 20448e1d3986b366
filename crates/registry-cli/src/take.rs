//! Acquires the lock of `run` and `hold`, and reports the holder during the wait. Also closes the
//! registry.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use lock_registry::{
    DistributedLock, FencingToken, Holder, LockEvent, LockGuard, LockOptions, LockRegistry,
    Observer, Reach, Registry,
};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::args::Taking;
use crate::exit::{Failure, LOST};
use crate::say::{HolderView, Say, coarse, holder_phrase, millis, printable};
use crate::signals::Signals;

/// The result of an acquisition.
#[derive(Debug)]
pub(crate) enum Taken {
    Guard(LockGuard),
    /// Other clients held the lock until the deadline.
    Busy,
    /// A signal requested the end of this process before the lock was acquired.
    Signal(Signal),
}

/// Records the registry events that matter to waiters and holders.
#[derive(Debug)]
pub(crate) struct Ear {
    busy: watch::Sender<Option<Sighting>>,
    renewed: watch::Sender<()>,
}

impl Ear {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { busy: watch::Sender::new(None), renewed: watch::Sender::new(()) })
    }

    /// Returns a receiver that changes after each renewal of the lease.
    pub(crate) fn renewals(&self) -> watch::Receiver<()> {
        self.renewed.subscribe()
    }
}

impl Observer for Ear {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::Busy { busy, .. } => {
                self.busy.send_replace(Some(Sighting {
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

/// The holder of the lock at a point in time.
#[derive(Debug, Clone)]
struct Sighting {
    holder: Option<Holder>,
    at: Instant,
}

impl Sighting {
    /// Returns the holder with its times extrapolated to now, if it is still the same.
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
pub(crate) struct Wait {
    /// The time limit for connecting and acquiring together, or `None` for no limit.
    patience: Option<Duration>,
    options: LockOptions,
    pub(crate) min_hold: Duration,
    /// The exit status if the lock is not obtained in time.
    pub(crate) busy_status: u8,
}

impl Wait {
    pub(crate) fn of(taking: &Taking) -> Self {
        Self {
            patience: taking.patience(),
            options: taking.options(),
            min_hold: taking.min_hold.unwrap_or_default(),
            busy_status: taking.conflict_exit_code,
        }
    }
}

/// Acquires `lock`. The wait is counted from `began`, before connecting.
pub(crate) async fn take(
    lock: &DistributedLock,
    wait: &Wait,
    began: Instant,
    ear: &Ear,
    signals: &mut Signals,
    say: Say,
) -> Result<Taken, Failure> {
    let patience = wait.patience;
    let mut options = wait.options.clone();
    if let Some(patience) = patience {
        options = options.wait(patience.saturating_sub(began.elapsed()));
    }
    let mut taking = Box::pin(lock.lock_with(options));
    let mut telling = Telling::new(lock.key(), began, patience != Some(Duration::ZERO), say);
    let mut look = tokio::time::interval(LOOK);
    let outcome = loop {
        tokio::select! {
            biased;
            outcome = &mut taking => break outcome,
            signal = signals.end() => return Ok(Taken::Signal(signal)),
            _ = look.tick() => {
                let seen = ear.busy.borrow().clone();
                if let Some(seen) = seen {
                    telling.tell(&seen);
                }
            }
        }
    };
    drop(telling);
    if let Some(guard) = outcome? {
        return Ok(Taken::Guard(guard));
    }
    let waited = began.elapsed();
    let holder = ear.busy.borrow().as_ref().and_then(Sighting::holder_now);
    let when = match patience {
        None | Some(Duration::ZERO) => String::new(),
        Some(wait) => format!("; not obtained within {}", humantime::format_duration(wait)),
    };
    say.notice(
        "not_obtained",
        &format!("{} is held by {}{when}", printable(lock.key()), holder_phrase(holder.as_ref())),
        json!({ "key": lock.key(), "waited_ms": millis(waited), "holder": holder.as_ref().map(HolderView::from) }),
    );
    Ok(Taken::Busy)
}

/// Warns that a store with the reach `process` does not exclude other processes.
pub(crate) fn warn_of_short_reach(registry: &Registry, say: Say) {
    let capabilities = registry.capabilities();
    if capabilities.reach == Reach::Process {
        let text = format!("the {} store keeps no other process out", capabilities.store);
        say.notice("warning", &text, json!({ "store": capabilities.store }));
    }
}

/// Closes the registry, which releases its remaining locks.
pub(crate) async fn close(registry: &Registry) {
    registry.close(CLOSE_LIMIT).await;
}

/// Closes `registry` after the lock ended with `status`. Waits until `min_hold` is over. A signal
/// ends this wait, and the key then stays locked until its lease ends.
pub(crate) async fn close_after(
    registry: &Registry,
    status: &Result<u8, Failure>,
    min_hold: Duration,
    signals: &mut Signals,
) {
    let status = status.as_ref().map_or_else(Failure::status, |status| *status);
    if status == LOST {
        // No lock is left to release, and the caller should receive the exit status soon. The limit
        // gives the store one second to answer.
        let _ = timeout(CLOSE_LIMIT_AFTER_LOSS, registry.close(Duration::ZERO)).await;
        return;
    }
    tokio::select! {
        _ = registry.close(CLOSE_LIMIT.saturating_add(min_hold)) => {}
        _ = signals.end(), if !min_hold.is_zero() => {
            registry.close(Duration::ZERO).await;
        }
    }
}

/// How often the live line is redrawn.
const LOOK: Duration = Duration::from_millis(200);
/// How often a log without a live line repeats that `lockreg` still waits.
const REMIND: Duration = Duration::from_secs(60);
/// How long dropping a live line waits until it is cleared.
const CLEAR_LIMIT: Duration = Duration::from_millis(100);
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
const CLOSE_LIMIT_AFTER_LOSS: Duration = Duration::from_secs(1);

/// Reports the holder: as one live line on a terminal, otherwise as separate lines.
struct Telling<'a> {
    key: &'a str,
    say: Say,
    began: Instant,
    /// False for a single attempt, which is reported only after it has failed.
    wanted: bool,
    live: Option<LiveLine>,
    /// The token of the holder in the last report, and its time.
    told: Option<(Option<FencingToken>, Instant)>,
}

impl<'a> Telling<'a> {
    fn new(key: &'a str, began: Instant, wanted: bool, say: Say) -> Self {
        Self { key, say, began, wanted, live: None, told: None }
    }

    fn tell(&mut self, seen: &Sighting) {
        if !self.wanted {
            return;
        }
        let holder = seen.holder_now();
        let text = format!("{}, held by {}", printable(self.key), holder_phrase(holder.as_ref()));
        let waited = self.began.elapsed();
        if self.say.is_live() {
            let live = self.live.get_or_insert_with(LiveLine::start);
            // The time comes first, because a narrow terminal cuts off the end of the line.
            live.show(format!("waited {} for {text}", coarse(waited)));
            return;
        }
        let token = holder.as_ref().and_then(|holder| holder.token);
        if self.told.is_some_and(|(told, at)| told == token && at.elapsed() < REMIND) {
            return;
        }
        let text = if self.told.is_some() {
            format!("waited {} for {text}", coarse(waited))
        } else {
            format!("waiting for {text}")
        };
        self.told = Some((token, Instant::now()));
        self.say.notice(
            "waiting",
            &text,
            json!({ "key": self.key, "waited_ms": millis(waited), "holder": holder.as_ref().map(HolderView::from) }),
        );
    }
}

/// A line on the terminal that is redrawn by its own thread, because a halted terminal must not
/// block `lockreg`.
struct LiveLine {
    texts: Option<SyncSender<String>>,
    ended: Receiver<()>,
}

impl LiveLine {
    fn start() -> Self {
        let (texts, queue) = sync_channel::<String>(1);
        let (tell_ended, ended) = channel();
        // Without the thread, only the live line is missing.
        let _ = std::thread::Builder::new().name("live line".to_owned()).spawn(move || {
            let live = progress_bar();
            for text in queue {
                live.set_message(text);
                live.tick();
            }
            live.finish_and_clear();
            let _ = tell_ended.send(());
        });
        Self { texts: Some(texts), ended }
    }

    fn show(&self, text: String) {
        if let Some(texts) = &self.texts {
            // Fails while the previous text is being drawn. A newer text follows.
            let _ = texts.try_send(text);
        }
    }
}

impl Drop for LiveLine {
    /// Waits for at most [`CLEAR_LIMIT`], so that the line is cleared before other output.
    fn drop(&mut self) {
        self.texts = None;
        let _ = self.ended.recv_timeout(CLEAR_LIMIT);
    }
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} lockreg: {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner());
    // Draws to stderr.
    ProgressBar::new_spinner().with_style(style)
}
