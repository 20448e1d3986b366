//! A gRPC service with tonic that handles one request per order at a time.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use http::{Request, Response, uri::PathAndQuery};
use lock_registry::tower::{LockLayer, LockServiceError};
use lock_registry::{FencingToken, LockRegistry};
use tonic::{Code, Status, body::Body, server::UnaryService};
use tonic_prost::ProstCodec;
use tower::{Layer, service_fn};

/// The method that the generated code of a service calls.
struct Ship;
impl UnaryService<u64> for Ship {
    type Response = String;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<String>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<u64>) -> Self::Future {
        let locked = request.metadata().get("order").and_then(|order| order.to_str().ok());
        if locked.and_then(|order| order.parse().ok()) != Some(*request.get_ref()) {
            let status = Status::invalid_argument("message and metadata name different orders");
            return Box::pin(async move { Err(status) });
        }
        let token = request.extensions().get::<FencingToken>();
        let text = format!("{} is shipped, fenced: {}", request.get_ref(), token.is_some());
        Box::pin(async move { Ok(tonic::Response::new(text)) })
    }
}

// ANCHOR: layer
/// Returns the key of a request. A layer has access to the metadata of a request, but not to its
/// message, so the service must check that both name the same order. The number is parsed, because
/// `42` and `042` would be different keys. `Ok(None)` would run a request without a lock.
fn key_of(request: &Request<Body>) -> Result<String, &'static str> {
    let order = request.headers().get("order").and_then(|order| order.to_str().ok());
    let order: u64 = order.and_then(|order| order.parse().ok()).ok_or("no valid order")?;
    Ok(format!("orders/{order}"))
}

fn respond(error: LockServiceError<Infallible, &'static str>) -> Response<Body> {
    let code = match error {
        LockServiceError::Busy { .. } => Code::Aborted,
        LockServiceError::Key(_) => Code::InvalidArgument,
        _ => Code::Internal,
    };
    Status::new(code, error.to_string()).into_http()
}
// ANCHOR_END: layer

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks: Arc<dyn LockRegistry> = Arc::new(lock_registry::connect("memory:").await?);
    let layer = LockLayer::new(locks.clone(), key_of).http().respond(respond);
    let service = layer.layer(service_fn(async |request: Request<Body>| {
        let mut server = tonic::server::Grpc::new(ProstCodec::<String, u64>::default());
        Ok::<_, Infallible>(server.unary(Ship, request).await)
    }));
    let mut client = tonic::client::Grpc::new(service);
    for is_held in [false, true] {
        let _guard = if is_held { Some(locks.obtain("orders/42").lock().await?) } else { None };
        client.ready().await?;
        let mut request = tonic::Request::new(42);
        request.metadata_mut().insert("order", "42".parse()?);
        let path = PathAndQuery::from_static("/shop.Orders/Ship");
        match client.unary(request, path, ProstCodec::<u64, String>::default()).await {
            Ok(response) => println!("{}", response.into_inner()),
            Err(status) => println!("{:?}: {}", status.code(), status.message()),
        }
    }
    Ok(())
}
