//! How locks in Redis were written over the years, and how each form fails. The last function uses
//! this library. Start it with `redis_history redis://HOST`.
//!
//! Three databases of the server stand for the three servers of Redlock.

use std::error::Error;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_registry::LockOptions;
use lock_registry::redis::{Fenced, FencedWrites, RedisConfig};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, RedisResult, Script, cmd};
use tokio::time::sleep;

type Outcome = Result<(), Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());
    let mut redis = redis::Client::open(&*url)?.get_multiplexed_async_connection().await?;
    if std::env::args().nth(2).is_some() {
        return Ok(client_that_crashes(&mut redis).await?);
    }
    setnx_and_expire(&url, &mut redis).await?;
    setnx_get_getset(&mut redis).await?;
    set_nx_px(&mut redis).await?;
    redlock(&url).await?;
    with_tokens(&url, &mut redis).await
}

// ANCHOR: setnx
/// `SETNX` acquires the lock. A second command, `EXPIRE`, sets its time limit.
async fn client_that_crashes(redis: &mut MultiplexedConnection) -> RedisResult<()> {
    let granted: bool = redis.set_nx("history:1", "A").await?;
    if granted {
        std::process::exit(0); // the process is killed here
    }
    redis.expire("history:1", 1).await
}

async fn setnx_and_expire(url: &str, redis: &mut MultiplexedConnection) -> Outcome {
    () = redis.del("history:1").await?;
    Command::new(std::env::current_exe()?).args([url, "crash"]).status()?;
    sleep(Duration::from_millis(1500)).await; // the limit is 1 s
    let granted: bool = redis.set_nx("history:1", "B").await?;
    let limit: i64 = redis.ttl("history:1").await?;
    println!("A was killed between SETNX and EXPIRE.");
    println!("Half a second after its limit, B is granted the lock: {granted}.");
    println!("TTL: {limit} (no limit: the lock stays for ever).");
    Ok(())
}
// ANCHOR_END: setnx

// ANCHOR: getset
/// The value is the time at which the lock ends, by the clock of the client that wrote it.
async fn getset(redis: &mut MultiplexedConnection, now: u64) -> RedisResult<bool> {
    if redis.set_nx("history:2", now + 10_000).await? {
        return Ok(true);
    }
    let end: Option<u64> = redis.get("history:2").await?;
    if end.is_some_and(|end| end > now) {
        return Ok(false);
    }
    // If two clients find an expired lock, the client that reads the old value has won.
    let end: Option<u64> = redis.getset("history:2", now + 10_000).await?;
    Ok(end.is_none_or(|end| end <= now))
}

async fn setnx_get_getset(redis: &mut MultiplexedConnection) -> Outcome {
    let now: u64 = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis().try_into()?;
    () = redis.del("history:2").await?;
    let a = getset(redis, now).await?;
    let b = getset(redis, now + 60_000).await?; // its clock is a minute ahead
    println!("A is granted 10 s: {a}. B, whose clock is ahead, at the same time: {b}.");
    () = redis.del("history:2").await?; // A releases, and no command checks the owner
    let c = getset(redis, now).await?;
    println!("A releases. It deletes the lock of B, so C is granted it: {c}.");

    // B and C find the lock of a dead client. Both read it before either of them writes.
    () = redis.set("history:2", now - 1).await?;
    let found_by_b: u64 = redis.getset("history:2", now + 10_000).await?;
    let found_by_c: u64 = redis.getset("history:2", now + 90_000).await?;
    let end: u64 = redis.get("history:2").await?;
    println!("B wins: {}. C wins: {}.", found_by_b <= now, found_by_c <= now);
    println!("The lock of B now lasts {} s: C has written its own end.", (end - now) / 1000);
    Ok(())
}
// ANCHOR_END: getset

// ANCHOR: set_px
/// One command sets the owner and the time limit. One script releases only the owner's lock.
async fn acquire(
    redis: &mut MultiplexedConnection,
    key: &str,
    owner: &str,
    lease: u64,
) -> RedisResult<bool> {
    cmd("SET").arg(key).arg(owner).arg("NX").arg("PX").arg(lease).query_async(redis).await
}

