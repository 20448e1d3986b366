//! `lockreg top`: shows holders and waiters continuously in the terminal.
//!
//! A task takes a snapshot of the store at each interval, and a thread reads the keyboard. The
//! state is in [`view`], and [`draw`] shows it.

mod draw;
pub(crate) mod view;

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::time::Duration;

use lock_registry::{Key, LockError, Registry};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};

use self::view::{Action, View};
use crate::acquire::close_without_locks;
use crate::args::{self, GlobalArgs};
use crate::exit::CliError;
use crate::output::{Output, printable};
use crate::snapshot::Snapshot;
use crate::store::StoreConfig;

/// An event after which the screen is drawn again.
enum Update {
    Input(Event),
    Snapshot(Result<Snapshot, LockError>),
    ForceReleased(Key, Result<bool, LockError>),
}

/// `lockreg top`.
pub(crate) async fn top(
    global: &GlobalArgs,
    args: &args::TopArgs,
    output: Output,
) -> Result<u8, CliError> {
    let problem = if global.json {
        "has no JSON output"
    } else if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        "needs a terminal"
    } else {
        ""
    };
    if !problem.is_empty() {
        return Err(CliError::usage(format!(
            "`lockreg top` {problem}; in scripts, use `lockreg --json list` and `lockreg --json list --waiters`"
        )));
    }
    let store = StoreConfig::choose(global)?;
    let registry = Arc::new(store.open(output).await?);
    // An error of the first request is printed like that of any other command.
    let first = Snapshot::take(&registry).await?;
    let mut view = View::new(registry.capabilities().store, registry.capabilities().waiters);
    view.record(Ok(first));
    let signal = wait_for_termination();
    // A stopped terminal (Ctrl-S) blocks this thread while it draws. The task ends the process even
    // then.
    tokio::spawn(async {
        signal.await;
        sleep(EXIT_LIMIT).await;
        std::process::exit(0);
    });
    let terminated = wait_for_termination();
    let mut terminal = ratatui::try_init().map_err(CliError::os("cannot use the terminal"))?;
    let shown = show(&mut terminal, &registry, &mut view, args.interval, terminated).await;
    ratatui::restore();
    close_without_locks(&registry).await;
    shown.map_err(CliError::os("cannot write to the terminal"))?;
    Ok(0)
}

async fn show(
    terminal: &mut ratatui::DefaultTerminal,
    registry: &Arc<Registry>,
    view: &mut View,
    pause: Duration,
    terminated: impl Future<Output = ()>,
) -> io::Result<()> {
    // A stopped terminal blocks the drawing. The channel is then full, and the senders wait.
    let (updates, mut received) = mpsc::channel(UPDATES_MAX);
    // This thread ends with the process, because a thread that reads the terminal cannot be
    // cancelled.
    std::thread::spawn({
        let updates = updates.clone();
        move || {
            while let Ok(event) = event::read() {
                if updates.blocking_send(Update::Input(event)).is_err() {
                    return;
                }
            }
        }
    });
    let sampler = tokio::spawn(take_snapshots(Arc::clone(registry), pause, updates.clone()));
    let mut redraw = interval(REDRAW_INTERVAL);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let event_loop = async {
        loop {
            terminal.draw(|frame| draw::draw(frame, view))?;
            let update = tokio::select! {
                update = received.recv() => update,
                _ = redraw.tick() => continue,
            };
            match update {
                Some(Update::Snapshot(snapshot)) => view.record(snapshot),
                Some(Update::ForceReleased(key, released)) => view.set_message(match released {
                    Ok(true) => format!("{} was released", printable(key.as_str())),
                    Ok(false) => format!("{} was not locked any more", printable(key.as_str())),
                    Err(error) => error.to_string(),
                }),
                Some(Update::Input(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    match view.press(key) {
                        Some(Action::Quit) => return Ok(()),
                        Some(Action::Break(key)) => break_lock(registry, key, &updates),
                        None => {}
                    }
                }
                Some(Update::Input(_)) => {}
                None => return Ok(()),
            }
        }
    };
    let ended = tokio::select! {
        ended = event_loop => ended,
        () = terminated => Ok(()),
    };
    sampler.abort();
    ended
}

/// Takes snapshots until the receiver of `updates` is dropped. To limit the load of the store, the
/// pause before a snapshot is at least as long as the last snapshot took.
async fn take_snapshots(registry: Arc<Registry>, pause: Duration, updates: mpsc::Sender<Update>) {
    let mut took = Duration::ZERO;
    loop {
        sleep(pause.max(took)).await;
        let started = std::time::Instant::now();
        let snapshot = Snapshot::take(&registry).await;
        took = started.elapsed();
        if updates.send(Update::Snapshot(snapshot)).await.is_err() {
            return;
        }
    }
}

fn break_lock(registry: &Arc<Registry>, key: Key, updates: &mpsc::Sender<Update>) {
    let (registry, updates) = (Arc::clone(registry), updates.clone());
    tokio::spawn(async move {
        let released = registry.force_release(key.as_str()).await;
        _ = updates.send(Update::ForceReleased(key, released)).await;
    });
}

/// Returns a future that waits for SIGTERM, SIGINT or SIGHUP, so that the terminal can be restored
/// before the process ends. The signals are caught from the call on.
fn wait_for_termination() -> impl Future<Output = ()> {
    use tokio::signal::unix::{SignalKind, signal};
    let signals =
        [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
    async move {
        let [Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)] = signals else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// The interval at which the ages on the screen are updated between two snapshots.
const REDRAW_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum time from a signal to the end of the process.
const EXIT_LIMIT: Duration = Duration::from_secs(3);
/// The number of updates that may wait to be drawn.
const UPDATES_MAX: usize = 4;
