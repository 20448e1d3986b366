//! The Lua scripts that the servers run. The server executes each script atomically.
//!
//! A script is the same for all layouts. The few functions that depend on the layout are prepended
//! to it, see `script/layout`. Tokens are times in microseconds, which a Lua number represents
//! exactly up to 2^53, the year 2255.

use std::sync::OnceLock;

use redis::{Arg, Cmd, ToRedisArgs};

use crate::config::Layout;
use crate::mutant::renewal;

/// The scripts of one layout.
pub(crate) struct Scripts {
    /// Grants the lock if it is free.
    pub(crate) acquire: Script,
    /// Extends leases. Never recreates and never shortens a lease.
    pub(crate) renew: Script,
    /// Releases one claim's grant and publishes the release.
    pub(crate) release: Script,
    /// Releases the lock whatever claim holds it, and publishes the release.
    pub(crate) break_open: Script,
    /// Returns the holders of locks.
    pub(crate) look: Script,
    /// Stores the token that a majority has agreed on.
    pub(crate) raise: Script,
    /// Releases the grant of one attempt of a claim and publishes the release.
    pub(crate) withdraw: Script,
}

/// The functions of a foreign layout, whose records have no room for tokens.
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
            // The planted bug may have changed since the last store was opened.
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

/// The source of a Lua script and its hash.
pub(crate) struct Script {
    source: String,
    hash: String,
}

impl Script {
    pub(crate) fn new(source: String) -> Self {
        let hash = redis::Script::new(&source).get_hash().to_owned();
        Self { source, hash }
    }

    /// Returns the whole source.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Starts a call with these keys; the caller adds the arguments.
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

    /// Asks the server for invalidations of the keys that the script reads.
    pub(crate) fn watching(self) -> Self {
        Self { watches: true, ..self }
    }

    pub(crate) fn watches(&self) -> bool {
        self.watches
    }

    /// Returns the keys of the script.
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

    /// Returns `EVALSHA`, for a server that has cached the script.
    pub(crate) fn known(&self) -> &Cmd {
        &self.command
    }

    /// Returns `EVAL`, which makes the server cache the script.
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

/// The number of arguments of most calls, without those that belong to one key.
const ARGUMENTS: usize = 8;
/// The bytes that most calls need per key, and once more for the rest.
const BYTES: usize = 96;
