-- The tables of lock-registry's SQLite store, version 1. The script may be run repeatedly;
-- `SqliteBackend::open` runs it.

-- One row for all namespaces.
CREATE TABLE IF NOT EXISTS lock_registry_meta (
    id              INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version         INTEGER NOT NULL,                       -- of these tables
    store           BLOB    NOT NULL,                       -- identifies this database
    boot            BLOB    NOT NULL,                       -- the current boot of the host
    floor           INTEGER NOT NULL,                       -- the largest token of all deleted rows
    sweep_namespace TEXT    NOT NULL,                       -- the position of the purge
    sweep_key       BLOB    NOT NULL
) STRICT;

INSERT OR IGNORE INTO lock_registry_meta (id, version, store, boot, floor, sweep_namespace, sweep_key)
VALUES (1, 1, randomblob(16), zeroblob(16), 0, '', x'');

-- One row per recently locked key. Times are microseconds since the host was booted.
CREATE TABLE IF NOT EXISTS lock_registry_locks (
    namespace TEXT    NOT NULL,
    key       BLOB    NOT NULL,                             -- UTF-8
    claim     BLOB,                                         -- the claim that holds the key; NULL after a release
    token     INTEGER NOT NULL,                             -- the first fencing token of the newest grant
    block     INTEGER NOT NULL,                             -- the number of tokens that the newest grant reserved
    label     TEXT,
    since     INTEGER NOT NULL,
    until     INTEGER NOT NULL,                             -- held until then, or free since then
    boot      BLOB    NOT NULL,                             -- since and until count from this boot
    PRIMARY KEY (namespace, key)
) STRICT, WITHOUT ROWID;

-- The value blocks of keys. A row is never deleted.
CREATE TABLE IF NOT EXISTS lock_registry_values (
    namespace TEXT    NOT NULL,
    key       BLOB    NOT NULL,                             -- UTF-8
    token     INTEGER NOT NULL,                             -- the fencing token of the writer
    value     BLOB    NOT NULL,
    PRIMARY KEY (namespace, key)
) STRICT;

-- The claims that wait, for listings. Locking does not depend on this table.
CREATE TABLE IF NOT EXISTS lock_registry_waiters (
    namespace TEXT    NOT NULL,
    key       BLOB    NOT NULL,                             -- UTF-8
    claim     BLOB    NOT NULL,
    mode      TEXT    NOT NULL,                             -- such as exclusive
    label     TEXT,
    since     INTEGER NOT NULL,
    until     INTEGER NOT NULL,                             -- the row has no meaning after that
    boot      BLOB    NOT NULL,                             -- since and until count from this boot
    PRIMARY KEY (namespace, key, claim)
) STRICT, WITHOUT ROWID;

-- Records the tokens of deleted rows, so that tokens keep growing, whatever client deletes them.
CREATE TRIGGER IF NOT EXISTS lock_registry_purged AFTER DELETE ON lock_registry_locks
BEGIN
    UPDATE lock_registry_meta SET floor = max(floor, OLD.token + (OLD.block - 1)) WHERE id = 1;
END;
