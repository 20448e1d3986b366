//! `lockreg run`: runs a command under a lock, from the checks to the exit status.

pub(crate) mod command;
mod once;
// Processes: the command, the program that starts it, and the watchdog that ends it if `lockreg`
// cannot.
mod child;
pub(crate) mod exec;
pub(crate) mod watchdog;
// The terminal.
pub(crate) mod terminal;

use std::sync::Arc;
use std::time::Duration;

use lock_registry::{LockError, LostReason, observe::Observer};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::Instant;

use self::child::{CommandExit, CommandProcess, StateChange};
use self::command::Program;
pub(crate) use self::once::Recording;
use self::once::{OnceCommand, OnceOutcome};
use self::terminal::{AfterStop, Terminal};
use self::watchdog::Watchdog;
use crate::acquire::{
    AcquireOptions, AcquireOutcome, LockObserver, acquire, close_after, warn_if_process_local,
};
use crate::args;
use crate::exit::{self, CliError, error_chain};
use crate::lock::{HeldLock, LockRequest};
use crate::output::{Output, printable};
use crate::signals::{self, Signals, is_termination_signal};
use crate::store::StoreConfig;

/// A validated `lockreg run`, before any access to the store.
#[derive(Debug)]
pub(crate) struct RunCommand {
    request: LockRequest,
    program: Program,
    store: StoreConfig,
    acquire_options: AcquireOptions,
    grace: Duration,
    once: Option<OnceCommand>,
}

impl RunCommand {
    pub(crate) fn from_args(
        global: &args::GlobalArgs,
        run: &args::RunArgs,
    ) -> Result<Self, CliError> {
        let (key, command) = run.key_and_command()?;
        let key = args::parse_key(key)?;
        let store = StoreConfig::choose(global)?.with_acquire_args(&run.acquire)?;
        let request = LockRequest::from_args(key, &run.acquire)?;
        let once = OnceCommand::from_args(&run.once)?;
        // The command is checked last. Any other mistake must end with 64, and not with the status
        // of a missing command.
        let program = Program::find(command.to_vec())?;
        let acquire_options = AcquireOptions::from_args(&run.acquire);
        Ok(Self { request, program, store, acquire_options, grace: run.grace, once })
    }

    /// Acquires the lock, runs the command, and releases the lock. Returns the exit status.
    pub(crate) async fn execute(
        self,
        mut signals: Signals,
        output: Output,
    ) -> Result<u8, CliError> {
        let Self { request, program, store, acquire_options, grace, once } = self;
        let started_at = Instant::now();
        let observer = LockObserver::new();
        let registry = tokio::select! {
            registry = store.with_observer(Arc::clone(&observer) as Arc<dyn Observer>).open(output) => registry?,
            signal = signals.next_termination() => return Ok(exit::status_of_signal(signal as i32)),
        };
        warn_if_process_local(&registry, output);
        let has_fencing = registry.capabilities().fencing;
        if let Some(once) = once {
            let begun =
                once.begin(&registry, &request, &acquire_options, started_at, &mut signals, output);
            let ended = match begun.await {
                Ok(OnceOutcome::Due(guard, recording)) => {
                    let locked = LockedRun::new(guard, has_fencing, &program, grace, output)
                        .with_recording(recording);
                    locked.run(&observer, &mut signals).await
                }
                Ok(OnceOutcome::NotDue) => Ok(RunEnd::Exited(0)),
                Ok(OnceOutcome::Signal(signal)) => Ok(RunEnd::by_signal(signal)),
                Err(failure) => Err(failure),
            };
            return close_after(&registry, ended, acquire_options.min_hold, &mut signals).await;
        }
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
                let locked = LockedRun::new(guard, has_fencing, &program, grace, output);
                locked.run(&observer, &mut signals).await
            }
            Err(failure) => Err(failure),
        };
        close_after(&registry, ended, acquire_options.min_hold, &mut signals).await
    }
}

