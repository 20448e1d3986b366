//! SQL databases: the suite, fences, opening and faults, on SQLite files and on real servers. The
//! tests of SQLite need no server. Those that the feature `server-tests` adds start PostgreSQL,
//! PgBouncer and MariaDB.

#[cfg(all(feature = "sqlite", target_os = "linux"))]
mod sqlite;
#[cfg(all(feature = "postgres", feature = "server-tests", target_os = "linux"))]
mod postgres;
#[cfg(all(feature = "mysql", feature = "server-tests", target_os = "linux"))]
mod mysql;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "server-tests", target_os = "linux"))]
mod faults;
