use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = elsewhere)]
async fn unknown(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
