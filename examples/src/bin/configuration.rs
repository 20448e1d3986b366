//! One registry, configured from a file, the environment and code. The sources in order of
//! precedence, highest first: code, environment, file, query of the URL, default.

use std::time::Duration;

use lock_registry::RegistryConfig;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // ANCHOR: sources
    let file = r#"
        [lock-registry]
        url = "sqlite:locks.db?lease=1m&poll=1s"   # the lowest precedence
        lease = "20s"                              # overrides the query of the URL
        busy_timeout = "1s"
    "#;

    let config = RegistryConfig::new()
        .with_toml(file)?
        .with_env()? // LOCK_REGISTRY_POLL=500ms and so on
        .label("worker 7"); // code has the highest precedence

    // Everything that can be checked without I/O is checked here; `connect` checks it too.
    config.check()?;
    for setting in config.settings()? {
        println!("{} = {} ({})", setting.name, setting.value, setting.origin);
    }
    let registry = config.connect().await?;
    // ANCHOR_END: sources

    let guard = registry.obtain("orders/42").lock().await?;
    println!("lease under 20 s: {}", guard.valid_for() <= Duration::from_secs(20));
    guard.unlock().await?;

    // ANCHOR: mistakes
    for url in [
        "sqllite:locks.db",
        "sqlite:locks.db?leese=10s",
        "sqlite:locks.db?lease=10",
        "etcd://app:secret@db/locks",
    ] {
        match lock_registry::connect(url).await {
            Ok(_) => println!("opened"),
            // The error names the nearest valid name or the expected form, and never the password.
            Err(error) => println!("refused: {error}"),
        }
    }
    // ANCHOR_END: mistakes
    Ok(())
}
