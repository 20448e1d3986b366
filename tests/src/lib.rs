//! Shared by the whole-system tests: the critical sections of real processes, and the generated
//! tables, charts and pictures of the book.

pub mod sections;

#[cfg(feature = "server-tests")]
pub mod book_tables;
#[cfg(feature = "server-tests")]
mod figures;
#[cfg(feature = "server-tests")]
pub mod charts;
pub mod pictures;
