use lock_registry::{LockError, Registry, locked};

#[locked(key = 42, registry = locks)]
async fn key(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = 7)]
async fn registry(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = "locks of mine")]
async fn quoted(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, mode = "read")]
async fn mode(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, token = "token")]
async fn token(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, token = locks)]
async fn argument(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, crate = lock_registry)]
async fn path(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, crate = 5)]
async fn number(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
