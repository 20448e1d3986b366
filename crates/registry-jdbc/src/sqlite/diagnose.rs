//! Checks a SQLite store for `lockreg doctor`. Changes nothing.

use registry_core::{BackendError, Finding};

use super::backend::SqliteBackend;
use super::error::FileMismatch;

/// The size of the write-ahead log above which `doctor` reports it. A log of this size usually
/// means that no checkpoint succeeds.
const WAL_BYTES_MAX: u64 = 64 * 1024 * 1024;

impl SqliteBackend {
    /// Returns the findings of [`diagnose`](registry_core::LockAdmin::diagnose).
    pub(super) async fn collect_findings(&self) -> Result<Vec<Finding>, BackendError> {
        match self.writer.check() {
            // A hard link is a finding instead of an error, because its removal repairs the store.
            // Further checks would fail.
            Err(error) if FileMismatch::from_error(&error) == Some(FileMismatch::HardLink) => {
                return Ok(vec![Finding::warning(error.to_string())]);
            }
            answer => answer?,
        }
        let path = self.path();
        let mut findings = Vec::new();

        let journal = self.reader.fetch_all(|| sqlx::query("PRAGMA main.journal_mode")).await?;
        let journal: String = match journal.first() {
            Some(row) => self.column(row, 0)?,
            None => "unknown".to_owned(),
        };
        if !journal.eq_ignore_ascii_case("wal") {
            findings.push(Finding::warning(format!(
                "the journal mode of {path:?} is {journal:?}, not \"wal\": releases may not wake waiters; \
                 restart the processes that use it"
            )));
        }

        let tables = [
            "lock_registry_meta",
            "lock_registry_locks",
            "lock_registry_values",
            "lock_registry_waiters",
        ];
        for table in tables {
            let check = self
                .reader
                .fetch_all(move || sqlx::query("SELECT * FROM pragma_quick_check(?1)").bind(table));
            for row in check.await? {
                let message: String = self.column(&row, 0)?;
                if message != "ok" {
                    findings.push(Finding::warning(format!(
                        "{path:?} is damaged: {message}; restore it, or move it away so that a new file is created"
                    )));
                }
            }
        }

        if let Ok(log) = std::fs::metadata(&self.paths.wal)
            && log.len() > WAL_BYTES_MAX
        {
            findings.push(Finding::warning(format!(
                "the write-ahead log of {path:?} has grown to {} MiB: a connection probably keeps a read \
                 transaction open; end it",
                log.len() >> 20
            )));
        }
        #[cfg(target_os = "linux")]
        findings.extend(linux::host_findings(path, &self.paths.wal));
        Ok(findings)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::Path;

    use nix::sys::statfs::{
        AFS_SUPER_MAGIC, CODA_SUPER_MAGIC, FUSE_SUPER_MAGIC, FsType, NCP_SUPER_MAGIC,
        NFS_SUPER_MAGIC, PROC_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs,
    };
    use registry_core::Finding;

    use super::super::commit_watch::CommitWatch;

    /// The free space below which `doctor` reports it.
    const FREE_BYTES_MIN: u64 = 64 * 1024 * 1024;

    /// Returns the findings about the file system, the kernel and the container.
    pub(super) fn host_findings(path: &Path, wal: &Path) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Ok(disk) = statfs(path) {
            if let Some(name) = network_file_system(disk.filesystem_type()) {
                findings.push(Finding::warning(format!(
                    "{path:?} is on {name}: if other hosts reach it, its locks do not exclude them, and the file may \
                     be damaged; move it to a local disk"
                )));
            }
            let block = u64::try_from(disk.block_size()).unwrap_or(0);
            let free = disk.blocks_available().saturating_mul(block);
            if free < FREE_BYTES_MIN {
                findings.push(Finding::warning(format!(
                    "the disk of {path:?} has {} MiB left; a full disk stops all locking",
                    free >> 20
                )));
            }
        }
        // Some containers mount their own file at this path.
        if statfs("/proc/sys/kernel/random/boot_id")
            .is_ok_and(|boot_id| boot_id.filesystem_type() != PROC_SUPER_MAGIC)
        {
            findings.push(Finding::warning(
                "this container has its own boot id: its locks do not exclude processes outside of it",
            ));
        }
        if CommitWatch::start(wal).is_polling() {
            findings.push(Finding::warning(
                "the kernel cannot watch the write-ahead log, so waiters poll; raise fs.inotify.max_user_instances \
                 and max_user_watches",
            ));
        }
        findings
    }

    /// Returns the name of a file system that other hosts may share.
    pub(super) fn network_file_system(kind: FsType) -> Option<&'static str> {
        // `nix` lacks these numbers, which are from the kernel's headers.
        const MAGIC_NUMBERS: [(i64, &str); 8] = [
            (0xff53_4d42, "a CIFS share"),
            (0xfe53_4d42, "an SMB share"),
            (0x0102_1997, "a 9P share"),
            (0x00c3_6400, "CephFS"),
            (0x0bd0_0bd0, "Lustre"),
            (0x0116_1970, "GFS2"),
            (0x786f_4256, "a VirtualBox share"),
            (0x4750_4653, "GPFS"),
        ];
        match kind {
            NFS_SUPER_MAGIC => return Some("NFS"),
            SMB_SUPER_MAGIC => return Some("an SMB share"),
            AFS_SUPER_MAGIC => return Some("AFS"),
            CODA_SUPER_MAGIC => return Some("Coda"),
            NCP_SUPER_MAGIC => return Some("an NCP share"),
            FUSE_SUPER_MAGIC => return Some("a FUSE file system"),
            _ => {}
        }
        // The type of the number depends on the architecture. Its low 32 bits are the magic number.
        #[expect(clippy::unnecessary_cast, reason = "needed where the type is another")]
        let number = kind.0 as i64 & 0xffff_ffff;
        MAGIC_NUMBERS.iter().find(|(magic, _)| *magic == number).map(|(_, name)| *name)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use nix::sys::statfs::{FsType, NFS_SUPER_MAGIC, TMPFS_MAGIC};

    use super::linux::network_file_system;

    #[test]
    fn file_systems_that_other_hosts_may_share_are_detected() {
        assert_eq!(network_file_system(NFS_SUPER_MAGIC), Some("NFS"));
        assert_eq!(network_file_system(FsType(0xfe53_4d42)), Some("an SMB share"));
        assert_eq!(network_file_system(TMPFS_MAGIC), None);
    }
}
