//! Measures several processes on one key, and many locks held by one process, each next to the
//! minimum that the job needs.
//!
//! The processes are this program itself with another argument. All timestamps are from the
//! monotonic clock, which the processes share.

mod contention;
mod held_locks;
mod server;
mod redis_reference;
mod postgres_reference;
mod measurement;

use std::io::BufRead;

use lock_registry_benches::write_results;
use nix::time::{ClockId, clock_gettime};

use crate::server::LockServer;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        match words[..] {
            ["child", "contention", ref rest @ ..] => contention::child(rest).await,
            ["child", "held", ref rest @ ..] => held_locks::child(rest).await,
            _ => {
                let is_selected = |name: &str| {
                    let filters: Vec<_> =
                        words.iter().filter(|word| !word.starts_with('-')).collect();
                    filters.is_empty() || filters.iter().any(|word| name.contains(**word))
                };
                if is_selected("redis-turns") {
                    contention::bench(&LockServer::redis().await).await;
                }
                if is_selected("redis-held") {
                    held_locks::bench_redis().await;
                }
                if is_selected("postgres-turns") {
                    contention::bench(&LockServer::postgres().await).await;
                }
                if is_selected("postgres-held") {
                    held_locks::bench_postgres().await;
                }
                write_results("processes");
            }
        }
    });
}

/// The monotonic clock in nanoseconds, which is the same in all processes.
fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
    u64::try_from(now.tv_sec() * 1_000_000_000 + now.tv_nsec()).unwrap()
}

/// Reads the next line from the parent process.
async fn read_stdin_line() -> String {
    let line = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        line
    });
    line.await.unwrap().trim().to_owned()
}
