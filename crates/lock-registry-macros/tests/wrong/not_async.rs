use lock_registry::{LockError, Registry, locked};

#[locked(key = "a", registry = locks)]
fn plain(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks)]
const async fn constant(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks)]
async extern "C" fn foreign(locks: &Registry) -> Result<(), LockError> {
    Ok(())
}

#[locked(key = "a", registry = locks)]
fn boxed(
    locks: &Registry,
) -> std::pin::Pin<Box<dyn Future<Output = Result<(), LockError>> + Send + '_>> {
    Box::pin(async { Ok(()) })
}

fn main() {}
