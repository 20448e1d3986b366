use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks, timeout = "2s")]
async fn unknown(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, wait = "1s", wait = "2s")]
async fn twice(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
