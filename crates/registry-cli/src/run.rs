//! `lockreg run`: runs a command under a lock, from the checks to the exit status.

mod command;
// Processes: the command, its state before it starts, and the watchdog that ends it without
// `lockreg`.
mod child;
pub(crate) mod exec;
pub(crate) mod watchdog;
// The terminal.
pub(crate) mod terminal;

use std::sync::Arc;
use std::time::Duration;

use lock_registry::{Key, LockError, LockGuard, LockRegistry, LostReason, Observer};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::Instant;

use self::child::{Change, Ending, Running};
use self::command::Program;
use self::terminal::{AfterStop, Terminal};
use self::watchdog::Watchdog;
use crate::args;
use crate::exit::{self, Failure, causes};
use crate::say::{Say, printable};
use crate::signals::{Signals, asks_to_end};
use crate::store::Store;
use crate::take::{Ear, Taken, Wait, close_after, take, warn_of_short_reach};

/// A checked `lockreg run`, before any access to the store.
#[derive(Debug)]
pub(crate) struct Run {
    key: Key,
    program: Program,
    store: Store,
    wait: Wait,
    grace: Duration,
}

impl Run {
    pub(crate) fn check(global: &args::Global, run: &args::Run) -> Result<Self, Failure> {
        let (key, command) = run.key_and_command()?;
        let key = args::key(key)?;
        let store = Store::choose(global)?.taking(&run.taking)?;
        // Checked last: any other mistake must exit with 64, and not with the status of a missing
        // command.
        let program = Program::find(command.to_vec())?;
        Ok(Self { key, program, store, wait: Wait::of(&run.taking), grace: run.grace })
    }

    /// Acquires the lock, runs the command, and releases the lock. Returns the exit status.
    pub(crate) async fn carry_out(self, mut signals: Signals, say: Say) -> Result<u8, Failure> {
        let Self { key, program, store, wait, grace } = self;
        let began = Instant::now();
        let ear = Ear::new();
        let registry = tokio::select! {
            registry = store.observed(Arc::clone(&ear) as Arc<dyn Observer>).open(say) => registry?,
            signal = signals.end() => return Ok(exit::by_signal(signal as i32)),
        };
        warn_of_short_reach(&registry, say);
        let lock = registry.obtain(key.as_str());
        let status = match take(&lock, &wait, began, &ear, &mut signals, say).await {
            Ok(Taken::Busy) => Ok(wait.busy_status),
            Ok(Taken::Signal(signal)) => Ok(exit::by_signal(signal as i32)),
            Ok(Taken::Guard(guard)) => {
                let held = Held { guard, program: &program, grace, say };
                held.run(&ear, &mut signals).await
            }
            Err(failure) => Err(failure),
        };
        close_after(&registry, &status, wait.min_hold, &mut signals).await;
        status
    }
}

/// A held lock, and the command to run under it.
struct Held<'a> {
    guard: LockGuard,
    program: &'a Program,
    grace: Duration,
    say: Say,
}

impl Held<'_> {
    async fn run(self, ear: &Ear, signals: &mut Signals) -> Result<u8, Failure> {
        let started = self.start().await;
        let Self { guard, grace, say, .. } = self;
        let ended = match started {
            Ok((running, watchdog, terminal)) => {
                let mut watch = Watch {
                    guard: &guard,
                    running,
                    watchdog,
                    terminal,
                    grace,
                    say,
                    lost: None,
                    pressure: Pressure::None,
                };
                let ending = watch.until_end(ear, signals).await;
                watch.terminal.take_back(watch.running.group());
                watch.watchdog.dismiss();
                Ok((ending, watch.lost))
            }
            Err(failure) => Err(failure),
        };
        let key = guard.key().to_owned();
        let released = guard.unlock().await;
        let (ending, lost) = ended?;
        // A loss that is found only now occurred after the last renewal, while the command may have
        // run.
        let lost = match (lost, &released) {
            (None, Err(LockError::Lost { reason, .. })) => {
                tell_lost(say, &key, *reason);
                true
            }
            (lost, _) => lost.is_some(),
        };
        if lost {
            say.alert(
                "ended",
                &format!("the command {ending}"),
                json!({ "key": key, "status": ending.status() }),
            );
            return Ok(exit::LOST);
        }
        if let Err(error) = released {
            say.alert(
                "release_failed",
                &format!("{}; the lock is free when its lease ends", causes(&error).join(": ")),
                json!({ "key": key, "causes": causes(&error) }),
            );
        }
        Ok(ending.status())
    }

    /// Starts the command under the watchdog.
    async fn start(&self) -> Result<(Running, Watchdog, Terminal), Failure> {
        // This process may have been stopped since the lock was granted.
        self.guard.protect(std::future::ready(())).await?;
        let terminal = Terminal::open();
        let mut watchdog = Watchdog::start().map_err(Failure::os("cannot start the watchdog"))?;
        let environment = vec![
            ("LOCKREG_KEY", Some(self.guard.key().to_owned())),
            // Removed if the store has no token, because the one of an outer `lockreg` would be
            // wrong.
            ("LOCKREG_FENCING_TOKEN", self.guard.fencing_token().map(|token| token.to_string())),
        ];
        match Running::start(self.program, environment, terminal.is_ours_alone()).await {
            Ok(mut running) => {
                watchdog.guard(running.group(), self.grace);
                watchdog.held_for(self.guard.valid_for());
                // This process may have been stopped again. From here on, the watchdog covers this
                // case.
                if let Err(error) = self.guard.protect(std::future::ready(())).await {
                    watchdog.dismiss();
                    return Err(error.into());
                }
                running.begin();
                Ok((running, watchdog, terminal))
            }
            Err(error) => {
                watchdog.dismiss();
                Err(Failure::os("cannot start the command")(error))
            }
        }
    }
}

