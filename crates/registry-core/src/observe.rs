//! Ready-made observers, and the events that they receive.

pub use crate::event::{AcquireEnd, HoldEnd, LockEvent, Observer, ReleaseEnd, TickEnd};

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "metrics")]
mod names;
#[cfg(feature = "tracing")]
mod tracing;

#[cfg(feature = "metrics")]
pub use self::metrics::{MetricDescription, MetricKind, MetricsObserver, describe_metrics};
#[cfg(feature = "metrics")]
pub use self::names::KeyNames;
#[cfg(feature = "tracing")]
pub use self::tracing::TracingObserver;
