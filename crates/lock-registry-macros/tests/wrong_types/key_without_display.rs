use lock_registry::{LockError, Registry, locked};

struct Order;

#[locked(key = "orders/{order}", registry = locks)]
async fn ship(locks: &Registry, order: Order) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = order, registry = locks)]
async fn refund(locks: &Registry, order: Order) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "orders/{order.id}", registry = locks)]
async fn cancel(locks: &Registry, order: Order) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