/// A command that runs under a lock, and the handlers of all events until its end.
struct Watch<'a> {
    guard: &'a LockGuard,
    running: Running,
    watchdog: Watchdog,
    terminal: Terminal,
    grace: Duration,
    say: Say,
    lost: Option<LostReason>,
    pressure: Pressure,
}

/// How the command is being ended.
#[derive(Debug, Clone, Copy)]
enum Pressure {
    None,
    /// It received a signal to end, and is killed at `kill_at`.
    Asked {
        kill_at: Instant,
    },
    /// It received SIGKILL. Processes that survive this cannot be ended.
    Killed,
}

impl Watch<'_> {
    /// Waits until the command has ended. If it was asked to end, also waits for all processes in
    /// its group.
    async fn until_end(&mut self, ear: &Ear, signals: &mut Signals) -> Ending {
        let mut renewals = ear.renewals();
        let mut lost = Box::pin(self.guard.lost());
        let ending = loop {
            let pressure = self.pressure;
            tokio::select! {
                biased;
                // The loss comes first, so that the command does not continue when this process was
                // stopped beyond the lease.
                reason = &mut lost, if self.lost.is_none() => self.on_lost(reason),
                signal = signals.next() => self.on_signal(signal),
                change = self.running.change() => match change {
                    Change::Ended(ending) => break ending,
                    Change::Stopped(signal) => self.on_stop(signal),
                },
                () = time_to_kill(pressure) => self.kill(),
                Ok(()) = renewals.changed() => self.watchdog.held_for(self.guard.valid_for()),
            }
        };
        // A command may leave processes running on purpose, unless it was asked to end.
        while let Pressure::Asked { kill_at } = self.pressure
            && self.running.is_anybody_left()
        {
            let now = Instant::now();
            if now >= kill_at {
                self.kill();
                break;
            }
            tokio::select! {
                biased;
                reason = &mut lost, if self.lost.is_none() => self.on_lost(reason),
                // A process that ignores one signal may end at another.
                signal = signals.next() => {
                    if asks_to_end(signal) {
                        self.ask_to_end(signal);
                    }
                }
                // Without these messages, the watchdog would treat the lease as over.
                Ok(()) = renewals.changed(), if self.lost.is_none() => {
                    self.watchdog.held_for(self.guard.valid_for());
                }
                () = tokio::time::sleep_until(kill_at.min(now + LOOK)) => {}
            }
        }
        ending
    }

    fn on_lost(&mut self, reason: LostReason) {
        self.lost = Some(reason);
        // The signal comes first, to save time. `mine` must not reach the watchdog before the
        // signal is sent.
        self.ask_to_end(Signal::SIGTERM);
        self.watchdog.mine();
        tell_lost(self.say, self.guard.key(), reason);
    }

    fn on_signal(&mut self, signal: Signal) {
        match signal {
            signal if asks_to_end(signal) => self.ask_to_end(signal),
            Signal::SIGTSTP => {
                self.running.signal_all(signal);
                terminal::stop_self();
                self.go_on();
            }
            Signal::SIGWINCH => self.running.signal_all(signal),
            // Only for the command, which handles it. The processes that it started may not handle
            // it and would end.
            signal => self.running.signal(signal),
        }
    }

    fn on_stop(&mut self, signal: Signal) {
        if !matches!(self.pressure, Pressure::None) {
            // Stopped processes do not end.
            return self.running.signal_all(Signal::SIGCONT);
        }
        match self.terminal.after_stop(self.running.group(), signal) {
            AfterStop::Leave => {}
            AfterStop::GoOn => self.go_on(),
            AfterStop::StopJob => {
                self.terminal.take_back(self.running.group());
                terminal::stop_job();
                self.go_on();
            }
        }
    }

    /// Continues a stopped command, unless the lock was lost in the meantime.
    fn go_on(&self) {
        if self.guard.is_held() {
            self.terminal.give(self.running.group());
            self.running.signal_all(Signal::SIGCONT);
        }
    }

    fn ask_to_end(&mut self, signal: Signal) {
        if let Pressure::None = self.pressure {
            self.pressure = Pressure::Asked { kill_at: Instant::now() + self.grace };
        }
        self.running.signal_all(signal);
        self.running.signal_all(Signal::SIGCONT);
    }

    fn kill(&mut self) {
        self.running.signal_all(Signal::SIGKILL);
        self.pressure = Pressure::Killed;
    }
}

fn tell_lost(say: Say, key: &str, reason: LostReason) {
    say.alert(
        "lost",
        &format!("the lock {} was lost: {reason}", printable(key)),
        json!({ "key": key, "lost": reason }),
    );
}

async fn time_to_kill(pressure: Pressure) {
    match pressure {
        Pressure::Asked { kill_at } => tokio::time::sleep_until(kill_at).await,
        Pressure::None | Pressure::Killed => std::future::pending().await,
    }
}

/// How often the group is checked for remaining processes. There is no notification of the end of
/// grandchildren.
const LOOK: Duration = Duration::from_millis(20);
