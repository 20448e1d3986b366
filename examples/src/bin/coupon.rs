//! A shop in Redis: `coupon redis://HOST`. A counter needs no lock, a coupon needs a lock, and a
//! seller that pauses needs a fence.

use std::error::Error;
use std::time::Duration;

use futures_util::future::join_all;
use lock_registry::redis::{Fenced, FencedWrites, RedisConfig};
use lock_registry::{LockOptions, LockRegistryExt as _};
use redis::AsyncCommands as _;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());
    let registry = lock_registry::connect(&url).await?;
    let shop = redis::Client::open(&*url)?.get_multiplexed_async_connection().await?;

    // ANCHOR: counter
    // 50 customers, 10 units. One command reads and writes the stock, so no lock is necessary.
    () = shop.clone().set("stock", 10).await?;
    let buy = || async { shop.clone().decr::<_, _, i64>("stock", 1).await };
    let left = join_all((0..50).map(|_| buy())).await;
    println!("sold: {}", left.iter().flatten().filter(|left| **left >= 0).count());
    // ANCHOR_END: counter

    // ANCHOR: lock
    // Read the coupon, let another service pay it, then write it. No single command can do that.
    let redeem = || async {
        if shop.clone().get::<_, Option<u64>>("coupon").await?.is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await; // the other service pays
            () = shop.clone().incr("paid", 1).await?;
            () = shop.clone().set("coupon", 1).await?;
        }
        Ok::<_, redis::RedisError>(())
    };
    join_all((0..5).map(|_| redeem())).await;
    println!("paid without a lock: {}", shop.clone().getset::<_, _, u64>("paid", 0).await?);
    () = shop.clone().del("coupon").await?;
    join_all((0..5).map(|_| registry.execute_locked("coupon", async |_guard| redeem().await)))
        .await;
    println!("paid with a lock: {}", shop.clone().get::<_, u64>("paid").await?);
    // ANCHOR_END: lock

    // ANCHOR: fence
    // A seller pauses for longer than its lease: a stopped process cannot notice the loss.
    let options = LockOptions::new().lease(Duration::from_millis(300)).auto_renew(false);
    let paused = registry.obtain("price").lock_with(options).await?;
    let next = registry.obtain("price").lock().await?; // after the end of that lease
    let prices = FencedWrites::open(RedisConfig::from_url(&url)?).await?;
    prices.set(next.fencing_token(), "price", "17.50").await?;
    if let Fenced::Stale { .. } = prices.set(paused.fencing_token(), "price", "3.00").await? {
        println!("the late price was refused");
    }
    // ANCHOR_END: fence
    Ok(())
}
