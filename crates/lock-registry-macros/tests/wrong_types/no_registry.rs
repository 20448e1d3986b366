use lock_registry::{LockError, Registry, locked};

struct Locks;

#[locked(key = "a", registry = locks)]
async fn other_type(locks: &Locks) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = elsewhere)]
async fn unknown(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