/// A held lock, and the command to run under it.
pub(crate) struct LockedRun<'a> {
    guard: HeldLock,
    /// The store has fencing, so the token can protect a resource.
    has_fencing: bool,
    program: &'a Program,
    grace: Duration,
    /// How long before the end of the lease the termination of the command begins. Zero if the
    /// command may run until the loss is detected.
    margin: Duration,
    /// What to record when the command has ended.
    recording: Option<Recording>,
    output: Output,
}

/// How `run`, `elect` or `hold` has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RunEnd {
    /// Without a loss. `lockreg` exits with this status.
    Exited(u8),
    /// The lock was lost, or its lease was about to end.
    Lost {
        /// A signal has also requested the end of this process.
        is_end_requested: bool,
    },
}

impl RunEnd {
    /// A signal ended `lockreg` before the command was started.
    pub(crate) fn by_signal(signal: Signal) -> Self {
        Self::Exited(exit::status_of_signal(signal as i32))
    }

    /// Returns the exit status of `lockreg`.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Exited(status) => status,
            Self::Lost { .. } => exit::LOST,
        }
    }
}

impl<'a> LockedRun<'a> {
    pub(crate) fn new(
        guard: HeldLock,
        has_fencing: bool,
        program: &'a Program,
        grace: Duration,
        output: Output,
    ) -> Self {
        let margin = Duration::ZERO;
        Self { guard, has_fencing, program, grace, margin, recording: None, output }
    }

    /// Begins the termination of the command this long before the end of the lease.
    pub(crate) fn with_margin(self, margin: Duration) -> Self {
        Self { margin, ..self }
    }

    pub(crate) fn with_recording(self, recording: Recording) -> Self {
        Self { recording: Some(recording), ..self }
    }

    pub(crate) async fn run(
        self,
        observer: &LockObserver,
        signals: &mut Signals,
    ) -> Result<RunEnd, CliError> {
        let started = self.start().await;
        let Self { guard, grace, margin, recording, output, .. } = self;
        let ended = match started {
            Ok((running, watchdog, terminal)) => {
                let mut supervisor = Supervisor {
                    guard: &guard,
                    running,
                    watchdog,
                    terminal,
                    grace,
                    margin,
                    output,
                    lost: None,
                    is_end_requested: false,
                    termination: Termination::NotRequested,
                };
                let command_exit = supervisor.until_end(observer, signals).await;
                supervisor.terminal.reclaim(supervisor.running.group());
                supervisor.watchdog.shut_down();
                Ok((command_exit, supervisor.lost, supervisor.is_end_requested))
            }
            Err(failure) => Err(failure),
        };
        let key = guard.key().to_owned();
        let recorded = match (&ended, &recording) {
            (Ok((command_exit, None, is_end_requested)), Some(recording)) => {
                recording.complete(&guard, command_exit.status(), *is_end_requested, signals).await
            }
            _ => Ok(()),
        };
        let released = guard.unlock().await;
        let (command_exit, lost, is_end_requested) = ended?;
        let report_end = || {
            output.alert(
                "ended",
                &format!("the command {command_exit}"),
                json!({ "key": key, "status": command_exit.status() }),
            );
        };
        if let Err(error) = recorded {
            report_end();
            return Err(error);
        }
        // The release may detect a loss that no renewal has detected. The command may have run
        // after this loss.
        let lost = match (lost, &released) {
            (None, Err(LockError::Lost { key, reason, .. })) => {
                report_loss(output, key, *reason);
                true
            }
            (lost, _) => lost.is_some(),
        };
        if lost {
            report_end();
            return Ok(RunEnd::Lost { is_end_requested });
        }
        if let Err(error) = released {
            output.alert(
                "release_failed",
                &format!(
                    "{}; the key is free by the end of its lease",
                    error_chain(&error).join(": ")
                ),
                json!({ "key": key, "causes": error_chain(&error) }),
            );
        }
        Ok(RunEnd::Exited(command_exit.status()))
    }

