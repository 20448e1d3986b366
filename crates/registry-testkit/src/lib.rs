//! What the tests of lock-registry need beside the code under test. It judges locks; it knows no store.
//!
//! The modules stand in the order in which a test of faults uses them: somewhere to listen, something that breaks
//! the network, somebody else who holds the lock, a record of what happened, a verdict on the record.

pub mod ports;
pub mod proxy;
//#[cfg(unix)]
pub mod process;
//#[cfg(unix)]
//pub mod holder;
pub mod history;
//pub mod observe;
pub mod check;
pub mod seed;

mod eventually;

pub use eventually::{NotInTime, Settled, eventually, within};
