//! `lockreg`: runs commands under distributed locks, and administers lock stores. The README
//! describes its interface.

#[cfg(not(unix))]
compile_error!("lockreg needs the process groups and signals of Unix");

// The command line and the store.
mod args;
mod store;
// Acquiring and holding a lock.
mod elect;
mod hold;
mod run;
mod signals;
mod acquire;
mod lock;
// Administering a store.
mod bench;
mod doctor;
mod inspect;
mod manual;
mod schema;
mod serve;
mod snapshot;
mod top;
// Output.
mod exit;
mod log;
mod output;

use std::ffi::OsString;
use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;

use crate::args::{Cli, CliCommand, GlobalArgs};
use crate::elect::ElectCommand;
use crate::exit::CliError;
use crate::hold::HoldCommand;
use crate::output::Output;
use crate::run::RunCommand;
use crate::serve::ServeCommand;
use crate::signals::Signals;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    // `lockreg` starts itself with these hidden subcommands.
    match arguments.next().as_deref().and_then(|first| first.to_str()) {
        Some(run::exec::HIDDEN_SUBCOMMAND) => return run::exec::main(arguments).into(),
        Some(run::watchdog::HIDDEN_SUBCOMMAND) => return run::watchdog::main().into(),
        _ => {}
    }
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map_or_else(String::new, |location| {
            format!(" in {}:{}", location.file(), location.line())
        });
        output::line_to_stderr(&format!(
            "lockreg: error: internal error{location}; report this bug"
        ));
    }));
    // The status 101 of a panic could also be the status of the command.
    let status = std::panic::catch_unwind(run_lockreg).unwrap_or(exit::INTERNAL);
    output::flush_stderr();
    status.into()
}

fn run_lockreg() -> u8 {
    let Cli { global, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_parse_error(&error),
    };
    let output = Output::new(global.json, global.quiet);
    let result = log::start(global.verbose).and_then(|()| dispatch(&global, command, output));
    result.unwrap_or_else(|failure| {
        output.failure(&failure);
        failure.status()
    })
}

fn dispatch(global: &GlobalArgs, command: CliCommand, output: Output) -> Result<u8, CliError> {
    match command {
        CliCommand::Run(args) => {
            let run = RunCommand::from_args(global, &args)?;
            with_signals(|signals| run.execute(signals, output))
        }
        CliCommand::Elect(args) => {
            let elect = ElectCommand::from_args(global, &args)?;
            with_signals(|signals| elect.execute(signals, output))
        }
        CliCommand::Hold(args) => {
            let hold = HoldCommand::from_args(global, &args)?;
            with_signals(|signals| hold.execute(signals, output))
        }
        CliCommand::Show(show) => block_on(inspect::show(global, &show, output)),
        CliCommand::List(args) => block_on(inspect::list(global, &args, output)),
        CliCommand::Top(args) => block_on(top::top(global, &args, output)),
        CliCommand::Serve(args) => {
            let serve = ServeCommand::from_args(global, args)?;
            with_signals(|signals| serve.execute(signals, output))
        }
        CliCommand::Break(args) => block_on(inspect::break_lock(global, &args, output)),
        CliCommand::Value(value) => block_on(inspect::value(global, &value, output)),
        CliCommand::Doctor(doctor) => block_on(doctor::doctor(global, &doctor, output)),
        CliCommand::Schema(schema) => schema::schema(&schema, output),
        CliCommand::Bench(bench) => block_on(bench::bench(global, &bench, output)),
        CliCommand::Completions(completions) => manual::completions(&completions),
        CliCommand::Man(man) => manual::man(&man),
    }
}

fn with_signals<F: Future<Output = Result<u8, CliError>>>(
    work: impl FnOnce(Signals) -> F,
) -> Result<u8, CliError> {
    // The signals are blocked before the runtime starts, because its threads inherit the signal
    // mask.
    let signals = Signals::catch().map_err(CliError::os("cannot block signals"))?;
    block_on(work(signals))
}

/// Runs `work` on this thread. The worker threads of the runtime renew leases even while `work`
/// blocks this thread.
fn block_on(work: impl Future<Output = Result<u8, CliError>>) -> Result<u8, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(CliError::os("cannot start threads"))?;
    let result = runtime.block_on(work);
    // No result of the remaining tasks is needed, and the exit must not wait for these tasks.
    runtime.shutdown_background();
    result
}

/// Prints help and version to stdout, because the user requested them. Reports every other error as
/// a usage error.
fn report_parse_error(error: &clap::Error) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let printed = error.print().and_then(|()| std::io::stdout().flush());
            printed.map_or_else(|error| report_failure(&CliError::Output(error)), |()| 0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            exit::USAGE
        }
        _ => {
            // The message may quote parts of a URL with a password. It is therefore taken from a
            // second parse, whose arguments contain redacted URLs.
            let message = Cli::try_parse_from(std::env::args_os().map(redact_argument))
                .map_or_else(
                    |error| error.to_string(),
                    |_| {
                        "error: an argument is not UTF-8; write all arguments as UTF-8 text"
                            .to_owned()
                    },
                );
            let message = message.strip_prefix("error: ").unwrap_or(&message).trim_end();
            let is_run = std::env::args_os().any(|word| word == "run");
            let is_separator_missing = error.kind() == ErrorKind::UnknownArgument
                && is_run
                && !std::env::args_os().any(|word| word == "--");
            let hint = if is_separator_missing {
                "\n\nWrite `--` before the command of `run`: lockreg run KEY -- COMMAND."
            } else {
                ""
            };
            report_failure(&CliError::usage(format!("{message}{hint}")))
        }
    }
}

/// Reports a failure to parse the options. Searches the raw arguments for `--json`.
fn report_failure(failure: &CliError) -> u8 {
    let mut options = std::env::args_os().skip(1).take_while(|word| word != "--");
    Output::new(options.any(|word| word == "--json"), false).failure(failure);
    failure.status()
}

/// Returns `argument`. Redacts an argument that contains a `:` or an `@`, which may be a URL.
fn redact_argument(argument: OsString) -> OsString {
    let text = argument.to_string_lossy();
    if !text.contains([':', '@']) {
        return argument;
    }
    match text.split_once('=') {
        Some((name, value)) if name.starts_with('-') && !name.contains([':', '@']) => {
            format!("{name}={}", lock_registry::config::redact_url(value))
        }
        _ => lock_registry::config::redact_url(&text),
    }
    .into()
}
