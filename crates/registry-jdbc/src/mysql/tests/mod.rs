//! What only this module can see.
