//! The command line: its options, its help texts, and the checks of its values.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use lock_registry::{Key, LockOptions, Reach, config::parse_duration};

use crate::exit::{self, CliError};

/// Runs commands under distributed locks, and administers lock stores.
///
/// Without --url and LOCK_REGISTRY_URL, locks are stored in an SQLite file of this user:
/// $XDG_STATE_HOME/lock-registry/locks.db, by default under ~/.local/state. These locks exclude
/// only processes of this user on this host.
#[derive(Debug, Parser)]
#[command(name = "lockreg", version, max_term_width = 100, after_help = EXIT_STATUS)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

// The table of exit statuses in the book is generated from this file.
const EXIT_STATUS: &str = include_str!("exit_status.txt");

/// Options of every subcommand.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// The lock store, such as redis://HOST or sqlite:/var/lib/app/locks.db; overrides
    /// LOCK_REGISTRY_URL
    #[arg(long, global = true, value_name = "URL", display_order = 100)]
    pub(crate) url: Option<String>,
    /// Uses the SQLite file of this user, without the warning about its reach
    #[arg(long, global = true, conflicts_with = "url", display_order = 100)]
    pub(crate) local: bool,
    /// The minimum reach of the store: process, host or network; a store with a shorter reach is
    /// an error with status 64
    #[arg(long, global = true, value_name = "REACH", display_order = 101)]
    pub(crate) require_reach: Option<RequiredReach>,
    /// The namespace; locks in different namespaces are independent
    #[arg(long, global = true, value_name = "NAME", display_order = 101)]
    pub(crate) namespace: Option<String>,
    /// Prints JSON instead of text, one object or array per line
    #[arg(long, global = true, display_order = 102)]
    pub(crate) json: bool,
    /// Prints no notices: waiting, not acquired, warnings; errors and lost locks are always printed
    #[arg(short, long, global = true, display_order = 102)]
    pub(crate) quiet: bool,
    /// Logs to stderr: -v lost locks and failed renewals, -vv also grants, releases and failed
    /// attempts, -vvv all events; LOCK_REGISTRY_LOG overrides this option with filter directives
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
pub(crate) enum CliCommand {
    Run(RunArgs),
    Elect(ElectArgs),
    Hold(HoldArgs),
    Show(ShowArgs),
    Value(ValueArgs),
    List(ListArgs),
    Top(TopArgs),
    Serve(ServeArgs),
    Break(BreakArgs),
    Doctor(DoctorArgs),
    Schema(SchemaArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Runs a command while holding a lock
///
/// Waits for the lock, by default without a limit; with --once-per or --tick, by default not at
/// all. Then runs the command, and releases the lock when the command has ended.
///
/// The environment of the command contains the key in LOCKREG_KEY. If the store has fencing,
/// LOCKREG_FENCING_TOKEN contains the fencing token. With --once-per or --tick, LOCKREG_TICK
/// contains the tick.
///
/// If the lock is lost while the command runs, lockreg sends SIGTERM to the process group of the
/// command, and SIGKILL after the grace time. Signals to lockreg are forwarded to the command.
#[derive(Debug, Args)]
#[command(override_usage = RUN_USAGE, after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) acquire: AcquireArgs,
    #[command(flatten)]
    pub(crate) once: OnceArgs,
    /// The time between SIGTERM and SIGKILL for the command, after a signal or the loss of the lock
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_grace)]
    pub(crate) grace: Duration,
    /// The key of the lock; write `--` before a key that may begin with `-`
    // The key is required, but may also follow the first `--`: see `key_and_command`.
    pub(crate) key: Option<OsString>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Options for a command that runs once per tick.