async fn release(redis: &mut MultiplexedConnection, key: &str, owner: &str) -> RedisResult<bool> {
    let script = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
                  return redis.call('DEL', KEYS[1])";
    Script::new(script).key(key).arg(owner).invoke_async(redis).await
}

async fn set_nx_px(redis: &mut MultiplexedConnection) -> Outcome {
    () = redis.del("history:3").await?;
    () = redis.set("stock", 10).await?;

    let a = acquire(redis, "history:3", "A", 200).await?;
    let stock_of_a: i64 = redis.get("stock").await?;
    sleep(Duration::from_millis(400)).await; // A is paused for longer than its lease

    let b = acquire(redis, "history:3", "B", 10_000).await?;
    let stock_of_b: i64 = redis.get("stock").await?;
    () = redis.set("stock", stock_of_b - 1).await?;

    () = redis.set("stock", stock_of_a - 1).await?; // A resumes, and writes what it computed
    let released = release(redis, "history:3", "A").await?;
    let stock: i64 = redis.get("stock").await?;
    println!("A is granted: {a}. A pauses beyond its lease. B is granted: {b}.");
    println!("Both sell one of 10. Left: {stock}. One sale is lost.");
    println!("A learns of it when it releases, after its write: released {released}.");
    Ok(())
}
// ANCHOR_END: set_px

// ANCHOR: redlock
/// The same lock on each of three servers; two of them are a majority.
async fn acquire_majority(servers: &mut [MultiplexedConnection], owner: &str) -> RedisResult<bool> {
    let mut granted = 0;
    for server in servers {
        granted += u32::from(acquire(server, "history:4", owner, 300).await?);
    }
    Ok(granted >= 2)
}

async fn redlock(url: &str) -> Outcome {
    let mut servers = Vec::new();
    for database in 1..=3 {
        let client = redis::Client::open(&*format!("{}/{database}", url.trim_end_matches('/')))?;
        let mut server = client.get_multiplexed_async_connection().await?;
        () = server.del(&["history:4", "price"]).await?;
        servers.push(server);
    }

    // A reaches the first two servers. The clock of the second one then jumps ahead: its lock
    // ends early, as after this command.
    let a = acquire_majority(&mut servers[..2], "A").await?;
    () = servers[1].pexpire("history:4", 1).await?;
    sleep(Duration::from_millis(20)).await;
    let b = acquire_majority(&mut servers, "B").await?;
    println!("A has a majority: {a}. One clock jumps. B has a majority: {b}, A still works.");

    // No clock jumps, but A pauses for longer than its lease.
    sleep(Duration::from_millis(400)).await;
    let a = acquire_majority(&mut servers, "A").await?;
    sleep(Duration::from_millis(400)).await;
    let b = acquire_majority(&mut servers, "B").await?;
    () = servers[0].set("price", "17.50 by B").await?;
    () = servers[0].set("price", "3.00 by A").await?;
    let price: String = servers[0].get("price").await?;
    println!("A has a majority: {a}. A pauses. B has a majority: {b}.");
    println!("B writes, then A resumes and writes. The price is {price}.");
    Ok(())
}
// ANCHOR_END: redlock

// ANCHOR: tokens
/// This library: each grant has a larger token, and the resource refuses a smaller one.
async fn with_tokens(url: &str, redis: &mut MultiplexedConnection) -> Outcome {
    let registry = lock_registry::connect(url).await?;
    let prices = FencedWrites::open(RedisConfig::from_url(url)?).await?;
    let options = LockOptions::new().lease(Duration::from_secs(1)).auto_renew(false);

    let a = registry.obtain("price").lock_with(options).await?;
    sleep(Duration::from_millis(1500)).await; // A is paused for longer than its lease

    let b = registry.obtain("price").lock().await?;
    println!("A pauses beyond its lease. B is granted: {}.", b.is_held());
    prices.set(b.fencing_token(), "price", "17.50 by B").await?;

    let late = prices.set(a.fencing_token(), "price", "3.00 by A").await?;
    println!(
        "B writes, then A resumes and writes: {}.",
        match late {
            Fenced::Stale { .. } => "refused",
            _ => "written",
        }
    );
    println!("The price is {}.", redis.get::<_, String>("price").await?);
    println!("A knows: still held {}.", a.is_held());
    b.unlock().await?;
    Ok(())
}
// ANCHOR_END: tokens
