//! What stores in database servers have in common, whatever they speak. Knows no SQL.

mod encryption;
mod pool;
mod row_id;
mod session;
// Locks that look like those of another program.
pub(crate) mod spring;

pub use encryption::Encryption;
#[cfg(feature = "postgres")]
pub(crate) use pool::Greet;
pub(crate) use pool::{Errand, Pool, PoolLimits, Refusal, Seat};
pub(crate) use row_id::RowId;
pub(crate) use session::{Failure, Session, Wire};
pub use spring::SpringTable;
