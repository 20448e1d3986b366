//! Workers that take messages from a Redis list. Messages of one account are handled one at a time:
//! `queue redis://HOST`.

use std::error::Error;

use lock_registry::Registry;
use redis::AsyncCommands as _;
use redis::Direction::{Left, Right};
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

// ANCHOR: worker
/// Handles messages until the list is empty. Returns the number of messages handled.
async fn work(registry: Registry, mut queue: MultiplexedConnection) -> Result<usize> {
    let mut handled = 0;
    // A message stays in `taken` until it has been handled, so that a crash does not lose it.
    while let Some(account) = queue.lmove("messages", "taken", Left, Right).await? {
        let account: String = account;
        if let Some(guard) = registry.obtain(&account).try_lock().await? {
            guard.protect(handle(&mut queue, &account)).await??;
            guard.unlock().await?;
            handled += 1;
        } else {
            // Another worker handles a message of this account. This message returns to the list.
            () = queue.rpush("messages", &account).await?;
        }
        () = queue.lrem("taken", 1, &account).await?;
    }
    Ok(handled)
}
// ANCHOR_END: worker

/// Reads, computes and writes the balance. Without the lock, concurrent updates would be lost.
async fn handle(queue: &mut MultiplexedConnection, account: &str) -> Result<()> {
    let balance: Option<i64> = queue.hget("balances", account).await?;
    () = queue.hset("balances", account, balance.unwrap_or_default() + 1).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());
    let mut queue = redis::Client::open(&*url)?.get_multiplexed_async_connection().await?;
    for message in 0..100 {
        () = queue.rpush("messages", format!("account {}", message % 2)).await?;
    }
    let mut workers = JoinSet::new();
    for _ in 0..4 {
        workers.spawn(work(lock_registry::connect(&url).await?, queue.clone()));
    }
    for handled in workers.join_all().await {
        println!("a worker has handled {}", handled?);
    }
    let balances: Vec<i64> = queue.hmget("balances", &["account 0", "account 1"]).await?;
    println!("balances: {balances:?}");
    Ok(())
}
