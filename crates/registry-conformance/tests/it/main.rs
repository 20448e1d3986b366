//! Tests the suite itself: over the in-process store, with injected faults, and over stores with
//! one bug each.

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
