//! Data in etcd that only the present holder of its lock can write: `fenced_etcd etcd://HOST,HOST,HOST`.
//!
//! A clerk looks at an account under a lock, is away while an operator breaks the lock, and comes back with what was true before. The members
//! compare the lock's key in the transaction that writes, so what comes late is not written.

use lock_registry::{EtcdFence, LockRegistry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "etcd://127.0.0.1".to_owned());
    let (slow, quick) = (lock_registry::connect(&url).await?, lock_registry::connect(&url).await?);

    let late = slow.obtain("account/42").lock().await?;
    println!("broken: {}", quick.force_release("account/42").await?);

    // ANCHOR: fence
    let guard = quick.obtain("account/42").lock().await?;
    // All of it or nothing, and only while the lock is ours.
    let done = guard
        .txn()
        .put("account/42/balance", "17.50")
        .delete("account/42/pending")
        .get("account/42/balance")
        .commit()
        .await?;
    // ANCHOR_END: fence
    println!("written in one step: {}", done.values == [Some(b"17.50".to_vec())]);

    // ANCHOR: late
    // The first clerk is back, whether it knows or not.
    let refused = late.txn().put("account/42/balance", "3.00").commit().await.is_err();
    // ANCHOR_END: late
    println!("refused: {refused}");

    guard.unlock().await?;
    Ok(())
}
