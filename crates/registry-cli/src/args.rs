//! The command line: its options, its help texts, and the checks of its values.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use lock_registry::{Key, LockOptions, Reach, parse_duration};

use crate::exit::{self, Failure};

/// Runs commands under distributed locks, and administers lock stores.
///
/// Without --url and LOCK_REGISTRY_URL, locks are in an SQLite file of this user,
/// $XDG_STATE_HOME/lock-registry/locks.db (by default under ~/.local/state), and exclude only
/// processes of this host.
#[derive(Debug, Parser)]
#[command(name = "lockreg", version, max_term_width = 100, after_help = EXIT_STATUS)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_STATUS: &str = "\
Exit status:
  0    done; `run` ends with the status of its command instead
  1    `show`, `break`: the key is not locked; `doctor --strict`: there is a warning
  64   the command line or a LOCK_REGISTRY_* variable is wrong; no lock was changed
  69   the store cannot be reached or used
  70   a bug in lockreg
  71   the operating system refused to start a process or thread
  74   stdout cannot be written to
  75   the lock was not obtained in time; -E changes this status
  76   the lock was lost while it was needed
  126  the command of `run` cannot be executed
  127  the command of `run` does not exist
  129… signal 1… ended the command of `run`, or lockreg while it held no lock

All options of a store can be set by environment variables too: LOCK_REGISTRY_URL, LOCK_REGISTRY_LEASE, …
A URL with a password belongs there: others on this host can see the command line.";

/// Options of every subcommand.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The lock store, such as redis://HOST or sqlite:/var/lib/app/locks.db; overrides
    /// LOCK_REGISTRY_URL
    #[arg(long, global = true, value_name = "URL", display_order = 100)]
    pub(crate) url: Option<String>,
    /// Uses the SQLite file of this user, without the warning that it excludes only processes of
    /// this host
    #[arg(long, global = true, conflicts_with = "url", display_order = 100)]
    pub(crate) local: bool,
    /// Fails with status 64 unless the store excludes at least: process, host or network
    #[arg(long, global = true, value_name = "REACH", display_order = 101)]
    pub(crate) require_reach: Option<RequiredReach>,
    /// Separates these locks from those of other namespaces
    #[arg(long, global = true, value_name = "NAME", display_order = 101)]
    pub(crate) namespace: Option<String>,
    /// Prints JSON instead of text, one object or array per line
    #[arg(long, global = true, display_order = 102)]
    pub(crate) json: bool,
    /// Prints no notices (waiting, not obtained, warnings); errors and lost locks are always
    /// printed
    #[arg(short, long, global = true, display_order = 102)]
    pub(crate) quiet: bool,
    /// Logs to stderr: -v warnings and worse, -vv grants and releases, -vvv everything;
    /// LOCK_REGISTRY_LOG overrides this with detailed directives
    #[arg(short, long, global = true, action = clap::ArgAction::Count, display_order = 103)]
    pub(crate) verbose: u8,
}

/// The values of `--require-reach`: the reaches of `Capabilities`, with their names in JSON.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RequiredReach {
    /// Tasks and threads of one process
    Process,
    /// Processes of one host
    Host,
    /// All hosts that reach the store
    Network,
}

impl From<RequiredReach> for Reach {
    fn from(required: RequiredReach) -> Self {
        match required {
            RequiredReach::Process => Self::Process,
            RequiredReach::Host => Self::Host,
            RequiredReach::Network => Self::Network,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Hold(Hold),
    Show(Show),
    /// Lists all locks that are held in the namespace
    List,
    Break(Break),
    Doctor(Doctor),
    Schema(Schema),
    Bench(Bench),
    Completions(Completions),
    Man(Man),
}

/// Runs a command while holding a lock
///
/// Waits for the lock, without a limit by default, runs the command, and releases the lock when the
/// command has ended. The command finds the key in LOCKREG_KEY and, if the store has fencing, the
/// fencing token in LOCKREG_FENCING_TOKEN.
///
/// If the lock is lost while the command runs, all processes of its process group get SIGTERM and,
/// after the grace time, SIGKILL. Signals are passed on to the command.
#[derive(Debug, Args)]
#[command(override_usage = RUN_USAGE, after_help = RUN_EXAMPLES)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) taking: Taking,
    /// How long the command has to end, after a signal or the loss of the lock, before it is killed
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = grace)]
    pub(crate) grace: Duration,
    /// The key of the lock; if it may begin with `-`, write `--` before it as well
    // Required, but it may also follow the first `--`: see `key_and_command`.
    pub(crate) key: Option<OsString>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) words: Vec<OsString>,
}

