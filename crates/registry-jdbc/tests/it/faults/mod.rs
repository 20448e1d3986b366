//! Locks in PostgreSQL and MariaDB under faults: clients compete for locks, their events are
//! recorded, and the checkers of the testkit evaluate them. Needs PostgreSQL and MariaDB.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]
#![expect(clippy::print_stdout, reason = "measurements for the developer")]

/// Generates two tests of each promise, one for each server.
macro_rules! on_both_servers {
    ($($(#[$attribute:meta])* $name:ident,)*) => {
        mod postgres {
            $(
                $(#[$attribute])*
                #[tokio::test]
                async fn $name() {
                    super::$name(crate::faults::server::ServerKind::Postgres).await;
                }
            )*
        }

        mod mariadb {
            $(
                $(#[$attribute])*
                #[tokio::test]
                async fn $name() {
                    super::$name(crate::faults::server::ServerKind::MariaDb).await;
                }
            )*
        }
    };
}

mod accounts;
mod reacquisition;
mod runtimes;
mod clocks;
mod workload;
mod app_connection;
mod durable;
mod error_texts;
mod processes;
mod fenced;
mod holders;
mod modes;
mod snapshots;
mod dropped_calls;
mod pool;
mod replies;
mod server;
mod session;
mod half_open_connections;
mod standby;
mod delayed_requests;
mod successors;
mod paused_holder;
mod waiting;
