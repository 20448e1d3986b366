//! What stores in database servers have in common, whatever they speak. Knows no SQL.

mod encryption;
mod pool;
mod row_id;
mod session;

pub use encryption::Encryption;
pub(crate) use pool::{Errand, Pool, PoolLimits, Refusal, Seat};
pub(crate) use row_id::RowId;
pub(crate) use session::{Failure, Session, Wire};
