use lock_registry::{LockError, Registry, locked};

#[locked(key = "a")]
async fn no_registry() -> Result<(), LockError> {
    Ok(())
}

#[locked(registry = locks)]
async fn no_key(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked]
async fn nothing(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key, registry = locks)]
async fn no_value(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
