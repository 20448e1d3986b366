//! What stores in database servers have in common, whatever they speak. Knows no SQL.

mod encryption;
mod hands;
mod recent_rows;
mod pool;
mod row_id;
mod runs;
mod session;
mod sessions;
// Locks that look like those of another program.
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

/// The shortest time that rows of free keys are kept. Far longer than any statement, or any wait for a row, so that nobody who saw a key before its row
/// was deleted still acts on what was seen.
pub(crate) const PURGE_AFTER_MIN: std::time::Duration = std::time::Duration::from_secs(60);

/// How many row locks may be held at once, unless it is set.
pub(crate) const ROW_LOCKS: u32 = 16;
