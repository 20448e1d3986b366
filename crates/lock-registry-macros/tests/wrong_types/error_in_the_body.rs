use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks)]
async fn wrong_type(locks: &Registry) -> Result<u32, LockError> {
    Ok("text")
}

#[locked(key = "{name}", registry = locks)]
async fn moved(locks: &Registry, name: String) -> Result<String, LockError> {
    drop(name);
    Ok(name)
}

#[locked(key = "a", registry = locks)]
async fn guard_is_hidden(locks: &Registry) -> Result<(), LockError> {
    guard.unlock().await
}

fn main() {}
