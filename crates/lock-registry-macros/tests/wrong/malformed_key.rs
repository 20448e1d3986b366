use lock_registry::{LockError, Registry, locked};

#[locked(key = "", registry = locks)]
async fn empty(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "orders/{id", registry = locks)]
async fn unclosed(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[locked(key = "orders/{{id}", registry = locks)]
async fn unopened(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[locked(key = "orders/{}", registry = locks)]
async fn unnamed(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[locked(key = "orders/{0}", registry = locks)]
async fn positional(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[locked(key = "orders/{id + 1}", registry = locks)]
async fn computed(locks: &Registry, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn main() {}
