//! `lockreg elect`: runs a command while this process leads a role.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_registry::election::Election;
use lock_registry::observe::Observer;
use lock_registry::{Key, LockError, LockRegistryExt as _, Registry};
use serde_json::json;
use tokio::time::sleep;

use crate::acquire::{LockObserver, close_after, warn_if_process_local};
use crate::args;
use crate::exit::{self, CliError, error_chain};
use crate::lock::HeldLock;
use crate::output::{Output, printable};
use crate::run::command::Program;
use crate::run::{LockedRun, Recording, RunEnd};
use crate::signals::Signals;
use crate::store::StoreConfig;

/// A validated `lockreg elect`, before any access to the store.
#[derive(Debug)]
pub(crate) struct ElectCommand {
    role: Key,
    data: String,
    priority: Option<u32>,
    grace: Duration,
    program: Program,
    store: StoreConfig,
}

impl ElectCommand {
    pub(crate) fn from_args(
        global: &args::GlobalArgs,
        elect: &args::ElectArgs,
    ) -> Result<Self, CliError> {
        let role = args::parse_key(&elect.role)?;
        let store = StoreConfig::choose(global)?;
        let store =
            store.with_connect_options(elect.lease.as_deref(), elect.label.as_deref(), None)?;
        if elect.data.len() > Election::DATA_BYTES_MAX {
            return Err(CliError::usage(format!(
                "--data has {} bytes, which is more than the maximum {}; shorten it",
                elect.data.len(),
                Election::DATA_BYTES_MAX
            )));
        }
        // As in `run`, the command is checked last: any other mistake must end with status 64, not
        // with the status of a missing command.
        let program = Program::find(elect.command.clone())?;
        let &args::ElectArgs { priority, grace, .. } = elect;
        Ok(Self { role, data: elect.data.clone(), priority, grace, program, store })
    }

    /// Campaigns and runs the command, until the command ends by itself or a signal arrives.
    /// Returns the exit status.
    pub(crate) async fn execute(
        self,
        mut signals: Signals,
        output: Output,
    ) -> Result<u8, CliError> {
        let Self { role, data, priority, grace, program, store } = self;
        let observer = LockObserver::new();
        let registry = tokio::select! {
            registry = store.with_observer(Arc::clone(&observer) as Arc<dyn Observer>).open(output) => registry?,
            signal = signals.next_termination() => return Ok(exit::status_of_signal(signal as i32)),
        };
        warn_if_process_local(&registry, output);
        let election = registry.election(role.as_str()).data(data);
        let candidate = Candidate {
            election: match priority {
                Some(priority) => election.priority(priority),
                None => election,
            },
            registry: &registry,
            program: &program,
            grace,
            output,
        };
        let ended = candidate.run(&observer, &mut signals).await;
        close_after(&registry, ended, Duration::ZERO, &mut signals).await
    }
}

struct Candidate<'a> {
    election: Election,
    registry: &'a Registry,
    program: &'a Program,
    grace: Duration,
    output: Output,
}

impl Candidate<'_> {
    async fn run(
        &self,
        observer: &LockObserver,
        signals: &mut Signals,
    ) -> Result<RunEnd, CliError> {
        // The texts of the last reported failure, and when it was reported. Cleared when a campaign
        // is won.
        let mut reported: Option<(Vec<String>, Instant)> = None;
        loop {
            let role = self.election.role();
            if reported.is_none() {
                let text = format!("campaigning for {}", printable(role));
                self.output.notice("campaigning", &text, json!({ "key": role }));
            }
            let won = tokio::select! {
                biased;
                won = self.election.campaign() => won,
                signal = signals.next_termination() => {
                    return Ok(RunEnd::by_signal(signal));
                }
            };
            // This record states that the role has no leader. `LockedRun` writes it after the
            // command has ended, unless the lock was lost.
            let (guard, vacant_record) = match won {
                Ok(won) => {
                    reported = None;
                    won
                }
                Err(error @ (LockError::Backend { .. } | LockError::Lost { .. })) => {
                    let texts = error_chain(&error);
                    // An outage would otherwise print the same line at each retry.
                    let was_reported = reported
                        .as_ref()
                        .is_some_and(|(last, at)| *last == texts && at.elapsed() < REPORT_INTERVAL);
                    if !was_reported {
                        self.report_failure(&texts);
                        reported = Some((texts, Instant::now()));
                    }
                    tokio::select! {
                        () = sleep(RETRY_INTERVAL) => continue,
                        signal = signals.next_termination() => {
                            return Ok(RunEnd::by_signal(signal));
                        }
                    }
                }
                Err(error) => return Err(error.into()),
            };
            let (role, token) = (guard.key().to_owned(), guard.fencing_token().get());
            self.output.notice(
                "leading",
                &format!("leading {} under token {token}", printable(&role)),
                json!({ "key": role, "token": token }),
            );
            let margin = guard.valid_for() / MARGIN_DIVISOR;
            let has_fencing = self.registry.capabilities().fencing;
            let (guard, grace) = (HeldLock::single(guard), self.grace.min(margin));
            let locked = LockedRun::new(guard, has_fencing, self.program, grace, self.output)
                .with_margin(margin)
                .with_recording(Recording::VacantRole(vacant_record));
            match locked.run(observer, signals).await {
                // The next campaign begins.
                Ok(RunEnd::Lost { is_end_requested: false })
                | Err(CliError::Lock(LockError::Lost { .. })) => {}
                ended => return ended,
            }
        }
    }

    fn report_failure(&self, texts: &[String]) {
        self.output.alert(
            "campaign_failed",
            &format!("{}; retrying", texts.join(": ")),
            json!({ "key": self.election.role(), "causes": texts }),
        );
    }
}

/// How often the same failure of campaigns is printed.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// The pause after a failed campaign.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The termination of the command begins when this part of the lease is left, measured when the
/// campaign is won. Renewals begin after the first third, so several renewals must fail before
/// that.
const MARGIN_DIVISOR: u32 = 3;
