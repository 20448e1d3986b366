//! A lock that is shared with a Spring service: `spring_peer redis://HOST`. Both sides exclude and
//! notify each other.
//!
//! The Java side, with Spring Integration's registry:
//!
//! ```java
//! @Bean
//! RedisLockRegistry locks(RedisConnectionFactory redis) {
//!     // The registry key is our namespace.
//!     var locks = new RedisLockRegistry(redis, "invoices", 60_000);
//!     // Publishes each release.
//!     locks.setRedisLockType(RedisLockRegistry.RedisLockType.PUB_SUB_LOCK);
//!     return locks;
//! }
//!
//! void send(String customer) throws Exception {
//!     // The key is used unchanged.
//!     locks.executeLocked("customer/" + customer, () -> mailer.send(customer));
//! }
//! ```

use std::time::Duration;

use lock_registry::{Registry, RegistryConfig, config::Layout};

// ANCHOR: open
/// Uses the same Redis and the same key names as the service.
async fn open(url: &str) -> Result<Registry, Box<dyn std::error::Error>> {
    let config = RegistryConfig::new()
        .url(url)
        .layout(Layout::Spring)
        .namespace("invoices")
        // How long the service may have to wait if this process dies. The lease of the service
        // itself is `expireAfter` on the Java side.
        .lease(Duration::from_secs(60));
    Ok(config.connect().await?)
}
// ANCHOR_END: open

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1".to_owned());
    let locks = open(&url).await?;

    // ANCHOR: send
    let guard = locks.obtain("customer/17").lock().await?; // waits while the service holds the lock
    guard.protect(send_invoice()).await?;
    // ANCHOR_END: send

    // The key in Redis is the one that Spring uses: registry key, colon, key.
    let holder =
        locks.obtain("customer/17").holders().await?.pop().ok_or("customer/17 is not locked")?;
    println!("a lease of a minute: {}", holder.lease_left > Some(Duration::from_secs(50)));
    // Spring's record has no field for the token, so this library stores the token under a separate
    // key.
    println!("a fencing token: {}", holder.token == Some(guard.fencing_token()));
    println!("labels are stored: {}", locks.capabilities().labels);

    guard.unlock().await?; // notifies the service, whichever version of Spring it uses
    println!("free for the service: {}", locks.obtain("customer/17").holders().await?.is_empty());
    Ok(())
}

async fn send_invoice() {
    println!("invoice sent");
}
