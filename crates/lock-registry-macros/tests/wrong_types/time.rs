use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks, wait = 1 + 1)]
async fn sum(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