    /// Starts the command under the watchdog.
    async fn start(&self) -> Result<(CommandProcess, Watchdog, Terminal), CliError> {
        // This process may have been stopped since the lock was granted.
        self.guard.check().await?;
        let terminal = Terminal::open();
        signals::keep_exit_statuses().map_err(CliError::os("cannot handle SIGCHLD"))?;
        let mut watchdog = Watchdog::start().map_err(CliError::os("cannot start the watchdog"))?;
        let tick = self.recording.as_ref().and_then(Recording::tick);
        let environment = vec![
            ("LOCKREG_KEY", Some(self.guard.key().to_owned())),
            // `None` removes the variable: the tick or token of an outer `lockreg` would be wrong.
            ("LOCKREG_TICK", tick),
            (
                "LOCKREG_FENCING_TOKEN",
                self.guard
                    .fencing_token()
                    .filter(|_| self.has_fencing)
                    .map(|token| token.to_string()),
            ),
        ];
        match CommandProcess::start(self.program, environment, terminal.is_foreground_job()).await {
            Ok(mut running) => {
                // With a margin, the watchdog also ends the command before the end of the lease.
                let grace = if self.margin.is_zero() {
                    self.grace
                } else {
                    self.grace.min(kill_after(self.margin))
                };
                watchdog.watch_group(running.group(), grace);
                watchdog.set_deadline(self.guard.valid_for().saturating_sub(self.margin));
                // This process may have been stopped again before the watchdog knew of the lease.
                // From here on, the watchdog handles a stop of this process.
                if let Err(error) = self.guard.check().await {
                    watchdog.shut_down();
                    return Err(error.into());
                }
                running.open_gate();
                Ok((running, watchdog, terminal))
            }
            Err(error) => {
                watchdog.shut_down();
                Err(CliError::os("cannot start the command")(error))
            }
        }
    }
}

/// Handles all events of a command that runs under a lock, until its end.
struct Supervisor<'a> {
    guard: &'a HeldLock,
    running: CommandProcess,
    watchdog: Watchdog,
    terminal: Terminal,
    grace: Duration,
    margin: Duration,
    output: Output,
    lost: Option<LostReason>,
    /// A signal to this process has requested its end.
    is_end_requested: bool,
    termination: Termination,
}

/// The progress of the command's termination.
#[derive(Debug, Clone, Copy)]
enum Termination {
    NotRequested,
    /// The command has received a termination signal. `lockreg` kills it at `kill_at`.
    Requested {
        kill_at: Instant,
    },
    /// The command has received SIGKILL. `lockreg` cannot end processes that survive SIGKILL, and
    /// waits for them only until `wait_until`.
    Killed {
        wait_until: Instant,
    },
}

impl Termination {
    /// Returns when to kill the command, or when to stop waiting for its killed processes.
    fn next_step_at(self) -> Option<Instant> {
        match self {
            Self::NotRequested => None,
            Self::Requested { kill_at: at } | Self::Killed { wait_until: at } => Some(at),
        }
    }
}

