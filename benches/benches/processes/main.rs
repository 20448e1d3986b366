//! Measures several processes on one key, and many locks held by one process, each next to the
//! minimum that the job needs.
//!
//! The processes are this program itself with another argument. All timestamps are from the
//! monotonic clock, which the processes share.

mod turns;
mod held;
mod store;
mod bare_redis;
mod bare_postgres;
mod measure;

use std::io::BufRead;

use nix::time::{ClockId, clock_gettime};

use crate::store::Store;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        match words[..] {
            ["child", "turns", ref rest @ ..] => turns::child(rest).await,
            ["child", "held", ref rest @ ..] => held::child(rest).await,
            _ => {
                // `cargo test` only verifies that the benchmark works, not how fast it is.
                let in_earnest = words.contains(&"--bench");
                let wanted = |name: &str| {
                    let named: Vec<_> =
                        words.iter().filter(|word| !word.starts_with('-')).collect();
                    named.is_empty() || named.iter().any(|word| name.contains(**word))
                };
                if wanted("redis-turns") {
                    turns::bench(&Store::redis().await, in_earnest).await;
                }
                if wanted("redis-held") {
                    held::bench_redis(in_earnest).await;
                }
                if wanted("postgres-turns") {
                    turns::bench(&Store::postgres().await, in_earnest).await;
                }
                if wanted("postgres-held") {
                    held::bench_postgres(in_earnest).await;
                }
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
async fn order() -> String {
    let line = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).unwrap();
        line
    });
    line.await.unwrap().trim().to_owned()
}
