use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks)]
struct Shop {
    locks: Registry,
}

trait Ship {
    #[locked(key = "a", registry = self.locks)]
    async fn ship(&self) -> Result<(), LockError>;
}

fn main() {}