#[derive(Debug, Args)]
pub(crate) struct OnceArgs {
    /// Runs the command at most once per period, over all hosts. A period begins at each multiple
    /// of TIME since 1970 in UTC. If the command already ran in this period, lockreg ends at once
    /// with status 0. If another process runs the command now, lockreg waits for at most --wait, by
    /// default not at all, and ends with status 0. If the other run fails during this wait, lockreg
    /// runs the command itself
    #[arg(long, value_name = "TIME", value_parser = parse_period, conflicts_with_all = ["tick", "shared", "permits", "also"], allow_hyphen_values = true)]
    pub(crate) once_per: Option<Duration>,
    /// Runs the command at most once per tick, over all hosts. A tick is a name, or a number that
    /// increases from run to run. Waits and the exit status are those of --once-per
    #[arg(long, value_name = "NAME", conflicts_with_all = ["shared", "permits", "also"])]
    pub(crate) tick: Option<String>,
    /// Counts a failed command as run. Otherwise, the next call runs the command again
    #[arg(long)]
    pub(crate) count_failures: bool,
}

const RUN_EXAMPLES: &str = "\
Examples:
  lockreg run nightly -- ./report.sh --all
  lockreg run --once-per 1h cleanup -- /usr/local/bin/cleanup
  lockreg run --tick 2026-11-25 report -- ./report.sh
  lockreg --url redis://locks.example run --wait 1m deploy -- sh -c 'git pull && make install'";

const RUN_USAGE: &str = "lockreg run [OPTIONS] <KEY> -- <COMMAND>...
       lockreg run [OPTIONS] -- <KEY> -- <COMMAND>...
       lockreg run [OPTIONS] -- <-KEY> <COMMAND>...";

impl RunArgs {
    /// Returns the key, and the command with its arguments.
    ///
    /// The key usually precedes the first `--`. It may also follow the first `--`, if a second `--`
    /// follows the key, or if the key begins with `-`. Otherwise, the words after the first `--`
    /// are a command whose key is missing. Such a command must not be taken as the key.
    pub(crate) fn key_and_command(&self) -> Result<(&OsString, &[OsString]), CliError> {
        let found = match (&self.key, &*self.command) {
            (Some(key), command) => Some((key, command)),
            (None, [key, separator, command @ ..]) if separator == "--" => Some((key, command)),
            (None, [key, command @ ..]) if key != "--" && key.as_bytes().starts_with(b"-") => {
                Some((key, command))
            }
            (None, _) => None,
        };
        found.filter(|(_, command)| !command.is_empty()).ok_or_else(|| {
            CliError::usage(
                "KEY or COMMAND is missing; write `lockreg run KEY -- COMMAND`; if the key may begin with `-`, \
                 write `lockreg run -- KEY -- COMMAND`",
            )
        })
    }
}

/// Runs a command while this process leads a role
///
/// Campaigns for the role, over all processes, and runs the command while this process leads. If
/// the lease could end before it is renewed, lockreg sends SIGTERM to the process group of the
/// command, and SIGKILL before the end of the lease, and campaigns again. If the command ends by
/// itself, lockreg releases the role, and ends with the status of the command.
///
/// The environment of the command contains the role in LOCKREG_KEY and the fencing token of the
/// term in LOCKREG_FENCING_TOKEN. Signals to lockreg are forwarded to the command.
#[derive(Debug, Args)]
#[command(after_help = ELECT_EXAMPLES)]
pub(crate) struct ElectArgs {
    /// Text that other clients can read while this candidate leads, for example its address
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) data: String,
    /// The priority of this candidate: a vacant role goes to the waiting candidate with the highest
    /// number. Set a priority for all candidates
    #[arg(long, value_name = "NUMBER")]
    pub(crate) priority: Option<u32>,
    /// How long the role stays taken if this process dies [default: 30s; zk: 15s]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) lease: Option<String>,
    /// The name of this candidate [default: host:pid]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// The time between SIGTERM and SIGKILL for the command, at most a third of the lease
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_grace)]
    pub(crate) grace: Duration,
    /// The role; write `--` before a role that may begin with `-`
    pub(crate) role: OsString,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

const ELECT_EXAMPLES: &str = "\
Examples:
  lockreg --url redis://locks.example elect scheduler -- ./scheduler
  lockreg elect --lease 15s --data 10.0.0.1:8080 scheduler -- ./scheduler";

