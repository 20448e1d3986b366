//! A balance in the same ZooKeeper as its lock, written together with a check that the lock is
//! still held.
//!
//! The URL of the server is the argument, or the environment variable `ZOOKEEPER`.
//! Example: `zookeeper zk://127.0.0.1:2181`.

use lock_registry::{
    RegistryConfig,
    zk::{FenceError as ZkFenceError, Multi},
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("ZOOKEEPER").ok());
    let Some(url) = url else {
        println!("usage: zookeeper zk://HOST:PORT, or set ZOOKEEPER to this URL");
        return Ok(());
    };
    // ANCHOR: multi
    let registry = RegistryConfig::new().url(url).label("payroll").connect().await?;
    let guard = registry.obtain("account/42").lock().await?;
    // All operations are applied or none, and only if the lock was not granted to another client.
    let written = guard
        .multi()?
        .create("/account-42", "17.50")
        .create("/account-42/journal", "opened")
        .commit()
        .await;
    match written {
        Ok(_) => println!("opened under token {}", guard.fencing_token()),
        Err(ZkFenceError::Lost { key, .. }) => println!("{key} was lost; nothing was written"),
        Err(ZkFenceError::Refused { step, source, .. }) => println!("write {step}: {source}"),
        Err(error) => return Err(error.into()),
    }
    guard.unlock().await?;
    // ANCHOR_END: multi
    Ok(())
}
