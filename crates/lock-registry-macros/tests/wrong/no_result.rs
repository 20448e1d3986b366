use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks)]
async fn nothing(locks: &Registry) {}

#[locked(key = "a", registry = locks)]
async fn number(locks: &Registry) -> u32 {
    1
}

#[locked(key = "a", registry = locks)]
async fn option(locks: &Registry) -> Option<LockError> {
    None
}

#[locked(key = "a", registry = locks)]
async fn pair(locks: &Registry) -> (u32, u32) {
    (1, 2)
}

fn main() {}