impl Supervisor<'_> {
    /// Waits until the command has ended. If its termination was requested, also waits for all
    /// processes in its group, and kills them after the grace time. After SIGKILL, waits for the
    /// end of the command, however long that takes, and for the rest of the group until
    /// [`KILL_LIMIT`].
    async fn until_end(&mut self, observer: &LockObserver, signals: &mut Signals) -> CommandExit {
        let mut renewals = observer.renewals();
        let mut lost = Box::pin(self.guard.lost());
        let command_exit = loop {
            let termination = self.termination;
            tokio::select! {
                biased;
                // The loss has priority. If the lease ended while this process was stopped, this
                // process must terminate the command before it resumes the command.
                (key, reason) = &mut lost, if self.lost.is_none() => self.on_lost(&key, reason),
                signal = signals.next() => self.on_signal(signal),
                change = self.running.next_change() => match change {
                    StateChange::Ended(command_exit) => break command_exit,
                    StateChange::Stopped(signal) => self.on_stop(signal),
                },
                () = until_kill_time(termination) => self.kill(),
                () = lease_ends_within(self.guard, self.margin), if self.lost.is_none() => {
                    self.on_lease_ending();
                }
                // After a loss, the renewal of another key must not arm the watchdog again.
                Ok(()) = renewals.changed(), if self.lost.is_none() => self.update_deadline(),
            }
        };
        self.on_end(command_exit);
        // A command may leave processes running on purpose, unless its termination was requested.
        while let Some(next_step_at) = self.termination.next_step_at()
            && self.running.has_processes()
        {
            let now = Instant::now();
            if now >= next_step_at {
                if let Termination::Killed { .. } = self.termination {
                    self.output.alert(
                        "survived",
                        "processes of the command survived SIGKILL; the lock is released",
                        json!({ "key": self.guard.key() }),
                    );
                    break;
                }
                // The lock stays held until the processes have ended. A process does not end at
                // once if the kernel must first finish its system call or free its memory.
                self.kill();
                continue;
            }
            tokio::select! {
                biased;
                (key, reason) = &mut lost, if self.lost.is_none() => self.on_lost(&key, reason),
                // A process that ignores one signal may end after another signal.
                signal = signals.next() => {
                    if is_termination_signal(signal) {
                        self.on_signal(signal);
                    }
                }
                () = lease_ends_within(self.guard, self.margin), if self.lost.is_none() => {
                    self.on_lease_ending();
                }
                // Without a new deadline, the watchdog would treat the lease as expired.
                Ok(()) = renewals.changed(), if self.lost.is_none() => self.update_deadline(),
                () = tokio::time::sleep_until(next_step_at.min(now + GROUP_POLL_INTERVAL)) => {}
            }
        }
        command_exit
    }

    fn on_lost(&mut self, key: &str, reason: LostReason) {
        self.lost = Some(reason);
        // The signal is sent before `disarm`. Otherwise, a stop of this process between the two
        // would leave the command running.
        self.request_termination(Signal::SIGTERM);
        self.watchdog.disarm();
        report_loss(self.output, key, reason);
    }

    fn update_deadline(&mut self) {
        self.watchdog.set_deadline(self.guard.valid_for().saturating_sub(self.margin));
    }

    /// Requests the termination of the command before the lease ends, because no renewal was
    /// confirmed in time.
    fn on_lease_ending(&mut self) {
        self.lost = Some(LostReason::Expired);
        let grace = self.grace.min(kill_after(self.guard.valid_for()));
        let kill_at = Instant::now() + grace;
        self.termination = match self.termination {
            Termination::NotRequested => Termination::Requested { kill_at },
            // An earlier signal may require an earlier end.
            Termination::Requested { kill_at: earlier } => {
                Termination::Requested { kill_at: kill_at.min(earlier) }
            }
            killed @ Termination::Killed { .. } => killed,
        };
        self.request_termination(Signal::SIGTERM);
        // From here on, the watchdog acts only shortly before the end of the lease, or if this
        // process dies. It then sends SIGKILL directly after SIGTERM. The watchdog must not send
        // SIGTERM earlier, because many programs abort their shutdown at a second SIGTERM.
        self.watchdog.watch_group(self.running.group(), Duration::ZERO);
        self.watchdog.set_deadline(kill_after(self.guard.valid_for()));
        report_loss(self.output, self.guard.key(), LostReason::Expired);
    }

    fn on_signal(&mut self, signal: Signal) {
        match signal {
            signal if is_termination_signal(signal) => {
                self.is_end_requested = true;
                self.request_termination(signal);
            }
            Signal::SIGTSTP => {
                // If the terminal sent this SIGTSTP, the command's group was not the foreground
                // group. The command then gets no terminal when it resumes, because another process
                // of a pipeline may use the terminal (`lockreg run … | less`).
                let had_terminal = self.terminal.is_foreground(self.running.group());
                self.running.signal_all(signal);
                terminal::stop_self();
                if had_terminal {
                    self.resume_with_terminal();
                } else {
                    self.resume();
                }
            }
            Signal::SIGWINCH => self.running.signal_all(signal),
            // Only the command receives the signal. Other processes of its group may not handle the
            // signal, and would end.
            signal => self.running.signal(signal),
        }
    }

    /// If a signal of the terminal (such as Ctrl-C) ended the command, gives the rest of its group
    /// the grace time to end. The terminal sends this signal only to the command's group, so
    /// `lockreg` infers the signal from the command's exit.
    fn on_end(&mut self, command_exit: CommandExit) {
        let is_terminal_signal = match command_exit {
            CommandExit::Signal(signal) => {
                matches!(signal, Signal::SIGINT | Signal::SIGQUIT | Signal::SIGHUP)
            }
            // A program that handles the signal exits with the status that a shell would report.
            CommandExit::Status(status) => matches!(status, 129..=131),
            CommandExit::RealTimeSignal(_) => false,
        };
        if is_terminal_signal
            && let Termination::NotRequested = self.termination
            && self.terminal.is_foreground(self.running.group())
        {
            // The whole group has received the signal. Many programs abort their shutdown at a
            // second one.
            self.is_end_requested = true;
            self.termination = Termination::Requested { kill_at: Instant::now() + self.grace };
        }
    }

    fn on_stop(&mut self, signal: Signal) {
        if !matches!(self.termination, Termination::NotRequested) {
            // A stopped process does not handle the termination signal.
            return self.running.signal_all(Signal::SIGCONT);
        }
        match self.terminal.after_stop(self.running.group(), signal) {
            AfterStop::Ignore => {}
            AfterStop::Resume => self.resume_with_terminal(),
            AfterStop::StopJob => {
                self.terminal.reclaim(self.running.group());
                terminal::stop_job();
                self.resume_with_terminal();
            }
        }
    }

    /// Gives the terminal to the command and continues it, unless the lock was lost.
    fn resume_with_terminal(&self) {
        if self.guard.is_held() {
            self.terminal.move_to(self.running.group());
        }
        self.resume();
    }

    /// Continues a stopped command, unless the lock was lost in the meantime.
    fn resume(&self) {
        if self.guard.is_held() {
            self.running.signal_all(Signal::SIGCONT);
        }
    }

    fn request_termination(&mut self, signal: Signal) {
        if let Termination::NotRequested = self.termination {
            self.termination = Termination::Requested { kill_at: Instant::now() + self.grace };
        }
        self.running.signal_all(signal);
        self.running.signal_all(Signal::SIGCONT);
    }

    fn kill(&mut self) {
        self.running.signal_all(Signal::SIGKILL);
        self.termination = Termination::Killed { wait_until: Instant::now() + KILL_LIMIT };
    }
}

