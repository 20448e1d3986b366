//! Locks in PostgreSQL and MariaDB under faults: clients compete for locks, their events are
//! recorded, and the checkers of the testkit evaluate them. Needs PostgreSQL and MariaDB.
#![cfg(all(feature = "postgres", feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]
#![expect(clippy::print_stdout, reason = "figures, for those who want to see them")]

/// Generates two tests of each promise, one for each server.
macro_rules! on_both_servers {
    ($($(#[$attribute:meta])* $name:ident,)*) => {
        mod postgres {
            $(
                $(#[$attribute])*
                #[tokio::test]
                async fn $name() {
                    super::$name(crate::server::Kind::Postgres).await;
                }
            )*
        }

        mod mariadb {
            $(
                $(#[$attribute])*
                #[tokio::test]
                async fn $name() {
                    super::$name(crate::server::Kind::MariaDb).await;
                }
            )*
        }
    };
}

mod accounts;
mod again;
mod callers;
mod clocks;
mod contest;
mod data;
mod durable;
mod elsewhere;
mod fenced;
mod holders;
mod modes;
mod past;
mod poison;
mod pool;
mod replies;
mod server;
mod session;
mod silent;
mod standby;
mod stray;
mod successors;
mod verdict;
mod waiting;
