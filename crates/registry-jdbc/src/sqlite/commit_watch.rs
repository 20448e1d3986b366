//! Reports commits that any process makes to the database. Used by `release_watcher`.
//!
//! Every commit writes to the write-ahead log, which the kernel watches (inotify). The kernel
//! reports the write shortly before the commit can be read. `release_watcher` therefore reads
//! several times. If inotify is not available (its limit of watches is reached, or the runtime has
//! no I/O), reports come at intervals.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// A source of reports about possible commits.
#[derive(Debug)]
pub(super) enum CommitWatch {
    #[cfg(target_os = "linux")]
    Inotify(linux::InotifyWatch),
    Interval {
        interval: Duration,
        next_at: Instant,
    },
}

impl CommitWatch {
    const INTERVAL_MIN: Duration = Duration::from_millis(4);
    const INTERVAL_MAX: Duration = Duration::from_millis(250);

    /// Watches the log at `wal`. If inotify is not available, reports at intervals.
    pub(super) fn start(wal: &Path) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(watch) = linux::InotifyWatch::start(wal) {
            return Self::Inotify(watch);
        }
        let _ = wal;
        Self::interval()
    }

    pub(super) fn interval() -> Self {
        Self::Interval {
            interval: Self::INTERVAL_MIN,
            next_at: Instant::now() + Self::INTERVAL_MIN,
        }
    }

    /// Returns whether reports come only at intervals.
    pub(super) const fn is_polling(&self) -> bool {
        matches!(self, Self::Interval { .. })
    }

    /// Waits until a commit may have happened since the last return.
    ///
    /// Without inotify, each interval is twice the last one, at most
    /// [`INTERVAL_MAX`](Self::INTERVAL_MAX), until [`reset_interval`](Self::reset_interval).
    /// Dropping the future loses no report.
    pub(super) async fn changed(&mut self) {
        #[cfg(target_os = "linux")]
        if let Self::Inotify(watch) = self {
            if watch.changed().await.is_ok() {
                return;
            }
            // The log was removed or the watch failed. A new log may already contain commits, so
            // this counts as a change.
            *self = Self::interval();
            return;
        }
        if let Self::Interval { interval, next_at } = self {
            sleep_until(*next_at).await;
            *interval = (*interval * 2).min(Self::INTERVAL_MAX);
            *next_at = Instant::now() + *interval;
        }
    }

    /// Makes the next interval short, because there is a new waiter.
    pub(super) fn reset_interval(&mut self) {
        if let Self::Interval { interval, next_at } = self {
            *interval = Self::INTERVAL_MIN;
            // Frequent new waiters must not postpone the report.
            *next_at = (*next_at).min(Instant::now() + Self::INTERVAL_MIN);
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

    /// An inotify watch of the log.
    #[derive(Debug)]
    pub(in super::super) struct InotifyWatch {
        events: AsyncFd<InotifyFd>,
    }

    #[derive(Debug)]
    struct InotifyFd(Inotify);

    impl AsRawFd for InotifyFd {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_fd().as_raw_fd()
        }
    }

    #[expect(
        deprecated,
        reason = "its successor is unsafe because a descriptor might be replaced; `InotifyFd` owns its descriptor and never replaces it"
    )]
    fn register_fd(events: InotifyFd) -> io::Result<AsyncFd<InotifyFd>> {
        AsyncFd::with_interest(events, Interest::READABLE)
    }

    impl InotifyWatch {
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
            // In a runtime without I/O, this call panics. Tokio has no other way to detect such a
            // runtime.
            let events =
                catch_unwind(AssertUnwindSafe(|| register_fd(InotifyFd(inotify)))).ok()?.ok()?;
            Some(Self { events })
        }

        /// Waits until a process writes to the log.
        ///
        /// # Errors
        /// If the log was removed or renamed, its attributes have changed, or the watch failed.
        pub(super) async fn changed(&mut self) -> io::Result<()> {
            loop {
                let mut ready = self.events.readable().await?;
                match ready.get_inner().0.read_events() {
                    Ok(events) => {
                        let removed_mask = AddWatchFlags::IN_IGNORED
                            | AddWatchFlags::IN_DELETE_SELF
                            | AddWatchFlags::IN_MOVE_SELF
                            | AddWatchFlags::IN_ATTRIB
                            | AddWatchFlags::IN_UNMOUNT;
                        // The removal of the last name of an open file changes its attributes.
                        // Other changes of the attributes are rare, so they count as a removal.
                        if events.iter().any(|event| event.mask.intersects(removed_mask)) {
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
