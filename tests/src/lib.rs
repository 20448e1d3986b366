//! Shared by the whole-system tests: the simulation of many processes on one store, and the
//! critical sections of real processes.

pub mod sim;

pub mod sections;
