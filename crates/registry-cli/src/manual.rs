//! `lockreg completions` and `lockreg man`: generated from the definition of the command line.

use std::io;

use clap::CommandFactory as _;

use crate::args::{Cli, Completions, Man};
use crate::exit::Failure;
use crate::say::to_stdout;

/// `lockreg completions`.
pub(crate) fn completions(completions: &Completions) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(completions.shell, &mut Cli::command(), "lockreg", &mut script);
    to_stdout(&script)?;
    Ok(0)
}

/// `lockreg man`.
pub(crate) fn man(man: &Man) -> Result<u8, Failure> {
    let mut command = Cli::command();
    // Sets the full name of each command, such as `lockreg run`, and its global options.
    command.build();
    let command = match &man.command {
        None => command,
        Some(name) => command.find_subcommand(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
            Failure::usage(format!(
                "{name:?} is no command of lockreg; there are {}",
                known.join(", ")
            ))
        })?,
    };
    let page = page(command).map_err(Failure::Output)?;
    to_stdout(&page)?;
    Ok(0)
}

fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(page)
}
