//! The Lua scripts that the servers execute atomically.
//!
//! The body of a script is the same for all layouts. `Scripts` prepends the functions that depend
//! on the layout, see `script/layout`. A token is the server's time in microseconds, or larger if
//! an earlier token is not smaller than that time. A Lua number represents tokens exactly up to
//! 2^53, which corresponds to the year 2255.

use std::sync::OnceLock;

use redis::{Arg, Cmd, ToRedisArgs};

use crate::config::Layout;
use crate::mutant::renew_script;

/// The scripts of one layout.
pub(crate) struct Scripts {
    /// Grants the lock to a claim if no other claim holds it.
    pub(crate) acquire: Script,
    /// Grants several locks if no other claim holds one of them.
    pub(crate) acquire_all: Script,
    /// Adds a grant to the record of a lock, if the record has not changed.
    pub(crate) add_grant: Script,
    /// Replaces the record of a lock with another one, or deletes it, if neither the record nor its
    /// expiry has changed. Otherwise returns the stored record.
    pub(crate) replace_record: Script,
    /// Extends leases. Never shortens a lease and never recreates a lock.
    pub(crate) renew: Script,
    /// Ends the claim's grant or removes the claim from the queue, and publishes the release.
    pub(crate) release: Script,
    /// Releases several locks.
    pub(crate) release_all: Script,
    /// Releases the lock regardless of its holder, and publishes the release.
    pub(crate) force_release: Script,
    /// Returns the holders of locks.
    pub(crate) inspect: Script,
    /// Returns the value block of a lock: the bytes that its holders have stored for the
    /// application.
    pub(crate) read_value_block: Script,
    /// Writes the value block if the claim holds the lock exclusively and no larger token has
    /// written.
    pub(crate) write_value_block: Script,
    /// Registers a claim that waits.
    pub(crate) register_waiter: Script,
    /// Removes the registration of a claim.
    pub(crate) unregister_waiter: Script,
    /// Returns the registered claims of a lock.
    pub(crate) waiters: Script,
    /// Stores the token that the quorum has chosen.
    pub(crate) store_token: Script,
    /// Releases a claim's grant if the grant's latest round is the given quorum round, and
    /// publishes the release.
    pub(crate) withdraw: Script,
}

/// The functions of another library's layout, whose records contain no token.
macro_rules! foreign_layout {
    ($layout:literal) => {
        concat!(include_str!($layout), "\n", include_str!("script/layout/foreign_tokens.lua"))
    };
}

impl Scripts {
    pub(crate) fn for_layout(layout: Layout) -> &'static Self {
        static NATIVE: OnceLock<Scripts> = OnceLock::new();
        static SPRING: OnceLock<Scripts> = OnceLock::new();
        static REDISSON: OnceLock<Scripts> = OnceLock::new();
        let (scripts, functions) = match layout {
            Layout::Native => (&NATIVE, include_str!("script/layout/native.lua")),
            Layout::Spring => (&SPRING, foreign_layout!("script/layout/spring.lua")),
            Layout::Redisson => (&REDISSON, foreign_layout!("script/layout/redisson.lua")),
        };
        if cfg!(lock_registry_mutants) {
            // A test may have enabled another planted bug after the last store was opened.
            return Box::leak(Box::new(Self::with_layout(functions)));
        }
        scripts.get_or_init(|| Self::with_layout(functions))
    }

    fn with_layout(layout_functions: &str) -> Self {
        let prelude = format!(
            "{layout_functions}\n{}\n{}",
            include_str!("script/tokens.lua"),
            include_str!("script/entries.lua")
        );
        let script = |body: &str| Script::new(format!("{prelude}\n{body}"));
        let with_error_helpers =
            |body: &str| script(&format!("{}\n{body}", include_str!("script/failure.lua")));
        Self {
            acquire: script(include_str!("script/acquire.lua")),
            acquire_all: with_error_helpers(include_str!("script/acquire_all.lua")),
            add_grant: script(include_str!("script/add_grant.lua")),
            replace_record: script(include_str!("script/replace_record.lua")),
            renew: with_error_helpers(&renew_script(include_str!("script/renew.lua"))),
            release: script(include_str!("script/release.lua")),
            release_all: script(&format!(
                "local function release(KEYS, ARGV)\n{}\nend\n{}",
                include_str!("script/release.lua"),
                include_str!("script/release_all.lua")
            )),
            force_release: script(include_str!("script/force_release.lua")),
            inspect: with_error_helpers(include_str!("script/inspect.lua")),
            read_value_block: Script::new(include_str!("script/read_value_block.lua").to_owned()),
            write_value_block: script(include_str!("script/write_value_block.lua")),
            register_waiter: script(include_str!("script/register_waiter.lua")),
            unregister_waiter: Script::new(include_str!("script/unregister_waiter.lua").to_owned()),
            waiters: Script::new(include_str!("script/waiters.lua").to_owned()),
            store_token: script(include_str!("script/store_token.lua")),
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

    /// Creates a call with these keys. The caller adds the arguments.
    pub(crate) fn call<I>(&self, keys: I) -> ScriptCall<'_>
    where
        I: IntoIterator<Item: ToRedisArgs, IntoIter: ExactSizeIterator>,
    {
        let keys = keys.into_iter();
        let mut command = Cmd::with_capacity(
            OTHER_ARGUMENTS + ARGUMENTS_PER_KEY * keys.len(),
            BYTES_PER_KEY * (1 + keys.len()),
        );
        command.arg("EVALSHA").arg(&self.hash).arg(keys.len());
        for key in keys {
            command.arg(key);
        }
        ScriptCall { script: self, command, is_tracked: false }
    }
}

/// A script with its keys and arguments.
pub(crate) struct ScriptCall<'a> {
    script: &'a Script,
    command: Cmd,
    is_tracked: bool,
}

impl ScriptCall<'_> {
    pub(crate) fn arg(mut self, argument: impl ToRedisArgs) -> Self {
        self.command.arg(argument);
        self
    }

    /// Makes the node send `CLIENT CACHING YES` before the script, unless the slot is migrating or
    /// a server refuses client tracking. The server then sends invalidations for the locks of this
    /// call.
    pub(crate) fn with_tracking(self) -> Self {
        Self { is_tracked: true, ..self }
    }

    pub(crate) fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// Returns the keys of the call.
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

    /// Returns the `EVALSHA` command, for a server that has cached the script.
    pub(crate) fn evalsha(&self) -> &Cmd {
        &self.command
    }

    /// Returns the `EVAL` command. The server then caches the script.
    pub(crate) fn eval(&self) -> Cmd {
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

/// The initial capacity for arguments of a call that belong to no key.
const OTHER_ARGUMENTS: usize = 8;
/// The initial capacity for one key and the arguments that belong to it.
const ARGUMENTS_PER_KEY: usize = 3;
/// The initial capacity in bytes for one key and its arguments. All other arguments count as one
/// more key.
const BYTES_PER_KEY: usize = 96;
