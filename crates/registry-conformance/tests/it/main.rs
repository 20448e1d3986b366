//! The suite over the in-process store, over faulty stores and over stores with planted defects.

mod broken;
mod broken_modes;
mod faulty;
mod faulty_memory;
mod list;
mod memory;
mod shared;
mod skips;
mod sweep;
mod tiny;
mod tiny_modes;
