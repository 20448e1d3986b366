//! Tests of all database servers, compiled once for each of them. The module `server` next to this
//! one names its types and its SQL.

pub(crate) mod common;
pub(crate) mod conformance;
pub(crate) mod fence;
pub(crate) mod failures;
mod lock_in;
mod run_in;
pub(crate) mod opening;
pub(crate) mod row;
mod rows;
mod several;
pub(crate) mod session;
pub(crate) mod spring;

use super::server;