/// Holds a lock until stdin ends or a signal arrives
///
/// Prints one line of JSON when the lock is acquired: {"key":…,"token":…,"valid_for_ms":…}. Prints
/// one line when the lock is lost: {"key":…,"lost":"reason"}. For scripts and for programs in any
/// language.
///
/// The status is 0 if stdin ends, or if a signal ends lockreg while it holds the lock.
#[derive(Debug, Args)]
#[command(after_help = HOLD_EXAMPLES)]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    pub(crate) acquire: AcquireArgs,
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
}

const HOLD_EXAMPLES: &str = "\
Examples:
  sleep 60 | lockreg hold orders/42
  lockreg hold --wait 5s --max-hold 10m orders/42";

/// Options for acquiring a lock.
#[derive(Debug, Args)]
pub(crate) struct AcquireArgs {
    /// The maximum time to wait for the lock, and to repeat failed attempts to connect. Then the
    /// status is 75, or that of --conflict-exit-code; or 69 if the store is unreachable. Without
    /// this option, connecting is retried for `connect_timeout` [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = parse_wait, conflicts_with = "no_wait", allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,
    /// Does not wait; if the lock is held, the status is 75, or that of --conflict-exit-code
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// The exit status if the lock was not acquired in time, 0 to 255
    #[arg(short = 'E', long, value_name = "STATUS", default_value_t = exit::NOT_ACQUIRED)]
    pub(crate) conflict_exit_code: u8,
    /// Shares the lock with other holders that share it; excludes exclusive holders
    #[arg(long, conflicts_with_all = ["permits", "also"])]
    pub(crate) shared: bool,
    /// Takes permits of a semaphore with this number of units; all callers must state the same
    /// number
    #[arg(long, value_name = "UNITS", conflicts_with = "also", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// The number of units to take
    #[arg(long, value_name = "UNITS", requires = "permits", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) take: u32,
    /// Waits in the order of arrival, over all processes that use this option
    #[arg(long)]
    pub(crate) fair: bool,
    /// A further key; all keys are locked together or not at all. May be repeated
    #[arg(long, value_name = "KEY")]
    pub(crate) also: Vec<OsString>,
    /// How long the key stays locked if this process dies. The lease is renewed while the process
    /// runs, unless LOCK_REGISTRY_RENEW or the URL sets `renew` to false [default: 30s; zk: 15s]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) lease: Option<String>,
    /// The minimum time that the key stays locked. lockreg waits until this time is over. A signal
    /// ends this wait; the key then stays locked until its lease ends
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    pub(crate) min_hold: Option<Duration>,
    /// The maximum time to hold the lock. Then the lock counts as lost: the command is ended, and
    /// the status is 76
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    pub(crate) max_hold: Option<Duration>,
    /// The name of this holder in the output of `show` and `list` [default: host:pid]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
}

impl AcquireArgs {
    /// Returns the time limit of the wait, or `None` for no limit.
    pub(crate) fn wait_limit(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }

    /// Returns the options `min_hold`, `max_hold` and `fair`. The limit of the wait is not
    /// included, because it also covers connecting.
    pub(crate) fn options(&self) -> LockOptions {
        let mut options = LockOptions::new();
        if let Some(min_hold) = self.min_hold {
            options = options.min_hold(min_hold);
        }
        if let Some(max_hold) = self.max_hold {
            options = options.max_hold(max_hold);
        }
        if self.fair {
            options = options.fair(true);
        }
        options
    }
}

/// Prints the holders and the waiters of a lock; status 1 if the key is not locked
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg show nightly\n  lockreg --json show nightly")]
pub(crate) struct ShowArgs {
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
}

/// Lists all locks that are held in the namespace
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg list\n  lockreg list --waiters")]
pub(crate) struct ListArgs {
    /// Prints the waiters instead of the holders
    ///
    /// A process is listed once per key and mode. In stores without a queue, it is listed after it
    /// has waited for a second.
    #[arg(long)]
    pub(crate) waiters: bool,
}

