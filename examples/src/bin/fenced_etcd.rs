//! Data in etcd that only the current holder of its lock can write.
//!
//! Start it with `fenced_etcd etcd://HOST,HOST,HOST`.
//!
//! A clerk acquires the lock of an account and pauses, while an operator force-releases the lock. A
//! second clerk acquires the lock and writes. Then the first clerk writes an outdated balance. The
//! transaction that writes also compares the lock's key, so the late write is rejected.

use lock_registry::etcd::Fence;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "etcd://127.0.0.1".to_owned());
    let (slow, quick) = (lock_registry::connect(&url).await?, lock_registry::connect(&url).await?);

    let late = slow.obtain("account/42").lock().await?;
    println!("force-released: {}", quick.force_release("account/42").await?);

    // ANCHOR: fence
    let guard = quick.obtain("account/42").lock().await?;
    // All writes or none, and only while the lock is held.
    let done = guard
        .txn()
        .put("account/42/balance", "17.50")
        .delete("account/42/pending")
        .get("account/42/balance")
        .commit()
        .await?;
    // ANCHOR_END: fence
    println!("written atomically: {}", done.values == [Some(b"17.50".to_vec())]);

    // ANCHOR: late
    // The first clerk resumes. Its writes are refused even before it is notified of the loss.
    let refused = late.txn().put("account/42/balance", "3.00").commit().await.is_err();
    // ANCHOR_END: late
    println!("refused: {refused}");

    guard.unlock().await?;
    Ok(())
}
