//! An HTTP server with axum that handles one request per order at a time.

use std::num::ParseIntError;
use std::sync::Arc;

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request};
use axum::http::header::RETRY_AFTER;
use axum::routing::{Router, get, post};
use lock_registry::tower::LockLayer;
use lock_registry::{FencingToken, LockRegistry};
use tower::ServiceExt;

// ANCHOR: layer
/// Returns the key of a request from its path. Requests without an order need no lock.
fn key_of(request: &Request) -> Result<Option<String>, ParseIntError> {
    let Some(order) = request.uri().path().strip_prefix("/ship/") else {
        return Ok(None);
    };
    Ok(Some(format!("orders/{}", order.parse::<u64>()?)))
}

/// The token is that of the order's lock. Send it with each write.
async fn ship(Path(order): Path<u64>, Extension(_token): Extension<FencingToken>) -> String {
    format!("order {order} is shipped under its lock")
}

fn app(locks: Arc<dyn LockRegistry>) -> Router {
    Router::new()
        .route("/ship/{order}", post(ship))
        .route("/health", get("healthy"))
        .layer(LockLayer::new(locks, key_of).http())
}
// ANCHOR_END: layer

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks: Arc<dyn LockRegistry> = Arc::new(lock_registry::connect("memory:").await?);
    let app = app(Arc::clone(&locks)); // for `axum::serve(listener, app)`
    send(&app, Request::post("/ship/42").body(Body::empty())?).await?;

    let guard = locks.obtain("orders/42").lock().await?; // as another request would
    send(&app, Request::post("/ship/42").body(Body::empty())?).await?;
    send(&app, Request::get("/health").body(Body::empty())?).await?;
    send(&app, Request::post("/ship/the-last").body(Body::empty())?).await?;
    guard.unlock().await?;
    Ok(())
}

async fn send(app: &Router, request: Request) -> Result<(), Box<dyn std::error::Error>> {
    let response = app.clone().oneshot(request).await?;
    let (status, retry) = (response.status(), response.headers().get(RETRY_AFTER).cloned());
    let body = String::from_utf8(to_bytes(response.into_body(), 1_000).await?.to_vec())?;
    println!("{status} {body:?}, retry after {retry:?}");
    Ok(())
}