/// Shows all holders and waiters continuously in the terminal
///
/// Keys: arrows select, s sorts by the next column, r reverses the order, / filters by key and
/// label, enter shows the details of a key, b releases it by force after a confirmation, q quits.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg top\n  lockreg --url redis://HOST top --interval 1s")]
pub(crate) struct TopArgs {
    /// The pause between two readings of the store, 50ms to 1h; longer if a reading takes longer
    #[arg(long, value_name = "TIME", value_parser = parse_interval, default_value = "100ms")]
    pub(crate) interval: Duration,
}

/// Shows all holders and waiters continuously in a web page
///
/// Prints the address of the page when the page can be opened, and runs until a signal arrives.
/// The page shows a table of locks and waiters, the past holders of a key, which processes wait for
/// which others, and possible deadlocks. For programs: `/api/locks`, `/api/locks/KEY`,
/// `/api/waits`, `/metrics` for Prometheus, `/healthz`.
///
/// Open pages cause no additional readings of the store. The pause between two readings is longer
/// than --interval if a reading takes longer than a quarter of --interval. It is also longer if the
/// readings, or the requests of clients, would otherwise use more than 4 % of a processor. The
/// connections are not encrypted, and all users who can reach the address can read all keys and
/// labels.
#[derive(Debug, Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(crate) struct ServeArgs {
    /// The IP address and port, or only a port of 127.0.0.1; port 0 selects a free port
    #[arg(long, value_name = "ADDR", value_parser = parse_listen, default_value = "127.0.0.1:8384")]
    pub(crate) listen: SocketAddr,
    /// The pause between two readings of the store, 50ms to 1h; after a failed reading at most 5s
    #[arg(long, value_name = "TIME", value_parser = parse_interval, default_value = "1s")]
    pub(crate) interval: Duration,
    /// Allows clients that send the token to release locks by force. The token has at least 16
    /// characters. It is read from --token-file, or else from the variable LOCKREG_SERVE_TOKEN
    #[arg(long)]
    pub(crate) allow_break: bool,
    /// The file with the token of --allow-break
    #[arg(long, value_name = "FILE", requires = "allow_break")]
    pub(crate) token_file: Option<PathBuf>,
    /// A host name of this server, for example the name of its proxy. If this option is set, or if
    /// the address is a loopback address, the header `Host` of a request must contain such a name,
    /// `localhost` or an IP address; lockreg refuses other requests. May be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
}

const SERVE_EXAMPLES: &str = "\
Examples:
  lockreg --url redis://locks.example serve
  lockreg serve --listen 0.0.0.0:8384 --interval 5s
  LOCKREG_SERVE_TOKEN=$(openssl rand -hex 16) lockreg serve --allow-break";

/// Prints the value block of a key; status 1 if it has none
///
/// Prints the bytes as they are. With --json, prints the text, or the bytes in hexadecimal digits
/// if they are not UTF-8, and the fencing token of the holder that wrote them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg value nightly\n  lockreg --json value nightly")]
pub(crate) struct ValueArgs {
    /// The key; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
}

