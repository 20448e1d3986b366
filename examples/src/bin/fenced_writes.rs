//! Data in Redis that only the newest holder of its lock can write: `fenced_writes redis://HOST`.
//!
//! A clerk reads an account under a lock, pauses for longer than the lease, and then writes a value
//! based on the old balance. By then another clerk has been granted the lock and has written. The
//! account rejects the late write, because its token is older.

use std::time::Duration;

use lock_registry::{
    LockOptions,
    redis::{Fenced, FencedScript, FencedWrites, RedisConfig, ScriptReply},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());

    // ANCHOR: open
    // The locks may be in any store with fencing tokens, the data in any Redis except a quorum.
    let locks = lock_registry::connect(&url).await?;
    let accounts = FencedWrites::open(RedisConfig::from_url(&url)?).await?;
    // ANCHOR_END: open

    // The clerk pauses for longer than the lease, and the lease is not renewed.
    let short_lease = LockOptions::new().lease(Duration::from_millis(300)).auto_renew(false);
    let slow = locks
        .obtain("account/42")
        .try_lock_with(short_lease)
        .await?
        .ok_or("account/42 is locked")?;
    let old = slow.fencing_token();
    slow.lost().await;

    // ANCHOR: set
    let guard = locks.obtain("account/42").lock().await?;
    let token = guard.fencing_token();
    match accounts.set(token, "account:42", "17.50").await? {
        Fenced::Written(()) => println!("written"),
        Fenced::Stale { .. } => return Err("a newer holder has written account:42".into()),
        _ => {}
    }
    // ANCHOR_END: set

    // ANCHOR: stale
    // The first clerk resumes and does not know of the loss.
    if let Fenced::Stale { newest } = accounts.set(old, "account:42", "3.00").await? {
        println!("refused, the newest token is the second holder's: {}", newest == token);
    }
    // ANCHOR_END: stale

    // ANCHOR: script
    // Redis runs a Lua script atomically. The first key names the resource that all keys belong
    // to.
    let booking = FencedScript::new(
        "redis.call('RPUSH', KEYS[2], ARGV[1])
         return redis.call('INCRBYFLOAT', KEYS[1], ARGV[1])",
    );
    let keys = ["account:42", "account:42:entries"];
    if let Fenced::Written(ScriptReply::Bytes(balance)) =
        accounts.run(token, &booking, &keys, &[b"-2.50"]).await?
    {
        println!("booked, the balance is {}", String::from_utf8_lossy(&balance));
    }
    // ANCHOR_END: script

    guard.unlock().await?;
    Ok(())
}
