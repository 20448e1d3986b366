//! What the server is asked to do, in its own language. Each script is one step that nothing comes in between.
//!
//! Tokens are numbers of microseconds; Lua counts exactly up to 2^53 of them, which is the year 2255.

use std::sync::LazyLock;

use redis::Script;

/// Grants the lock if nobody holds it.
pub(crate) static ACQUIRE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("script/acquire.lua")));

/// Prolongs leases; never brings one back, never shortens one.
pub(crate) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("script/renew.lua")));

/// Ends the grant of one claim and tells those who wait.
pub(crate) static RELEASE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("script/release.lua")));

/// Ends the grant of whoever holds the lock and tells those who wait.
pub(crate) static BREAK: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("script/break.lua")));

/// Tells who holds locks.
pub(crate) static LOOK: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("script/look.lua")));
