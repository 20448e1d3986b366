use lock_registry::{LockError, Registry, locked};

struct PayError;

#[locked(key = "a", registry = locks)]
async fn pay(locks: &Registry) -> Result<u32, PayError> {
    Ok(1)
}

fn main() {}
