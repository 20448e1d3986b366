//! An axum handler that receives a lock as an argument: that of the order in the request's path.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, Path, Request};
use axum::http::{StatusCode, request::Parts};
use axum::routing::{Router, post};
use lock_registry::{LockError, LockGuard, LockRegistry as _, Registry};
use tower::ServiceExt as _;

// ANCHOR: extractor
/// The order of a request. Its lock is held until the handler has ended.
struct LockedOrder {
    id: u64,
    guard: LockGuard,
}

impl FromRequestParts<Arc<Registry>> for LockedOrder {
    type Rejection = (StatusCode, String);

    async fn from_request_parts(
        parts: &mut Parts,
        locks: &Arc<Registry>,
    ) -> Result<Self, Self::Rejection> {
        let Path(id) = Path::<u64>::from_request_parts(parts, locks)
            .await
            .map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))?;
        match locks.obtain(&format!("orders/{id}")).try_lock_for(Duration::from_millis(50)).await {
            Ok(Some(guard)) => Ok(Self { id, guard }),
            Ok(None) => Err((StatusCode::LOCKED, format!("order {id} is in use"))),
            Err(error) => Err((StatusCode::SERVICE_UNAVAILABLE, error.to_string())),
        }
    }
}

async fn ship(order: LockedOrder) -> Result<String, (StatusCode, String)> {
    let lost = |error: LockError| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    // The work ends if the lock is lost. Send `order.guard.fencing_token()` with each write.
    let work = async { format!("order {} is shipped", order.id) };
    order.guard.protect(work).await.map_err(lost)
}
// ANCHOR_END: extractor

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let locks = Arc::new(lock_registry::connect("memory:").await?);
    let app = Router::new().route("/ship/{order}", post(ship)).with_state(Arc::clone(&locks));
    let _held = locks.obtain("orders/43").lock().await?; // as another request would
    for path in ["/ship/42", "/ship/43", "/ship/the-last"] {
        let response = app.clone().oneshot(Request::post(path).body(Body::empty())?).await?;
        let status = response.status();
        let body = to_bytes(response.into_body(), 1_000).await?;
        println!("{status}: {}", String::from_utf8_lossy(&body));
    }
    Ok(())
}