const RUN_EXAMPLES: &str = "\
Examples:
  lockreg run nightly -- ./report.sh --all
  lockreg run --no-wait -E 0 --quiet --min-hold 50s cleanup -- /usr/local/bin/cleanup
  lockreg --url redis://locks.example run --wait 1m deploy -- sh -c 'git pull && make install'";

const RUN_USAGE: &str = "lockreg run [OPTIONS] <KEY> -- <COMMAND>...
       lockreg run [OPTIONS] -- <KEY> -- <COMMAND>...
       lockreg run [OPTIONS] -- <-KEY> <COMMAND>...";

impl Run {
    /// Returns the key, and the command with its arguments.
    ///
    /// If no key precedes the first `--`, the key may follow it. This requires a second `--` after
    /// the key, or a key that begins with `-`, as no command does. Any other word there is a
    /// command whose key is missing. It must not be taken as the key, with its first argument as
    /// the command.
    pub(crate) fn key_and_command(&self) -> Result<(&OsString, &[OsString]), Failure> {
        let found = match (&self.key, &*self.words) {
            (Some(key), command) => Some((key, command)),
            (None, [key, mark, command @ ..]) if mark == "--" => Some((key, command)),
            (None, [key, command @ ..]) if key != "--" && key.as_bytes().starts_with(b"-") => {
                Some((key, command))
            }
            (None, _) => None,
        };
        found.filter(|(_, command)| !command.is_empty()).ok_or_else(|| {
            Failure::usage(
                "KEY or COMMAND is missing; write `lockreg run KEY -- COMMAND`, or `lockreg run -- KEY -- COMMAND` \
                 if the key may begin with `-`",
            )
        })
    }
}

/// Holds a lock until stdin ends or a signal arrives
///
/// Prints one line of JSON when it holds the lock, {"key":…,"token":…,"valid_for_ms":…}, and one
/// when the lock is lost, {"key":…,"lost":"reason"}. For scripts and for programs in any language.
/// The status is also 0 if a signal ends it while it holds the lock.
#[derive(Debug, Args)]
#[command(after_help = HOLD_EXAMPLES)]
pub(crate) struct Hold {
    #[command(flatten)]
    pub(crate) taking: Taking,
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
}

const HOLD_EXAMPLES: &str = "\
Examples:
  sleep 60 | lockreg hold orders/42
  lockreg hold --wait 5s --max-hold 10m orders/42";

/// Options for acquiring a lock.
#[derive(Debug, Args)]
pub(crate) struct Taking {
    /// Gives up after this time, with status 75, or 69 if the store could not be reached. Failed
    /// attempts to connect are repeated for this time; without this option, for `connect_timeout`
    /// [default: never]
    #[arg(long, value_name = "TIME", value_parser = wait, conflicts_with = "no_wait", allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,
    /// Gives up at once if the lock is held, with status 75
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The exit status if the lock was not obtained in time, 0 to 255
    #[arg(short = 'E', long, value_name = "STATUS", default_value_t = exit::NOT_OBTAINED)]
    pub(crate) conflict_exit_code: u8,
    /// How long the key stays locked if this process dies; renewed while it lives, unless
    /// LOCK_REGISTRY_RENEW=false [default: 30s; zk: 15s]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) lease: Option<String>,
    /// Keeps the key locked for at least this time; lockreg ends when it is over
    #[arg(long, value_name = "TIME", value_parser = span, allow_hyphen_values = true)]
    pub(crate) min_hold: Option<Duration>,
    /// Ends the lock after this time, as if it were lost: the command is ended, and the status is
    /// 76
    #[arg(long, value_name = "TIME", value_parser = span, allow_hyphen_values = true)]
    pub(crate) max_hold: Option<Duration>,
    /// What `show` and `list` print as the holder [default: host:pid]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
}

impl Taking {
    /// Returns how long to wait, or `None` for no limit.
    pub(crate) fn patience(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }

    /// Returns the options of the lock, without the wait, which starts before connecting.
    pub(crate) fn options(&self) -> LockOptions {
        let mut options = LockOptions::new();
        if let Some(min_hold) = self.min_hold {
            options = options.min_hold(min_hold);
        }
        if let Some(max_hold) = self.max_hold {
            options = options.max_hold(max_hold);
        }
        options
    }
}

/// Prints the holder of a lock; status 1 if the key is not locked
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
}

