//! `lockreg`: runs commands under distributed locks, and administers lock stores. The README
//! describes its interface.

#[cfg(not(unix))]
compile_error!("lockreg needs the process groups and signals of Unix");

// The command line and the store.
mod args;
mod store;
// Acquiring and holding a lock.
mod hold;
mod run;
mod signals;
mod take;
// Administering a store.
mod bench;
mod doctor;
mod inspect;
mod manual;
mod schema;
// Output.
mod exit;
mod log;
mod say;

use std::ffi::OsString;
use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;

use crate::args::{Cli, Command, Global};
use crate::exit::Failure;
use crate::hold::Hold;
use crate::run::Run;
use crate::say::Say;
use crate::signals::Signals;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    // Hidden roles in which `lockreg` starts itself.
    match arguments.next().as_deref().and_then(|first| first.to_str()) {
        Some(run::exec::ROLE) => return run::exec::main(arguments).into(),
        Some(run::watchdog::ROLE) => return run::watchdog::main().into(),
        _ => {}
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = panic
            .location()
            .map_or_else(String::new, |place| format!(" in {}:{}", place.file(), place.line()));
        say::line_to_stderr(&format!("lockreg: error: internal error{place}; please report it"));
    }));
    // A panic must not end with 101, which could be the status of the command.
    let status = std::panic::catch_unwind(lockreg).unwrap_or(exit::INTERNAL);
    say::flush_stderr();
    status.into()
}

fn lockreg() -> u8 {
    let Cli { global, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_parsed(&error),
    };
    let say = Say::new(global.json, global.quiet);
    let done = log::start(global.verbose).and_then(|()| carry_out(&global, command, say));
    done.unwrap_or_else(|failure| {
        say.failure(&failure);
        failure.status()
    })
}

fn carry_out(global: &Global, command: Command, say: Say) -> Result<u8, Failure> {
    match command {
        Command::Run(run) => {
            let run = Run::check(global, &run)?;
            with_signals(|signals| run.carry_out(signals, say))
        }
        Command::Hold(hold) => {
            let hold = Hold::check(global, &hold)?;
            with_signals(|signals| hold.carry_out(signals, say))
        }
        Command::Show(show) => block_on(inspect::show(global, &show, say)),
        Command::List => block_on(inspect::list(global, say)),
        Command::Break(broken) => block_on(inspect::break_lock(global, &broken, say)),
        Command::Doctor(doctor) => block_on(doctor::doctor(global, &doctor, say)),
        Command::Schema(schema) => schema::schema(&schema, say),
        Command::Bench(bench) => block_on(bench::bench(global, &bench, say)),
        Command::Completions(completions) => manual::completions(&completions),
        Command::Man(man) => manual::man(&man),
    }
}

fn with_signals<F: Future<Output = Result<u8, Failure>>>(
    work: impl FnOnce(Signals) -> F,
) -> Result<u8, Failure> {
    // Before the runtime starts, because its threads inherit the signal mask.
    let signals = Signals::catch().map_err(Failure::os("cannot catch signals"))?;
    block_on(work(signals))
}

/// Runs `work` on this thread. Worker threads renew leases at the same time, even if `work` blocks
/// this thread.
fn block_on(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Failure::os("cannot start threads"))?;
    let done = runtime.block_on(work);
    // Tasks that still run have no further use, and the exit status must not wait for them.
    runtime.shutdown_background();
    done
}

/// Prints help and version, which the user requested, to stdout. Every other error is a mistake on
/// the command line.
fn not_parsed(error: &clap::Error) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let printed = error.print().and_then(|()| std::io::stdout().flush());
            printed.map_or_else(|error| failed(&Failure::Output(error)), |()| 0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            exit::USAGE
        }
        _ => {
            // The message would quote a misplaced URL in parts or in other spellings. It is
            // therefore taken from a second parse without the secrets of URLs.
            let message = Cli::try_parse_from(std::env::args_os().map(without_url)).map_or_else(
                |error| error.to_string(),
                |_| "error: an argument is not UTF-8".to_owned(),
            );
            let message = message.strip_prefix("error: ").unwrap_or(&message).trim_end();
            let is_run = std::env::args_os().any(|word| word == "run");
            let lacks_mark = error.kind() == ErrorKind::UnknownArgument
                && is_run
                && !std::env::args_os().any(|word| word == "--");
            let hint = if lacks_mark { "\n\nWrite `--` before the command of `run`." } else { "" };
            failed(&Failure::usage(format!("{message}{hint}")))
        }
    }
}

/// Reports a failure before the options are parsed. Looks for `--json` in the raw arguments.
fn failed(failure: &Failure) -> u8 {
    let mut options = std::env::args_os().skip(1).take_while(|word| word != "--");
    Say::new(options.any(|word| word == "--json"), false).failure(failure);
    failure.status()
}

/// Returns `argument` without the secrets of a URL that it contains.
fn without_url(argument: OsString) -> OsString {
    let text = argument.to_string_lossy();
    if !text.contains([':', '@']) {
        return argument;
    }
    match text.split_once('=') {
        Some((name, value)) if name.starts_with('-') && !name.contains([':', '@']) => {
            format!("{name}={}", lock_registry::redact_url(value))
        }
        _ => lock_registry::redact_url(&text),
    }
    .into()
}
