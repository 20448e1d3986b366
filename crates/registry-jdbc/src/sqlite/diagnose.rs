//! The findings of `doctor` about a SQLite store. Reads only, repairs nothing.

use registry_core::{BackendError, Finding};

use super::backend::SqliteBackend;
use crate::error::Detached;

/// A larger write-ahead log is not being written back to the database.
const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;

impl SqliteBackend {
    /// Returns the findings of [`diagnose`](registry_core::LockBackend::diagnose).
    pub(super) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        match self.writer.check() {
            // Unlike the other errors, this one can be undone. No further check works before that.
            Err(error) if Detached::of(&error) == Some(Detached::OtherName) => {
                return Ok(vec![Finding::warning(error.to_string())]);
            }
            answer => answer?,
        }
        let path = self.path();
        let mut findings = Vec::new();

        let journal = self.reader.rows(|| sqlx::query("PRAGMA main.journal_mode")).await?;
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

        for table in ["lock_registry_meta", "lock_registry_locks"] {
            let check = self
                .reader
                .rows(move || sqlx::query("SELECT * FROM pragma_quick_check(?1)").bind(table));
            for row in check.await? {
                let says: String = self.column(&row, 0)?;
                if says != "ok" {
                    findings.push(Finding::warning(format!(
                        "{path:?} is damaged: {says}; restore it, or move it away to start afresh"
                    )));
                }
            }
        }

        if let Ok(log) = std::fs::metadata(&self.place.wal)
            && log.len() > LOG_BYTES_MAX
        {
            findings.push(Finding::warning(format!(
                "the write-ahead log of {path:?} has grown to {} MiB: some connection keeps a read transaction \
                 open; end it",
                log.len() >> 20
            )));
        }
        #[cfg(target_os = "linux")]
        findings.extend(linux::look_around(path, &self.place.wal));
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

    use super::super::watch::Watch;

    /// Less free space than this is reported.
    const FREE_BYTES_MIN: u64 = 64 * 1024 * 1024;

    /// Returns the findings about the file system, the kernel and the container.
    pub(super) fn look_around(path: &Path, wal: &Path) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Ok(disk) = statfs(path) {
            if let Some(name) = network(disk.filesystem_type()) {
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
        // Some containers mount a file of their own at this path.
        if statfs("/proc/sys/kernel/random/boot_id")
            .is_ok_and(|boot_id| boot_id.filesystem_type() != PROC_SUPER_MAGIC)
        {
            findings.push(Finding::warning(
                "this container has its own boot id: its locks do not exclude processes outside of it",
            ));
        }
        if Watch::start(wal).is_by_time() {
            findings.push(Finding::warning(
                "the kernel cannot watch the write-ahead log, so waiters poll; raise fs.inotify.max_user_instances \
                 and max_user_watches",
            ));
        }
        findings
    }

    /// Returns the name of a file system that other hosts may share.
    pub(super) fn network(kind: FsType) -> Option<&'static str> {
        // Missing in libc; from the kernel's headers.
        const NAMED_HERE: [(i64, &str); 8] = [
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
        // The type of the number differs between architectures. Only its low 32 bits count.
        #[expect(clippy::unnecessary_cast, reason = "needed where the type is another")]
        let number = kind.0 as i64 & 0xffff_ffff;
        NAMED_HERE.iter().find(|(magic, _)| *magic == number).map(|(_, name)| *name)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use nix::sys::statfs::{FsType, NFS_SUPER_MAGIC, TMPFS_MAGIC};

    use super::linux::network;

    #[test]
    fn file_systems_with_other_hosts_behind_them_are_known() {
        assert_eq!(network(NFS_SUPER_MAGIC), Some("NFS"));
        assert_eq!(network(FsType(0xfe53_4d42)), Some("an SMB share"));
        assert_eq!(network(TMPFS_MAGIC), None);
    }
}