/// Releases a lock by force
///
/// The holder is notified at its next renewal at the latest; until then two holders may work.
/// Status 1 if the key is not locked.
#[derive(Debug, Args)]
pub(crate) struct Break {
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
    /// Releases the lock; without it, `break` only prints the holder, with status 64
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Connects to the store, and prints its guarantees, its settings and its problems
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Ends with status 1 if there is a warning
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Prints a completion script for a shell
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  lockreg completions bash >~/.local/share/bash-completion/completions/lockreg"
)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// Prints the manual page, of lockreg or of one of its commands, in roff
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg man run | man -l -")]
pub(crate) struct Man {
    /// A command, such as `run`
    pub(crate) command: Option<String>,
}

/// Prints the SQL that creates the tables of a store
#[derive(Debug, Args)]
pub(crate) struct Schema {
    /// The database
    pub(crate) dialect: String,
}

/// Measures lock and unlock pairs against the store
///
/// Each task stops after 5 million pairs, even if there is time left.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// How long to measure, at most 1h
    #[arg(long = "for", value_name = "TIME", default_value = "3s", value_parser = measured)]
    pub(crate) time: Duration,
    /// How many tasks of this process measure at once, each with its own key; at most 1024
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) tasks: u16,
}

/// Parses the key of a lock. Called before the store is opened.
pub(crate) fn key(given: &OsString) -> Result<Key, Failure> {
    let Some(text) = given.to_str() else {
        return Err(Failure::usage(format!(
            "the key {given:?} is not UTF-8; lock keys are UTF-8 text"
        )));
    };
    Key::new(text).map_err(|error| Failure::Lock(error.into()))
}

fn span(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| format!("it is {error}"))
}

fn wait(text: &str) -> Result<Duration, String> {
    bounded(text, LockOptions::WAIT_MAX, "leave --wait out to wait for ever")
}

fn grace(text: &str) -> Result<Duration, String> {
    bounded(
        text,
        Duration::from_secs(24 * 60 * 60),
        "a command that needs longer should not be killed at all",
    )
}

fn measured(text: &str) -> Result<Duration, String> {
    bounded(text, Duration::from_secs(60 * 60), "a benchmark settles much sooner")
}

fn bounded(text: &str, max: Duration, advice: &str) -> Result<Duration, String> {
    let given = span(text)?;
    if given > max {
        return Err(format!("it is longer than {}; {advice}", humantime::format_duration(max)));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    /// Returns the key and the command in `words` after `lockreg run`, if the words are valid.
    fn meant(words: &[&str]) -> Option<(String, String)> {
        let cli = Cli::try_parse_from(["lockreg", "run"].iter().chain(words)).ok()?;
        let Command::Run(run) = cli.command else { panic!("{words:?} is no run") };
        let (key, command) = run.key_and_command().ok()?;
        let text = |word: &OsString| word.to_str().expect("it was UTF-8").to_owned();
        Some((text(key), command.iter().map(text).collect::<Vec<_>>().join(" ")))
    }

    #[test]
    fn a_key_may_stand_behind_the_mark_that_ends_the_options() {
        for (words, key, command) in [
            (&["key", "--", "a", "-b", "--", "c"][..], "key", "a -b -- c"),
            (&["key", "--", "-a"], "key", "-a"),
            (&["--", "-key-", "a", "-b"], "-key-", "a -b"),
            (&["--", "-key-", "--", "a", "--", "-b"], "-key-", "a -- -b"),
            (&["--no-wait", "--", "--no-wait", "--", "a"], "--no-wait", "a"),
            (&["--", "key", "--", "a"], "key", "a"),
            (&["--", "", "--", "a"], "", "a"),
            (&["--", "-", "a"], "-", "a"),
            (&["--", "--", "--", "a"], "--", "a"),
        ] {
            assert_eq!(meant(words), Some((key.to_owned(), command.to_owned())), "{words:?}");
        }
    }

    #[test]
    fn a_command_is_never_taken_for_a_key_that_was_forgotten() {
        for words in [
            &["--", "a"][..],
            &["--", "a", "b"],
            &["--", "a", "-b", "--", "c"],
            &["--", "--", "a"],
            &["--", "-key-"],
            &["--", "-key-", "--"],
            &["--", "key", "--"],
            &["--"],
            &["-key-", "--", "a"],
            &["--waits", "--", "a"],
        ] {
            assert_eq!(meant(words), None, "{words:?}");
        }
    }
}
