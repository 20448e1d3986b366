//! Reports that the database may have changed, by any process. Contains no lock or waiter logic.
//! Used by `wake`.
//!
//! Every commit writes to the write-ahead log, so the kernel watches that file. It reports the
//! write shortly before the commit can be read; `wake` handles that. If the kernel cannot watch
//! (its limit of watches is reached, or the runtime has no I/O), the hints come at intervals.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// A source of hints.
#[derive(Debug)]
pub(super) enum Watch {
    #[cfg(target_os = "linux")]
    Kernel(linux::LogWatch),
    Time {
        pause: Duration,
        until: Instant,
    },
}

impl Watch {
    const PAUSE_MIN: Duration = Duration::from_millis(4);
    const PAUSE_MAX: Duration = Duration::from_millis(250);

    /// Watches the log at `wal`. Falls back to intervals if that is not possible.
    pub(super) fn start(wal: &Path) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(watch) = linux::LogWatch::start(wal) {
            return Self::Kernel(watch);
        }
        let _ = wal;
        Self::by_time()
    }

    pub(super) fn by_time() -> Self {
        Self::Time { pause: Self::PAUSE_MIN, until: Instant::now() + Self::PAUSE_MIN }
    }

    /// Returns whether hints come only at intervals.
    pub(super) const fn is_by_time(&self) -> bool {
        matches!(self, Self::Time { .. })
    }

    /// Returns when something may have changed since the last return.
    ///
    /// Intervals grow; [`restart`](Self::restart) makes them short again. Dropping the future loses
    /// nothing.
    pub(super) async fn changed(&mut self) {
        #[cfg(target_os = "linux")]
        if let Self::Kernel(watch) = self {
            if watch.changed().await.is_ok() {
                return;
            }
            // The log was removed or the watch broke. A new log may already contain commits, so
            // this counts as a change.
            *self = Self::by_time();
            return;
        }
        if let Self::Time { pause, until } = self {
            sleep_until(*until).await;
            *pause = (*pause * 2).min(Self::PAUSE_MAX);
            *until = Instant::now() + *pause;
        }
    }

    /// Makes the next interval short, because there is a new waiter.
    pub(super) fn restart(&mut self) {
        if self.is_by_time() {
            *self = Self::by_time();
        }
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::{AsFd, AsRawFd, RawFd};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use nix::errno::Errno;
    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;

    /// The kernel's watch of the log.
    #[derive(Debug)]
    pub(in super::super) struct LogWatch {
        events: AsyncFd<Events>,
    }

    #[derive(Debug)]
    struct Events(Inotify);

    impl AsRawFd for Events {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_fd().as_raw_fd()
        }
    }

    #[expect(
        deprecated,
        reason = "its successor is unsafe because a descriptor might be replaced; `Events` owns its own and never does"
    )]
    fn register(events: Events) -> io::Result<AsyncFd<Events>> {
        AsyncFd::with_interest(events, Interest::READABLE)
    }

    impl LogWatch {
        /// Returns `None` if the kernel or the runtime cannot watch the file.
        pub(super) fn start(wal: &Path) -> Option<Self> {
            let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok()?;
            inotify
                .add_watch(
                    wal,
                    AddWatchFlags::IN_MODIFY
                        | AddWatchFlags::IN_DELETE_SELF
                        | AddWatchFlags::IN_MOVE_SELF
                        | AddWatchFlags::IN_ATTRIB,
                )
                .ok()?;
            // Tokio panics in a runtime without I/O, and has no other way to detect one.
            let events = catch_unwind(AssertUnwindSafe(|| register(Events(inotify)))).ok()?.ok()?;
            Some(Self { events })
        }

        /// Returns after a write to the log.
        ///
        /// # Errors
        /// If the log is gone.
        pub(super) async fn changed(&mut self) -> io::Result<()> {
            loop {
                let mut ready = self.events.readable().await?;
                match ready.get_inner().0.read_events() {
                    Ok(events) => {
                        let gone = AddWatchFlags::IN_IGNORED
                            | AddWatchFlags::IN_DELETE_SELF
                            | AddWatchFlags::IN_MOVE_SELF
                            | AddWatchFlags::IN_ATTRIB
                            | AddWatchFlags::IN_UNMOUNT;
                        // The attributes change when the last name of an open file is removed.
                        // Other changes of them are rare.
                        if events.iter().any(|event| event.mask.intersects(gone)) {
                            return Err(io::ErrorKind::NotFound.into());
                        }
                        return Ok(());
                    }
                    Err(Errno::EAGAIN) => ready.clear_ready(),
                    Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
}
