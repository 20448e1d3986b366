//! Machinery that the stores for database servers share, whatever their SQL dialect. Contains no
//! SQL. Used by `postgres` and `mysql`.

mod encryption;
mod hands;
mod recent_rows;
mod pool;
mod row_id;
mod runs;
mod session;
mod sessions;
// Locks in the table of another program.
pub(crate) mod spring;

pub use encryption::Encryption;
#[cfg(feature = "postgres")]
pub(crate) use pool::Greet;
pub(crate) use pool::{Errand, Pool, PoolLimits, Refusal, Seat};
pub(crate) use recent_rows::RecentRows;
pub(crate) use row_id::RowId;
#[cfg(feature = "mysql")]
pub(crate) use runs::Taken;
pub(crate) use runs::Terms;
pub(crate) use session::{Failure, Session, Took, Wire};
pub use sessions::RowLocksExhausted;
pub(crate) use sessions::{Place, Places, Sessions};
pub use spring::SpringTable;

/// The minimum time for which rows of free keys are kept. It is far longer than any statement or
/// wait for a row. So no client acts on what it read of a key before the key's row was deleted.
pub(crate) const PURGE_AFTER_MIN: std::time::Duration = std::time::Duration::from_secs(60);

/// The default maximum number of row locks that are held at once.
pub(crate) const ROW_LOCKS: u32 = 16;
