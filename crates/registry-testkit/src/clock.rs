//! Clocks that jump, for the programs that a test starts. The machine's own clocks are left alone.
//!
//! A small library, loaded into the program before all others, adds to what the system says of the time. It is written in C because
//! it has to be a library of the C kind; the C compiler builds it when a test asks for it.

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

/// The clocks of the programs that were started [with it](Self::environment). They jump all together; clones are the same clock.
#[derive(Debug, Clone)]
pub struct ClockShim(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    folder: TempDir,
    ahead: Mutex<Ahead>,
}

/// What is added to the machine's clocks, in nanoseconds.
#[derive(Debug, Default)]
struct Ahead {
    wall: i64,
    monotonic: i64,
}

impl ClockShim {
    /// Clocks that show the right time so far.
    ///
    /// # Errors
    /// When there is no C compiler `cc`, or it cannot build the library.
    pub fn new() -> io::Result<Self> {
        // One for each clock, not one for the whole process: nobody would remove its folder. Building takes a tenth of a second.
        let shim = Self(Arc::new(Inner { folder: tempfile::tempdir()?, ahead: Mutex::default() }));
        // Servers may run by an account of their own.
        fs::set_permissions(shim.0.folder.path(), Permissions::from_mode(0o755))?;
        let source = shim.0.folder.path().join("shim.c");
        fs::write(&source, SOURCE)?;
        let mut build = Command::new("cc");
        build.args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
        let built = build.arg(shim.library()).arg(source).output()?;
        if !built.status.success() {
            let said = String::from_utf8_lossy(&built.stderr);
            return Err(io::Error::other(format!("the clock shim cannot be built: {said}")));
        }
        shim.tell(&Ahead::default())?;
        Ok(shim)
    }

    /// Moves the wall clock (`CLOCK_REALTIME`) by so many seconds, back if they are negative.
    ///
    /// # Errors
    /// The operating system's.
    pub fn jump_wall(&self, seconds: i64) -> io::Result<()> {
        self.jump(|ahead| ahead.wall += seconds * NANOS)
    }

    /// Moves the clock that should only ever go forward (`CLOCK_MONOTONIC`) by so many seconds, as the clock of a machine that sleeps
    /// falls behind. `CLOCK_BOOTTIME` stays right.
    ///
    /// # Errors
    /// The operating system's.
    pub fn jump_monotonic(&self, seconds: i64) -> io::Result<()> {
        self.jump(|ahead| ahead.monotonic += seconds * NANOS)
    }

    fn jump(&self, by: impl FnOnce(&mut Ahead)) -> io::Result<()> {
        let mut ahead = self.0.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        by(&mut ahead);
        self.tell(&ahead)
    }

    /// Programs have the file in their memory, so they know at once.
    fn tell(&self, ahead: &Ahead) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(self.told())?;
        file.write_all_at(&ahead.wall.to_ne_bytes(), 0)?;
        file.write_all_at(&ahead.monotonic.to_ne_bytes(), 8)
    }

    /// The environment variables with which a program lives by these clocks.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, OsString); 2] {
        [("LD_PRELOAD", self.library().into()), ("CLOCKSHIM", self.told().into())]
    }

    fn library(&self) -> PathBuf {
        self.0.folder.path().join("shim.so")
    }

    fn told(&self) -> PathBuf {
        self.0.folder.path().join("ahead")
    }
}
