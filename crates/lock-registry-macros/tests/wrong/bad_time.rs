use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks, wait = "2 parsecs")]
async fn unit(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, lease = "30")]
async fn no_unit(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks, wait = 2)]
async fn number(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
