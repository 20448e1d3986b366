//! What the whole-system tests share: the simulation of many processes on one store, and the work of real ones.

pub mod sim;

pub mod sections;
