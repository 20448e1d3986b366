use lock_registry::{LockError, Registry, locked};

type Output = (u32, LockError);

#[locked(key = "a", registry = locks)]
async fn alias(locks: &Registry) -> Output {
    (1, LockError::Closed)
}

fn main() {}
