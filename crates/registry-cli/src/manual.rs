//! `lockreg completions` and `lockreg man`: generate their output from the definition of the
//! command line.

use std::io;

use clap::CommandFactory as _;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::exit::CliError;
use crate::output::to_stdout;

/// `lockreg completions`.
pub(crate) fn completions(completions: &CompletionsArgs) -> Result<u8, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(completions.shell, &mut Cli::command(), "lockreg", &mut script);
    to_stdout(&script)?;
    Ok(0)
}

/// `lockreg man`.
pub(crate) fn man(man: &ManArgs) -> Result<u8, CliError> {
    let mut command = Cli::command();
    // `build` sets the full name of each command, such as `lockreg run`, and its global options.
    command.build();
    let command = match &man.command {
        None => command,
        Some(name) => command.find_subcommand(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
            // The error does not show the argument, which may be a URL with a password.
            CliError::usage(format!("unknown command; known commands: {}", known.join(", ")))
        })?,
    };
    let page = page(command).map_err(CliError::Output)?;
    to_stdout(&page)?;
    Ok(0)
}

fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(page)
}
