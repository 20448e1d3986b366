use lock_registry::{LockError, Registry, locked};

#[locked(key = "orders/{order}", registry = locks)]
async fn ship(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn main() {}
