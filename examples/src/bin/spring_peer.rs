//! A lock that is shared with a Spring service: `spring_peer redis://HOST`. Both sides exclude each other and wake each other.
//!
//! The Java side, with Spring Integration's registry:
//!
//! ```java
//! @Bean
//! RedisLockRegistry locks(RedisConnectionFactory redis) {
//!     var locks = new RedisLockRegistry(redis, "invoices", 60_000); // the registry key is our namespace
//!     locks.setRedisLockType(RedisLockRegistry.RedisLockType.PUB_SUB_LOCK); // tells us when it lets go
//!     return locks;
//! }
//!
//! void send(String customer) throws Exception {
//!     locks.executeLocked("customer/" + customer, () -> mailer.send(customer)); // our key, letter by letter
//! }
//! ```

use std::time::Duration;

use lock_registry::{Layout, LockRegistry, Registry, RegistryConfig};

// ANCHOR: open
/// The same Redis as the service, the same names.
async fn open(url: &str) -> Result<Registry, Box<dyn std::error::Error>> {
    let config = RegistryConfig::new()
        .url(url)
        .layout(Layout::Spring)
        .namespace("invoices")
        // How long the service may have to wait for us if we die. Its own is that of the Java side, `expireAfter`.
        .lease(Duration::from_secs(60));
    Ok(config.connect().await?)
}
// ANCHOR_END: open

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());
    let locks = open(&url).await?;

    // ANCHOR: send
    let guard = locks.obtain("customer/17").lock().await?; // waits for the service, if that has it
    guard.protect(send_invoice()).await?;
    // ANCHOR_END: send

    // Where Spring looks, there is what Spring would have written: its registry key, a colon, the key.
    let holder = locks.obtain("customer/17").holder().await?.ok_or("we hold it")?;
    println!("a lease of a minute: {}", holder.lease_left > Some(Duration::from_secs(50)));
    // What Spring has no room for is kept beside it.
    println!("a fencing token: {}", holder.token == guard.fencing_token());
    println!("labels are kept: {}", locks.capabilities().labels);

    guard.unlock().await?; // wakes the service, whichever version of Spring it is
    println!("free for the service: {}", locks.obtain("customer/17").holder().await?.is_none());
    Ok(())
}

async fn send_invoice() {
    println!("invoice sent");
}
