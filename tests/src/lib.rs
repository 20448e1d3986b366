//! What the whole-system tests share: the simulation of many processes on one store.

pub mod sim;
