//! What the servers are asked to do, in their own language. Each script is one step that nothing comes in between.
//!
//! A script is the same for all layouts; before it come the few functions in which layouts differ, see `script/layout`.
//! Tokens are numbers of microseconds; Lua counts exactly up to 2^53 of them, which is the year 2255.

use std::sync::OnceLock;

use redis::{Arg, Cmd, ToRedisArgs};

use crate::config::Layout;
use crate::mutant::renewal;

/// The scripts of one layout.
pub(crate) struct Scripts {
    /// Grants the lock if nobody holds it.
    pub(crate) acquire: Script,
    /// Prolongs leases; never brings one back, never shortens one.
    pub(crate) renew: Script,
    /// Ends the grant of one claim and tells those who wait.
    pub(crate) release: Script,
    /// Ends the grant of whoever holds the lock and tells those who wait.
    pub(crate) break_open: Script,
    /// Tells who holds locks.
    pub(crate) look: Script,
    /// Writes down the token of a majority.
    pub(crate) raise: Script,
    /// Ends what one attempt of a claim has got, and tells those who wait.
    pub(crate) withdraw: Script,
}

/// A layout of others, which has no room for tokens in its records.
macro_rules! peers {
    ($layout:literal) => {
        concat!(include_str!($layout), "\n", include_str!("script/layout/beside.lua"))
    };
}

impl Scripts {
    pub(crate) fn of(layout: Layout) -> &'static Self {
        static NATIVE: OnceLock<Scripts> = OnceLock::new();
        static SPRING: OnceLock<Scripts> = OnceLock::new();
        static REDISSON: OnceLock<Scripts> = OnceLock::new();
        let (made, functions) = match layout {
            Layout::Native => (&NATIVE, include_str!("script/layout/native.lua")),
            Layout::Spring => (&SPRING, peers!("script/layout/spring.lua")),
            Layout::Redisson => (&REDISSON, peers!("script/layout/redisson.lua")),
        };
        if cfg!(lock_registry_mutants) {
            // Another planted bug may be switched on than when the last store was opened.
            return Box::leak(Box::new(Self::after(functions)));
        }
        made.get_or_init(|| Self::after(functions))
    }

    fn after(layout: &str) -> Self {
        let script = |body: &str| Script::new(format!("{layout}\n{body}"));
        let read = |body: &str| script(&format!("{}\n{body}", include_str!("script/failure.lua")));
        Self {
            acquire: script(include_str!("script/acquire.lua")),
            renew: read(&renewal(include_str!("script/renew.lua"))),
            release: script(include_str!("script/release.lua")),
            break_open: script(include_str!("script/break.lua")),
            look: read(include_str!("script/look.lua")),
            raise: script(include_str!("script/raise.lua")),
            withdraw: script(include_str!("script/withdraw.lua")),
        }
    }
}

/// A program for a server.
pub(crate) struct Script {
    source: String,
    hash: String,
}

impl Script {
    pub(crate) fn new(source: String) -> Self {
        let hash = redis::Script::new(&source).get_hash().to_owned();
        Self { source, hash }
    }

    /// All of it.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// A call with these keys, to which arguments are yet to be added.
    pub(crate) fn call<I>(&self, keys: I) -> Call<'_>
    where
        I: IntoIterator<Item: ToRedisArgs, IntoIter: ExactSizeIterator>,
    {
        let keys = keys.into_iter();
        let (arguments, bytes) = (ARGUMENTS + 3 * keys.len(), BYTES * (1 + keys.len()));
        let mut command = Cmd::with_capacity(arguments, bytes);
        command.arg("EVALSHA").arg(&self.hash).arg(keys.len());
        for key in keys {
            command.arg(key);
        }
        Call { script: self, command, watches: false }
    }
}

/// A script with its keys and arguments.
pub(crate) struct Call<'a> {
    script: &'a Script,
    command: Cmd,
    watches: bool,
}

impl Call<'_> {
    pub(crate) fn arg(mut self, argument: impl ToRedisArgs) -> Self {
        self.command.arg(argument);
        self
    }

    /// Has the server tell when somebody else changes what the script has read.
    pub(crate) fn watching(self) -> Self {
        Self { watches: true, ..self }
    }

    pub(crate) fn watches(&self) -> bool {
        self.watches
    }

    /// The keys of the script.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        let simple = |argument| match argument {
            Arg::Simple(argument) => Some(argument),
            _ => None,
        };
        let mut arguments = self.command.args_iter().skip(2).filter_map(simple);
        let count =
            arguments.next().and_then(|count| std::str::from_utf8(count).ok()?.parse().ok());
        arguments.take(count.unwrap_or(0))
    }

    /// For a server that knows the script.
    pub(crate) fn known(&self) -> &Cmd {
        &self.command
    }

    /// For a server that does not, which then will.
    pub(crate) fn unknown(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(&self.script.source);
        for argument in self.command.args_iter().skip(2) {
            if let Arg::Simple(argument) = argument {
                command.arg(argument);
            }
        }
        command
    }
}

/// What most calls have beside their keys and what belongs to each of them.
const ARGUMENTS: usize = 8;
/// The room that most of them need, for each key and once more.
const BYTES: usize = 96;