fn report_loss(output: Output, key: &str, reason: LostReason) {
    output.alert(
        "lost",
        &format!("the lock {} was lost: {reason}", printable(key)),
        json!({ "key": key, "lost": reason }),
    );
}

/// Returns the time after which to kill a command that must end within `left`.
fn kill_after(left: Duration) -> Duration {
    left.saturating_sub(KILL_MARGIN)
}

/// Waits until at most `margin` of the lease is left. A renewal extends the wait. Never returns for
/// a margin of zero.
async fn lease_ends_within(guard: &HeldLock, margin: Duration) {
    if margin.is_zero() {
        return std::future::pending().await;
    }
    loop {
        let left = guard.valid_for().saturating_sub(margin);
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left).await;
    }
}

async fn until_kill_time(termination: Termination) {
    match termination {
        Termination::Requested { kill_at } => tokio::time::sleep_until(kill_at).await,
        Termination::NotRequested | Termination::Killed { .. } => std::future::pending().await,
    }
}

/// The interval at which the group is checked for remaining processes. The kernel sends no
/// notification of the end of grandchildren.
const GROUP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long `lockreg` waits for the end of killed processes before it releases the lock.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// How long before the end of the lease a command is killed, if it must not outlive the lease.
const KILL_MARGIN: Duration = Duration::from_millis(300);
