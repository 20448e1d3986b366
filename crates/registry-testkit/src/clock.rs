//! Clocks that jump, for programs that a test starts. The machine's own clocks do not change.
//!
//! `LD_PRELOAD` loads a small library into the program. The library adds an offset to the time that
//! the system returns. It is written in C because it replaces functions of the C library. The C
//! compiler builds it on demand.

use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use tempfile::TempDir;

const SOURCE: &str = include_str!("clock/shim.c");
const NANOS: i64 = 1_000_000_000;

/// The clocks of all programs started [with it](Self::environment). A jump affects all of them.
/// Clones share the same clock.
#[derive(Debug, Clone)]
pub struct ClockShim(Arc<ShimState>);

#[derive(Debug)]
struct ShimState {
    folder: TempDir,
    offsets: Mutex<ClockOffsets>,
}

/// The offsets added to the machine's clocks, in nanoseconds.
#[derive(Debug, Default)]
struct ClockOffsets {
    wall: i64,
    monotonic: i64,
}

impl ClockShim {
    /// Builds the library and starts with both offsets at zero.
    pub fn new() -> io::Result<Self> {
        // Built for each `ClockShim`, because a `static` would never remove its folder. A build
        // takes about 0.1 s.
        let shim =
            Self(Arc::new(ShimState { folder: tempfile::tempdir()?, offsets: Mutex::default() }));
        // Servers may run under another account.
        fs::set_permissions(shim.0.folder.path(), Permissions::from_mode(0o755))?;
        let source = shim.0.folder.path().join("shim.c");
        fs::write(&source, SOURCE)?;
        let mut build = Command::new("cc");
        build.args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
        let built = build.arg(shim.library()).arg(source).output()?;
        if !built.status.success() {
            let output_text = String::from_utf8_lossy(&built.stderr);
            return Err(io::Error::other(format!("the clock shim cannot be built: {output_text}")));
        }
        shim.write_offsets(&ClockOffsets::default())?;
        Ok(shim)
    }

    /// Moves the wall clock (`CLOCK_REALTIME`) by this many seconds; negative values move it back.
    pub fn jump_wall(&self, seconds: i64) -> io::Result<()> {
        self.jump(|offsets| offsets.wall += seconds * NANOS)
    }

    /// Moves the monotonic clock (`CLOCK_MONOTONIC`) by this many seconds. A negative value
    /// simulates a suspended machine. `CLOCK_BOOTTIME` is unaffected.
    pub fn jump_monotonic(&self, seconds: i64) -> io::Result<()> {
        self.jump(|offsets| offsets.monotonic += seconds * NANOS)
    }

    fn jump(&self, change: impl FnOnce(&mut ClockOffsets)) -> io::Result<()> {
        let mut offsets = self.0.offsets.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut offsets);
        self.write_offsets(&offsets)
    }

    /// Writes the offsets to the file. Programs map the file into memory, so the change applies
    /// immediately.
    fn write_offsets(&self, offsets: &ClockOffsets) -> io::Result<()> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.offsets_file())?;
        file.write_all_at(&offsets.wall.to_ne_bytes(), 0)?;
        file.write_all_at(&offsets.monotonic.to_ne_bytes(), 8)
    }

    /// Returns the environment variables that make a program use these clocks.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, OsString); 2] {
        [("LD_PRELOAD", self.library().into()), ("CLOCKSHIM", self.offsets_file().into())]
    }

    fn library(&self) -> PathBuf {
        self.0.folder.path().join("shim.so")
    }

    fn offsets_file(&self) -> PathBuf {
        self.0.folder.path().join("offsets")
    }
}