/// Releases a lock by force
///
/// The holder detects the loss at its next renewal or at the end of its lease, at the latest. Until
/// then, two holders may run.
/// The status is 1 if the key is not locked.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg break nightly\n  lockreg break nightly --yes")]
pub(crate) struct BreakArgs {
    /// The key of the lock; if it may begin with `-`, write `--` before it
    pub(crate) key: OsString,
    /// Releases the lock; without this option, `break` only prints the holder, with status 64
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Connects to the store, and prints its guarantees, its settings and its configuration faults
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg --url redis://HOST doctor\n  lockreg doctor --strict")]
pub(crate) struct DoctorArgs {
    /// Ends with status 1 if the report contains a warning
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Prints a completion script for a shell
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  lockreg completions bash >~/.local/share/bash-completion/completions/lockreg"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// Prints the manual page of lockreg or of one of its commands, in roff
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg man run | man -l -")]
pub(crate) struct ManArgs {
    /// A command, such as `run`
    pub(crate) command: Option<String>,
}

/// Prints the SQL that creates the tables of a store
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lockreg schema postgres | psql shop\n  lockreg schema mysql")]
pub(crate) struct SchemaArgs {
    /// The database: mysql, postgres or sqlite
    pub(crate) dialect: String,
}

/// Measures lock and unlock pairs against the store
///
/// Each task stops after 5 million pairs, even before the time is over.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  lockreg --url redis://HOST bench\n  lockreg bench --for 10s --tasks 64"
)]
pub(crate) struct BenchArgs {
    /// The duration of the measurement, at most 1h
    #[arg(long = "for", value_name = "TIME", default_value = "3s", value_parser = parse_bench_time)]
    pub(crate) time: Duration,
    /// The number of concurrent tasks, each with its own key, at most 1024
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) tasks: u16,
}

/// Parses the key of a lock. Called before the store is opened.
pub(crate) fn parse_key(given: &OsString) -> Result<Key, CliError> {
    let Some(text) = given.to_str() else {
        return Err(CliError::usage(format!(
            "the key {given:?} is not UTF-8; write the key as UTF-8 text"
        )));
    };
    Key::new(text).map_err(|error| CliError::Lock(error.into()))
}

fn parse_time(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// The maximum of `--wait`.
const WAIT_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

fn parse_wait(text: &str) -> Result<Duration, String> {
    parse_bounded_time(text, WAIT_MAX, "leave --wait out to wait without a limit")
}

fn parse_period(text: &str) -> Result<Duration, String> {
    match parse_time(text)? {
        period if period < Duration::from_secs(1) => {
            Err("it is shorter than the minimum 1s; set a longer period".to_owned())
        }
        period => Ok(period),
    }
}

fn parse_grace(text: &str) -> Result<Duration, String> {
    parse_bounded_time(text, Duration::from_secs(24 * 60 * 60), "set a shorter grace time")
}

fn parse_bench_time(text: &str) -> Result<Duration, String> {
    parse_bounded_time(text, Duration::from_secs(60 * 60), "set a shorter time")
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    match parse_bounded_time(text, Duration::from_secs(60 * 60), "set a shorter interval")? {
        interval if interval < Duration::from_millis(50) => {
            Err("it is shorter than the minimum 50ms; set a longer interval".to_owned())
        }
        interval => Ok(interval),
    }
}

fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse() {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    let address = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    address
        .parse()
        .map_err(|_| "it is not an address; write IP:PORT, [IPv6]:PORT or a port".to_owned())
}

fn parse_bounded_time(text: &str, max: Duration, hint: &str) -> Result<Duration, String> {
    let given = parse_time(text)?;
    if given > max {
        return Err(format!(
            "it is longer than the maximum {}; {hint}",
            humantime::format_duration(max)
        ));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_valid() {
        Cli::command().debug_assert();
    }

    /// Returns the key and the command in `words` after `lockreg run`, if the words are valid.
    fn parsed(words: &[&str]) -> Option<(String, String)> {
        let cli = Cli::try_parse_from(["lockreg", "run"].iter().chain(words)).ok()?;
        let CliCommand::Run(run) = cli.command else { panic!("{words:?} is not `run`") };
        let (key, command) = run.key_and_command().ok()?;
        let text = |word: &OsString| word.to_str().expect("it was UTF-8").to_owned();
        Some((text(key), command.iter().map(text).collect::<Vec<_>>().join(" ")))
    }

    #[test]
    fn a_key_may_follow_the_separator_that_ends_the_options() {
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
            assert_eq!(parsed(words), Some((key.to_owned(), command.to_owned())), "{words:?}");
        }
    }

    #[test]
    fn a_command_is_never_parsed_as_a_missing_key() {
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
            assert_eq!(parsed(words), None, "{words:?}");
        }
    }
}
